"""Choosing the next token: greedy, temperature, top-k, top-p."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from vhajax.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    temperature: 0 is greedy. top_k: 0 keeps all, more than V keeps all. top_p: 1 keeps all; the
    most likely token always stays.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        # Written so that NaN fails too.
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}; it must be 0 (greedy) or more.")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must lie in (0, 1].")


GREEDY = Sampling()


def sample(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """One token a row: float32 logits [B, V] and one key a row → [B] int32.

    A row's draw depends on its own logits and key only.
    """
    logits = logits.astype(jnp.float32)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Against the top logit, so that a tiny temperature overflows to −inf and never to NaN.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / sampling.temperature
    kept = _keep(scaled, sampling)
    draw = jax.vmap(jax.random.categorical)(keys, jnp.where(kept, scaled, -jnp.inf))
    return draw.astype(jnp.int32)


def _keep(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """[B, V] bool: tokens that top-k and then top-p leave (ties are broken by id)."""
    V = logits.shape[-1]
    if sampling.top_k in (0, V) and sampling.top_p == 1:
        return jnp.ones(logits.shape, bool)
    order = jnp.argsort(-logits, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    k = min(sampling.top_k or V, V)
    likely = jnp.where(jnp.arange(V) < k, jnp.take_along_axis(logits, order, axis=-1), -jnp.inf)
    probability = jax.nn.softmax(likely, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    keep = (jnp.arange(V) < k) & (before < sampling.top_p)  # before[0] = 0: one always stays
    return jnp.take_along_axis(keep, rank, axis=-1)
