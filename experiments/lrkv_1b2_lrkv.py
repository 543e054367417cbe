"""LRKV of rank 51 at the paper's 1.2B."""

from experiments.families.lrkv import lrkv, size_1b2

EXPERIMENT = size_1b2(lrkv(12, rank=51))
