"""The VHA authors' GQA baseline: the Qwen3 4B shape, 32 query heads, 8 KV heads."""

from experiments.families.vha import gqa, size_4b

EXPERIMENT = size_4b(gqa(32))
