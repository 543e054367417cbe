"""The same attention by einsums alone, for the roofline: what XLA makes of it without a kernel.

It has what XLA needs to do well: the kernels' row and their aligned lanes, products in the cache's
dtype, equal full lengths. What a dead slot holds is multiplied by 0, so it must be finite.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rows import gather, gqa_views, lrkv_views, padded, place, spread
from pallas_kernels.shapes import Shape


def attend(shape: Shape, arrays: dict[str, jax.Array]) -> jax.Array:
    """`Shape.call(arrays).out`."""
    return _grouped(shape, **arrays) if shape.kind == "gqa" else _low_rank(shape, **arrays)


def _grouped(shape: Shape, q, cache, lengths):
    (_, N, H), K, V = q.shape, shape.num_kv_heads, shape.v_dim
    G, views = N // K, gqa_views(K, H, V)
    outs = []
    for k, view in enumerate(views.views):
        start = k * (H + V)
        laid = place(q[:, k * G : (k + 1) * G], start - view.keys, views.key_width)
        weights, total = _softmax(shape, _logits(laid, cache, view.keys), lengths, None)
        mixed = _mixed(weights, cache, view.values, views.value_width)
        at = start + H - view.values
        outs.append(mixed[..., at : at + V] / total)
    return jnp.concatenate(outs, axis=1)


def _low_rank(shape: Shape, q, cache, lengths, key_up, value_up, q_residual=None, key_scales=None):
    (_, N, H), R, V = q.shape, shape.rank, shape.v_dim
    views = lrkv_views(N, R, H, V, latent_keys=shape.kind != "rope")
    (view,) = views.views
    if shape.kind == "rope":
        logits = _logits(q, cache[..., :H], 0) + _rotated(shape, q, cache, key_up)
    else:
        residual = q if q_residual is None else q_residual
        absorbed = jnp.einsum("BNH,NRH->BNR", residual.astype(jnp.float32), key_up)
        laid = jnp.concatenate([q, spread(absorbed.astype(q.dtype), N)], axis=-1)
        logits = _logits(place(laid, 0, views.key_width), cache, view.keys)
    weights, total = _softmax(shape, logits, lengths, key_scales)
    mixed = _mixed(weights, cache, view.values, views.value_width)
    mixed = mixed[..., H + N * R - view.values :]
    latents = gather(mixed[..., V : V + N * R], N)
    return (mixed[..., :V] + jnp.einsum("BNR,NRV->BNV", latents, value_up)) / total


def _rotated(shape: Shape, q, cache, key_up):
    """Σ_ρ z_ρ (t_n A)_ρ, see `decode.lrkv_decode`; the sum over a head's lanes as a product."""
    (B, N, H), R = q.shape, shape.rank
    angles = np.arange(cache.shape[1])[:, None] * shape.frequencies
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    q1, q2 = jnp.split(q[:, :, None].astype(jnp.float32), 2, axis=-1)
    b1, b2 = jnp.split(key_up, 2, axis=-1)
    rotor = jnp.concatenate([q1 * b1 + q2 * b2, q2 * b1 - q1 * b2], axis=-1).reshape(B, N * R, H)
    start = H // 128 * 128
    width = padded(H - start + N * R)
    rotor = jnp.pad(rotor, ((0, 0), (H - start, width - N * R - H + start), (0, 0)))
    own = place(spread(jnp.ones((1, N, R)), N)[0], H - start, width).astype(cache.dtype)
    # The rotor first: with the table first XLA writes `seen` to HBM where N·R fills its lanes.
    seen = _product("BZP,SP->BSZ", rotor.astype(cache.dtype), jnp.asarray(table, cache.dtype))
    product = (seen * cache[..., start : start + width]).astype(cache.dtype)
    return _product("NZ,BSZ->BNS", own, product)


def _product(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(letters, x, y, preferred_element_type=jnp.float32)


def _logits(laid: jax.Array, cache: jax.Array, start: int) -> jax.Array:
    keys = cache[..., start : start + laid.shape[-1]]
    return _product("BNW,BSW->BNS", laid.astype(cache.dtype), keys)


def _mixed(weights: jax.Array, cache: jax.Array, start: int, width: int) -> jax.Array:
    return _product("BNS,BSW->BNW", weights.astype(cache.dtype), cache[..., start : start + width])


def _softmax(shape: Shape, logits, lengths, key_scales) -> tuple[jax.Array, jax.Array]:
    """Exponentials [B, N, S] and their sums [B, N, 1]."""
    logits = logits * shape.head_dim**-0.5
    if key_scales is not None:
        logits = logits * key_scales
    live = jnp.arange(logits.shape[-1]) < lengths[:, None, None]
    logits = jnp.where(live, logits, -jnp.inf)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return weights, jnp.sum(weights, axis=-1, keepdims=True)
