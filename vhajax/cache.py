"""One layer's cache: what a mechanism stores of every token, in the layout its backend reads best.

An accelerator reads one padded row a token (what its kernels want). XLA on CPU reads a matrix whose
minor axis is the sequence many times faster than slices of a row, so there every part is an array
of its own, features first.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import Backend
from vhajax.mechanisms import LANES, SUBLANES, CacheRow
from vhajax.sharding import axis_for, head_axes, local, model_size, platform, reshard

Layout = Literal["rows", "columns"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Stored tokens of one layer. How many slots are live is kept once for all layers.

    arrays: in layout `rows` one [B, S, W], W the row padded to 128; in layout `columns` one
      [B, heads, width, S] for each part of the row.
    scales: [B, N, S] float32 inverse RMS of keys that are sums, or None. In layout `rows` a
      device's heads are padded to a multiple of 8, or XLA on TPU would lay them out in another way
      than the kernels read them, and copy all of them in between.
    row: what a token's row holds.
    backend: what decodes rows, see `kernels.read`.
    """

    arrays: tuple[jax.Array, ...]
    scales: jax.Array | None
    row: CacheRow = field(metadata={"static": True})
    backend: Backend = field(default="auto", metadata={"static": True})

    @property
    def layout(self) -> Layout:
        return "rows" if self.arrays[0].ndim == 3 else "columns"

    @property
    def capacity(self) -> int:
        """S, slots of a sequence."""
        return self.arrays[0].shape[1 if self.layout == "rows" else 3]


def default_layout(backend: Backend = "auto") -> Layout:
    """The only place that chooses a layout: rows for kernels and accelerators."""
    return "columns" if platform() == "cpu" and backend in ("auto", "jnp") else "rows"


def create(
    row: CacheRow,
    num_heads: int,
    batch: int,
    capacity: int,
    dtype,
    layout: Layout | None = None,
    backend: Backend = "auto",
) -> LayerCache:
    """An empty cache of `capacity` slots; over `model` lies what divides into heads there."""
    if (layout or default_layout(backend)) == "rows":
        shapes = [(batch, capacity, row.padded)]
    else:
        shapes = [(batch, row.groups * heads, width, capacity) for heads, width in row.parts]
    scales = None
    if row.scales:
        shards = model_size() if part_axis(row.scales, num_heads) else 1
        mine = row.scales // shards
        if len(shapes[0]) == 3:
            mine = -(-mine // SUBLANES) * SUBLANES
        scales = jnp.ones((batch, shards * mine, capacity), jnp.float32)
    arrays = tuple(jnp.zeros(shape, dtype) for shape in shapes)
    cache = LayerCache(arrays, scales, row, backend)
    leaves, tree = jax.tree.flatten(cache)
    places = placements(cache, num_heads)
    return tree.unflatten([reshard(x, p) for x, p in zip(leaves, places, strict=True)])


def part_axis(heads: int, num_heads: int) -> str | None:
    """The mesh axis of a part's heads: with the query heads, unless there is one for all."""
    return head_axes(num_heads, heads)[1] if heads > 1 and model_size() > 1 else None


def row_axis(row: CacheRow, num_heads: int) -> str | None:
    """The mesh axis of rows: with the query heads where whole groups divide over it."""
    whole = row.groups > 1 and row.elements == row.padded
    return part_axis(row.groups, num_heads) if whole else None


def append(
    cache: LayerCache,
    parts: Sequence[jax.Array],
    scales: jax.Array | None,
    positions: jax.Array,
    valid: jax.Array,
    num_heads: int,
) -> LayerCache:
    """The cache with new tokens written at their slots.

    Args:
      parts: [B, T, heads, width] each, as the row lists them.
      scales: [B, T, N] float32, or None.
      positions: [B, T] int32 slot of each token; out of range drops it.
      valid: [B, T] bool; padding is not written.
    """
    slots = jnp.where(valid, positions, cache.capacity)
    if cache.layout == "rows":
        arrays = [_append_rows(cache, parts, slots, num_heads)]
    else:
        arrays = [
            _append_column(column, part, slots, part_axis(column.shape[1], num_heads))
            for column, part in zip(cache.arrays, parts, strict=True)
        ]
    if scales is not None:
        assert cache.scales is not None
        axis = part_axis(scales.shape[2], num_heads)
        blocks = cache.layout == "rows"
        scales = _append_scales(cache.scales, scales, slots, axis, blocks)
    # Without it XLA writes the token once for every reader, each time into a copy of the cache.
    written = dataclasses.replace(cache, arrays=tuple(arrays), scales=scales)
    return jax.lax.optimization_barrier(written)


def _append_rows(
    cache: LayerCache, parts: Sequence[jax.Array], slots: jax.Array, num_heads: int
) -> jax.Array:
    batch, axis = axis_for("data", slots.shape[0]), row_axis(cache.row, num_heads)
    groups = cache.row.groups

    def write(rows: jax.Array, slots: jax.Array, *parts: jax.Array) -> jax.Array:
        B, T = slots.shape
        mine = groups if axis is None else parts[0].shape[2]
        new = jnp.concatenate([p.reshape(B, T, mine, -1) for p in parts], axis=-1)
        new = new.reshape(B, T, -1).astype(rows.dtype)
        new = jnp.pad(new, ((0, 0), (0, 0), (0, rows.shape[-1] - new.shape[-1])))
        return rows.at[jnp.arange(B)[:, None], slots].set(new, mode="drop")

    places = [(batch, None, axis), (batch, None), *[(batch, None, axis, None)] * len(parts)]
    return local(write, places, places[0])(cache.arrays[0], slots, *parts)


def _append_column(
    column: jax.Array, part: jax.Array, slots: jax.Array, axis: str | None
) -> jax.Array:
    """column [B, heads, width, S], part [B, T, heads, width]."""
    batch = axis_for("data", slots.shape[0])

    def write(column: jax.Array, part: jax.Array, slots: jax.Array) -> jax.Array:
        rows = jnp.arange(slots.shape[0])[:, None]
        return column.at[rows, :, :, slots].set(part.astype(column.dtype), mode="drop")

    place = (batch, axis, None, None)
    return local(write, [place, (batch, None, axis, None), (batch, None)], place)(
        column, part, slots
    )


def _append_scales(
    scales: jax.Array, new: jax.Array, slots: jax.Array, axis: str | None, blocks: bool
) -> jax.Array:
    """scales [B, N or more, S], new [B, T, N]."""

    def write(scales: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
        (B, M, S), (_, T, N) = scales.shape, new.shape
        new = jnp.pad(new, ((0, 0), (0, 0), (0, M - N)))
        if T > 1 or not blocks:
            return scales.at[jnp.arange(B)[:, None], :, slots].set(new, mode="drop")
        # For single slots XLA on TPU transposes all scales, and back; not for aligned blocks.
        size = min(LANES, S)

        def one(b: jax.Array | int, scales: jax.Array) -> jax.Array:
            start = jnp.minimum(slots[b, 0] // size * size, S - size)
            block = jax.lax.dynamic_slice(scales, (b, 0, start), (1, M, size))
            here = start + jnp.arange(size) == slots[b, 0]
            block = jnp.where(here, new[b, 0][None, :, None], block)
            return jax.lax.dynamic_update_slice(scales, block, (b, 0, start))

        return jax.lax.fori_loop(0, B, one, scales)

    batch = axis_for("data", slots.shape[0])
    place = (batch, axis, None)
    return local(write, [place, (batch, None, axis), (batch, None)], place)(scales, new, slots)


def columns(arrays: Sequence[jax.Array], row: CacheRow) -> list[jax.Array]:
    """Every part as [B, heads, width, S], from either layout (a device's own share of it)."""
    if arrays[0].ndim == 4:
        return list(arrays)
    (rows,) = arrays
    B, S, W = rows.shape
    groups = row.groups if row.padded == W else W // row.group_elements
    grouped = rows[..., : groups * row.group_elements].reshape(B, S, groups, -1)
    parts, start = [], 0
    for heads, width in row.parts:
        part = grouped[..., start : start + heads * width].reshape(B, S, groups * heads, width)
        parts.append(part.transpose(0, 2, 3, 1))
        start += heads * width
    return parts


def placements(cache: LayerCache, num_heads: int) -> list[tuple[str | None, ...]]:
    """How the arrays lie, and the scales if there are any."""
    batch = axis_for("data", cache.arrays[0].shape[0])
    places: list[tuple[str | None, ...]]
    if cache.layout == "rows":
        places = [(batch, None, row_axis(cache.row, num_heads))]
    else:
        places = [(batch, part_axis(a.shape[1], num_heads), None, None) for a in cache.arrays]
    if cache.scales is not None:
        places.append((batch, part_axis(cache.row.scales, num_heads), None))
    return places
