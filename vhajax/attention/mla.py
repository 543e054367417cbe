"""Multi-head Latent Attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), absorbed at decode."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from vhajax import config
from vhajax.attention.base import HEADS, Attention, Stored
from vhajax.attention.cached import mix, rotated_scores, scores, softmax
from vhajax.attention.core import HIGHEST
from vhajax.layers import RMSNorm, inverse_rms, normal
from vhajax.sharding import einsum, gathered, operand, reshard, weight


class Latents(NamedTuple):
    """What one token makes.

    q: [B, T, N, H] or [B, T, N, H + H_rope], normed and rotated. latent: [B, T, C], normed.
    shared_key: [B, T, 1, H_rope] before norm and rotation, or None.
    """

    q: jax.Array
    latent: jax.Array
    shared_key: jax.Array | None


class MLAttention(Attention):
    """Keys and values of all heads are linear in one latent c = norm(x W_c).

    latent [D, C], key_up [C, N, H], value_up [C, N, H_v], shared_key [D, H_rope] (decoupled form).
    k_n = [c W_n^K | P k_r] with k_r = x W_r shared by all heads (`decoupled`), P_s(c W_n^K)
    (`full`) or c W_n^K (`none`). QK-norm, where on, acts on a head's whole key before rotation; at
    decode it is one inverse RMS a head and token, its weight moved into W_n^K and the shared key.
    """

    def _init_keys(self, model: config.Model, key_key: jax.Array, value_key: jax.Array) -> None:
        cfg, D = self.mla, model.dim
        N, C = cfg.num_heads, cfg.latent_dim
        latent_key, shared_key, up_key = jax.random.split(key_key, 3)
        self.latent = weight(normal(latent_key, (D, C), D), ("data", None))
        self._init_bias("latent_bias", (C,))
        self.latent_norm = RMSNorm(C, cfg.latent_norm, model.norm_eps)
        up = ("data", "model", None)
        self.key_up = weight(normal(up_key, (C, N, cfg.head_dim), C), up)
        self.value_up = weight(normal(value_key, (C, N, cfg.v_dim), C), up)
        if cfg.shared_key_dim:
            shape = (D, cfg.shared_key_dim)
            self.shared_key = weight(normal(shared_key, shape, D), ("data", None))
            self._init_bias("shared_key_bias", shape[1:])

    @property
    def mla(self) -> config.MLA:
        assert isinstance(self.cfg, config.MLA)
        return self.cfg

    def project(self, x: jax.Array, positions: jax.Array) -> Latents:
        q = self._rotate_tail(self.query_norm(self.queries(x)), positions)
        shared = self.shared(x, "shared_key")[:, :, None] if self.mla.shared_key_dim else None
        return Latents(q, self.latent_norm(self.shared(x, "latent")), shared)

    def _rotate_tail(self, heads: jax.Array, positions: jax.Array) -> jax.Array:
        """The part of whole heads that carries positions, rotated."""
        if self.mla.position == "none":
            return heads
        split = self.mla.head_dim if self.mla.position == "decoupled" else 0
        tail = self.rotated(heads[..., split:], positions)
        return jnp.concatenate([heads[..., :split], tail], axis=-1)

    def _whole_keys(self, made: Latents) -> jax.Array:
        """[B, T, N, H + H_rope] before norm and rotation."""
        up = operand(self.key_up, made.latent.dtype)
        keys = einsum("BTC,CNH->BTNH", made.latent, up, out=HEADS)
        if made.shared_key is None:
            return keys
        shape = (*keys.shape[:3], made.shared_key.shape[-1])
        shared = reshard(jnp.broadcast_to(made.shared_key, shape), HEADS)
        return jnp.concatenate([keys, shared], axis=-1)

    def expand(self, made: Latents, positions: jax.Array):
        keys = self._rotate_tail(self.key_norm(self._whole_keys(made)), positions)
        up = operand(self.value_up, made.latent.dtype)
        return made.q, keys, einsum("BTC,CNH->BTNH", made.latent, up, out=HEADS)

    def store(self, made: Latents, positions: jax.Array) -> Stored:
        parts = [made.latent[:, :, None]]
        if made.shared_key is not None:
            weighted = made.shared_key * self.key_scale()[self.mla.head_dim :]
            rotated = self.rotated(weighted.astype(made.shared_key.dtype), positions)
            parts.append(rotated)
        if self.mla.qk_norm == "none":
            return Stored(tuple(parts))
        return Stored(tuple(parts), inverse_rms(self._whole_keys(made), self.key_norm.eps)[..., 0])

    def decode_weights(self) -> tuple[jax.Array, ...]:
        """W^K with QK-norm's weight, and W^V: [N, C, ·]."""
        key_up = gathered(self.key_up, jnp.float32) * self.key_scale()[: self.mla.head_dim]
        return key_up.swapaxes(0, 1), gathered(self.value_up, jnp.float32).swapaxes(0, 1)

    def decode(self, q, parts, scales, mask, key_up, value_up) -> jax.Array:
        """Absorbed: (q W_Kᵀ) c + q_r k_r, and (a c) W_V; c is never brought to H dimensions.

        In position `full` by `cached.rotated_scores`, at N·C·H multiply-adds a cached token.
        """
        cfg, latents = self.mla, parts[0]
        q = q.astype(jnp.float32) * self.scale
        if cfg.position == "full":
            logits = rotated_scores(q, latents, key_up, cfg.rope_theta, cfg.rope_scaling)
        else:
            content = q[..., : cfg.head_dim]
            absorbed = jnp.einsum("BNTH,NCH->BNTC", content, key_up, precision=HIGHEST)
            logits = scores(absorbed, latents)
        if cfg.shared_key_dim:
            logits += scores(q[..., cfg.head_dim :], parts[1])
        if scales is not None:
            logits *= scales
        weights = softmax(logits, mask, cfg.logit_cap)
        mixed = mix(weights, latents, mask)
        return jnp.einsum("BNTC,NCH->BNTH", mixed, value_up, precision=HIGHEST)
