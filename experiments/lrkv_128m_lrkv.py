"""LRKV of rank 46 at the paper's 128M."""

from experiments.families.lrkv import lrkv, size_128m

EXPERIMENT = size_128m(lrkv(6, rank=46))
