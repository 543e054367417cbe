"""The LRKV paper's MHA baseline at 6.3B."""

from experiments.families.lrkv import gqa, size_6b3

EXPERIMENT = size_6b3(gqa(32, num_kv_heads=32))
