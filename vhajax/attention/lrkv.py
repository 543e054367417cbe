"""Low-Rank Key-Value attention (arXiv 2601.11471): one shared K, V and a rank-R residual a head."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import gqa_decode, lrkv_decode
from vhajax import config
from vhajax.attention.base import HEADS, Attention, Stored
from vhajax.attention.cached import mix, rotated_scores, scores, softmax
from vhajax.attention.core import HIGHEST
from vhajax.attention.kernels import Rows
from vhajax.layers import inverse_rms, normal
from vhajax.rope import frequencies
from vhajax.sharding import Matrix, einsum, gathered, operand, weight

RESIDUAL = 0.1  # norm of U Bᵀ over the norm of the shared matrix at the start


class Factors(NamedTuple):
    """What one token makes, before norm and rotation of keys.

    q: [B, T, N, H] normed and rotated; [rotated | not], [B, T, N, 2·H], in position `shared`.
    k, v: [B, T, H], [B, T, H_v] shared. zk, zv: [B, T, N, R] latents, or None at rank 0.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    zk: jax.Array | None
    zv: jax.Array | None


class LRKVAttention(Attention):
    """W_n = W_shared + U_n B_nᵀ for keys and for values.

    key, value [D, H]; key_down, value_down U [N, D, R]; key_up, value_up Bᵀ [N, R, H]. Training
    forms the keys of all heads; the cache holds k_s, v_s and the latents z = x U. QK-norm acts on
    the sum k_s + B z: its inverse RMS is stored in float32 (as QK-Normed MLA does for a latent),
    its weight γ goes into the stored k_s and into B, before any rotation.

    U and B keep heads in front so that Muon orthogonalises one head's D × R factor at a time: side
    by side, N·R columns would be made orthogonal to each other across heads, which need not differ,
    and where N·R > D no head could get an update of full rank R.
    """

    has_kernel = True

    def _init_keys(self, model: config.Model, key_key: jax.Array, value_key: jax.Array) -> None:
        cfg, D = self.lrkv, model.dim
        N, R = cfg.num_heads, cfg.rank
        for name, noise, H in (("key", key_key, cfg.head_dim), ("value", value_key, cfg.v_dim)):
            shared_key, down_key, up_key = jax.random.split(noise, 3)
            setattr(self, name, weight(normal(shared_key, (D, H), D), ("data", None)))
            self._init_bias(f"{name}_bias", (H,))
            if R:
                small = math.sqrt(RESIDUAL)  # in each factor, so that neither starts at nothing
                down = small * normal(down_key, (N, D, R), D)
                up = small * normal(up_key, (N, R, H), R)
                down = weight(down, ("model", "data", None), matrix=Matrix(batch=1))
                setattr(self, f"{name}_down", down)
                setattr(self, f"{name}_up", weight(up, ("model", None, None), matrix=Matrix(1)))

    @property
    def lrkv(self) -> config.LRKV:
        assert isinstance(self.cfg, config.LRKV)
        return self.cfg

    def _factor(self, name: str) -> nnx.Param:
        return getattr(self, name)

    def _latents(self, x: jax.Array, name: str) -> jax.Array | None:
        if not self.lrkv.rank:
            return None
        down = operand(self._factor(f"{name}_down"), x.dtype)
        return einsum("BTD,NDR->BTNR", x, down, out=HEADS)

    def project(self, x: jax.Array, positions: jax.Array) -> Factors:
        plain = self.query_norm(self.queries(x))
        q = plain if self.lrkv.position == "none" else self.rotated(plain, positions)
        if self.lrkv.position == "shared" and self.lrkv.rank:
            q = jnp.concatenate([q, plain], axis=-1)
        shared = (self.shared(x, "key"), self.shared(x, "value"))
        return Factors(q, *shared, self._latents(x, "key"), self._latents(x, "value"))

    def _residual(self, latents: jax.Array, name: str) -> jax.Array:
        up = gathered(self._factor(f"{name}_up"), latents.dtype)
        return einsum("BTNR,NRH->BTNH", latents, up, out=HEADS)

    def expand(self, made: Factors, positions: jax.Array):
        shared, value = made.k[:, :, None], made.v[:, :, None]
        if made.zk is None or made.zv is None:
            keys = self._positioned(self.key_norm(shared), None, positions)
            return made.q, keys, value
        residual = self._residual(made.zk, "key")
        value = value + self._residual(made.zv, "value")
        total = shared + residual
        if self.lrkv.position != "shared":
            return made.q, self._positioned(self.key_norm(total), None, positions), value
        # The norm of the sum scales both of its terms.
        shared = jnp.broadcast_to(shared, total.shape)
        if self.lrkv.qk_norm != "none":
            scale = inverse_rms(total, self.key_norm.eps) * self.key_scale()
            shared, residual = ((x * scale).astype(x.dtype) for x in (shared, residual))
        return made.q, self._positioned(shared, residual, positions), value

    def _positioned(self, rotating: jax.Array, still: jax.Array | None, positions: jax.Array):
        """Keys with their positions, beside the part that has none, if any."""
        if self.lrkv.position == "none":
            return rotating
        rotated = self.rotated(rotating, positions)
        return rotated if still is None else jnp.concatenate([rotated, still], axis=-1)

    def store(self, made: Factors, positions: jax.Array) -> Stored:
        shared, value = made.k[:, :, None], made.v[:, :, None]
        if made.zk is None or made.zv is None:  # MQA
            shared = self.key_norm(shared)
        else:
            shared = (shared * self.key_scale()).astype(shared.dtype)
        if self.lrkv.position != "none":
            shared = self.rotated(shared, positions)
        if made.zk is None or made.zv is None:
            return Stored((shared, value))
        scales = None
        if self.lrkv.qk_norm != "none":
            keys = made.k[:, :, None] + self._residual(made.zk, "key")
            scales = inverse_rms(keys, self.key_norm.eps)[..., 0]
        return Stored((shared, made.zk, value, made.zv), scales)

    def decode_weights(self) -> tuple[jax.Array, ...]:
        """γ B^K and B^V, [N, R, ·] float32."""
        if not self.lrkv.rank:
            return ()
        key_up, value_up = (gathered(self._factor(n), jnp.float32) for n in ("key_up", "value_up"))
        return key_up * self.key_scale(), value_up

    def decode(self, q, parts, scales, mask, *factors) -> jax.Array:
        """Associative: q k_s + (q B^K) z^K, and a v_s + (a z^V) B^V.

        In position `full` the second term is `cached.rotated_scores`, at N·R·H multiply-adds a
        cached token instead of N·R. In `shared` it takes the query that was not rotated.
        """
        cfg = self.lrkv
        q = q.astype(jnp.float32) * self.scale
        logits = scores(q[..., : cfg.head_dim], parts[0])
        if not cfg.rank:
            weights = softmax(logits, mask, cfg.logit_cap)
            return mix(weights, parts[1], mask)
        (_, zk, v, zv), (key_up, value_up) = parts, factors
        if cfg.position == "full":
            logits += rotated_scores(q, zk, key_up, cfg.rope_theta, cfg.rope_scaling)
        else:
            still = q[..., -cfg.head_dim :]
            absorbed = jnp.einsum("BNTH,NRH->BNTR", still, key_up, precision=HIGHEST)
            logits += scores(absorbed, zk)
        if scales is not None:
            logits *= scales
        weights = softmax(logits, mask, cfg.logit_cap)
        residual = mix(weights, zv, mask)
        up = jnp.einsum("BNTR,NRH->BNTH", residual, value_up, precision=HIGHEST)
        return mix(weights, v, mask) + up

    def kernel(self, q, held: Rows, *factors) -> jax.Array:
        """The same as `decode`, from rows."""
        cfg, options = self.lrkv, dict(held.options, scale=self.scale)
        if not cfg.rank:
            return gqa_decode(q, held.rows, num_kv_heads=1, value_dim=cfg.v_dim, **options).out
        if cfg.position == "full":
            theta, scaling = cfg.rope_theta, cfg.rope_scaling
            options["frequencies"] = frequencies(cfg.head_dim, theta, scaling)
            options["multiplier"] = scaling.multiplier
        elif cfg.position == "shared":
            q, options["q_residual"] = jnp.split(q, 2, axis=-1)
        return lrkv_decode(
            q,
            held.rows,
            key_up=factors[0],
            value_up=factors[1],
            key_scales=held.scales,
            **options,
        ).out
