"""`make compare`: Multi-query attention: one KV head."""

from experiments.families.small import small
from vhajax.config import GQA

ATTENTION = GQA(num_heads=8, num_kv_heads=1, head_dim=32)

EXPERIMENT = small(ATTENTION, ffn_dim=496)
