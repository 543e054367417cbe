"""`make compare`: MFA: low-rank queries, heads twice as wide, one KV head."""

from experiments.families.small import small
from vhajax.config import MFA

ATTENTION = MFA(num_heads=8, head_dim=64, query_latent_dim=64)

EXPERIMENT = small(ATTENTION, ffn_dim=368)
