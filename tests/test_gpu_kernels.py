"""The GPU kernel, interpreted, against the float64 oracle, and how it divides its work.

Dead slots and the padding of live rows hold NaN unless a test says otherwise. S is 304, no multiple
of a tile's 64 rows, so that the last tile begins early.
"""

import dataclasses
import functools
import traceback
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import kernel_oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from kernel_oracle import assert_attended
from test_kernels import bits, fast, part_of, refusal, refusals, slow

from pallas_kernels import balance, gpu, gqa_decode, lrkv_decode, parts, shapes
from pallas_kernels.core import Problem, Rotation
from pallas_kernels.parts import LANES
from pallas_kernels.rows import padded
from pallas_kernels.shapes import Shape

TILE = gpu.TILE
LENGTHS = (304, 0, 129, 1)
EDGES = (304, 0, TILE, 1, TILE + 1, TILE - 1, 2 * TILE, 303)
GQA = Shape(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=64)
LRKV = Shape(kind="lrkv", num_heads=3, rank=10, head_dim=64, value_dim=32)
ROPE = LRKV.replace(kind="rope")

# ------------------------------------------------------------------ running


def specified(trace):
    """What trace() returns, and the kernel's `Spec`, none of which may wait forever."""
    found = []

    def specify(*arguments):
        found.append(gpu_specify(*arguments))
        return found[-1]

    gpu_specify = gpu.specify
    with mock.patch.object(gpu, "specify", specify):
        result = trace()
    (spec,) = found
    return result, spec


def assert_ring_suffices(spec: gpu.Spec) -> None:
    """What a consumer holds at once: a tile's table until its latents end, or a batch of values."""
    held = spec.table + parts.chunks_of(spec.plan.latents)
    batches = gpu._batches(spec.plan.values + spec.plan.own, spec.ring)
    assert spec.ring >= max(held, *(len(at) for at, _ in batches)), "the copies wait forever"


def compiled(call, *arguments):
    traced, spec = specified(lambda: jax.jit(call).trace(*arguments))
    assert_ring_suffices(spec)
    return traced.lower().compile()


@functools.cache
def program(shape: Shape, **options):
    """Of a shape's arrays; compiled once."""
    call = functools.partial(shape.call, backend="gpu_interpret", **options)
    return compiled(call, shape.arguments())


def make(shape: Shape, lengths=LENGTHS, **options):
    shape = shape.replace(batch=len(lengths), slots=304)
    return kernel_oracle.make(shape, lengths, **options)


def assert_right(case, *, splits: int | None = None, factor: float = 1.0, **options) -> None:
    arrays, expected = case.arrays(window=options.get("window")), case.attended(**options)
    found = program(case.shape, splits=splits, **options)(arrays)
    assert_attended(found, expected, case.shape.dtype, factor)


# ------------------------------------------------------------------ shapes


@pytest.mark.parametrize(
    "sizes",  # N, K, H, V
    [
        fast((16, 2, 128, 128)),
        fast((21, 3, 40, 24)),
        fast((128, 2, 128, 128)),
        fast((65, 1, 72, 72)),
        slow((9, 9, 24, 40)),
        slow((16, 8, 64, 64)),
        slow((4, 2, 40, 72)),
        slow((16, 1, 256, 256)),
        slow((66, 2, 64, 128)),
        slow((64, 1, 72, 200)),
        slow((200, 2, 64, 64)),
        slow((130, 1, 32, 96)),
        slow((1, 1, 128, 128)),
    ],
    ids=str,
)
def test_any_group_of_queries_and_any_width_of_heads(sizes):
    """Groups 1, 2, 7, 8, 16, 33, 64, and 65 to 130, which are several blocks of queries."""
    N, K, H, V = sizes
    assert_right(make(Shape(kind="gqa", num_heads=N, num_kv_heads=K, head_dim=H, value_dim=V)))


@pytest.mark.parametrize(
    "sizes",  # kind, N, R, H, V
    [
        fast(("lrkv", 6, 46, 128, 128)),
        fast(("shared", 12, 10, 64, 40)),
        fast(("rope", 6, 46, 128, 128)),
        slow(("lrkv", 16, 64, 128, 128)),
        slow(("rope", 16, 64, 128, 128)),
        slow(("lrkv", 3, 8, 64, 32)),
        slow(("lrkv", 18, 55, 128, 128)),
        slow(("lrkv", 6, 128, 128, 128)),
        slow(("lrkv", 3, 300, 64, 64)),
        slow(("lrkv", 2, 8, 40, 24)),
        slow(("shared", 16, 64, 128, 128)),
        slow(("shared", 12, 51, 128, 128)),
        slow(("rope", 18, 55, 128, 128)),
        slow(("rope", 20, 10, 64, 40)),
        slow(("rope", 6, 128, 128, 128)),
        slow(("rope", 2, 300, 64, 64)),
        slow(("rope", 2, 8, 40, 24)),
    ],
    ids=str,
)
def test_any_number_of_heads_and_any_rank(sizes):
    kind, N, R, H, V = sizes
    assert_right(make(Shape(kind=kind, num_heads=N, rank=R, head_dim=H, value_dim=V)))


@pytest.mark.parametrize(
    "shape",
    [
        fast(GQA),
        slow(GQA.replace(num_heads=64, num_kv_heads=1, value_dim=40)),
        slow(LRKV.replace(num_heads=9, scaled=True)),
        slow(LRKV.replace(kind="shared")),
        slow(ROPE.replace(num_heads=6, rank=46)),
    ],
    ids=lambda shape: shape.name,
)
def test_float16(shape):
    assert_right(make(shape.replace(dtype="float16")))


@pytest.mark.parametrize("shape", shapes.MAIN, ids=lambda shape: shape.name)
def test_main_shapes_find_room(shape):
    """In shared memory, without waiting forever; not run."""
    call = functools.partial(shape.call, backend="gpu_interpret")
    shape = shape.replace(slots=1024)  # less to trace
    _, spec = specified(lambda: jax.eval_shape(call, shape.arguments()))
    assert spec.plan.sums <= parts.MOST_GROUP
    assert_ring_suffices(spec)


# ------------------------------------------------------------------ QK-norm


@pytest.mark.parametrize("kind", [fast("lrkv"), slow("shared"), slow("rope")])
def test_qk_norm_with_a_weight(kind):
    """γ stands between norm and rotation, so it goes into key_up and the stored shared key."""
    assert_right(make(LRKV.replace(kind=kind, scaled=True), weighted=True))


@pytest.mark.parametrize(
    ("kind", "heads"),
    [fast("rope", 3), slow("lrkv", 3), slow("lrkv", 9), slow("shared", 18), slow("rope", 20)],
)
def test_scales_may_be_padded_to_a_multiple_of_8_heads(kind, heads):
    case = make(LRKV.replace(kind=kind, num_heads=heads, scaled=True))
    arrays = case.arrays()
    padding = ((0, 0), (0, -heads % 8), (0, 0))
    arrays["key_scales"] = np.pad(arrays["key_scales"], padding, constant_values=np.nan)
    run = compiled(functools.partial(case.shape.call, backend="gpu_interpret"), arrays)
    assert_attended(run(arrays), case.attended(), case.shape.dtype)


# ------------------------------------------------------------------ lengths, windows, splits


@pytest.mark.parametrize("splits", [fast(None), slow(1), fast(2), slow(8)])
def test_lengths_at_the_edges_of_tiles(splits):
    for lengths in (EDGES, [304] * 8, [0] * 8)[: 1 if splits in (2, 8) else 3]:
        assert_right(make(GQA, lengths), splits=splits)


@pytest.mark.parametrize("splits", [slow(None), slow(1), slow(2)])
@pytest.mark.parametrize("shape", [LRKV, ROPE.replace(scaled=True)], ids=lambda s: s.kind)
def test_lengths_at_the_edges_of_tiles_of_lrkv(shape, splits):
    for lengths in (EDGES, EDGES[::-1]):
        assert_right(make(shape, lengths), splits=splits)


@pytest.mark.parametrize("slots", [fast(64), slow(72), slow(128), slow(136)])
def test_caches_of_few_tiles(slots):
    lengths = (slots, 1, 0, slots // 2, slots - 1)
    assert_right(kernel_oracle.make(GQA.replace(batch=5, slots=slots), lengths))


@pytest.mark.parametrize("window", [slow(1), slow(TILE), fast(TILE + 1), slow(150), slow(1000)])
def test_windows_smaller_than_a_tile_as_large_and_across_several(window):
    assert_right(make(GQA, EDGES), window=window)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        fast(ROPE.replace(scaled=True), {"cap": 1.5, "window": 150}),
        slow(ROPE.replace(scaled=True), {"cap": 1.5, "window": 150, "splits": 2}),
        slow(GQA, {"cap": 2.0}),
        slow(GQA.replace(num_heads=100), {"cap": 2.0, "window": 70}),
        slow(LRKV, {"cap": 1.5, "splits": 8}),
        slow(LRKV.replace(kind="shared"), {"cap": 0.5, "window": 200}),
        slow(ROPE, {"window": 1}),
    ],
)
def test_a_cap_of_logits_with_windows_and_splits(shape, options):
    assert_right(make(shape, weighted=shape.scaled), **options)


def test_a_length_of_zero_gives_zeros_and_leaves_neighbours_alone():
    """Their bits are the same where their stretches are: at one split."""
    case = make(GQA, EDGES)
    run = program(case.shape, splits=2)
    before = run(case.arrays())
    for lengths in ([0, 0, 64, 1, 0, 63, 0, 0], [0] * 8):
        found = run(dataclasses.replace(case, lengths=np.array(lengths)).arrays())
        for b, length in enumerate(lengths):
            if length == 0:
                assert not np.asarray(found.out[b]).any()
                assert (np.asarray(found.lse[b]) == -np.inf).all()
            elif length == EDGES[b]:
                assert bits(found, b) == bits(before, b)


def test_what_is_not_finite_spoils_its_own_sequence_only():
    """A live row of one sequence, and a query of another."""
    case = make(GQA, EDGES)
    arrays, run = case.arrays(), program(case.shape, splits=2)
    before = run(arrays)
    spoilt = {name: np.array(x) for name, x in arrays.items()}
    b, c = EDGES.index(64), EDGES.index(65)
    spoilt["cache"][b, 3] = np.inf
    spoilt["q"][c] = np.nan
    found = run(spoilt)
    for i in range(len(EDGES)):
        if i in (b, c):
            assert np.isnan(found.out[i]).all()
            assert not np.isfinite(found.lse[i]).any()
        else:
            assert bits(found, i) == bits(before, i)


@pytest.mark.slow
def test_lengths_that_are_known_before_the_program_runs():
    case = make(GQA)
    call = functools.partial(case.shape.call, backend="gpu_interpret")
    assert bits(call(case.arrays())) == bits(program(case.shape)(case.arrays()))


@pytest.mark.parametrize("shape", [fast(GQA), slow(GQA.replace(num_heads=128))])
def test_logits_of_hundreds_neither_overflow_nor_vanish(shape):
    """float32 logits of up to 400 are off by 2⁻²⁴ of that and more."""
    case = make(shape, EDGES, loudness=100)
    assert np.abs(case.attended()[1][0]).max() > 200
    assert_right(case)


@pytest.mark.slow
def test_keys_are_rotated_exactly_at_the_end_of_a_long_context():
    """A float32 product of slot and frequency would be off by 2⁻⁸ radians there."""
    shape = ROPE.replace(num_heads=2, rank=8, batch=1, slots=2**17, dtype="float16")
    assert_right(kernel_oracle.make(shape, 2**17 - 40), window=200)


# ------------------------------------------------------------------ what must not matter


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # inf · 0
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        fast(GQA, {}),
        fast(ROPE.replace(scaled=True), {"cap": 1.5, "window": 150}),
        slow(GQA.replace(num_heads=100), {}),
        slow(LRKV.replace(scaled=True), {}),
        slow(LRKV.replace(kind="shared"), {"cap": 0.5, "window": 200}),
        slow(ROPE.replace(num_heads=6, rank=46), {}),
    ],
)
def test_dead_slots_and_padding_do_not_matter_to_the_last_bit(shape, options):
    case, window = make(shape), options.get("window")
    run = program(case.shape, **options)
    clean = bits(run(case.arrays(0.0, window)))
    for poison in (np.nan, np.inf, 1e30):
        assert bits(run(case.arrays(poison, window))) == clean, poison


@pytest.mark.parametrize(
    "shape", [fast(LRKV.replace(scaled=True)), slow(GQA), slow(ROPE)], ids=lambda s: s.kind
)
def test_what_neighbours_hold_does_not_matter_to_the_last_bit(shape):
    """Nor how loud they are; their lengths do, since all sequences share blocks."""
    case = make(shape)
    run, arrays = program(case.shape), case.arrays()
    others = make(shape, seed=1, loudness=100).arrays()
    per_sequence = [k for k in arrays if k not in ("key_up", "value_up")]
    found = run(arrays)
    for b in (0, 2):
        mixed = arrays | {k: others[k].copy() for k in per_sequence}
        for name in per_sequence:
            mixed[name][b] = arrays[name][b]
        assert bits(run(mixed), b) == bits(found, b)


# ------------------------------------------------------------------ some of the heads


@functools.cache
def program_of_part(shape: Shape, count: int, first: int | None):
    """Of arrays and first, which is traced unless it is given here."""

    def call(arrays, begin):
        heads = (begin if first is None else first, shape.num_heads)
        return shape.call(arrays, heads=heads, backend="gpu_interpret")

    arguments = shape.replace(num_heads=count).arguments() | {"cache": shape.arguments()["cache"]}
    return compiled(call, arguments, 0)


SIX = GQA.replace(num_heads=6, num_kv_heads=3, value_dim=40)
TWENTY = LRKV.replace(num_heads=20, rank=46, head_dim=40)


@pytest.mark.parametrize(
    ("shape", "count", "firsts", "traced"),
    [
        fast(SIX, 3, (1, 3), True),
        fast(LRKV.replace(num_heads=11, scaled=True), 5, (6,), True),
        slow(ROPE.replace(num_heads=11), 5, (3,), False),
        slow(SIX, 3, (2,), False),
        slow(SIX, 1, (0, 3, 5), True),
        slow(GQA.replace(num_heads=9, num_kv_heads=9, head_dim=24), 4, (0, 2, 5), True),
        slow(GQA.replace(num_heads=9, num_kv_heads=9, head_dim=24), 4, (5,), False),
        slow(GQA.replace(num_heads=140), 75, (0, 33, 65), True),
        slow(GQA.replace(num_heads=140), 75, (33,), False),
        slow(TWENTY, 9, (0, 7, 11), True),
        slow(TWENTY, 9, (7,), False),
        slow(TWENTY.replace(kind="shared"), 9, (0, 7, 11), True),
        slow(TWENTY.replace(kind="rope", scaled=True), 9, (0, 7, 11), True),
        slow(TWENTY.replace(kind="rope"), 9, (7,), False),
        slow(ROPE.replace(num_heads=30), 25, (0, 3), True),
    ],
)
def test_some_of_the_heads_read_the_row_of_all(shape, count, firsts, traced):
    """They begin anywhere in a KV head or a chunk of latents, and end in another."""
    case = make(shape)
    arrays, (out, lse) = case.arrays(), case.attended()
    for first in firsts:
        run = program_of_part(case.shape, count, None if traced else first)
        mine = slice(first, first + count)
        found = run(part_of(arrays, first, count), first)
        assert_attended(found, (out[:, mine], lse[:, mine]), shape.dtype)


# ------------------------------------------------------------------ who reads what


@st.composite
def schedules(draw):
    """Live slots, needed parts, blocks, splits, and whether the needed parts are known.

    Of few shapes, since every operation compiles anew for each.
    """
    high = np.array(draw(st.lists(st.integers(0, 900), min_size=5, max_size=5)), np.int32)
    high[draw(st.integers(0, 5)) :] = 0
    window = draw(st.sampled_from([None, 1, 64, 100, 2000]))
    low = np.maximum(high - window, 0) if window else np.zeros_like(high)
    needed = np.array([True, *(draw(st.booleans()) for _ in range(2))])
    needed = np.roll(needed, draw(st.integers(0, 2)))
    blocks, splits = draw(st.sampled_from([(1, None), (2, None), (13, None), (0, 1), (0, 3)]))
    return low, high, needed, blocks, splits, draw(st.booleans())


@given(schedules())
@settings(max_examples=25, deadline=None)
def test_every_tile_is_read_once_for_every_part(drawn):
    low, high, needed, blocks, splits, known = drawn
    found = balance.schedule(
        (jnp.asarray(low), jnp.asarray(high)),
        needed if known else jnp.asarray(needed),
        tile=TILE,
        blocks=blocks,
        splits=splits,
    )
    found = balance.Schedule(*(np.asarray(x) for x in found))
    tiles = np.where(high > low, -(-high // TILE) - low // TILE, 0)
    line = np.concatenate([[0], np.cumsum(tiles)])
    np.testing.assert_array_equal(found.line, line)
    np.testing.assert_array_equal(found.live, np.stack([low // TILE, low, high], axis=1))

    reads = np.zeros((len(needed), line[-1]), int)
    teams: dict[int, dict[int, tuple]] = {}
    for begin, end, first, stop, part, team in found.blocks.tolist():
        if end > begin:
            reads[part, begin:end] += 1
            teams.setdefault(team, {})[part] = (begin, end)
            met = {b for b in range(len(high)) if max(line[b], begin) < min(line[b + 1], end)}
            assert met <= set(range(first, stop)), "a sequence of the stretch is not visited"
    assert (reads == needed[:, None]).all()
    assert_teams_are_fair(teams, tiles, needed, blocks, splits)
    assert_places_are_whose_they_are(found, teams, line)


def assert_teams_are_fair(teams, tiles, needed, blocks: int, splits: int | None) -> None:
    """All members take one stretch; stretches are as long as the share, the last ones shorter."""
    stretches = []
    for members in teams.values():
        assert set(members) == set(np.flatnonzero(needed))
        assert len(set(members.values())) == 1
        stretches += set(members.values())
    lengths = [end - begin for begin, end in sorted(stretches)]
    if splits is None:
        share = max(-(-tiles.sum() // max(blocks // needed.sum(), 1)), balance.FEWEST)
        assert all(length == share for length in lengths[:-1])
        assert all(length <= share for length in lengths[-1:])
        assert len(teams) * needed.sum() <= max(blocks, needed.sum())
        return
    line = np.cumsum(tiles) - tiles
    for begin, end in stretches:
        b = np.flatnonzero((line <= begin) & (tiles > 0))[-1]
        assert end <= line[b] + tiles[b]
        assert end - begin <= -(-tiles[b] // splits)


def assert_places_are_whose_they_are(found, teams, line) -> None:
    expected = np.zeros_like(found.mine)
    for team, members in teams.items():
        begin, end = next(iter(members.values()))
        for b in range(len(line) - 1):
            if max(line[b], begin) < min(line[b + 1], end):
                expected[b, team + b] = True
    np.testing.assert_array_equal(found.mine, expected)
    assert (found.mine.sum(axis=0) <= 1).all()


@pytest.mark.parametrize("seed", range(8))
def test_partial_results_merge_into_the_softmax_of_all(seed):
    """Places that nobody wrote hold NaN; a consumer without tiles leaves a peak of LOW."""
    rng = np.random.default_rng(seed)
    B, P, M, V, many = 4, 9, 3, 5, 2
    owner = rng.integers(-2, B, P)  # negative: nobody's
    mine = owner == np.arange(B)[:, None]
    count, spread = 6, (1, 100)[seed % 2]  # slots of a place and consumer
    logits = spread * rng.standard_normal((P, many, count, M))
    values = rng.standard_normal((P, many, count, M, V))
    idle = rng.random((P, many)) < 0.3
    peak = np.where(idle[..., None], gpu.LOW, logits.max(axis=2))
    weights = np.where(idle[..., None, None], 0, np.exp2(logits - logits.max(axis=2)[:, :, None]))
    sums, total = (weights[..., None] * values).sum(axis=2), weights.sum(axis=2)
    for x in (sums, peak, total):
        x[owner < 0] = np.nan
    found = balance.merge(
        *(jnp.asarray(x, jnp.float32) for x in (sums, peak, total)), jnp.asarray(mine)
    )
    out, lse = np.zeros((B, M, V)), np.full((B, M), -np.inf)
    for b in range(B):
        live = mine[b][:, None] & ~idle
        if live.any():
            x = logits[live].reshape(-1, M) * np.log(2)
            weight = np.exp(x - x.max(axis=0))
            out[b] = (weight[..., None] * values[live].reshape(-1, M, V)).sum(axis=0)
            out[b] /= weight.sum(axis=0)[:, None]
            lse[b] = x.max(axis=0) + np.log(weight.sum(axis=0))
    np.testing.assert_allclose(found.out, out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.lse, lse, rtol=1e-5, atol=1e-4)


# ------------------------------------------------------------------ how a call is divided


@st.composite
def problems(draw):
    """Of any sizes that the kernel takes, with a first head that is known."""
    H, V = (8 * draw(st.integers(1, 20)) for _ in range(2))
    kind = draw(st.sampled_from(["gqa", "lrkv", "rope"]))
    K = draw(st.integers(1, 9)) if kind == "gqa" else 1
    total = K * draw(st.integers(1, 70)) if kind == "gqa" else draw(st.integers(1, 24))
    R = 0 if kind == "gqa" else draw(st.integers(1, 70))
    partial = draw(st.booleans())
    N = draw(st.integers(1, total)) if partial else total
    first = draw(st.integers(0, total - N))
    rotation = None
    if kind == "rope":
        rotation = Rotation(jax.ShapeDtypeStruct((1, N, R, H), jnp.float32), np.ones(H // 2), 1.0)
    row = padded(K * (H + V + 2 * total * R))
    return Problem(
        "",
        jax.ShapeDtypeStruct((1, N, H), jnp.float32),
        jax.ShapeDtypeStruct((1, 64, row), jnp.bfloat16),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        *(K, V, 1.0, None, 0.0, first, total, partial, R),
        rotation=rotation,
    )


@given(problems())
@settings(max_examples=200, deadline=None)
def test_every_query_finds_its_lanes(problem):
    assert_divided(problem, *parts.divide(problem))


@given(problems())
@settings(max_examples=15, deadline=None)
def test_every_query_finds_its_lanes_where_the_first_is_traced(problem):
    traced = dataclasses.replace(problem, first=jnp.int32(problem.first))
    assert_divided(problem, *parts.divide(traced))


def assert_divided(problem, plan, places) -> None:
    N = problem.q.shape[1]
    queries, needed = np.asarray(places.queries), np.asarray(places.needed)
    assert queries.shape == (plan.parts, plan.groups, plan.heads)
    assert sorted(queries[queries < N]) == list(range(N))
    np.testing.assert_array_equal(needed, (queries < N).any(axis=(1, 2)))
    assert plan.heads <= plan.width
    assert plan.columns <= parts.MOST_COLUMNS
    assert plan.sums <= parts.MOST_GROUP
    starts, offsets = np.asarray(places.starts), np.asarray(places.offsets)
    for run in plan.runs:
        assert (starts[:, run.index] >= 0).all()
        assert (LANES * starts[:, run.index] + run.lanes <= padded(problem.elements)).all()
    if not plan.edge:
        for run in plan.keys:
            assert (LANES * starts[:, run.index] + run.lanes <= problem.elements).all()
    for part, group, head in zip(*np.nonzero(queries < N), strict=True):
        assert_own_lanes(problem, plan, starts[part], offsets[part], group, head, queries[part])


def assert_own_lanes(problem, plan, starts, offsets, group, head, queries) -> None:
    """Each run that a query's column meets holds its lanes, where the offset says."""
    runs = {run.index: run for run in plan.runs}
    column = group * plan.width + head
    for index, (lane, size) in lanes_of_query(problem, group, queries[group, head]).items():
        run, start = runs[index], LANES * starts[index]
        step = head * problem.rank if index >= 2 else 0
        assert start + offsets[index] + step == lane
        assert start <= lane
        assert lane + size <= start + run.lanes
        assert run.first <= column < run.first + run.count
        if run in plan.latents:
            assert_meeting(plan, offsets[index] + step, head)


def lanes_of_query(problem, group: int, query: int) -> dict[int, tuple[int, int]]:
    """First lane and width of what a query reads of a row, by run."""
    H, V, R = problem.q.shape[2], problem.value_dim, problem.rank
    head = problem.first + query
    mine = 2 + 2 * group
    if not R:
        kv = head // (problem.total // problem.num_kv_heads) * (H + V)
        return {mine: (kv, H), mine + 1: (kv + H, V)}
    values = H + problem.total * R
    own = {mine: (H + head * R, R), mine + 1: (values + V + head * R, R)}
    return {0: (0, H), 1: (values, V)} | own


def assert_meeting(plan, lane: int, head: int) -> None:
    """Chunks with latents of a head count it among the heads that they meet."""
    offset = lane - head * plan.rank
    for i in range(lane // LANES, -(-(lane + plan.rank) // LANES)):
        first = max(i * LANES - offset, 0) // plan.rank
        assert first <= head < first + plan.meeting
    assert not plan.aligned or offset == 0


# ------------------------------------------------------------------ refusals


def arguments(shape: Shape) -> dict:
    given = shape.replace(batch=2, slots=128).arguments() | {"backend": "gpu_interpret"}
    if shape.kind == "gqa":
        given |= {"num_kv_heads": shape.num_kv_heads, "value_dim": shape.v_dim}
    return given | ({"frequencies": shape.frequencies} if shape.kind == "rope" else {})


REFUSED = [  # a call, what is changed in it, the words
    (GQA.replace(dtype="float32"), {}, "cache is float32; … wgmma has no float32 … backend='jnp'"),
    (LRKV.replace(dtype="float32"), {}, "cache is float32; … wgmma has no float32"),
    (GQA, {"cache": (2, 60, 256)}, "cache has 60 slots; … multiple of 8, so make it 64."),
    (GQA, {"cache": (2, 100, 256)}, "cache has 100 slots; … multiple of 8, so make it 104."),
    (LRKV.replace(rank=2000), {}, "value_dim 32 and rank 2000 are too much … backend='jnp'"),
    (ROPE.replace(rank=2000), {}, "value_dim 32 and rank 2000 are too much … backend='jnp'"),
    (GQA.replace(value_dim=4096), {}, "value_dim 4096 and rank 0 are too much … backend='jnp'"),
    (
        Shape(kind="gqa", num_heads=64, num_kv_heads=1, head_dim=2048, value_dim=64),
        {},
        "q and cache need … KiB of shared memory; h200 has 227. Use fewer heads or a smaller rank.",
    ),
    (GQA, {"backend": "gpu"}, "backend is 'gpu', but this program is for cpu … gpu_interpret"),
    (GQA, {"mesh": 2}, "backend is 'gpu_interpret' on a mesh of 2 devices; … without a mesh"),
    (GQA, {"threads": 1000}, "backend is 'gpu_interpret' with … XLA_FLAGS=--xla_force_host_platf"),
]


def refused(shape: Shape, changes: dict):
    given, changes = arguments(shape), dict(changes)
    mesh = AbstractMesh((changes.pop("mesh", 1),), ("data",))
    threads = mock.patch.object(gpu, "INTERPRETER_THREADS", changes.pop("threads", 1))
    if "cache" in changes:
        changes = {"cache": jax.ShapeDtypeStruct(changes["cache"], given["cache"].dtype)}
    entry = gqa_decode if shape.kind == "gqa" else lrkv_decode
    with jax.sharding.use_abstract_mesh(mesh), threads:
        return refusal(entry, given, changes)


@pytest.mark.parametrize(
    ("shape", "changes", "words"), REFUSED, ids=[words for *_, words in REFUSED]
)
def test_what_is_refused_is_named_with_its_value_and_the_fix(shape, changes, words):
    sentence = str(refused(shape, changes))
    begin, *rest = words.split("…")
    assert sentence.startswith(begin.strip())
    for part in rest:
        assert part.strip() in sentence


def test_every_refusal_of_the_gpu_kernel_is_among_these():
    met = set()
    for shape, changes, _ in REFUSED:
        for frame in traceback.extract_tb(refused(shape, changes).__traceback__):
            met.add((Path(frame.filename).stem, frame.lineno))
    for module in ("gpu", "parts", "balance", "chips"):
        text = (Path(gpu.__file__).parent / f"{module}.py").read_text()
        for node in refusals(text):
            lines = {(module, line) for line in range(node.lineno, node.end_lineno + 1)}
            assert lines & met, f"no case above meets {module}.py:{node.lineno}"
