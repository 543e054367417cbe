"""Grouped-query attention (arXiv 2305.13245): K = N is MHA, K = 1 is MQA."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from vhajax import config
from vhajax.attention.core import append, attend, read
from vhajax.layers import ACTIVATIONS, RMSNorm, normal
from vhajax.rope import rotate
from vhajax.sharding import Matrix, axis_for, einsum, gathered, model_size, reshard, weight

HEADS = ("data", "context", "model", None)  # [B, T, N, H]
LANES = 128  # a TPU row is padded to this many elements


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer, one padded row a token.

    rows: [B, S, W], a row is [K_0 | V_0 | K_1 | V_1 | … | padding], keys normed and roped,
    W = 2·K·H rounded up to 128. How many slots are live is kept once for all layers.
    """

    rows: jax.Array

    @staticmethod
    def logical_width(cfg: config.Attention) -> int:
        """Elements a token and layer, as papers count: 2·K·H."""
        return 2 * cfg.num_kv_heads * cfg.head_dim

    @staticmethod
    def stored_width(cfg: config.Attention) -> int:
        """Elements a token and layer in memory: the logical ones, padded to 128."""
        return -(-KVCache.logical_width(cfg) // LANES) * LANES

    @classmethod
    def create(cls, cfg: config.Attention, batch: int, capacity: int, dtype) -> "KVCache":
        """An empty cache of `capacity` slots; sharded over `model` where rows split into heads."""
        logical, stored = cls.logical_width(cfg), cls.stored_width(cfg)
        split = logical == stored and cfg.num_kv_heads % model_size() == 0
        rows = jnp.zeros((batch, capacity, stored), dtype)
        return cls(reshard(rows, (axis_for("data", batch), None, "model" if split else None)))


class GQAttention(nnx.Module):
    """Attention with K KV heads; subclasses change how queries are made and outputs projected."""

    def __init__(self, cfg: config.Attention, model: config.Model, key: jax.Array):
        self.cfg = cfg
        D, N, K, H = model.dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        query_key, key_key, value_key, out_key = jax.random.split(key, 4)
        self._init_query(D, query_key)
        self.key = weight(normal(key_key, (D, K, H), D), ("data", "model", None))
        self.value = weight(normal(value_key, (D, K, H), D), ("data", "model", None))
        out = normal(out_key, (N, H, D), N * H) / math.sqrt(2 * model.num_layers)
        self.out = weight(out, ("model", None, "data"), matrix=Matrix(rows=2))
        self.query_norm = RMSNorm(H, cfg.qk_norm, model.norm_eps)
        self.key_norm = RMSNorm(H, cfg.qk_norm, model.norm_eps)

    def _init_query(self, D: int, key: jax.Array) -> None:
        shape = (D, self.cfg.num_heads, self.cfg.head_dim)
        self.query = weight(normal(key, shape, D), ("data", "model", None))

    def queries(self, x: jax.Array) -> jax.Array:
        """[B, T, D] → [B, T, N, H], before norm and RoPE."""
        return einsum("BTD,DNH->BTNH", x, gathered(self.query, x.dtype), out=HEADS)

    def output(self, o: jax.Array) -> jax.Array:
        """[B, T, N, H] → [B, T, D]."""
        return einsum("BTNH,NHD->BTD", o, gathered(self.out, o.dtype), out=ACTIVATIONS)

    def _project(
        self, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        theta = self.cfg.rope_theta
        q = rotate(self.query_norm(self.queries(x)), positions, theta)
        k = einsum("BTD,DKH->BTKH", x, gathered(self.key, x.dtype), out=HEADS)
        v = einsum("BTD,DKH->BTKH", x, gathered(self.value, x.dtype), out=HEADS)
        return q, rotate(self.key_norm(k), positions, theta), v

    def __call__(self, x: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
        """Training forward: x [B, T, D], positions and segments [B, T] → [B, T, D]."""
        return self.output(attend(*self._project(x, positions), segments))

    def init_cache(self, batch: int, capacity: int, dtype) -> KVCache:
        return KVCache.create(self.cfg, batch, capacity, dtype)

    def prefill(
        self, x: jax.Array, cache: KVCache, positions: jax.Array, valid: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """A first prompt into an empty cache: training attention, keys and values kept.

        Args:
          x: [B, T, D].
          positions: [B, T] int32, slot of each token.
          valid: [B, T] bool, False for padding.
        """
        q, k, v = self._project(x, positions)
        rows = append(cache.rows, k, v, positions, valid)
        return self.output(attend(q, k, v, valid.astype(jnp.int32))), KVCache(rows)

    def extend(
        self, x: jax.Array, cache: KVCache, positions: jax.Array, valid: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """New tokens on top of a cache: one (a decode step) or more (a chunk of a prompt)."""
        q, k, v = self._project(x, positions)
        rows = append(cache.rows, k, v, positions, valid)
        live = positions[:, 0] + valid.sum(axis=1)
        out = read(q, rows, self.cfg.num_kv_heads, positions, live)
        return self.output(out), KVCache(rows)
