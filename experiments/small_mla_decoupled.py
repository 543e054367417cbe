"""`make compare`: MLA as in DeepSeek: a rotated key of its own, norm on the latent, no QK-norm."""

from experiments.families.small import small
from vhajax.config import MLA

ATTENTION = MLA(
    num_heads=8, head_dim=32, latent_dim=112, position="decoupled", rope_dim=16, qk_norm="none"
)

EXPERIMENT = small(ATTENTION, ffn_dim=288)
