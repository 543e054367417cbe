"""Sizes of a call: how many rows a copy brings, and the VMEM that it all takes."""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels import chips
from pallas_kernels.check import UnsupportedError, require
from pallas_kernels.chips import MIB, Chip
from pallas_kernels.rows import LANES, Views, up
from pallas_kernels.wide import Wide

BUFFERS = 3  # one on its way, one for logits, one for values
TILES = (4096, 2048, 1024, 512, 256, 128)


@dataclass(frozen=True)
class Spec:
    """Everything static about a call.

    slots: S. tile: rows of a step. piece: rows of a copy where not all of a tile is live.
    align: multiple of slots at which tiles begin.
    queries: M, padded to whole registers.
    latents: lane of the row where the cover of rotated latents begins, if any.
    vmem: bytes that it may take.
    """

    name: str
    views: Views
    slots: int
    tile: int
    piece: int
    align: int
    queries: int
    scale: float
    cap: float
    scaled: bool
    latents: int | None
    vmem: int


def plan(problem: Wide) -> tuple[Spec, Chip]:
    """The largest tile of the chip's choice that fits its VMEM.

    Raises:
      ValueError: none fits, or S is not a multiple of what a tile must begin at.
    """
    chip = chips.chip()
    require(
        problem.cache.dtype != jnp.float16,
        "cache is float16; the TPU kernel takes float32 or bfloat16.",
    )
    S, W = problem.cache.shape[1:]
    item = problem.cache.dtype.itemsize
    sublanes = 32 // item
    queries = up(problem.q.shape[2], sublanes)
    align = LANES if problem.scales is not None else sublanes
    sizes = [t for t in TILES if t * W * item <= chip.tile_bytes and t <= S] or [min(S, TILES[-1])]
    if S * W * item <= chip.tile_bytes:
        sizes.insert(0, S)  # the whole sequence in one tile
    for tile in sizes:
        vmem = vmem_bytes(problem, queries, tile)
        if vmem <= chip.vmem * 7 // 8:
            break
    else:
        raise UnsupportedError(
            f"q and cache need {vmem // MIB} MiB of VMEM for {problem.q.shape[1]} × "
            f"{problem.q.shape[2]} queries over rows of {W} even {tile} rows at a time; "
            f"{chip.name} has {chip.vmem // MIB}. Use fewer heads or a smaller rank."
        )
    require(
        S % align == 0,
        f"cache has {S} slots; the kernel copies tiles that begin at multiples of {align}, so make "
        f"it {up(S, align)}.",
    )
    rotation = problem.rotation
    spec = Spec(
        problem.name,
        problem.views,
        S,
        tile,
        LANES if tile % LANES == 0 else tile,
        align,
        queries,
        problem.scale,
        problem.cap,
        problem.scales is not None,
        rotation.start if rotation else None,
        vmem,
    )
    return spec, chip


def vmem_bytes(problem: Wide, queries: int, tile: int) -> int:
    """Predicted bytes of VMEM: buffers, what Pallas fetches ahead (twice), and values in flight."""
    W, item = problem.cache.shape[2], problem.cache.dtype.itemsize
    views, count = problem.views, len(problem.views.views)
    M = count * queries
    held = BUFFERS * tile * W * item
    moving = 2 * M * (views.key_width * item + (views.value_width + LANES) * 4)
    state = M * (up(tile, LANES) + views.value_width + 2 * LANES) * 4
    flight = 4 * M * up(tile, LANES) * 4 + 2 * M * views.value_width * 4
    clearing = tile * W * 4
    if problem.scales is not None:
        held += BUFFERS * queries * up(tile, LANES) * 4
    if problem.rotation is not None:
        _, Z, P = problem.rotation.rotor.shape
        tiles = -(-problem.cache.shape[1] // tile)
        moving += 2 * (Z * P * 4 + tile * P * item + 2 * up(tiles, 8) * P * 4 + queries * Z * item)
        state += Z * P * item
        flight += tile * Z * (4 + item) + 2 * Z * P * 4
    exact = 3 if problem.cache.dtype == jnp.float32 else 1  # HIGHEST: operands in three parts
    return held + moving + state + exact * flight + clearing + 2 * MIB
