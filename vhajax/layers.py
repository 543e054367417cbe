"""Norms, initialisers, the embedding and the feed-forward network."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vhajax import config
from vhajax.sharding import (
    Group,
    Matrix,
    axis_for,
    einsum,
    gathered,
    local,
    model_size,
    platform,
    weight,
)

ACTIVATIONS = ("data", "context", None)  # [B, T, D]


def compute_dtype(cfg: config.Model) -> Any:
    """float32 on CPU and bfloat16 elsewhere, unless the configuration says which."""
    if cfg.dtype == "auto":
        return jnp.float32 if platform() == "cpu" else jnp.bfloat16
    return jnp.dtype(cfg.dtype)


def normal(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    """float32 noise of standard deviation 1/√fan_in."""
    return jax.random.normal(key, shape, jnp.float32) / math.sqrt(fan_in)


def rms_norm(x: jax.Array, scale: jax.Array | None, eps: float) -> jax.Array:
    """x / √(mean x² + eps) · scale over the last axis, in float32, returned in x's dtype.

    Source: Zhang & Sennrich 2019 (arXiv 1910.07467), eq. 4.
    """
    normed = x.astype(jnp.float32) * inverse_rms(x, eps)
    return (normed if scale is None else normed * scale).astype(x.dtype)


def inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    """1 / √(mean x² + eps) over the last axis, which is kept with size 1; float32."""
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """RMSNorm over the last axis; `weightless` holds no parameter, `none` is the identity."""

    def __init__(self, size: int, kind: config.Norm, eps: float):
        self.kind, self.eps = kind, eps
        if kind == "weighted":
            self.scale = weight(jnp.ones(size), (None,), group="vector")

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.kind == "none":
            return x
        return rms_norm(x, self.scale[...] if self.kind == "weighted" else None, self.eps)


class FeedForward(nnx.Module):
    """SwiGLU (arXiv 2002.05202, eq. 6) or squared ReLU (arXiv 2109.08668)."""

    def __init__(self, cfg: config.Model, key: jax.Array):
        gate_key, up_key, down_key = jax.random.split(key, 3)
        D, F = cfg.dim, cfg.ffn_dim
        self.kind = cfg.ffn
        if cfg.ffn == "swiglu":
            self.gate = weight(normal(gate_key, (D, F), D), ("data", "model"))
        self.up = weight(normal(up_key, (D, F), D), ("data", "model"))
        # Blocks start as the identity plus little: both projections into the residual stream are
        # scaled by 1/√(2L) (GPT-2).
        down = normal(down_key, (F, D), F) / math.sqrt(2 * cfg.num_layers)
        self.down = weight(down, ("model", "data"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [B, T, D] → [B, T, D]."""
        hidden = ("data", "context", "model")
        up = einsum("BTD,DF->BTF", x, gathered(self.up, x.dtype), out=hidden)
        if self.kind == "swiglu":
            gate = einsum("BTD,DF->BTF", x, gathered(self.gate, x.dtype), out=hidden)
            inner = jax.nn.silu(gate) * up
        else:
            inner = jnp.square(jax.nn.relu(up))
        return einsum("BTF,FD->BTD", inner, gathered(self.down, x.dtype), out=ACTIVATIONS)


def embedding_weight(cfg: config.Model, key: jax.Array, group: Group) -> nnx.Param:
    """[V padded, D]; starts at deviation 1, as (also tied) unembedding at 1/√D."""
    fan_in = 1 if group == "embedding" else cfg.dim
    table = normal(key, (cfg.padded_vocab, cfg.dim), fan_in)
    return weight(table, ("model", "data"), group, Matrix())


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of a table whose vocabulary lies over `model`.

    Args:
      table: [V, D].
      tokens: [B, T] int32 in [0, V).
    Returns:
      [B, T, D] in table's dtype.
    """
    shards = model_size()
    places = (axis_for("data", tokens.shape[0]), axis_for("context", tokens.shape[1]))
    if shards == 1:
        return local(lambda t, i: t[i], [(None, None), places], (*places, None))(table, tokens)
    rows = table.shape[0] // shards

    def lookup(shard: jax.Array, ids: jax.Array) -> jax.Array:
        ids = ids - jax.lax.axis_index("model") * rows
        mine = (ids >= 0) & (ids < rows)
        found = jnp.where(mine[..., None], shard[jnp.clip(ids, 0, rows - 1)], 0)
        return jax.lax.psum(found, "model")

    return local(lookup, [("model", None), places], (*places, None))(table, tokens)
