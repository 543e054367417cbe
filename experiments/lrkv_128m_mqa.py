"""The LRKV paper's MQA baseline at 128M."""

from experiments.families.lrkv import gqa, size_128m

EXPERIMENT = size_128m(gqa(6, num_kv_heads=1))
