"""Fewer KV heads, GQA-K → GQA-K', from weights alone: a start for further training."""

import dataclasses

import numpy as np

from vhajax import config
from vhajax.fold import HEADS, Params, repeat_heads


def merge_heads(
    model: config.Model, params: Params, num_kv_heads: int
) -> tuple[config.Model, Params]:
    """Every K / K' neighbouring KV heads become their mean; query heads read on as they stand.

    Source: GQA (arXiv 2305.13245), sec. 2.1.
    """
    gqa = model.attention
    assert isinstance(gqa, config.GQA)
    merged = dict(params)
    for name in ("key", "value", "key_bias", "value_bias"):
        if (path := f"{HEADS}{name}") in params:
            heads = np.asarray(params[path], np.float64)  # [L, D, K, H], or [L, K, H]
            groups = (*heads.shape[:-2], num_kv_heads, -1, heads.shape[-1])
            merged[path] = heads.reshape(groups).mean(axis=-2).astype(np.float32)
    fewer = dataclasses.replace(gqa, num_kv_heads=num_kv_heads)
    return dataclasses.replace(model, attention=fewer), merged


def regroup(model: config.Model, params: Params, num_kv_heads: int) -> tuple[config.Model, Params]:
    """GQA with another number of KV heads: a multiple (exact), the same, or a divisor."""
    gqa = model.attention
    assert isinstance(gqa, config.GQA)
    change = merge_heads if num_kv_heads < gqa.num_kv_heads else repeat_heads
    return change(model, params, num_kv_heads)


def add_postmix(model: config.Model, params: Params, rank: int) -> tuple[config.Model, Params]:
    """GQA → VHA without Premix whose Postmix of this rank (-1: N/4) starts as the identity."""
    gqa = model.attention
    assert isinstance(gqa, config.GQA)
    vha = config.VHA(
        num_physical_heads=gqa.num_heads,
        num_kv_heads=gqa.num_kv_heads,
        premix=False,
        postmix_rank=rank,
        **gqa.common(),
    )
    made, shape = dict(params), (model.num_layers, gqa.num_heads, vha.rank)
    if vha.rank:
        noise = np.random.default_rng(0).standard_normal(shape)
        made[f"{HEADS}postmix_u"] = (0.01 * noise).astype(np.float32)  # as at initialisation
        made[f"{HEADS}postmix_v"] = np.zeros(shape, np.float32)
    return dataclasses.replace(model, attention=vha), made
