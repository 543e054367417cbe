"""The LRKV paper's GQA baseline at 1.2B: 4 KV heads."""

from experiments.families.lrkv import gqa, size_1b2

EXPERIMENT = size_1b2(gqa(12, num_kv_heads=4))
