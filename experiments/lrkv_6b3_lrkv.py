"""LRKV of rank 54 at the paper's 6.3B."""

from experiments.families.lrkv import lrkv, size_6b3

EXPERIMENT = size_6b3(lrkv(32, rank=54))
