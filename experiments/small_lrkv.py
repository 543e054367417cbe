"""`make compare`: LRKV of rank 12: half of MHA's cache. Full RoPE, the paper's training form."""

from experiments.families.small import small
from vhajax.config import LRKV

ATTENTION = LRKV(num_heads=8, head_dim=32, rank=12, position="full")

EXPERIMENT = small(ATTENTION, ffn_dim=416)
