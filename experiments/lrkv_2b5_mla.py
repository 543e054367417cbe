"""The LRKV paper's MLA baseline at 2.5B: simplified, C 384.

36 layers, not the 18 of Table 5: families/lrkv.py says why.
"""

from experiments.families.lrkv import mla, size_2b5

EXPERIMENT = size_2b5(mla(18, latent_dim=384))
