"""Grouped-query attention (arXiv 2305.13245): K = N is MHA, K = 1 is MQA."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import gqa_decode
from vhajax import config
from vhajax.attention.base import Attention, Stored
from vhajax.attention.cached import mix, scores, softmax
from vhajax.attention.kernels import Rows
from vhajax.layers import normal
from vhajax.sharding import weight


class QKV(NamedTuple):
    """q [B, T, N, H] and k [B, T, K, H], normed and rotated; v [B, T, K, H_v]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class GQAttention(Attention):
    """K KV heads, each read by N/K query heads. key [D, K, H], value [D, K, H_v]."""

    has_kernel = True

    def _init_keys(self, model: config.Model, key_key: jax.Array, value_key: jax.Array) -> None:
        cfg, D = self.cfg, model.dim
        assert isinstance(cfg, config.GQA | config.VHA | config.MFA)
        for name, noise, width in (("key", key_key, cfg.head_dim), ("value", value_key, cfg.v_dim)):
            shape = (D, cfg.num_kv_heads, width)
            setattr(self, name, weight(normal(noise, shape, D), ("data", "model", None)))
            self._init_bias(f"{name}_bias", shape[1:])

    def project(self, x: jax.Array, positions: jax.Array) -> QKV:
        q = self.rotated(self.query_norm(self.queries(x)), positions)
        k = self.rotated(self.key_norm(self.heads(x, "key")), positions)
        return QKV(q, k, self.heads(x, "value"))

    def expand(self, made: QKV, positions: jax.Array) -> QKV:
        del positions
        return made

    def store(self, made: QKV, positions: jax.Array) -> Stored:
        del positions
        return Stored((made.k, made.v))

    def decode(self, q, parts, scales, mask) -> jax.Array:
        """softmax(q Kᵀ / √H) V over the KV head of each group."""
        del scales
        keys, values = parts
        weights = softmax(
            scores(q.astype(jnp.float32) * self.scale, keys), mask, self.cfg.logit_cap
        )
        return mix(weights, values, mask)

    def kernel(self, q, held: Rows) -> jax.Array:
        """The same as `decode`, from rows."""
        return gqa_decode(
            q,
            held.rows,
            num_kv_heads=held.groups,
            value_dim=self.cfg.v_dim,
            scale=self.scale,
            **held.options,
        ).out
