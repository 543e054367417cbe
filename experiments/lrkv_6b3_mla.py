"""The LRKV paper's MLA baseline at 6.3B: simplified, C 1024."""

from experiments.families.lrkv import mla, size_6b3

EXPERIMENT = size_6b3(mla(32, latent_dim=1024))
