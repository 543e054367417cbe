"""`make train`: the baseline with Virtual Head Attention in place of GQA, half its cache."""

import dataclasses

from experiments.demo_gqa import EXPERIMENT as BASELINE
from vhajax.config import VHA

ATTENTION = VHA(num_physical_heads=4, num_kv_heads=2, head_dim=32)
EXPERIMENT = dataclasses.replace(
    BASELINE, model=dataclasses.replace(BASELINE.model, attention=ATTENTION)
)
