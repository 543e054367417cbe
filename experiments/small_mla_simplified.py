"""`make compare`: MLA as the LRKV paper's baseline: keys rotated after the up-projection."""

from experiments.families.small import small
from vhajax.config import MLA

ATTENTION = MLA(num_heads=8, head_dim=32, latent_dim=128, position="full", latent_norm="none")

EXPERIMENT = small(ATTENTION, ffn_dim=304)
