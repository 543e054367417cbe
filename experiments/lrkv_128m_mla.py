"""The LRKV paper's MLA baseline at 128M: simplified, C 128."""

from experiments.families.lrkv import mla, size_128m

EXPERIMENT = size_128m(mla(6, latent_dim=128))
