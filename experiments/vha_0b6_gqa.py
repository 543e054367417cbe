"""The VHA authors' GQA baseline: the Qwen3 0.6B shape, 16 query heads, 8 KV heads."""

from experiments.families.vha import gqa, size_0b6

EXPERIMENT = size_0b6(gqa(16))
