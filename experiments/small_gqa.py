"""`make compare`: Grouped-query attention: four KV heads, half of MHA's cache."""

from experiments.families.small import small
from vhajax.config import GQA

ATTENTION = GQA(num_heads=8, num_kv_heads=4, head_dim=32)

EXPERIMENT = small(ATTENTION, ffn_dim=432)
