"""The VHA authors' GQA baseline: the Qwen3 1.7B shape, 16 query heads, 8 KV heads."""

from experiments.families.vha import gqa, size_1b7

EXPERIMENT = size_1b7(gqa(16))
