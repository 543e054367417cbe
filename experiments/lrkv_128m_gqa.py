"""The LRKV paper's GQA baseline at 128M: 3 KV heads."""

from experiments.families.lrkv import gqa, size_128m

EXPERIMENT = size_128m(gqa(6, num_kv_heads=3))
