"""The LRKV paper's GQA baseline at 6.3B: 2 KV heads."""

from experiments.families.lrkv import gqa, size_6b3

EXPERIMENT = size_6b3(gqa(32, num_kv_heads=2))
