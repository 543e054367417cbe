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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import blocks
from pallas_kernels.blocks import BUFFERS, Spec
from pallas_kernels.core import Attended, Problem, Rotation
from pallas_kernels.rows import LANES

DEAD = -0.7 * float(jnp.finfo(jnp.float32).max)  # a masked logit: exp(DEAD − anything) is 0


def solve(problem: Problem, splits: int | None, *, interpret: bool = False) -> Attended:
    """See `core.solve`; UnsupportedError where the chip's VMEM or the cache's shape forbid it.

    interpret: run the kernel in JAX's interpreter, on any device, slowly.
    """
    from pallas_kernels.decode import merge

    spec, chip = blocks.plan(problem)
    splits = splits or chip.cores
    out, lse = _call(problem, spec, splits, interpret)
    M = problem.q.shape[2]
    parts = Attended(out[..., :M, :], lse[..., :M, 0])
    return Attended(*(x[0] for x in parts)) if splits == 1 else merge(parts)


def tiles(problem: Problem, tile: int, splits: int):
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


def _call(
    problem: Problem, spec: Spec, splits: int, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Unmerged out [splits, B, views, M, value_width] and lse [splits, B, views, M, 128]."""
    cache, views, scales = problem.cache, spec.views, problem.scales
    B, M, V = cache.shape[0], spec.queries, len(views.views)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    q = _rows_to(problem.q, M, 2).astype(cache.dtype)
    operands, specs = [q, cache], [_per_sequence(q), in_hbm]
    scratch = [pltpu.VMEM((BUFFERS, spec.tile, cache.shape[2]), cache.dtype)]
    if scales is not None:
        operands.append(scales)
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


def _rotation(rotation: Rotation, cache: jax.Array, spec: Spec) -> list[jax.Array]:
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


def _kernel(begin, count, after, low, high, q, *refs, spec: Spec):
    """begin, count [splits, B], after [splits, B + 1], low, high [B]: int32 in SMEM."""
    refs = list(refs)

    def take(present: bool) -> Any:
        return refs.pop(0) if present else None

    turning = spec.latents is not None
    cache, scales = take(True), take(spec.scaled)
    rotor, table, turns, heads = (take(turning) for _ in range(4))
    out, lse, rows = take(True), take(True), take(True)
    held, turned = take(spec.scaled), take(turning)
    logits, acc, peak, total, current, semaphores = refs
    split, b = pl.program_id(0), pl.program_id(1)
    last = pl.num_programs(1) - 1
    n = count[split, b]

    def bounds(sequence, tile):
        """Where a tile begins (the last one early, to end in time) and its live rows."""
        base = jnp.minimum(tile * spec.tile, spec.slots - spec.tile)
        first = jnp.maximum(low[sequence], tile * spec.tile) - base
        return base, first, jnp.minimum(high[sequence] - base, spec.tile)

    def copies(sequence, base, row, size, slot):
        source = pl.ds(pl.multiple_of(base + row, spec.align), size)
        target = pl.ds(pl.multiple_of(row, size), size)
        pairs = [(cache.at[sequence, source], rows.at[slot, target])]
        if spec.scaled:
            pairs.append((scales.at[sequence, :, source], held.at[slot, :, target]))
        return [
            pltpu.make_async_copy(*pair, semaphores.at[slot, i]) for i, pair in enumerate(pairs)
        ]

    def each_copy(sequence, tile, slot, act):
        """Starts or waits for a tile: as one copy if all of it is live, else by live pieces."""
        base, first, stop = bounds(sequence, tile)
        whole = (first == 0) & (stop == spec.tile)

        @pl.when(whole)
        def _():
            for copy in copies(sequence, base, 0, spec.tile, slot):
                act(copy)

        @pl.when(jnp.logical_not(whole))
        def _():
            def piece(i, _):
                for copy in copies(sequence, base, i * spec.piece, spec.piece, slot):
                    act(copy)
                return 0

            jax.lax.fori_loop(first // spec.piece, pl.cdiv(stop, spec.piece), piece, 0)

    def start(sequence, tile, slot):
        each_copy(sequence, tile, slot, lambda copy: copy.start())

    def begin_of(sequence):
        return begin[split, jnp.minimum(sequence, last)]

    @pl.when(b == 0)
    def _():
        current[0] = 0
        first = after[split, 0]
        pl.when(first <= last)(lambda: start(first, begin_of(first), 0))

    peak[...] = jnp.full_like(peak, DEAD)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

    def fetch(i, slot):
        """Starts the copy of the tile after the i-th, and waits for the i-th."""
        tile, more = begin[split, b] + i, i + 1 < n
        sequence = jnp.where(more, b, after[split, b + 1])
        following = jnp.where(more, tile + 1, begin_of(sequence))
        pl.when(sequence <= last)(lambda: start(sequence, following, _next(slot)))
        each_copy(b, tile, slot, lambda copy: copy.wait())
        _, first, stop = bounds(b, tile)
        # 0 · NaN is NaN: what dead rows hold must not meet the product with values.
        _clear(rows.at[slot], first, stop)
        return tile, first, stop

    def score(slot, tile, first, stop):
        added = None
        if turning:
            _turn(turned, rotor, turns, tile)
            added = _rotated(rows.at[slot], turned, table, heads, spec)
        factors = _rows_to(held[slot], spec.queries, 0) if spec.scaled else None
        return _score(q, rows.at[slot], factors, added, first, stop, spec)

    def body(i, before):
        """Logits of the i-th tile beside softmax and values of the one before: neither waits."""
        slot = _next(before)
        new = score(slot, *fetch(i, slot))
        _absorb(logits, rows.at[before], acc, peak, total, spec)
        logits[...] = new
        return slot

    @pl.when(n > 0)
    def _():
        slot = current[0]
        logits[...] = score(slot, *fetch(0, slot))
        slot = jax.lax.fori_loop(1, n, body, slot)
        _absorb(logits, rows.at[slot], acc, peak, total, spec)
        current[0] = _next(slot)

    alive = total[...] > 0
    sums = jnp.where(alive, total[...], 1.0)
    out[...] = acc[...] / sums[..., :1]
    lse[...] = jnp.where(alive, peak[...] + jnp.log(sums), -jnp.inf)


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


def _keys(tile, start: int, spec: Spec):
    width, row = spec.views.key_width, spec.views.row
    keys = tile[:, start : start + width]
    if start + width <= row:
        return keys
    lanes = jax.lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    return jnp.where(lanes < row - start, keys, jnp.zeros_like(keys))


def _score(q, tile, factors, added, first, stop, spec: Spec):
    """Masked logits of every view: [views, M, tile] float32."""
    slots = jax.lax.broadcasted_iota(jnp.int32, (spec.queries, spec.tile), 1)
    live = (slots >= first) & (slots < stop)
    logits = []
    for k, view in enumerate(spec.views.views):
        s = _dot(q[k], _keys(tile, view.keys, spec), (1, 1))
        if added is not None:
            s = s + added
        s = s * spec.scale
        if factors is not None:
            s = s * factors
        if spec.cap:
            s = spec.cap * jnp.tanh(s * (1 / spec.cap))
        logits.append(jnp.where(live, s, DEAD))
    return jnp.stack(logits)


def _absorb(logits, tile, acc, peak, total, spec: Spec):
    """A tile's logits and values into the running maximum, sum and weighted values."""
    for k, view in enumerate(spec.views.views):
        s, before = logits[k], peak[k]
        now = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
        p, shrink = jnp.exp(s - now[:, :1]), jnp.exp(before - now)
        peak[k] = now
        total[k] = shrink * total[k] + jnp.sum(p, axis=1, keepdims=True)
        values = tile[:, view.values : view.values + spec.views.value_width]
        acc[k] = shrink[:, :1] * acc[k] + _dot(p.astype(values.dtype), values, (1, 0))


def _turn(turned, rotor, turns, tile):
    """A(n₀) = A(0) turned by n₀θ: [a | b] → [a cos + b sin | b cos − a sin]."""
    at, a = pl.ds(tile, 1), rotor[...]
    swapped = pltpu.roll(a, a.shape[1] // 2, 1)
    turned[...] = (a * turns[0, at] + swapped * turns[1, at]).astype(turned.dtype)


def _rotated(tile, turned, table, heads, spec: Spec):
    """Σ_ρ z_ρ (t A)_ρ, the sum over a head's lanes taken by a product with 0 and 1: [M, tile]."""
    latents = tile[:, spec.latents : spec.latents + turned.shape[0]]
    seen = _dot(table[...], turned[...], (1, 1))
    product = (seen * latents.astype(jnp.float32)).astype(latents.dtype)
    return _dot(heads[...], product, (1, 1))
