"""The mechanisms, one file each. `build` is the only place that knows them all."""

from collections.abc import Callable

import jax

from vhajax import config
from vhajax.attention.gqa import GQAttention, KVCache
from vhajax.attention.vha import VHAttention

__all__ = ["GQAttention", "KVCache", "VHAttention", "build"]

MODULES: dict[type, Callable[..., GQAttention]] = {config.GQA: GQAttention, config.VHA: VHAttention}


def build(model: config.Model, key: jax.Array) -> GQAttention:
    """The attention module that a configuration asks for."""
    return MODULES[type(model.attention)](model.attention, model, key)
