"""VHA in the Qwen3 4B shape: 16 physical query heads, 2 KV heads."""

from experiments.families.vha import size_4b, vha

EXPERIMENT = size_4b(vha(16))
