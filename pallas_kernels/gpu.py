"""The GPU kernel for Hopper (wgmma, TMA): one query token a sequence against rows of a cache.

One block a multiprocessor takes an equal share of all tiles of 64 rows (`balance`). One of its
warpgroups copies tiles, chunk by chunk of 64 rows × 64 lanes, into rings of shared memory, across
the ends of sequences, so that the copies never pause; two others (one, where A leaves no room for
two rings) take turns at tiles:

    s = K_tile qᵀ (+ the rotated part) · scales → cap → mask       [rows, columns]
    m' = max(m, max s);  p = 2^(s − m');  l' = 2^(m − m')·l + Σp;  o' = 2^(m − m')·o + V_tileᵀ p

Rows are the 64 rows of a matrix product and queries its columns, as few as 8: groups of 8 need no
padding, and what a product costs is reading the chunk from shared memory. 33 to 64 queries of one
group are the rows instead, and maxima and sums stay within a warp (`Plan.flipped`). Weighted values
stay unnormalised in float32, and `balance.merge` joins those of all blocks.

Rotated part (LRKV with RoPE on whole keys): Σ_ρ z_ρ (t_n A)_ρ, t_n = [cos nθ | sin nθ]. A lies in
shared memory, for both consumers; a product with the table of a tile's t_n meets the latents in
float32 registers, and a head's lanes are summed there.
"""

import collections
import dataclasses
import functools
import math
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import balance, chips, parts
from pallas_kernels.check import UnsupportedError, require
from pallas_kernels.core import Problem, Rotation, Solved
from pallas_kernels.parts import LANES, Plan, Run
from pallas_kernels.rows import up

TILE = 64  # rows of a matrix product
LOW = -1e30  # a masked logit: 2^(LOW − anything live) is 0
LOG2E = math.log2(math.e)
DTYPES = (jnp.bfloat16, jnp.float16)
INTERPRETED_BLOCKS = 2
INTERPRETER_THREADS = 4  # one for each warpgroup, which waits in it, and one to go on
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # of a thread: 40 + 2 · 232 ≤ 512
MOST_SLOTS = 24  # of a ring
PHASES = 32  # of one array of barriers, whose phases Mosaic GPU keeps in the bits of a register
MOST_WAITING = 64  # columns, of chunks of values together
CHUNK_BYTES = 2 * TILE * LANES
RESERVED = 4 * 1024  # shared memory for barriers, and for maxima over the warps of a group
WGMMA = plgpu.Layout.WGMMA


@dataclass(frozen=True)
class Spec:
    """Everything static about a call.

    slots: S. row: elements of a row. table: chunks of t_n. consumers: warpgroups that compute.
    ring: chunks of the ring of each. shared: bytes of shared memory, what is set aside for the
    compiler included.
    """

    name: str
    plan: Plan
    slots: int
    row: int
    scale: float
    cap: float
    scaled: bool
    table: int
    consumers: int = 2
    ring: int = 0
    shared: int = RESERVED

    @property
    def stages(self) -> int:
        """Chunks of a tile."""
        return parts.chunks_of(self.plan.runs) + self.table

    @property
    def products(self) -> dict[int, int]:
        """Matrix instructions of a tile (64 rows, 16 deep) by their columns."""
        deep, found = LANES // 16, collections.Counter()
        for run in self.plan.keys + self.plan.values + self.plan.own:
            found[LANES if self.plan.flipped else run.count] += run.chunks * deep
        for run in self.plan.latents:
            found[LANES] += run.chunks * self.table * deep
        return dict(found)


def solve(problem: Problem, splits: int | None, *, interpret: bool = False) -> Solved:
    """See `core.solve`; UnsupportedError where the chip or the cache's shape or dtype forbid it.

    interpret: run the kernel in JAX's interpreter, on a CPU, slowly.
    """
    if interpret:
        _require_interpreter()
    chip = chips.GPUS["h200"] if interpret else chips.gpu()
    plan, places = parts.divide(problem)
    spec = specify(problem, plan, chip)
    blocks = INTERPRETED_BLOCKS if interpret else chip.cores
    schedule = balance.schedule(
        problem.live, places.needed, tile=TILE, blocks=blocks, splits=splits
    )
    whole, own, stats = _call(problem, spec, schedule, places, interpret)
    values = parts.gather_values(problem, plan, places, whole, own)
    merge = jax.vmap(functools.partial(balance.merge, mine=schedule.mine))
    merged = merge(values, stats[..., 0, :], stats[..., 1, :])
    return parts.ungroup(problem, plan, places, merged)


def _require_interpreter() -> None:
    """Refuses what JAX's interpreter of GPU kernels would fail at, or wait for without end."""
    mesh = jax.sharding.get_abstract_mesh()
    require(
        mesh.size <= 1,
        f"backend is 'gpu_interpret' on a mesh of {mesh.size} devices; JAX's interpreter of GPU "
        "kernels knows one, so run it without a mesh.",
    )
    threads = max(os.cpu_count() or 1, len(jax.devices("cpu")))
    require(
        threads >= INTERPRETER_THREADS,
        f"backend is 'gpu_interpret' with {threads} threads for XLA, which then waits for itself; "
        "set XLA_FLAGS=--xla_force_host_platform_device_count=8 before JAX starts.",
    )


def specify(problem: Problem, plan: Plan, chip: chips.GPU) -> Spec:
    """How the kernel runs on a chip; what `solve` raises."""
    S, dtype = problem.cache.shape[1], problem.cache.dtype
    require(
        any(dtype == d for d in DTYPES),
        f"cache is {dtype}; the GPU kernel multiplies bfloat16 and float16 only (wgmma has no "
        "float32), so store the cache in one of them or use backend='jnp'.",
    )
    require(
        S % 8 == 0 and S >= TILE,
        f"cache has {S} slots; the GPU kernel copies {TILE} rows that begin at a multiple of 8, so "
        f"make it {max(up(S, 8), TILE)}.",
    )
    table = up(problem.rotor_width, LANES) // LANES
    spec = Spec(
        problem.name,
        plan,
        S,
        problem.elements,
        problem.scale,
        problem.cap,
        problem.scales is not None,
        table,
    )
    # Tables are held while all latents pass behind them.
    least = table + parts.chunks_of(plan.latents) + 1 if table else 2
    for consumers in (2, 1):
        buffers = _operand_buffers(spec, consumers, dtype)
        fixed = RESERVED + sum(math.prod(x.shape) * x.dtype.itemsize for x in buffers)
        chunk = consumers * CHUNK_BYTES
        ring = min((chip.shared - fixed) // chunk, MOST_SLOTS, PHASES // consumers)
        if ring >= least:
            shared = fixed + ring * chunk
            return dataclasses.replace(spec, consumers=consumers, ring=ring, shared=shared)
    raise UnsupportedError(
        f"q and cache need {(fixed + least * chunk) // 1024} KiB of shared memory; {chip.name} has "
        f"{chip.shared // 1024}. Use fewer heads or a smaller rank."
    )


def _operand_buffers(spec: Spec, many: int, dtype: Any) -> list[Any]:
    """What shared memory holds beside rings: queries, weights p, then A or scales if any."""
    plan = spec.plan
    found = [
        _swizzled((many, plan.columns, parts.lanes_of(plan.keys)), dtype),
        _swizzled((many, plan.columns, TILE), dtype),
    ]
    if spec.table:
        lanes = parts.lanes_of(plan.latents)
        found.append(_swizzled((lanes, spec.table * LANES), dtype))
    if spec.scaled:
        found.append(plgpu.SMEM((many, plan.columns, TILE), jnp.float32))
    return found


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as matrix products read it."""
    tiled: Any = plgpu.TilingTransform
    swizzled: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiled((8, LANES)), swizzled(128)))


def _call(
    problem: Problem, spec: Spec, schedule: balance.Schedule, places: parts.Places, interpret: bool
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """What every block found of every sequence it met, by place and consumer.

    Returns:
      whole [parts, places, consumers, lanes, columns], own [parts, places, consumers, lanes] (None
      without latents), stats [parts, places, consumers, 2, columns] peak and total: float32.
    """
    plan, cache, many = spec.plan, problem.cache, spec.consumers
    numbers = [schedule.blocks, schedule.line, schedule.live, _stage_chunks(spec, places)]
    operands = [*numbers, places.offsets, parts.lay_queries(problem, plan, places), cache]
    barriers = [plgpu.Barrier(num_barriers=many)]
    barriers += [plgpu.Barrier(num_barriers=many * spec.ring)] * 2
    if problem.rotation is not None:
        operands.append(_table(problem.rotation, spec, cache.dtype))
        operands.append(parts.lay_rotor(problem, plan, places))
        barriers += [plgpu.Barrier(), plgpu.Barrier(num_arrivals=many)]
    if problem.scales is not None:
        operands.append(_padded_scales(problem, plan))
        barriers.append(plgpu.Barrier(num_arrivals=plan.groups, num_barriers=many))
    at = (plan.parts, schedule.mine.shape[1], many)
    sides = (parts.lanes_of(plan.values), plan.columns)
    shapes: list[tuple[int, ...]] = [(*at, *(sides[::-1] if plan.flipped else sides))]
    shapes.append((*at, 2, plan.columns))
    if plan.own:
        shapes.append((*at, parts.lanes_of(plan.own)))
    ring = _swizzled((many * spec.ring, TILE, LANES), cache.dtype)
    whole, stats, *own = plgpu.kernel(
        functools.partial(_kernel, spec=spec),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(schedule.blocks.shape[0],),
        grid_names=("block",),
        num_threads=many + 1,
        thread_name="warpgroup",
        scratch_types=[*_operand_buffers(spec, many, cache.dtype), ring, *barriers],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=spec.name,
    )(*operands)
    return whole, own[0] if own else None, stats


def _stage_chunks(spec: Spec, places: parts.Places) -> jax.Array:
    """[parts, stages] int32: the chunk of a row, or of the table, that each stage copies."""
    plan = spec.plan
    count = parts.chunks_of(plan.keys)
    chunks = [places.starts[:, r.index, None] + np.arange(r.chunks) for r in plan.runs]
    chunks = jnp.concatenate(chunks, axis=1).astype(jnp.int32)
    table = jnp.broadcast_to(jnp.arange(spec.table, dtype=jnp.int32), (plan.parts, spec.table))
    return jnp.concatenate([chunks[:, :count], table, chunks[:, count:]], axis=1)


def _table(rotation: Rotation, spec: Spec, dtype: Any) -> jax.Array:
    """[S, P] cosine and sine of every slot's angles, to float32 exact before it is rounded."""
    tiles = -(-spec.slots // TILE)
    near, far = np.arange(TILE), np.arange(tiles) * TILE
    c0, s0 = (jnp.asarray(x, jnp.float32)[:, None] for x in rotation.table(far))
    c1, s1 = (jnp.asarray(x, jnp.float32)[None] for x in rotation.table(near))
    table = jnp.concatenate([c0 * c1 - s0 * s1, s0 * c1 + c0 * s1], axis=-1) * rotation.multiplier
    table = table.reshape(tiles * TILE, -1)[: spec.slots]
    return jnp.pad(table, ((0, 0), (0, spec.table * LANES - table.shape[1]))).astype(dtype)


def _padded_scales(problem: Problem, plan: Plan) -> jax.Array:
    """Scales with a row for every head that a group may have."""
    assert problem.scales is not None
    spare = plan.parts * plan.groups * plan.heads - problem.scales.shape[1]
    return jnp.pad(problem.scales, ((0, 0), (0, max(spare, 0)), (0, 0)))


# ------------------------------------------------------------------ the kernel


class _Refs(NamedTuple):
    """What a kernel is given, in this order; None where the call has no use for it."""

    # Inputs: int32 (`balance.Schedule`, `_stage_chunks`, `parts.Places.offsets`), then arrays.
    blocks: Any
    line: Any
    live: Any
    chunks: Any
    offsets: Any
    q: Any
    cache: Any
    table: Any
    rotor: Any
    scales: Any
    whole: Any
    stats: Any
    own: Any
    # Shared memory. queries, weights, held (scales): of each consumer. turning: A.
    queries: Any
    weights: Any
    turning: Any
    held: Any
    rows: Any
    # Barriers: of a consumer's queries, of every slot of its ring, of A (there; spent), of scales.
    ready: Any
    full: Any
    empty: Any
    turned: Any
    spent: Any
    scaled: Any


def _named(refs: tuple, spec: Spec) -> _Refs:
    absent = set() if spec.scaled else {"scales", "held", "scaled"}
    absent |= set() if spec.table else {"table", "rotor", "turning", "turned", "spent"}
    absent |= set() if spec.plan.own else {"own"}
    given = iter(refs)
    return _Refs(*(None if name in absent else next(given) for name in _Refs._fields))


def _kernel(*refs, spec: Spec):
    r = _named(refs, spec)
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == spec.consumers)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _produce(r, spec)

    @pl.when(warpgroup < spec.consumers)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        _Consumer(r, spec, warpgroup).run()


class _Stretch(NamedTuple):
    """What a block reads of a sequence. place: of its result. tile: the first. count: tiles."""

    batch: Any
    part: Any
    place: Any
    tile: Any
    count: Any


def _each_stretch(r: _Refs, act) -> Any:
    """act(stretch, tiles of this block before it) for each; returns all its tiles."""
    block = jax.lax.axis_index("block")
    begin, end, first, stop, part, team = (r.blocks[block, i] for i in range(6))

    def visit(b, done):
        low = jnp.maximum(r.line[b], begin)
        count = jnp.maximum(jnp.minimum(r.line[b + 1], end) - low, 0)
        act(_Stretch(b, part, team + b, r.live[b, 0] + low - r.line[b], count), done)
        return done + count

    return jax.lax.fori_loop(first, stop, visit, jnp.int32(0))


def _base(tile, spec: Spec):
    """Where a tile begins: the last one early, to end in time."""
    return pl.multiple_of(jnp.minimum(tile * TILE, spec.slots - TILE), 8)


def _slot(spec: Spec, consumer, turn, stage):
    """Of the rings, that of a stage of a consumer's turn-th tile; and how many it used before."""
    used = turn * spec.stages + stage
    return consumer * spec.ring + jax.lax.rem(used, jnp.int32(spec.ring)), used


# ------------------------------------------------------------------ copies


def _produce(r: _Refs, spec: Spec):
    """Copies all tiles of the block, each into the ring of the consumer whose turn it is.

    Tiles of all consumers advance together, chunk by chunk, or one would wait for the other's.
    """
    many, keys = jnp.int32(spec.consumers), parts.chunks_of(spec.plan.keys)

    def stretch(stretch: _Stretch, done):
        def copy(tile, stage, source):
            consumer, turn = jax.lax.rem(done + tile, many), jax.lax.div(done + tile, many)
            slot, used = _slot(spec, consumer, turn, stage)
            pl.when(used >= spec.ring)(lambda: plgpu.barrier_wait(r.empty.at[slot]))
            rows = pl.ds(_base(stretch.tile + tile, spec), TILE)
            lanes = pl.ds(r.chunks[stretch.part, stage] * LANES, LANES)
            plgpu.copy_gmem_to_smem(source.at[rows, lanes], r.rows.at[slot], r.full.at[slot])

        def turns(i, _):
            def copies(begin, end, source):
                def each(stage, _):
                    for consumer in range(spec.consumers):
                        tile = i * many + consumer
                        pl.when(tile < stretch.count)(lambda tile=tile: copy(tile, stage, source))

                jax.lax.fori_loop(begin, end, each, None)

            copies(0, keys, r.cache.at[stretch.batch])
            if spec.table:
                copies(keys, keys + spec.table, r.table)
            copies(keys + spec.table, spec.stages, r.cache.at[stretch.batch])

        jax.lax.fori_loop(0, jax.lax.div(stretch.count + many - 1, many), turns, None)

    tiles = _each_stretch(r, stretch)
    for consumer in range(spec.consumers):  # a barrier must not end unobserved
        turns = jax.lax.div(tiles + (spec.consumers - 1 - consumer), many)
        used = turns * spec.stages

        def drain(at, _, consumer=consumer):
            slot = consumer * spec.ring + jax.lax.rem(at, jnp.int32(spec.ring))
            plgpu.barrier_wait(r.empty.at[slot])

        jax.lax.fori_loop(jnp.maximum(used - spec.ring, 0), used, drain, None)


# ------------------------------------------------------------------ attention


class _State(NamedTuple):
    """Running maximum and sum of every column, and weighted values [64 lanes, columns] by chunk."""

    peak: Any
    total: Any
    sums: tuple


class _Consumer:
    """One warpgroup that computes: its turns are every `consumers`-th tile of the block."""

    def __init__(self, r: _Refs, spec: Spec, index):
        self.r, self.spec, self.plan, self.index = r, spec, spec.plan, index
        self.row_axis = 1 if spec.plan.flipped else 0  # of logits: that of rows of the cache
        self.query_axis = 1 - self.row_axis

    def run(self):
        _each_stretch(self.r, self.stretch)

    def stretch(self, stretch: _Stretch, done):
        many = jnp.int32(self.spec.consumers)
        first = jax.lax.rem(many + self.index - jax.lax.rem(done, many), many)
        turns = jax.lax.div(jnp.maximum(stretch.count - first + many - 1, 0), many)

        @pl.when(stretch.count > 0)
        def _():
            self.load_queries(stretch)
            before = jax.lax.div(done + first, many)

            def tile(i, state):
                at = stretch.tile + first + i * many
                return self.tile(stretch, at, before + i, state)

            state = jax.lax.fori_loop(0, turns, tile, self.nothing())
            self.write(stretch, state)
            if self.spec.table:  # until no one reads A, it must not be copied over
                plgpu.barrier_arrive(self.r.spent)
                pl.when(self.index == 0)(lambda: plgpu.barrier_wait(self.r.spent))

    def load_queries(self, stretch: _Stretch):
        r, ready = self.r, self.r.ready.at[self.index]
        plgpu.copy_gmem_to_smem(
            r.q.at[stretch.batch, stretch.part], r.queries.at[self.index], ready
        )
        plgpu.barrier_wait(ready)
        if self.spec.table:
            rotor = r.rotor.at[stretch.batch, stretch.part]

            @pl.when(self.index == 0)
            def _():
                plgpu.copy_gmem_to_smem(rotor, r.turning, r.turned)

            plgpu.barrier_wait(r.turned)

    def nothing(self) -> _State:
        columns = self.plan.columns
        along = WGMMA.reduce(self.row_axis)
        sums = [
            plgpu.layout_cast(jnp.zeros((LANES, r.count), jnp.float32), WGMMA)
            for r, _ in _chunks(self.plan.values + self.plan.own)
        ]
        return _State(
            plgpu.layout_cast(jnp.full((columns,), LOW, jnp.float32), along),
            plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), along),
            tuple(sums),
        )

    def tile(self, stretch: _Stretch, tile, turn, state: _State) -> _State:
        """One tile's logits, softmax and values."""
        r, spec, plan = self.r, self.spec, self.plan
        base = _base(tile, spec)
        first = jnp.maximum(r.live[stretch.batch, 1], tile * TILE) - base
        stop = jnp.minimum(r.live[stretch.batch, 2] - base, TILE)
        if spec.scaled:
            self.start_scales(stretch, base)
        s = self.logits(stretch, turn)
        rows = plgpu.broadcasted_iota(jnp.int32, s.shape, self.row_axis, layout=WGMMA)
        s = jnp.where((rows >= first) & (rows < stop), s, LOW)
        peak = jnp.maximum(state.peak, s.max(axis=self.row_axis))
        p = jnp.exp2(s - self.spread(peak, s))
        shrink = jnp.exp2(state.peak - peak)
        total = shrink * state.total + p.sum(axis=self.row_axis)
        weights = r.weights.at[self.index]
        (weights if plan.flipped else weights.T)[...] = p.astype(r.cache.dtype)
        plgpu.commit_smem()
        sums, stage = list(state.sums), parts.chunks_of(plan.keys + plan.latents) + spec.table
        for batch in _batches(plan.values + plan.own, spec.ring):
            at, run = batch
            found = self.weighted(run, len(at), turn, stage + at[0], first, stop)
            less = shrink[run.first : run.first + run.count]
            for i, new in zip(at, found, strict=True):
                sums[i] = sums[i] * self.spread(less, new) + new
        return _State(peak, total, tuple(sums))

    def spread(self, x, like):
        """One number a query, over the other axis."""
        return jax.lax.broadcast_in_dim(x, like.shape, [self.query_axis])

    # -------------------------------------------------------------- rings

    def take(self, turn, stage):
        """The slot of a stage, once its chunk has arrived."""
        slot, _ = _slot(self.spec, self.index, turn, stage)
        plgpu.barrier_wait(self.r.full.at[slot])
        return slot

    def give(self, slot):
        plgpu.barrier_arrive(self.r.empty.at[slot])

    # -------------------------------------------------------------- logits

    def logits(self, stretch: _Stretch, turn):
        """[rows, columns] (flipped: [columns, rows]) float32, times log2(e)."""
        r, spec, plan = self.r, self.spec, self.plan

        def product(acc):
            stage = 0
            for run in plan.keys:
                target = (
                    acc if run.count == plan.columns else acc.at[:, pl.ds(run.first, run.count)]
                )
                columns = r.queries.at[self.index, pl.ds(run.first, run.count)]

                def chunk(i, _, run=run, stage=stage, target=target, columns=columns):
                    slot = self.take(turn, stage + i)
                    if plan.edge:
                        self.clear_padding(slot, r.chunks[stretch.part, stage + i])
                    lanes = pl.ds(pl.multiple_of(run.lane + i * LANES, LANES), LANES)
                    if plan.flipped:
                        plgpu.wgmma(target, columns.at[:, lanes], r.rows.at[slot].T)
                    else:
                        plgpu.wgmma(target, r.rows.at[slot], columns.at[:, lanes].T)
                    plgpu.wgmma_wait(0)
                    self.give(slot)

                jax.lax.fori_loop(0, run.chunks, chunk, None)
                stage += run.chunks
            return acc[...]

        s = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((TILE, plan.columns), jnp.float32))
        if spec.table:
            s = s + self.rotated(stretch, turn)
        s = s * (spec.scale * LOG2E)
        if spec.scaled:
            plgpu.barrier_wait(r.scaled.at[self.index])
            s = s * self.factors(s)
        if spec.cap:
            cap = spec.cap * LOG2E
            s = cap - (2 * cap) / (1 + jnp.exp2(s * (2 * LOG2E / cap)))  # cap · tanh(s / cap)
        return s

    def factors(self, s):
        """Scales of every column, where logits stand."""
        columns = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=WGMMA)
        found = jnp.ones_like(s)
        for g in range(self.plan.groups):
            for head in range(self.plan.heads):
                at = g * self.plan.width + head
                held = plgpu.load(self.r.held.at[self.index, at], layout=WGMMA.reduce(1))
                held = jax.lax.broadcast_in_dim(held, s.shape, [0])
                found = jnp.where(columns == at, held, found)
        return found

    def start_scales(self, stretch: _Stretch, base):
        r, plan = self.r, self.plan
        barrier, held = r.scaled.at[self.index], r.held.at[self.index]
        for g in range(plan.groups):
            heads = pl.ds((stretch.part * plan.groups + g) * plan.heads, plan.heads)
            source = r.scales.at[stretch.batch, heads, pl.ds(base, TILE)]
            target = held.at[pl.ds(g * plan.width, plan.heads)]
            plgpu.copy_gmem_to_smem(source, target, barrier)

    def rotated(self, stretch: _Stretch, turn):
        """Σ_ρ z_ρ (t_n A)_ρ [rows, columns], products and sums in float32."""
        r, plan = self.r, self.plan
        start, (run,) = parts.chunks_of(plan.keys), plan.latents
        tables = [self.take(turn, start + i) for i in range(self.spec.table)]
        offset = 0 if plan.aligned else r.offsets[stretch.part, run.index]
        columns = plgpu.broadcasted_iota(jnp.int32, (TILE, plan.columns), 1, layout=WGMMA)
        lanes = plgpu.broadcasted_iota(jnp.int32, (TILE, LANES), 1, layout=WGMMA)

        def chunk(i, s):
            slot = self.take(turn, start + len(tables) + i)
            rows = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)

            def product(acc):
                for j, table in enumerate(tables):
                    a = r.turning.at[rows, pl.ds(j * LANES, LANES)].T
                    plgpu.wgmma(acc, r.rows.at[table], a)
                return acc[...]

            seen = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((TILE, LANES), jnp.float32))
            seen = seen * plgpu.load(r.rows.at[slot], layout=WGMMA).astype(jnp.float32)
            self.give(slot)
            begin = i * LANES - offset  # of the chunk, in the latents of the run
            head = jax.lax.div(jnp.maximum(begin, 0), jnp.int32(plan.rank))
            for _ in range(plan.meeting):
                mine = seen
                if not plan.aligned:
                    low = head * plan.rank - begin
                    mine = jnp.where((lanes >= low) & (lanes < low + plan.rank), seen, 0.0)
                sums = jax.lax.broadcast_in_dim(mine.sum(axis=1), s.shape, [0])
                s = s + jnp.where(columns == head, sums, 0.0)
                head = head + 1
            return s

        s = plgpu.layout_cast(jnp.zeros((TILE, plan.columns), jnp.float32), WGMMA)
        s = jax.lax.fori_loop(0, run.chunks, chunk, s)
        plgpu.commit_smem()  # orders loads of latents, too, before copies: those wait for tables
        for table in tables:
            self.give(table)
        return s

    # -------------------------------------------------------------- values

    def weighted(self, run: Run, count: int, turn, stage, first, stop) -> list[Any]:
        """[64 lanes, columns] (flipped: [columns, 64]) of each of so many chunks of a run."""
        r, flipped = self.r, self.plan.flipped
        weights = r.weights.at[self.index, pl.ds(run.first, run.count)]
        slots = [self.take(turn, stage + i) for i in range(count)]

        @pl.when((first > 0) | (stop < TILE))
        def _():
            def clear(i, _):
                slot, _ = _slot(self.spec, self.index, turn, stage + i)
                _clear(r.rows.at[slot], first, stop, LANES)

            jax.lax.fori_loop(0, count, clear, None)
            plgpu.commit_smem()

        def products(*accs):
            for acc, slot in zip(accs, slots, strict=True):
                if flipped:
                    plgpu.wgmma(acc, weights, r.rows.at[slot])
                else:
                    plgpu.wgmma(acc, r.rows.at[slot].T, weights.T)
            return [acc[...] for acc in accs]

        accs = [plgpu.WGMMAAccumulatorRef((LANES, run.count), jnp.float32)] * count
        found = pl.run_scoped(products, *accs)
        for slot in slots:
            self.give(slot)
        return found

    def clear_padding(self, slot, chunk):
        limit = self.spec.row - chunk * LANES

        @pl.when(limit < LANES)
        def _():
            _clear(self.r.rows.at[slot], 0, TILE, limit)
            plgpu.commit_smem()

    def write(self, stretch: _Stretch, state: _State):
        r, plan, at = self.r, self.plan, (stretch.part, stretch.place, self.index)
        _store(r.stats.at[*at, 0], state.peak)
        _store(r.stats.at[*at, 1], state.total)
        for (run, i), sums in zip(_chunks(plan.values), state.sums, strict=False):
            sides = (pl.ds(run.lane + i * LANES, LANES), pl.ds(run.first, run.count))
            _store(r.whole.at[*at, *(sides[::-1] if plan.flipped else sides)], sums)
        own = state.sums[parts.chunks_of(plan.values) :]
        for (run, i), sums in zip(_chunks(plan.own), own, strict=True):
            lane, column = (
                plgpu.broadcasted_iota(jnp.int32, sums.shape, d, layout=WGMMA) for d in (0, 1)
            )
            low = column * plan.rank - (i * LANES - r.offsets[stretch.part, run.index])
            mine = jnp.where((lane >= low) & (lane < low + plan.rank), sums, 0.0)
            _store(r.own.at[*at, pl.ds(run.lane + i * LANES, LANES)], mine.sum(axis=1))


def _chunks(runs: tuple[Run, ...]) -> list[tuple[Run, int]]:
    return [(run, i) for run in runs for i in range(run.chunks)]


def _batches(runs: tuple[Run, ...], ring: int) -> list[tuple[range, Run]]:
    """Chunks of a run whose products are waited for together, as registers and the ring allow."""
    found, at = [], 0
    for run in runs:
        most = max(1, min(MOST_WAITING // run.count, ring // 2))
        for i in range(0, run.chunks, most):
            count = min(most, run.chunks - i)
            found.append((range(at, at + count), run))
            at += count
    return found


def _clear(ref, first, stop, limit):
    """Zeroes a chunk's rows outside [first, stop) and its lanes from limit on: 0 · NaN is NaN."""
    x = plgpu.load(ref, layout=WGMMA)
    rows, lanes = (plgpu.broadcasted_iota(jnp.int32, x.shape, d, layout=WGMMA) for d in (0, 1))
    live = (rows >= first) & (rows < stop) & (lanes < limit)
    ref[...] = jnp.where(live, x, jnp.zeros_like(x))


def _store(ref, x):
    """Registers to global memory."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:  # jax before 0.12: the only way
        ref[...] = x
