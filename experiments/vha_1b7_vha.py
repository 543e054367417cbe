"""VHA in the Qwen3 1.7B shape: 8 physical query heads, 2 KV heads."""

from experiments.families.vha import size_1b7, vha

EXPERIMENT = size_1b7(vha(8))
