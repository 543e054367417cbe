"""Softmax attention: one function for training, and what reading a cache needs.

Mechanisms give queries, keys and values; this file masks, normalises and shards.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from vhajax.cache import LayerCache, columns, placements
from vhajax.mechanisms import RopeScaling
from vhajax.rope import phases
from vhajax.sharding import axis_for, head_axes, local, platform

HIGHEST = jax.lax.Precision.HIGHEST
TILE = 512  # slots whose rotated queries or keys exist at one time

Window = jax.Array | int | None


# ------------------------------------------------------------------ training


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    window: Window = None,
    *,
    scale: float,
    cap: float = 0.0,
) -> jax.Array:
    """Causal attention inside documents: written out on CPU, tokamax's on TPU and GPU.

    Args:
      q: [B, T, N, H]. k: [B, T, K, H]. v: [B, T, K, H_v]; query head n reads KV head n // (N / K).
      segments: [B, T] int32; a query sees keys of its own segment, itself and earlier.
      window: tokens that a query sees, itself included; None or 0: all.
      scale: of the logits before the softmax.
      cap: soft cap of the scaled logits; 0: none.
    Returns:
      [B, T, N, H_v] in q's dtype; softmax in float32.
    """
    q_axis, kv_axis = head_axes(q.shape[2], k.shape[2])
    batch, num_heads, on_cpu = axis_for("data", q.shape[0]), q.shape[2], platform() == "cpu"
    heads, kv_heads = (batch, None, q_axis, None), (batch, None, kv_axis, None)

    def run(q, k, v, mask):
        if q_axis != kv_axis:
            k, v = (_own_heads(x, 2, q.shape[2], num_heads) for x in (k, v))
        if on_cpu:
            return attend_reference(q, k, v, mask, scale=scale, cap=cap)
        import tokamax  # 7 s to import: only where its kernels run

        return tokamax.dot_product_attention(
            q, k, v, mask=mask[:, None], scale=scale, is_causal=True, logits_soft_cap=cap or None
        )

    mask = document_mask(segments, window)
    places = [heads, kv_heads, kv_heads, (batch, None, None)]
    return local(run, places, heads)(q, k, v, mask)


def document_mask(segments: jax.Array, window: Window = None) -> jax.Array:
    """[B, T] segment ids → [B, T, T] bool: same segment, key not after query nor out of window."""
    slots = jnp.arange(segments.shape[1])
    seen = _within(slots[:, None], slots, window)
    return seen & (segments[:, :, None] == segments[:, None, :])


def _within(query: jax.Array, key: jax.Array, window: Window) -> jax.Array:
    """Whether a query's position sees a key's."""
    behind = query - key
    if window is None:
        return behind >= 0
    return (behind >= 0) & ((behind < window) | (jnp.asarray(window) == 0))


def attend_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    scale: float | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """Grouped attention in float32, written out.

    Args:
      q: [B, T, N, H]. k: [B, S, K, H]. v: [B, S, K, H_v].
      mask: [B, T, S] bool, True where a query sees a key; every query must see one.
      scale: 1/√H by default.
    Returns:
      [B, T, N, H_v] in q's dtype.

    Source: Attention Is All You Need (arXiv 1706.03762), eq. 1; GQA (arXiv 2305.13245), sec. 2.2.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H).astype(jnp.float32)
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k.astype(jnp.float32), precision=HIGHEST)
    logits = soft_cap(logits * (scale or 1 / math.sqrt(H)), cap)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], logits, -jnp.inf), axis=-1)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v.astype(jnp.float32), precision=HIGHEST)
    return out.reshape(B, T, N, v.shape[-1]).astype(q.dtype)


def soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    """c·tanh(logits / c) (Gemma 2, arXiv 2408.00118, sec. 2); the logits where c is 0."""
    return cap * jnp.tanh(logits / cap) if cap else logits


# ------------------------------------------------------------------ reading a cache


def read(
    form: Callable[..., jax.Array],
    q: jax.Array,
    cache: LayerCache,
    positions: jax.Array,
    live: jax.Array,
    window: Window = None,
    weights: Sequence[jax.Array] = (),
) -> jax.Array:
    """Attention over a cache that already holds the new tokens, on each device's heads.

    Args:
      form: (q [B, N, T, H], parts [B, heads, width, S] each, inverse RMS [B, N, 1, S] or None,
        mask [B, 1, T, S], *weights) → [B, N, T, H_v] float32: the mechanism's decode.
      q: [B, T, N, H], a head's queries side by side if it has several.
      positions: [B, T] int32; a query sees slots up to its own.
      live: [B] int32 slots in use; what lies behind them cannot matter.
      window: slots that a query sees, its own included; None or 0: all.
      weights: [N, …] each, split as the query heads are.
    Returns:
      [B, T, N, H_v] in q's dtype.
    """
    N, capacity, row = q.shape[2], cache.capacity, cache.row
    total = [row.groups * heads for heads, _ in row.parts]
    q_axis, _ = head_axes(N, max(total))
    batch, scaled = axis_for("data", q.shape[0]), cache.scales is not None

    def run(q, positions, live, *rest):
        arrays, rest = rest[: len(cache.arrays)], rest[len(cache.arrays) :]
        scales, rest = (rest[0][:, :, None], rest[1:]) if scaled else (None, rest)
        parts = [
            _own_heads(part, 1, q.shape[2], N) if q_axis and part.shape[1] == all_heads else part
            for part, all_heads in zip(columns(arrays, row), total, strict=True)
        ]
        slots = jnp.arange(capacity)
        mask = _within(positions[..., None], slots, window) & (slots < live[:, None, None])
        # A row with no live slot sees slot 0 rather than nothing; its output is not used.
        mask |= (slots == 0) & ~mask.any(axis=-1, keepdims=True)
        return form(q.swapaxes(1, 2), parts, scales, mask[:, None], *rest).swapaxes(1, 2)

    held = [*cache.arrays, *([cache.scales] if scaled else [])]
    heads = (batch, None, q_axis, None)
    own = [(q_axis, *[None] * (w.ndim - 1)) for w in weights]
    places = [heads, (batch, None), (batch,), *placements(cache, N), *own]
    return local(run, places, heads)(q, positions, live, *held, *weights).astype(q.dtype)


def scores(q: jax.Array, keys: jax.Array) -> jax.Array:
    """q · k in float32: [B, N, T, H], [B, K, H, S] → [B, N, T, S]; head n reads n // (N / K)."""
    B, N, T, H = q.shape
    K = keys.shape[1]
    grouped = q.reshape(B, K, N // K * T, H).astype(jnp.float32)
    out = jnp.einsum("BKMH,BKHS->BKMS", grouped, keys.astype(jnp.float32), precision=HIGHEST)
    return out.reshape(B, N, T, -1)


def softmax(logits: jax.Array, mask: jax.Array, cap: float) -> jax.Array:
    """Weights in float32: [B, N, T, S] scaled logits, [B, 1, T, S] bool → [B, N, T, S]."""
    return jax.nn.softmax(jnp.where(mask, soft_cap(logits, cap), -jnp.inf), axis=-1)


def mix(weights: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Weighted sums in float32: [B, N, T, S], [B, K, H, S] → [B, N, T, H], masked slots left out.

    0 · NaN is NaN. A copy with zeros in masked slots costs more than the sum itself, so it is made
    only if the sum is not finite.
    """
    B, N, T, S = weights.shape
    K = values.shape[1]
    grouped = weights.reshape(B, K, N // K * T, S)

    def total(values: jax.Array) -> jax.Array:
        values = values.astype(jnp.float32)
        return jnp.einsum("BKMS,BKHS->BKMH", grouped, values, precision=HIGHEST)

    def masked() -> jax.Array:
        return total(jnp.where(mask.any(axis=2)[:, :, None], values, 0))

    plain = total(values)
    out = jax.lax.cond(jnp.isfinite(plain).all(), lambda: plain, masked)
    return out.reshape(B, N, T, -1)


def rotated_scores(
    q: jax.Array, latents: jax.Array, up: jax.Array, theta: float, scaling: RopeScaling
) -> jax.Array:
    """q · P_s(B z_s) for every slot s, in float32, where P_s rotates by RoPE at position s.

    Args:
      q: [B, N, T, H], already rotated.
      latents: [B, N or 1, R, S] z, never rotated.
      up: [N, R, H] B, one a head.
    Returns:
      [B, N, T, S].

    RoPE does not commute with B, so latents cannot be stored rotated. For one query a head the sum
    is turned round: q · P_s B z = Σ_ρ z_ρ (t_s · A)_ρ with t_s = [cos sθ | sin sθ] and
    A = [q₁B₁ + q₂B₂; q₂B₁ − q₁B₂] (halves of H), so that no key is formed. For more queries keys
    of one tile of slots at a time are formed and rotated.
    """
    B, N, T, H = q.shape
    q, up = q.astype(jnp.float32), up.astype(jnp.float32)
    S, half = latents.shape[-1], H // 2
    low, high = up[..., :half], up[..., half:]
    if T == 1:
        first, second = q[:, :, 0, None, :half], q[:, :, 0, None, half:]
        turned = jnp.concatenate([first * low + second * high, second * low - first * high], -1)

    def tile(start: jax.Array, size: int) -> jax.Array:
        z = jax.lax.dynamic_slice_in_dim(latents, start, size, axis=3).astype(jnp.float32)
        cos, sin = phases(start + jnp.arange(size), H, theta, scaling)
        if T == 1:
            table = jnp.concatenate([cos, sin], axis=-1)
            rotated = jnp.einsum("SF,BNRF->BNRS", table, turned, precision=HIGHEST)
            return jnp.sum(rotated * z, axis=2)[:, :, None]
        z = jnp.broadcast_to(z, (B, N, *z.shape[2:]))
        x = jnp.einsum("BNRS,NRF->BNSF", z, low, precision=HIGHEST)
        y = jnp.einsum("BNRS,NRF->BNSF", z, high, precision=HIGHEST)
        keys = jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)
        return jnp.einsum("BNTH,BNSH->BNTS", q, keys, precision=HIGHEST)

    size = min(TILE, S)
    tiles = jax.lax.map(lambda i: tile(i * size, size), jnp.arange(S // size))
    out = jnp.moveaxis(tiles, 0, 3).reshape(B, N, T, -1)
    rest = S % size
    return jnp.concatenate([out, tile(jnp.int32(S - rest), rest)], axis=-1) if rest else out


def _own_heads(x: jax.Array, axis: int, local_heads: int, num_heads: int) -> jax.Array:
    """The heads that this device's query heads read, of an x that holds all heads."""
    group = num_heads // x.shape[axis]
    start = jax.lax.axis_index("model") * local_heads // group
    return jax.lax.dynamic_slice_in_dim(x, start, max(1, local_heads // group), axis=axis)
