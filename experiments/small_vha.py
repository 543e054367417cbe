"""`make compare`: VHA: four physical query heads, eight virtual ones, two KV heads."""

from experiments.families.small import small
from vhajax.config import VHA

ATTENTION = VHA(num_physical_heads=4, num_kv_heads=2, head_dim=32)

EXPERIMENT = small(ATTENTION, ffn_dim=512)
