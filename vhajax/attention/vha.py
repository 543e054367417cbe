"""Virtual Head Attention: fewer physical query heads, more virtual ones, GQA at inference.

Form and initialisation follow the authors' code (PaddlePaddle/PaddleFleet, `SelfAttentionVHA`).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from vhajax import config
from vhajax.attention.base import HEADS
from vhajax.attention.gqa import GQAttention
from vhajax.layers import normal
from vhajax.sharding import Matrix, Whole, einsum, gather, gathered, operand, reshard, weight


class VHAttention(GQAttention):
    """GQA whose query projection is W_Q[p] W[k] and whose output projection is (I + V Uᵀ) W_O.

    query: [D, P, Q] physical query heads. premix W: [K, Q, H], one matrix a KV group, applied to
    every physical head. postmix U, V: [N, r], mixing along the head axis.
    QK-norm acts after Premix: a norm between W_Q and W would make the fold inexact.
    """

    def _init_query(self, model: config.Model, key: jax.Array) -> None:
        cfg, D = self.vha, model.dim
        query_key, premix_key, postmix_key = jax.random.split(key, 3)
        P, K, N = cfg.num_physical_heads, cfg.num_kv_heads, cfg.num_heads
        self.query = weight(normal(query_key, (D, P, cfg.q_dim), D), ("data", "model", None))
        self._init_bias("query_bias", (P, cfg.q_dim))
        if cfg.premix:
            premix = init_premix(premix_key, K, cfg.q_dim, cfg.head_dim)
            self.premix = weight(premix, (None, None, None), matrix=Matrix(1))
        if cfg.rank:
            u = 0.01 * jax.random.normal(postmix_key, (N, cfg.rank))
            self.postmix_u = weight(u, ("model", None))
            self.postmix_v = weight(jnp.zeros((N, cfg.rank)), ("model", None))

    @property
    def vha(self) -> config.VHA:
        assert isinstance(self.cfg, config.VHA)
        return self.cfg

    def queries(self, x: jax.Array) -> jax.Array:
        """Virtual queries Q[k·P + p] = q[p] W[k]: [B, T, D] → [B, T, N, H]."""
        physical = self.heads(x, "query")
        if not self.vha.premix:
            return physical
        # Every KV group reads every physical head.
        physical = reshard(physical, ("data", "context", None, None))
        premix = gathered(self.premix, x.dtype)
        out = ("data", "context", None, None, None)
        virtual = einsum("BTPQ,KQH->BTKPH", physical, premix, out=out)
        B, T, K, P, H = virtual.shape
        return reshard(virtual.reshape(B, T, K * P, H), HEADS)

    def output_weight(self, dtype: Any) -> jax.Array | Whole:
        """M W_O with M = I + V Uᵀ: Σ_h o[h] M[j, h] W_O[j] summed over j, [N, H_v, D].

        Postmix is linear, so W_O takes it: N²·H·D/2 multiply-adds a step instead of N²·H/2 (both
        at rank N/4) a token, less from D tokens on, and no activation of its own to keep.
        """
        if not self.vha.rank:
            return operand(self.out, dtype)
        mixed = fold_postmix(self.postmix_u[...], self.postmix_v[...], self.out[...])
        return gather(mixed, ("model", None, "data"), dtype)


def init_premix(key: jax.Array, K: int, Q: int, H: int) -> jax.Array:
    """[K, Q, H]: I + 0.1/√H noise if Q = H, else rows orthonormal times √(H/Q)."""
    if Q == H:
        return jnp.eye(H) + 0.1 / math.sqrt(H) * jax.random.normal(key, (K, H, H))
    orthogonal = jax.nn.initializers.orthogonal()
    wide = jax.vmap(lambda k: orthogonal(k, (Q, H), jnp.float32))(jax.random.split(key, K))
    return wide * math.sqrt(H / Q)


def fold_premix(query: jax.Array, premix: jax.Array) -> jax.Array:
    """W_Q'[k·P + p] = W_Q[p] W[k], in float32: [D, P, Q], [K, Q, H] → [D, N, H]."""
    folded = jnp.einsum("DPQ,KQH->DKPH", query, premix, precision="highest")
    D, K, P, H = folded.shape
    return folded.reshape(D, K * P, H)


def fold_postmix(u: jax.Array, v: jax.Array, out: jax.Array) -> jax.Array:
    """W_O'[j] = Σ_h (I + V Uᵀ)[h, j] W_O[h], in float32: u, v [N, r], out [N, H, D] → [N, H, D]."""
    low = einsum("NR,NHD->RHD", v, out, out=(None, None, "data"), precision="highest")
    return out + einsum("NR,RHD->NHD", u, low, out=("model", None, "data"), precision="highest")
