"""Attention over a cache: what mechanisms build their decode from.

Everything is computed in float32. Letters as in `mechanisms.py`; M queries that read one head.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from vhajax.attention.core import HIGHEST, Window, own_heads, soft_cap, within
from vhajax.cache import LayerCache, columns, placements
from vhajax.mechanisms import RopeScaling
from vhajax.rope import phases
from vhajax.sharding import axis_for, head_axes, local

TILE = 512  # slots whose rotated queries or keys exist at one time
WIDE_TILE = 2048  # slots of a head that a CPU brings from bfloat16 to float32 at one time


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
        scales, rest = (rest[0][:, : q.shape[2], None], rest[1:]) if scaled else (None, rest)
        parts = [
            own_heads(part, 1, q.shape[2], N) if q_axis and part.shape[1] == all_heads else part
            for part, all_heads in zip(columns(arrays, row), total, strict=True)
        ]
        if cache.layout == "rows":  # fused into the products; `columns` are read as they are
            parts = [part.astype(jnp.float32) for part in parts]
        slots = jnp.arange(capacity)
        mask = within(positions[..., None], slots, window) & (slots < live[:, None, None])
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
    K, S = keys.shape[1], keys.shape[-1]
    grouped = q.reshape(B, K, N // K * T, H).astype(jnp.float32)
    if not _tiled(keys):
        out = jnp.einsum("BKMH,BKHS->BKMS", grouped, keys.astype(jnp.float32), precision=HIGHEST)
        return out.reshape(B, N, T, S)

    def head(q: jax.Array, i: jax.Array) -> jax.Array:
        tile = lambda t: jnp.matmul(q, _wide_tile(keys, i, t), precision=HIGHEST)  # noqa: E731
        return jax.lax.map(tile, jnp.arange(S // WIDE_TILE)).swapaxes(0, 1).reshape(-1, S)

    flat = grouped.reshape(B * K, -1, H)
    return jax.lax.map(lambda x: head(*x), (flat, jnp.arange(B * K))).reshape(B, N, T, S)


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
        if not _tiled(values):
            # Values on the left: XLA on CPU takes half the time of the other order.
            values = values.astype(jnp.float32)
            out = jnp.einsum("BKHS,BKMS->BKHM", values, grouped, precision=HIGHEST)
            return out.swapaxes(2, 3)
        flat = grouped.reshape(B * K, -1, S // WIDE_TILE, WIDE_TILE)

        def head(i: jax.Array) -> jax.Array:
            def part(t: jax.Array | int) -> jax.Array:
                tile = _wide_tile(values, i, t)
                return jnp.matmul(flat[i, :, t], tile.T, precision=HIGHEST)

            # The first tile, not zeros, to begin with: over a mesh it varies as the sum does.
            add = lambda t, total: total + part(t)  # noqa: E731
            return jax.lax.fori_loop(1, S // WIDE_TILE, add, part(0))

        return jax.lax.map(head, jnp.arange(B * K)).reshape(B, K, -1, values.shape[2])

    def masked() -> jax.Array:
        return total(jnp.where(mask.any(axis=2)[:, :, None], values, 0))

    plain = total(values)
    out = jax.lax.cond(jnp.isfinite(plain).all(), lambda: plain, masked)
    return out.reshape(B, N, T, -1)


def _tiled(stored: jax.Array) -> bool:
    """Whether a head's slots are read a tile at a time.

    XLA on CPU multiplies bfloat16 matrices 20 times slower than float32 ones, and a float32 copy of
    a long cache costs more than the product.
    """
    return stored.dtype == jnp.bfloat16 and stored.shape[-1] % WIDE_TILE == 0


def _wide_tile(stored: jax.Array, head: jax.Array, tile: jax.Array | int) -> jax.Array:
    """Tile of a head of [B, K, H, S] bfloat16 as float32 [H, WIDE_TILE].

    The upper half of a float32 is a bfloat16; shifts run faster on CPU than XLA's conversion.
    """
    B, K, H, S = stored.shape
    flat = stored.reshape(B * K, H, S)
    part = jax.lax.dynamic_slice(flat, (head, 0, tile * WIDE_TILE), (1, H, WIDE_TILE))[0]
    bits = jax.lax.bitcast_convert_type(part, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


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
