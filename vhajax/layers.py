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
    Whole,
    axis_for,
    einsum,
    local,
    model_size,
    operand,
    platform,
    reduce_scattered,
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
        up = einsum("BTD,DF->BTF", x, operand(self.up, x.dtype), out=hidden)
        if self.kind == "swiglu":
            gate = einsum("BTD,DF->BTF", x, operand(self.gate, x.dtype), out=hidden)
            inner = jax.nn.silu(gate) * up
        else:
            inner = jnp.square(jax.nn.relu(up))
        return einsum("BTF,FD->BTD", inner, operand(self.down, x.dtype), out=ACTIVATIONS)


def embedding_weight(cfg: config.Model, key: jax.Array, group: Group) -> nnx.Param:
    """[V padded, D]; starts at deviation 1, as (also tied) unembedding at 1/√D."""
    fan_in = 1 if group == "embedding" else cfg.dim
    table = normal(key, (cfg.padded_vocab, cfg.dim), fan_in)
    return weight(table, ("model", "data"), group, Matrix())


def embed(table: jax.Array | Whole, tokens: jax.Array) -> jax.Array:
    """Rows of a table whose vocabulary lies over `model`.

    Args:
      table: [V, D].
      tokens: [B, T] int32 in [0, V).
    Returns:
      [B, T, D] in table's dtype.
    """
    if isinstance(table, Whole):
        return _embed(table.stored, table.array, tokens)
    return _rows(table, tokens)


def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    shards, places = model_size(), _token_axes(tokens)
    if shards == 1:
        return local(lambda t, i: t[i], [(None, None), places], (*places, None))(table, tokens)
    lookup = lambda shard, ids: jax.lax.psum(_own_rows(shard, ids), "model")  # noqa: E731
    return local(lookup, [("model", None), places], (*places, None))(table, tokens)


def _own_rows(shard: jax.Array, ids: jax.Array) -> jax.Array:
    """A device's part of the vocabulary, zeros for other ids."""
    rows = shard.shape[0]
    ids = ids - jax.lax.axis_index("model") * rows
    mine = (ids >= 0) & (ids < rows)
    return jnp.where(mine[..., None], shard[jnp.clip(ids, 0, rows - 1)], 0)


def _token_axes(tokens: jax.Array) -> tuple[str | None, str | None]:
    return axis_for("data", tokens.shape[0]), axis_for("context", tokens.shape[1])


@jax.custom_vjp
def _embed(stored: jax.Array, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """`_rows` of a table that was gathered from `stored`, which gets its gradient."""
    del stored
    return _rows(table, tokens)


def _embed_forward(stored: jax.Array, table: jax.Array, tokens: jax.Array):
    return _embed(stored, table, tokens), (stored, tokens)


def _embed_backward(kept: tuple[jax.Array, jax.Array], dy: jax.Array):
    stored, tokens = kept
    places = _token_axes(tokens)
    shape = (stored.shape[0] // model_size(), stored.shape[1])

    def gradient(ids: jax.Array, dy: jax.Array) -> jax.Array:
        shard = jnp.zeros(shape, dy.dtype)
        return jax.linear_transpose(lambda t: _own_rows(t, ids), shard)(dy)[0]

    spec = jax.typeof(stored).sharding.spec
    run = reduce_scattered(gradient, [places, (*places, None)], spec)
    return run(tokens, dy).astype(stored.dtype), None, None


_embed.defvjp(_embed_forward, _embed_backward)
