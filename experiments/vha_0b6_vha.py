"""VHA in the Qwen3 0.6B shape: 8 physical query heads, 2 KV heads."""

from experiments.families.vha import size_0b6, vha

EXPERIMENT = size_0b6(vha(8))
