"""The LRKV paper's MHA baseline at 128M."""

from experiments.families.lrkv import gqa, size_128m

EXPERIMENT = size_128m(gqa(6, num_kv_heads=6))
