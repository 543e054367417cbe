"""`make compare`: Multi-head attention: eight KV heads."""

from experiments.families.small import small
from vhajax.config import GQA

ATTENTION = GQA(num_heads=8, num_kv_heads=8, head_dim=32)

EXPERIMENT = small(ATTENTION, ffn_dim=352)
