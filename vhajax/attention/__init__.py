"""The mechanisms, one file each. `build` is the only place that knows them all."""

from collections.abc import Callable

import jax

from vhajax import config
from vhajax.attention.base import Attention
from vhajax.attention.gqa import GQAttention
from vhajax.attention.lrkv import LRKVAttention
from vhajax.attention.mfa import MFAttention
from vhajax.attention.mla import MLAttention
from vhajax.attention.vha import VHAttention

__all__ = [
    "Attention",
    "GQAttention",
    "LRKVAttention",
    "MFAttention",
    "MLAttention",
    "VHAttention",
    "build",
]

MODULES: dict[type, Callable[..., Attention]] = {
    config.GQA: GQAttention,
    config.MLA: MLAttention,
    config.MFA: MFAttention,
    config.VHA: VHAttention,
    config.LRKV: LRKVAttention,
}


def build(model: config.Model, key: jax.Array) -> Attention:
    """The attention module that a configuration asks for."""
    return MODULES[type(model.attention)](model.attention, model, key)
