"""The TPU kernel: one query token a sequence against rows of a cache, a tile of rows at a time.

Grid: (splits, sequences). The rows stay in HBM; a tile is copied to VMEM while the one before it is
computed on, across the ends of sequences, so that the copies never pause. A tile is met by every
view (`rows.Views`) with one product for logits and one for values, around an online softmax:

    s = q Kᵀ (+ the rotated part) · scales → cap → mask
    m' = max(m, max s);  p = exp(s − m');  l' = exp(m − m')·l + Σp;  o' = exp(m − m')·o + p V

Softmax and values lag one tile behind, so that logits of a tile and values of the one before are
independent and their latencies overlap.

Rotated part (LRKV with RoPE on whole keys): Σ_ρ z_ρ (t_n A)_ρ, with t_n = [cos nθ | sin nθ]. In a
tile that begins at slot n₀, t_{n₀+j} A = t_j A(n₀): the table of t_j is a constant, and A is turned
by n₀θ, in float32, once a tile.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import blocks
from pallas_kernels.blocks import BUFFERS, Spec
from pallas_kernels.core import Attended, merge
from pallas_kernels.rows import LANES
from pallas_kernels.wide import Turned, Wide

DEAD = -0.7 * float(jnp.finfo(jnp.float32).max)  # a masked logit: exp(DEAD − anything) is 0


def solve(problem: Wide, splits: int | None, *, interpret: bool = False) -> Attended:
    """See `core.solve`; UnsupportedError where the chip's VMEM or the cache's shape forbid it.

    interpret: run the kernel in JAX's interpreter, on any device, slowly.
    """
    spec, chip = blocks.plan(problem)
    splits = splits or chip.cores
    out, lse = _call(problem, spec, splits, interpret)
    M = problem.q.shape[2]
    parts = Attended(out[..., :M, :], lse[..., :M, 0])
    return Attended(*(x[0] for x in parts)) if splits == 1 else merge(parts)


def tiles(problem: Wide, tile: int, splits: int):
    """Which tiles each split reads of each sequence, and which sequence comes next.

    Returns int32 begin, count [splits, B], after [splits, B + 1] (the first sequence from b on that
    has tiles; B if none has), low, high [B] (live slots).
    """
    B, S, _ = problem.cache.shape
    high = jnp.clip(problem.lengths, 0, S)
    low = jnp.maximum(high - problem.window, 0) if problem.window else jnp.zeros_like(high)
    first, end = low // tile, -(-high // tile)
    share = -(-(end - first) // splits)
    begin = first + share * jnp.arange(splits, dtype=jnp.int32)[:, None]
    count = jnp.clip(end - begin, 0, share)
    sequence = jnp.where(count > 0, jnp.arange(B, dtype=jnp.int32), B)
    after = jax.lax.cummin(sequence, axis=1, reverse=True)
    after = jnp.concatenate([after, jnp.full((splits, 1), B, jnp.int32)], axis=1)
    return begin, count, after, low, high


def _call(problem: Wide, spec: Spec, splits: int, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Unmerged out [splits, B, views, M, value_width] and lse [splits, B, views, M, 128]."""
    cache, views, scales = problem.cache, spec.views, problem.scales
    B, M, V = cache.shape[0], spec.queries, len(views.views)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    # Or XLA, where it has VMEM to spare, copies all of them there first.
    stay = lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM)  # noqa: E731
    q = _rows_to(problem.q, M, 2).astype(cache.dtype)
    operands, specs = [q, stay(cache)], [_per_sequence(q), in_hbm]
    scratch = [pltpu.VMEM((BUFFERS, spec.tile, cache.shape[2]), cache.dtype)]
    if scales is not None:
        operands.append(stay(scales))
        specs.append(in_hbm)
        scratch.append(pltpu.VMEM((BUFFERS, scales.shape[1], spec.tile), jnp.float32))
    if problem.rotation is not None:
        rotor, *constants = _rotation(problem.rotation, cache, spec)
        operands += [rotor, *constants]
        specs += [_per_sequence(rotor), *map(_constant, constants)]
        scratch.append(pltpu.VMEM(rotor.shape[1:], cache.dtype))
    state = (spec.tile, views.value_width, LANES, LANES)
    scratch += [pltpu.VMEM((V, M, width), jnp.float32) for width in state]
    scratch += [pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA((BUFFERS, 2))]
    results = [(V, M, views.value_width), (V, M, LANES)]
    return pl.pallas_call(
        functools.partial(_kernel, spec=spec),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(splits, B),
            in_specs=specs,
            out_specs=[
                pl.BlockSpec((None, None, *r), lambda s, b, *_: (s, b, 0, 0, 0)) for r in results
            ],
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct((splits, B, *r), jnp.float32) for r in results],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=spec.vmem
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name=spec.name,
    )(*tiles(problem, spec.tile, splits), *operands)


def _per_sequence(x: jax.Array) -> pl.BlockSpec:
    rest = (0,) * (x.ndim - 1)
    return pl.BlockSpec((None, *x.shape[1:]), lambda _, b, *__: (b, *rest))


def _constant(x: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _rows_to(x: jax.Array, size: int, axis: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def _rotation(rotation: Turned, cache: jax.Array, spec: Spec) -> list[jax.Array]:
    """Rotor [B, Z, P] float32, table [tile, P], turns [2, tiles, P] float32, heads [M, Z]."""
    S = cache.shape[1]
    table = np.concatenate(rotation.table(np.arange(spec.tile)), axis=1) * rotation.multiplier
    bases = np.minimum(np.arange(-(-S // spec.tile)) * spec.tile, S - spec.tile)
    cos, sin = rotation.table(bases)
    turns = np.stack([np.concatenate([cos, cos], axis=1), np.concatenate([sin, -sin], axis=1)])
    return [
        rotation.rotor,
        jnp.asarray(table, cache.dtype),
        jnp.asarray(turns, jnp.float32),
        _rows_to(rotation.heads, spec.queries, 0),
    ]


# ------------------------------------------------------------------ the kernel


class _Refs(NamedTuple):
    """What a kernel is given, in this order; None where the call has no use for it."""

    # Scalars: [splits, B] begin, count, [splits, B + 1] after, [B] low, high (see `tiles`).
    begin: Any
    count: Any
    after: Any
    low: Any
    high: Any
    # Inputs. cache and scales stay in HBM.
    q: Any
    cache: Any
    scales: Any
    rotor: Any
    table: Any
    turns: Any
    heads: Any
    out: Any
    lse: Any
    # Scratch. rows, held: tiles of cache and scales. turned: A(n₀). logits: of the last tile.
    # current: buffer of the next tile.
    rows: Any
    held: Any
    turned: Any
    logits: Any
    acc: Any
    peak: Any
    total: Any
    current: Any
    semaphores: Any


def _named(refs: tuple, spec: Spec) -> _Refs:
    absent = set() if spec.scaled else {"scales", "held"}
    if spec.latents is None:
        absent |= {"rotor", "table", "turns", "heads", "turned"}
    given = iter(refs)
    return _Refs(*(None if name in absent else next(given) for name in _Refs._fields))


def _kernel(*refs, spec: Spec):
    """One sequence's part of one split."""
    r = _named(refs, spec)
    tiles, b = _Tiles(r, spec), pl.program_id(1)
    n = r.count[tiles.split, b]

    @pl.when(b == 0)
    def _():
        r.current[0] = 0
        first = r.after[tiles.split, 0]
        pl.when(first <= tiles.last)(lambda: tiles.start(first, tiles.begin(first), 0))

    r.peak[...] = jnp.full_like(r.peak, DEAD)
    r.total[...] = jnp.zeros_like(r.total)
    r.acc[...] = jnp.zeros_like(r.acc)

    def body(i, before):
        """Logits of the i-th tile beside softmax and values of the one before: neither waits."""
        slot = _next(before)
        new = _score(r, slot, *tiles.fetch(b, i, n, slot), spec)
        _absorb(r, before, spec)
        r.logits[...] = new
        return slot

    @pl.when(n > 0)
    def _():
        slot = r.current[0]
        r.logits[...] = _score(r, slot, *tiles.fetch(b, 0, n, slot), spec)
        slot = jax.lax.fori_loop(1, n, body, slot)
        _absorb(r, slot, spec)
        r.current[0] = _next(slot)

    alive = r.total[...] > 0
    sums = jnp.where(alive, r.total[...], 1.0)
    r.out[...] = r.acc[...] / sums[..., :1]
    r.lse[...] = jnp.where(alive, r.peak[...] + jnp.log(sums), -jnp.inf)


class _Tiles:
    """The tiles of one split on their way from HBM to VMEM."""

    def __init__(self, r: _Refs, spec: Spec):
        self.r, self.spec = r, spec
        self.split, self.last = pl.program_id(0), pl.num_programs(1) - 1

    def begin(self, sequence):
        """Its first tile; of the last sequence where there is none."""
        return self.r.begin[self.split, jnp.minimum(sequence, self.last)]

    def bounds(self, sequence, tile):
        """Where a tile begins (the last one early, to end in time) and its live rows."""
        r, spec = self.r, self.spec
        base = jnp.minimum(tile * spec.tile, spec.slots - spec.tile)
        first = jnp.maximum(r.low[sequence], tile * spec.tile) - base
        return base, first, jnp.minimum(r.high[sequence] - base, spec.tile)

    def copies(self, sequence, base, row, size, slot):
        r, spec = self.r, self.spec
        source = pl.ds(pl.multiple_of(base + row, spec.align), size)
        target = pl.ds(pl.multiple_of(row, size), size)
        pairs = [(r.cache.at[sequence, source], r.rows.at[slot, target])]
        if spec.scaled:
            pairs.append((r.scales.at[sequence, :, source], r.held.at[slot, :, target]))
        return [
            pltpu.make_async_copy(*pair, r.semaphores.at[slot, i]) for i, pair in enumerate(pairs)
        ]

    def each_copy(self, sequence, tile, slot, act):
        """Starts or waits for a tile: as one copy if all of it is live, else by live pieces."""
        spec = self.spec
        base, first, stop = self.bounds(sequence, tile)
        whole = (first == 0) & (stop == spec.tile)

        @pl.when(whole)
        def _():
            for copy in self.copies(sequence, base, 0, spec.tile, slot):
                act(copy)

        @pl.when(jnp.logical_not(whole))
        def _():
            def piece(i, _):
                for copy in self.copies(sequence, base, i * spec.piece, spec.piece, slot):
                    act(copy)
                return 0

            jax.lax.fori_loop(first // spec.piece, pl.cdiv(stop, spec.piece), piece, 0)

    def start(self, sequence, tile, slot):
        self.each_copy(sequence, tile, slot, lambda copy: copy.start())

    def fetch(self, b, i, n, slot):
        """Starts the copy of the tile after the i-th of n, and waits for the i-th.

        Returns the tile, and its live rows: first, stop.
        """
        r, tile, more = self.r, self.begin(b) + i, i + 1 < n
        sequence = jnp.where(more, b, r.after[self.split, b + 1])
        following = jnp.where(more, tile + 1, self.begin(sequence))
        pl.when(sequence <= self.last)(lambda: self.start(sequence, following, _next(slot)))
        self.each_copy(b, tile, slot, lambda copy: copy.wait())
        _, first, stop = self.bounds(b, tile)
        # 0 · NaN is NaN: what dead rows hold must not meet the product with values.
        _clear(r.rows.at[slot], first, stop)
        return tile, first, stop


def _next(slot):
    return jnp.where(slot == BUFFERS - 1, 0, slot + 1)


def _clear(tile, first, stop):
    """Zeroes the rows of a tile outside [first, stop); nothing to do for most tiles."""
    step = 32 // tile.dtype.itemsize  # rows of one register

    def clear(i, _):
        at = pl.ds(pl.multiple_of(i * step, step), step)
        slots = i * step + jax.lax.broadcasted_iota(jnp.int32, (step, tile.shape[1]), 0)
        held = tile[at]
        tile[at] = jnp.where((slots >= first) & (slots < stop), held, jnp.zeros_like(held))
        return 0

    jax.lax.fori_loop(0, pl.cdiv(first, step), clear, 0)
    jax.lax.fori_loop(stop // step, tile.shape[0] // step, clear, 0)


def _dot(a, b, contract: tuple[int, int]):
    """float32 operands as such, where the MXU would take bfloat16."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _lanes(tile, start: int, width: int, row: int):
    """Lanes that queries meet, with zeros for the row's padding if they reach so far."""
    found = tile[:, start : start + width]
    if start + width <= row:
        return found
    lanes = jax.lax.broadcasted_iota(jnp.int32, found.shape, 1)
    return jnp.where(lanes < row - start, found, jnp.zeros_like(found))


def _score(r: _Refs, slot, tile, first, stop, spec: Spec):
    """Masked logits of every view: [views, M, tile] float32."""
    rows, rotated, factors = r.rows.at[slot], None, None
    if spec.latents is not None:
        _turn(r, tile)
        latents = _lanes(rows, spec.latents, r.turned.shape[0], spec.views.row)
        rotated = _rotated(r, latents)
    if spec.scaled:
        factors = _rows_to(r.held[slot], spec.queries, 0)
    slots = jax.lax.broadcasted_iota(jnp.int32, (spec.queries, spec.tile), 1)
    live = (slots >= first) & (slots < stop)
    width, row, logits = spec.views.key_width, spec.views.row, []
    for k, view in enumerate(spec.views.views):
        s = _dot(r.q[k], _lanes(rows, view.keys, width, row), (1, 1))
        if rotated is not None:
            s = s + rotated
        s = s * spec.scale
        if factors is not None:
            s = s * factors
        if spec.cap:
            s = spec.cap * jnp.tanh(s * (1 / spec.cap))
        logits.append(jnp.where(live, s, DEAD))
    return jnp.stack(logits)


def _absorb(r: _Refs, slot, spec: Spec):
    """A tile's logits and values into the running maximum, sum and weighted values."""
    rows, width = r.rows.at[slot], spec.views.value_width
    for k, view in enumerate(spec.views.views):
        s, before = r.logits[k], r.peak[k]
        now = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
        p, shrink = jnp.exp(s - now[:, :1]), jnp.exp(before - now)
        r.peak[k] = now
        r.total[k] = shrink * r.total[k] + jnp.sum(p, axis=1, keepdims=True)
        values = rows[:, view.values : view.values + width]
        r.acc[k] = shrink[:, :1] * r.acc[k] + _dot(p.astype(values.dtype), values, (1, 0))


def _turn(r: _Refs, tile):
    """A(n₀) = A(0) turned by n₀θ: [a | b] → [a cos + b sin | b cos − a sin]."""
    at, a = pl.ds(tile, 1), r.rotor[...]
    swapped = pltpu.roll(a, a.shape[1] // 2, 1)
    r.turned[...] = (a * r.turns[0, at] + swapped * r.turns[1, at]).astype(r.turned.dtype)


def _rotated(r: _Refs, latents):
    """Σ_ρ z_ρ (t A)_ρ, the sum over a head's lanes taken by a product with 0 and 1: [M, tile]."""
    seen = _dot(r.table[...], r.turned[...], (1, 1))
    product = (seen * latents.astype(jnp.float32)).astype(latents.dtype)
    return _dot(r.heads[...], product, (1, 1))
