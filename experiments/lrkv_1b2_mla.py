"""The LRKV paper's MLA baseline at 1.2B: simplified, C 256."""

from experiments.families.lrkv import mla, size_1b2

EXPERIMENT = size_1b2(mla(12, latent_dim=256))
