"""The three forms of every mechanism (training, prefill, decode) around what differs."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import Backend
from vhajax import cache, config
from vhajax.attention import kernels
from vhajax.attention.cached import read
from vhajax.attention.core import Window, attend
from vhajax.cache import LayerCache, Layout
from vhajax.layers import ACTIVATIONS, RMSNorm, normal
from vhajax.rope import rotate
from vhajax.sharding import Matrix, Whole, einsum, gathered, operand, weight

HEADS = ("data", "context", "model", None)  # [B, T, N, H]


class Stored(NamedTuple):
    """What the cache gets: parts [B, T, heads, width] and inverse RMS [B, T, N] float32 or None."""

    parts: tuple[jax.Array, ...]
    scales: jax.Array | None = None


class Attention(nnx.Module):
    """Queries and the output projection, shared by all mechanisms.

    A mechanism gives `project` (what is made of the input), `expand` (queries, keys and values of
    the training form), `store` (what the cache gets) and `decode` (attention over stored parts).
    """

    def __init__(self, cfg: config.Attention, model: config.Model, key: jax.Array):
        self.cfg = cfg
        self.scale = 1 / math.sqrt(cfg.key_dim)
        query_key, key_key, value_key, out_key = jax.random.split(key, 4)
        D, N, V = model.dim, cfg.num_heads, cfg.v_dim
        self._init_query(model, query_key)
        self._init_keys(model, key_key, value_key)
        out = normal(out_key, (N, V, D), N * V) / math.sqrt(2 * model.num_layers)
        self.out = weight(out, ("model", None, "data"), matrix=Matrix(rows=2))
        if cfg.out_bias:
            self.out_bias = weight(jnp.zeros(D), (None,), group="vector")
        if cfg.output_gate:
            gate = normal(jax.random.fold_in(out_key, 1), (D, N, V), D)
            self.gate = weight(gate, ("data", "model", None))
        self.query_norm = RMSNorm(cfg.key_dim, cfg.qk_norm, model.norm_eps)
        self.key_norm = RMSNorm(cfg.key_dim, cfg.qk_norm, model.norm_eps)

    def _init_query(self, model: config.Model, key: jax.Array) -> None:
        """[D, N, H], or through a latent [D, C_q] and its norm."""
        cfg, width = self.cfg, model.dim
        if isinstance(cfg, config.MLA | config.MFA) and cfg.query_latent_dim:
            down_key, key = jax.random.split(key)
            shape = (width, cfg.query_latent_dim)
            self.query_latent = weight(normal(down_key, shape, width), ("data", None))
            width = cfg.query_latent_dim
            self.query_latent_norm = RMSNorm(width, cfg.latent_norm, model.norm_eps)
        shape = (width, cfg.num_heads, cfg.key_dim)
        self.query = weight(normal(key, shape, width), ("data", "model", None))
        self._init_bias("query_bias", shape[1:])

    def _init_bias(self, name: str, shape: tuple[int, ...]) -> None:
        if self.cfg.qkv_bias:
            names = ("model", None) if len(shape) == 2 else (None,)
            setattr(self, name, weight(jnp.zeros(shape), names, group="vector"))

    def _init_keys(self, model: config.Model, key_key: jax.Array, value_key: jax.Array) -> None:
        raise NotImplementedError

    def queries(self, x: jax.Array) -> jax.Array:
        """[B, T, D] → [B, T, N, H], before norm and RoPE."""
        if hasattr(self, "query_latent"):
            latent = operand(self.query_latent, x.dtype)
            x = einsum("BTD,DC->BTC", x, latent, out=ACTIVATIONS)
            x = self.query_latent_norm(x)
        return self.heads(x, "query")

    def heads(self, x: jax.Array, name: str) -> jax.Array:
        """A projection to heads, with its bias if it has one: [B, T, D] → [B, T, heads, H]."""
        y = einsum("BTD,DNH->BTNH", x, operand(getattr(self, name), x.dtype), out=HEADS)
        return y + gathered(getattr(self, f"{name}_bias"), x.dtype) if self.cfg.qkv_bias else y

    def shared(self, x: jax.Array, name: str) -> jax.Array:
        """A projection for all heads at once, with its bias if any: [B, T, D] → [B, T, C]."""
        y = einsum("BTD,DC->BTC", x, operand(getattr(self, name), x.dtype), out=ACTIVATIONS)
        return y + gathered(getattr(self, f"{name}_bias"), x.dtype) if self.cfg.qkv_bias else y

    def rotated(self, heads: jax.Array, positions: jax.Array) -> jax.Array:
        return rotate(heads, positions, self.cfg.rope_theta, self.cfg.rope_scaling)

    def key_scale(self) -> jax.Array:
        """γ, the weight of QK-norm on whole keys; ones where it has none."""
        if self.cfg.qk_norm == "weighted":
            return self.key_norm.scale[...]
        return jnp.ones(self.cfg.key_dim)

    def output(self, o: jax.Array, x: jax.Array) -> jax.Array:
        """Heads [B, T, N, H_v] and the layer's input [B, T, D] → [B, T, D]."""
        if self.cfg.output_gate:
            gate = einsum("BTD,DNH->BTNH", x, operand(self.gate, x.dtype), out=HEADS)
            o = o * jax.nn.sigmoid(gate)
        y = einsum("BTNH,NHD->BTD", o, self.output_weight(o.dtype), out=ACTIVATIONS)
        return y + gathered(self.out_bias, y.dtype) if self.cfg.out_bias else y

    def output_weight(self, dtype: Any) -> jax.Array | Whole:
        """[N, H_v, D], whole along `data`."""
        return operand(self.out, dtype)

    def project(self, x: jax.Array, positions: jax.Array) -> Any:
        """[B, T, D], [B, T] → what `expand` and `store` begin with; its `q` is [B, T, N, ·]."""
        raise NotImplementedError

    def expand(self, made: Any, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, T, N, ·], keys [B, T, K, ·], values [B, T, K, H_v] of the training form."""
        raise NotImplementedError

    def store(self, made: Any, positions: jax.Array) -> Stored:
        raise NotImplementedError

    def decode(self, q, parts, scales, mask, *weights) -> jax.Array:
        """See `cached.read`: attention over stored parts, without forming keys of all heads."""
        raise NotImplementedError

    has_kernel = False
    """Whether `kernel` exists."""

    def kernel(self, q, held: kernels.Rows, *weights) -> jax.Array:
        """See `kernels.read`: `decode` of one token, by a Pallas kernel."""
        raise NotImplementedError

    def decode_weights(self) -> tuple[jax.Array, ...]:
        """Weights [N, …] that `decode` and `kernel` take."""
        return ()

    # -------------------------------------------------------------- the three forms

    def __call__(
        self, x: jax.Array, positions: jax.Array, segments: jax.Array, window: Window = None
    ) -> jax.Array:
        """Training forward: x [B, T, D], positions and segments [B, T] → [B, T, D]."""
        return self._attend(x, self.project(x, positions), positions, segments, window)

    def _attend(self, x, made, positions, segments, window) -> jax.Array:
        q, k, v = self.expand(made, positions)
        out = attend(q, k, v, segments, window, scale=self.scale, cap=self.cfg.logit_cap)
        return self.output(out, x)

    def init_cache(
        self,
        batch: int,
        capacity: int,
        dtype,
        layout: Layout | None = None,
        backend: Backend = "auto",
    ) -> LayerCache:
        kernels.check(backend, layout, self.has_kernel)
        row = self.cfg.cache_row()
        return cache.create(row, self.cfg.num_heads, batch, capacity, dtype, layout, backend)

    def _append(self, made, held: LayerCache, positions, valid) -> LayerCache:
        stored = self.store(made, positions)
        return cache.append(held, *stored, positions, valid, self.cfg.num_heads)

    def prefill(
        self,
        x: jax.Array,
        held: LayerCache,
        positions: jax.Array,
        valid: jax.Array,
        window: Window = None,
    ) -> tuple[jax.Array, LayerCache]:
        """A first prompt into an empty cache: the training form, and what it stores.

        Args:
          x: [B, T, D].
          positions: [B, T] int32, slot of each token.
          valid: [B, T] bool, False for padding.
        """
        made = self.project(x, positions)
        out = self._attend(x, made, positions, valid.astype(jnp.int32), window)
        return out, self._append(made, held, positions, valid)

    def extend(
        self,
        x: jax.Array,
        held: LayerCache,
        positions: jax.Array,
        valid: jax.Array,
        window: Window = None,
    ) -> tuple[jax.Array, LayerCache]:
        """New tokens on top of a cache: one (a decode step) or more (a chunk of a prompt)."""
        made = self.project(x, positions)
        held = self._append(made, held, positions, valid)
        live = positions[:, 0] + valid.sum(axis=1)
        out, weights = None, self.decode_weights()
        if x.shape[1] == 1 and kernels.applies(held, self.has_kernel):
            cap = self.cfg.logit_cap
            out = kernels.read(self.kernel, made.q, held, live, window, cap, weights)
        if out is None:
            out = read(self.decode, made.q, held, positions, live, window, weights)
        return self.output(out, x), held
