"""LRKV of rank 55 at the paper's 2.5B.

36 layers, not the 18 of Table 5: families/lrkv.py says why.
"""

from experiments.families.lrkv import lrkv, size_2b5

EXPERIMENT = size_2b5(lrkv(18, rank=55))
