"""The cache row that the kernels read, and queries and outputs laid out to match it.

One token is one row of W elements, W a multiple of 128:

    GQA   [K_0 | V_0 | K_1 | V_1 | … | padding]
    LRKV  [k_shared | Z^K (N·R) | v_shared | Z^V (N·R) | padding]

A query laid out over the row, zero where it does not look, turns both into one product for logits
and one for values. LRKV's are block-diagonal over the latents of all heads, so any rank works.
Letters: B batch, S slots, N query heads, K KV heads, G = N/K, H head dim, R rank, W row, M queries
of one view.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

LANES = 128


@dataclass(frozen=True)
class View:
    """What one block of queries reads of a row: from these lanes on, multiples of 128."""

    keys: int
    values: int


@dataclass(frozen=True)
class Views:
    """Views of equal widths, one a block of queries.

    key_width, value_width: lanes of each view, multiples of 128.
    row: elements of a row that hold something; what lies behind is padding.
    """

    views: tuple[View, ...]
    key_width: int
    value_width: int
    row: int


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def padded(elements: int) -> int:
    """Elements of a stored row."""
    return up(elements, LANES)


def gqa_views(num_kv_heads: int, head_dim: int, value_dim: int) -> Views:
    """One view a KV head: aligned lanes that cover K_k, and others that cover V_k."""
    group = head_dim + value_dim
    keys = [(k * group, head_dim) for k in range(num_kv_heads)]
    values = [(k * group + head_dim, value_dim) for k in range(num_kv_heads)]
    return _cover(keys, values, num_kv_heads * group)


def lrkv_views(
    num_heads: int, rank: int, head_dim: int, value_dim: int, *, latent_keys: bool
) -> Views:
    """One view: [k_shared | Z^K] and [v_shared | Z^V]; without latent_keys only k_shared."""
    latents = num_heads * rank
    key, value = head_dim + latents, value_dim + latents
    return _cover([(0, key if latent_keys else head_dim)], [(key, value)], key + value)


def whole_row(elements: int) -> Views:
    """One view of everything, for queries whose KV head is not known before the program runs."""
    return _cover([(0, elements)], [(0, elements)], elements)


def _cover(keys: list[tuple[int, int]], values: list[tuple[int, int]], row: int) -> Views:
    def width(spans: list[tuple[int, int]]) -> int:
        return max(padded(start % LANES + size) for start, size in spans)

    def begin(start: int, width: int) -> int:
        return min(start // LANES * LANES, padded(row) - width)

    key_width, value_width = width(keys), width(values)
    views = tuple(
        View(begin(k, key_width), begin(v, value_width))
        for (k, _), (v, _) in zip(keys, values, strict=True)
    )
    return Views(views, key_width, value_width, row)


def own(num_heads: int, blocks: int, width: int, first: jax.Array | int, group: int) -> jax.Array:
    """[N, blocks·width] bool: the lanes of the block that a head reads, (first + n) // group."""
    block = (first + jnp.arange(num_heads)) // group
    return block[:, None] == jnp.arange(blocks * width) // width


def spread(x: jax.Array, blocks: int, first: jax.Array | int = 0, group: int = 1) -> jax.Array:
    """x in the block of each head, zero in all others: [B, N, w] → [B, N, blocks·w]."""
    mask = own(x.shape[1], blocks, x.shape[2], first, group)
    return jnp.where(mask, jnp.tile(x, (1, 1, blocks)), 0)


def gather(y: jax.Array, blocks: int, first: jax.Array | int = 0, group: int = 1) -> jax.Array:
    """The block of each head: [B, N, blocks·w] → [B, N, w]."""
    B, N, width = y.shape
    mask = own(N, blocks, width // blocks, first, group)
    return jnp.where(mask, y, 0).reshape(B, N, blocks, -1).sum(axis=2)


def place(x: jax.Array, offset: int, width: int) -> jax.Array:
    """x at lanes from `offset` on of `width` lanes, zero elsewhere: [..., w] → [..., width]."""
    before = [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, [*before, (offset, width - offset - x.shape[-1])])
