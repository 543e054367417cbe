"""The decode kernels, interpreted, and their jnp form against float64 oracles.

Everything here runs with NaN in dead slots and in the padding of live rows unless it says
otherwise, and with tiles far smaller than a chip would choose, so that few slots make many tiles.
"""

import ast
import dataclasses
import functools
import itertools
import traceback
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import kernel_oracle
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kernel_oracle import assert_attended

import pallas_kernels
from pallas_kernels import (
    Attended,
    UnsupportedError,
    chips,
    gqa_decode,
    lrkv_decode,
    merge,
    shapes,
)
from pallas_kernels.blocks import BUFFERS
from pallas_kernels.shapes import Shape

TILE = 128
DTYPES = ("float32", "bfloat16")
INTERPRETER = pltpu.InterpretParams(uninitialized_memory="nan")
GQA = Shape(kind="gqa", num_heads=16, num_kv_heads=2, dtype="float32")
LRKV = Shape(kind="lrkv", num_heads=3, rank=10, head_dim=64, value_dim=32, dtype="float32")
ROPE = dataclasses.replace(LRKV, kind="rope")
EDGES = (304, 0, TILE, 1, TILE + 1, TILE - 1, 2 * TILE, 303)


def fast(*values):
    return pytest.param(*values)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# ------------------------------------------------------------------ running


def compiled(call, arguments: tuple, row: int, dtype: str, rows: int):
    """call, compiled for arguments like these, interpreted with tiles of so many rows."""
    tile_bytes = rows * row * jnp.dtype(dtype).itemsize
    chip = dataclasses.replace(chips.CHIPS[chips.UNKNOWN], tile_bytes=tile_bytes)
    with (
        mock.patch.dict(chips.CHIPS, {chips.UNKNOWN: chip}),
        pltpu.force_tpu_interpret_mode(INTERPRETER),
    ):
        traced = jax.jit(call).trace(*arguments)
        buffers = f"[{BUFFERS},{rows},{row}]"
        assert "pallas_call" not in (text := str(traced.jaxpr)) or buffers in text
        return traced.lower().compile()


@functools.cache
def program(shape: Shape, backend: str, rows: int = TILE, **options):
    """Of a shape's arrays; compiled once."""
    call = functools.partial(shape.call, backend=backend, **options)
    return compiled(call, (shape.arguments(),), shape.row, shape.dtype, rows)


def assert_right(case, *, rows: int = TILE, splits: int | None = None, factor=1.0, **options):
    """The kernel and the jnp form, which computes in float32, agree with the oracle."""
    arrays, expected = case.arrays(window=options.get("window")), case.attended(**options)
    rows = min(rows, case.shape.slots)
    found = program(case.shape, "tpu", rows, splits=splits, **options)(arrays)
    assert_attended(found, expected, case.shape.dtype, factor)
    found = program(case.shape, "jnp", rows, **options)(arrays)
    assert_attended(found, expected, "float32", factor)


def small(shape: Shape, lengths=(304, 0, TILE + 1, 1), dtype: str = "") -> Shape:
    """Few slots, in which the last tile begins early; scales need a multiple of 128."""
    slots = 384 if shape.scaled else 304
    return shape.replace(batch=len(lengths), slots=slots, dtype=dtype or shape.dtype)


def make(shape: Shape, lengths=(304, 0, TILE + 1, 1), **options):
    return kernel_oracle.make(small(shape, lengths), lengths, **options)


def bits(attended: Attended, sequence=slice(None)) -> bytes:
    return b"".join(np.asarray(x)[sequence].tobytes() for x in attended)


# ------------------------------------------------------------------ shapes

QUICK = {
    ("GQA-2 G 8 H 128", "bfloat16"),
    ("GQA-2 G 64 H 128", "bfloat16"),
    ("LRKV none N 6 R 46 H 128", "float32"),
    ("LRKV none N 16 R 64 H 128", "bfloat16"),
    ("LRKV full RoPE N 6 R 46 H 128", "bfloat16"),
    ("LRKV full RoPE N 16 R 64 H 128, QK-norm", "bfloat16"),
}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (fast if (shape.name, dtype) in QUICK else slow)(shape, dtype)
        for shape in shapes.MAIN
        for dtype in DTYPES
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_main_shapes(shape, dtype):
    assert_right(make(shape.replace(dtype=dtype)))


GROUPS = [  # N, K, H, V
    (3, 3, 40, 24),
    (21, 3, 40, 40),
    (24, 1, 256, 256),
    (9, 3, 64, 64),
    (4, 2, 40, 72),
    (5, 1, 128, 128),
    (12, 2, 64, 128),
]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        (fast if i < 4 and i % 2 == j else slow)(sizes, dtype)
        for i, sizes in enumerate(GROUPS)
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_any_group_of_queries_and_any_width_of_heads(sizes, dtype):
    """Groups 1, 2, 3, 5, 6, 7 and 24 over 1 to 3 KV heads; 4, 8, 16 and 64 are main shapes."""
    N, K, H, V = sizes
    assert_right(
        make(Shape(kind="gqa", num_heads=N, num_kv_heads=K, head_dim=H, value_dim=V, dtype=dtype))
    )


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        fast("lrkv", "float32"),
        fast("shared", "bfloat16"),
        slow("lrkv", "bfloat16"),
        slow("shared", "float32"),
        slow("rope", "float32"),
        slow("rope", "bfloat16"),
    ],
)
def test_qk_norm_with_a_weight(kind, dtype):
    """γ stands between norm and rotation, so it goes into key_up and the stored shared key."""
    assert_right(make(LRKV.replace(kind=kind, scaled=True, dtype=dtype), EDGES, weighted=True))


@pytest.mark.parametrize(("heads", "dtype"), [fast(3, "bfloat16"), slow(9, "float32")])
def test_scales_may_be_padded_to_a_multiple_of_8_heads(heads, dtype):
    case = make(LRKV.replace(num_heads=heads, scaled=True, dtype=dtype), EDGES)
    arrays, shape = case.arrays(), case.shape
    padding = ((0, 0), (0, -heads % 8), (0, 0))
    arrays["key_scales"] = np.pad(arrays["key_scales"], padding, constant_values=np.nan)
    for backend, computed in (("tpu", dtype), ("jnp", "float32")):
        call = functools.partial(shape.call, backend=backend)
        run = compiled(call, (arrays,), shape.row, dtype, TILE)
        assert_attended(run(arrays), case.attended(), computed)


@pytest.mark.parametrize("kind", [fast("rope"), slow("lrkv"), slow("shared")])
def test_rows_narrower_than_a_register_may_hold_anything_in_their_padding(kind):
    """k_shared, v_shared and both latents share one block of 128 lanes with the padding."""
    shape = Shape(kind=kind, num_heads=2, rank=8, head_dim=40, value_dim=24, dtype="float32")
    assert (shape.elements, shape.row) == (96, 128)
    assert_right(make(shape))


@pytest.mark.parametrize(
    ("N", "R"), [(6, r) for r in (8, 16, 32, 46, 64, 128)] + [(12, 51), (18, 55), (32, 54)]
)
def test_padding_of_a_row_wastes_at_most_16_percent(N, R):
    """The ranks of the paper's tables, H 128: 2·(H + N·R) elements, rounded up to 128."""
    elements = 2 * (128 + N * R)
    row = 128 * -(-elements // 128)
    assert row - elements <= 0.16 * elements
    assert Shape(kind="lrkv", num_heads=N, rank=R).row == row


# ------------------------------------------------------------------ lengths, tiles, splits


@pytest.mark.parametrize("splits", [slow(1), fast(2), fast(8)])
def test_lengths_at_the_edges_of_tiles(splits):
    for lengths in (EDGES, [304] * 8, [TILE] * 8)[: 1 if splits == 8 else 3]:
        assert_right(make(GQA.replace(num_heads=4, head_dim=64), lengths), splits=splits)


@pytest.mark.parametrize(
    ("splits", "dtype"), [slow(1, "float32"), slow(2, "bfloat16"), slow(8, "float32")]
)
@pytest.mark.parametrize("shape", [LRKV, ROPE.replace(scaled=True)], ids=lambda s: s.kind)
def test_lengths_at_the_edges_of_tiles_of_lrkv(shape, splits, dtype):
    assert_right(make(shape.replace(dtype=dtype), EDGES), splits=splits)


@pytest.mark.parametrize(
    "shape", [fast(ROPE.replace(scaled=True)), slow(GQA)], ids=lambda s: s.kind
)
def test_tiles_of_several_pieces_copy_the_live_ones(shape):
    lengths = (640, 1, 127, 129, 255, 256, 257, 0, 385, 512, 513)
    shape = shape.replace(batch=len(lengths), slots=640)
    assert_right(kernel_oracle.make(shape, lengths), rows=256)


@pytest.mark.parametrize(
    ("window", "dtype"), [slow(1, "float32"), slow(130, "bfloat16"), slow(300, "float32")]
)
@pytest.mark.parametrize("shape", [GQA, LRKV, ROPE], ids=lambda s: s.kind)
def test_windows_begin_within_any_piece_of_a_tile(shape, window, dtype):
    lengths = (640, 1, 127, 129, 255, 257, 0, 385, 513)
    shape = shape.replace(batch=len(lengths), slots=640, dtype=dtype)
    assert_right(kernel_oracle.make(shape, lengths), rows=256, window=window, splits=2)


@pytest.mark.parametrize(
    ("slots", "dtype"), [fast(304, "bfloat16"), slow(8, "float32"), slow(16, "bfloat16")]
)
def test_a_whole_sequence_in_one_tile(slots, dtype):
    lengths = (slots, 1, 0, slots // 2, slots - 1)
    shape = GQA.replace(batch=len(lengths), slots=slots, dtype=dtype)
    assert_right(kernel_oracle.make(shape, lengths), rows=slots)


@pytest.mark.parametrize("window", [fast(1), fast(TILE), slow(TILE + 1), slow(150), slow(1000)])
def test_windows_smaller_than_a_tile_as_large_and_across_several(window):
    assert_right(make(GQA.replace(num_heads=4), EDGES), window=window)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        slow(GQA.replace(num_heads=4), {"cap": 2.0}),
        fast(ROPE.replace(scaled=True), {"cap": 1.5, "window": 150, "splits": 2}),
        slow(LRKV, {"cap": 1.5, "splits": 8}),
        slow(LRKV.replace(kind="shared"), {"cap": 0.5, "window": 200}),
        slow(GQA.replace(dtype="bfloat16"), {"cap": 2.0, "window": 200, "splits": 2}),
    ],
)
def test_a_cap_of_logits_with_windows_and_splits(shape, options):
    assert_right(make(shape, EDGES, weighted=shape.scaled), **options)


def test_a_length_of_zero_gives_zeros_and_leaves_neighbours_alone():
    shape = small(GQA.replace(num_heads=4, head_dim=64), EDGES)
    case = kernel_oracle.make(shape, EDGES)
    for backend in ("tpu", "jnp"):
        run = program(shape, backend, splits=2) if backend == "tpu" else program(shape, backend)
        before = run(case.arrays())
        for lengths in ([0, 0, 0, 1, 0, 0, 0, 0], [0] * 8, [0, 0, 128, 1, 0, 127, 0, 0]):
            found = run(dataclasses.replace(case, lengths=np.array(lengths)).arrays())
            for b, length in enumerate(lengths):
                if length == 0:
                    assert not np.asarray(found.out[b]).any()
                    assert (np.asarray(found.lse[b]) == -np.inf).all()
                elif length == EDGES[b]:
                    assert bits(found, b) == bits(before, b)


def test_logits_of_hundreds_neither_overflow_nor_vanish():
    """float32 logits of up to 400 are off by 2⁻²⁴ of that and more, hence the wide tolerance."""
    case = make(GQA.replace(num_heads=4, head_dim=64), EDGES, loudness=100)
    assert np.abs(case.attended()[1][0]).max() > 200
    assert_right(case, splits=2, factor=100)


# ------------------------------------------------------------------ what must not matter


@pytest.mark.parametrize("backend", ["tpu", "jnp"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        fast(GQA.replace(num_heads=4, head_dim=64), {"splits": 2}),
        fast(LRKV.replace(scaled=True), {}),
        fast(ROPE.replace(scaled=True), {"cap": 1.5, "window": 150, "splits": 2}),
        slow(LRKV.replace(kind="shared"), {"cap": 0.5, "window": 200}),
        slow(GQA.replace(dtype="bfloat16"), {"window": 200, "cap": 2.0, "splits": 2}),
        slow(ROPE.replace(dtype="bfloat16"), {"splits": 2}),
    ],
)
def test_dead_slots_and_padding_do_not_matter_to_the_last_bit(shape, options, backend):
    options = {k: v for k, v in options.items() if backend == "tpu" or k != "splits"}
    case, window = make(shape, EDGES), options.get("window")
    run = program(case.shape, backend, TILE, **options)
    clean = bits(run(case.arrays(0.0, window)))
    for poison in (np.nan, np.inf, -np.inf, 1e30):
        assert bits(run(case.arrays(poison, window))) == clean, poison


@pytest.mark.parametrize("backend", ["tpu", "jnp"])
def test_neighbours_do_not_matter_to_the_last_bit(backend):
    """Not what they hold, nor how loud and long they are, nor in which order they come."""
    shape = LRKV.replace(scaled=True)
    case = make(shape, EDGES)
    run, arrays = program(case.shape, backend, TILE), case.arrays()
    per_sequence = ("q", "cache", "lengths", "key_scales")
    found = run(arrays)
    turned = {k: np.roll(v, 3, axis=0) if k in per_sequence else v for k, v in arrays.items()}
    assert bits(run(turned)) == bits(Attended(*(np.roll(x, 3, axis=0) for x in found)))
    others = make(shape, EDGES[::-1], seed=1, loudness=100).arrays()
    for b in (0, 4, 7):
        mixed = {k: others[k].copy() if k in per_sequence else v for k, v in arrays.items()}
        for name in per_sequence:
            mixed[name][b] = arrays[name][b]
        assert bits(run(mixed), b) == bits(found, b)


def test_auto_is_the_jnp_form_on_a_cpu():
    case = make(GQA.replace(num_heads=4))
    auto, named = (program(case.shape, backend)(case.arrays()) for backend in ("auto", "jnp"))
    assert bits(auto) == bits(named)


def test_interpret_runs_the_kernel_without_more_ado():
    """With the tiles of a chip: here the whole of a sequence."""
    case = make(GQA.replace(num_heads=4))
    found = jax.jit(functools.partial(case.shape.call, backend="tpu_interpret"))(case.arrays())
    assert_attended(found, case.attended(), "float32")


def test_a_backend_that_was_asked_for_does_not_give_way_to_another():
    case = make(GQA.replace(num_heads=4))
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU backend"):
        jax.jit(functools.partial(case.shape.call, backend="tpu"))(case.arrays())


# ------------------------------------------------------------------ some of the heads


def part_of(arrays: dict, first: int, count: int) -> dict:
    """The arguments of heads first … first + count − 1, over the row of all heads."""
    axes = {"q": 1, "q_residual": 1, "key_up": 0, "value_up": 0, "key_scales": 1}
    heads = range(first, first + count)
    return {k: np.take(v, heads, axes[k]) if k in axes else v for k, v in arrays.items()}


@functools.cache
def program_of_part(shape: Shape, backend: str, count: int, first: int | None, **options):
    """Of arrays and first, which is traced unless it is given here."""

    def call(arrays, begin):
        heads = (begin if first is None else first, shape.num_heads)
        return shape.call(arrays, heads=heads, backend=backend, **options)

    arguments = shape.replace(num_heads=count).arguments() | {"cache": shape.arguments()["cache"]}
    return compiled(call, (arguments, 0), shape.row, shape.dtype, TILE)


def assert_parts_right(case, count: int, firsts, traced: bool, **options):
    shape, arrays = case.shape, case.arrays()
    out, lse = case.attended()
    for backend, first in itertools.product(("tpu", "jnp"), firsts):
        run = program_of_part(shape, backend, count, None if traced else first, **options)
        mine = slice(first, first + count)
        dtype = shape.dtype if backend == "tpu" else "float32"
        found = run(part_of(arrays, first, count), first)
        assert_attended(found, (out[:, mine], lse[:, mine]), dtype)


SIX = GQA.replace(num_heads=6, num_kv_heads=3, head_dim=64, value_dim=40)


@pytest.mark.parametrize(
    ("shape", "traced"),
    [
        fast(SIX, True),
        slow(LRKV.replace(num_heads=4, scaled=True), True),
        slow(SIX, False),
        slow(SIX.replace(dtype="bfloat16"), True),
        slow(LRKV.replace(num_heads=4), False),
        slow(LRKV.replace(num_heads=4, kind="shared"), True),
        slow(ROPE.replace(num_heads=4), False),
    ],
)
def test_some_of_the_heads_read_the_row_of_all(shape, traced):
    """Three heads of six over three KV heads begin within a group, and end within another."""
    count = shape.num_heads // 2
    firsts = range(count + 1) if traced else (1,)
    assert_parts_right(make(shape), count, firsts, traced)


def test_some_of_the_heads_of_rotated_keys_with_yarns_multiplier():
    case = make(ROPE.replace(num_heads=4), multiplier=1.25)
    assert_parts_right(case, 2, (0, 1, 2), traced=True, multiplier=1.25)


# ------------------------------------------------------------------ long contexts


@pytest.mark.parametrize("backend", [fast("tpu"), slow("jnp")])
def test_keys_are_rotated_exactly_at_the_end_of_a_long_context(backend):
    """A float32 product of slot and frequency would be off by 2⁻⁸ radians there."""
    shape = ROPE.replace(num_heads=2, rank=8, batch=1, slots=2**17)
    case = kernel_oracle.make(shape, 2**17 - 40)
    found = program(shape, backend, TILE, window=200)(case.arrays(window=200))
    assert_attended(found, case.attended(window=200), "float32")


# ------------------------------------------------------------------ merging


def attended(shape: Shape, arrays: dict) -> Attended:
    return jax.jit(functools.partial(shape.call, backend="jnp"))(arrays)


def random_parts(*shape: int) -> Attended:
    rng = np.random.default_rng(0)
    out, lse = rng.standard_normal((*shape, 4)), 3 * rng.standard_normal(shape)
    return Attended(jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32))


def stacked(*parts: Attended) -> Attended:
    return Attended(*(jnp.stack(x) for x in zip(*parts, strict=True)))


def test_a_prefix_and_the_rest_merge_into_the_whole():
    """The prefix is shared: one cache for all sequences, as long as the rest is not."""
    case = make(GQA.replace(num_heads=4, head_dim=64), (304, 101, 129, 100))
    arrays = case.arrays()
    prefix = {**arrays, "cache": arrays["cache"][:, :100], "lengths": np.full(4, 100, np.int32)}
    rest = {**arrays, "cache": arrays["cache"][:, 100:], "lengths": arrays["lengths"] - 100}
    parts = stacked(*(attended(case.shape, x) for x in (prefix, rest)))
    assert (np.asarray(parts.lse[1, 3]) == -np.inf).all()
    assert_attended(merge(parts), case.attended(), "float32")


def test_merging_is_the_weighted_mean_of_its_parts():
    """Against weights exp(lse) in float64, along any axis."""
    parts = random_parts(5, 3, 2)
    out, lse = (np.asarray(x, np.float64) for x in parts)
    for axis in (0, 1, 2, -1):
        weights = np.exp(lse)
        total = weights.sum(axis=axis)
        mean = (weights[..., None] * out).sum(axis=axis % 3) / total[..., None]
        merged = merge(parts, axis)
        np.testing.assert_allclose(merged.out, mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(merged.lse, np.log(total), rtol=1e-5, atol=1e-6)


def test_merging_is_associative_and_its_order_does_not_matter():
    parts = random_parts(3, 4)
    a, b, c = (Attended(parts.out[i], parts.lse[i]) for i in range(3))
    whole = merge(parts)
    for other in (
        merge(stacked(merge(stacked(a, b)), c)),
        merge(stacked(a, merge(stacked(b, c)))),
        merge(stacked(c, a, b)),
    ):
        for x, y in zip(whole, other, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_merging_leaves_out_empty_parts():
    part = random_parts(4)
    empty = Attended(jnp.zeros((4, 4)), jnp.full(4, -jnp.inf))
    for merged in (merge(stacked(empty, part)), merge(stacked(part, empty, empty))):
        np.testing.assert_array_equal(merged.out, part.out)
        np.testing.assert_array_equal(merged.lse, part.lse)
    for x, y in zip(merge(stacked(empty, empty)), empty, strict=True):
        np.testing.assert_array_equal(x, y)


def test_merging_parts_of_very_different_weight_neither_overflows_nor_vanishes():
    part = random_parts(4)
    heavy, light = (Attended(part.out, part.lse + x) for x in (1e4, -1e4))
    merged = merge(stacked(light, heavy))
    np.testing.assert_array_equal(merged.out, heavy.out)
    np.testing.assert_array_equal(merged.lse, heavy.lse)


# ------------------------------------------------------------------ refusals


def f32(*shape: int, dtype="float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


REFUSED_GQA = [  # what is changed in a call of 4 heads of 64 over 2 KV heads, B 2, S 128; its words
    ({"q": f32(4, 64)}, "q has shape (4, 64); it must be [B, N, H]"),
    ({"q": f32(2, 0, 64)}, "q has shape (2, 0, 64); it must be [B, N, H]"),
    ({"num_kv_heads": 0}, "num_kv_heads is 0; it must be a whole number of at least 1"),
    ({"num_kv_heads": 3}, "num_kv_heads is 3, which does not divide the 4 heads"),
    ({"value_dim": 0}, "value_dim is 0; it must be a whole number of at least 1"),
    ({"cache": f32(128, 256)}, "cache has shape (128, 256); it must be [B, S, W] with B = 2"),
    ({"cache": f32(3, 128, 256)}, "cache has shape (3, 128, 256); it must be [B, S, W] with B = 2"),
    ({"cache": f32(2, 128, 512)}, "cache has rows of 512; … need 256 elements, padded to W = 256"),
    ({"value_dim": 65}, "cache has rows of 256; … need 258 elements, padded to W = 384"),
    ({"cache": f32(2, 0, 256)}, "cache has shape (2, 0, 256); it needs at least one slot"),
    ({"cache": f32(2, 128, 256, dtype="int8")}, "cache is int8; … bfloat16, float32 or float16"),
    ({"cache": f32(2, 128, 256, dtype="float16")}, "cache is float16; … float32 or bfloat16"),
    ({"cache": f32(2, 2**22, 256)}, "cache has 2147483648 elements; … fewer sequences at a time"),
    ({"lengths": f32(3, dtype="int32")}, "lengths is int32[3]; it must be int32[2]"),
    ({"lengths": f32(2)}, "lengths is float32[2]; it must be int32[2]"),
    ({"window": 0}, "window is 0; it must be a whole number of at least 1"),
    ({"cap": -1.0}, "cap is -1.0; it must be finite and not negative"),
    ({"cap": float("inf")}, "cap is inf; it must be finite and not negative"),
    ({"cap": float("nan")}, "cap is nan; it must be finite and not negative"),
    ({"window": 2.5}, "window is 2.5; it must be a whole number of at least 1"),
    ({"scale": float("nan")}, "scale is nan; it must be finite"),
    ({"splits": 0}, "splits is 0; it must be a whole number of at least 1"),
    ({"heads": (0, 2)}, "heads says that there are 2 heads, but q has 4"),
    ({"heads": (-1, 8)}, "heads begins at -1; 4 heads of 8 cannot begin there"),
    ({"heads": (np.int64(5), 8)}, "heads begins at 5; 4 heads of 8 cannot begin there"),
    ({"heads": (5, 8)}, "heads begins at 5; 4 heads of 8 cannot begin there"),
    (
        {"backend": "cuda"},
        "backend is 'cuda'; choose one of auto, jnp, tpu, tpu_interpret, gpu, gpu_inter",
    ),
    ({"cache": f32(2, 129, 256)}, "cache has 129 slots; … multiples of 8, so make it 136"),
    (
        {"cache": f32(2, 136, 256, dtype="bfloat16")},
        "cache has 136 slots; … multiples of 16, so make it 144",
    ),
    (
        {"q": f32(2, 2**16, 64)},
        "q and cache need … MiB of VMEM for … even 128 rows at a time; v5e has 128. Use fewer",
    ),
]
REFUSED_LRKV = [  # in a call of 2 heads of 64 at rank 8, B 2, S 128
    ({"key_up": f32(2, 8)}, "key_up has shape (2, 8); it must be [N, R, H] = [2, R, 64]"),
    ({"key_up": f32(3, 8, 64)}, "key_up has shape (3, 8, 64); it must be [N, R, H] = [2, R, 64]"),
    ({"key_up": f32(2, 8, 63)}, "key_up has shape (2, 8, 63); it must be [N, R, H] = [2, R, 64]"),
    ({"key_up": f32(2, 0, 64)}, "key_up has shape (2, 0, 64); … with R ≥ 1 (… gqa_decode"),
    ({"value_up": f32(2, 9, 64)}, "value_up has shape (2, 9, 64); … [N, R, V] = [2, 8, V]"),
    ({"value_up": f32(2, 8, 0)}, "value_up has shape (2, 8, 0); … [N, R, V] = [2, 8, V]"),
    ({"value_up": f32(2, 8)}, "value_up has shape (2, 8); … [N, R, V] = [2, 8, V]"),
    ({"cache": f32(2, 128, 128)}, "cache has rows of 128; … need 160 elements, padded to W = 256"),
    ({"q_residual": f32(2, 2, 63)}, "q_residual has shape (2, 2, 63); it must be q's (2, 2, 64)"),
    (
        {"key_scales": f32(2, 2, 127)},
        "key_scales is float32[2, 2, 127]; it must be float32[2, 2, 128], [B, N, S], … padded",
    ),
    (
        {"key_scales": f32(2, 2, 128, dtype="bfloat16")},
        "key_scales is bfloat16[2, 2, 128]; it must be float32[2, 2, 128], [B, N, S], … padded",
    ),
    (
        {"key_scales": f32(2, 2, 136), "cache": f32(2, 136, 256)},
        "cache has 136 slots; … multiples of 128, so make it 256",
    ),
    ({"heads": (0, 20)}, "cache has rows of 256; … need 448 elements, padded to W = 512"),
    (
        {"frequencies": np.ones(31)},
        "frequencies is a ndarray of shape (31,); it must be a NumPy array of H/2 = 32",
    ),
    ({"frequencies": [1.0] * 32}, "frequencies is a list of shape None; … of H/2 = 32"),
    ({"frequencies": np.full(32, np.nan)}, "frequencies has nan; all must be finite"),
    ({"multiplier": 2.0}, "multiplier is 2.0, but without frequencies nothing turns"),
    (
        {"frequencies": np.ones(32), "multiplier": float("nan")},
        "multiplier is nan; it must be finite",
    ),
    (
        {"frequencies": np.ones(32), "q_residual": f32(2, 2, 64)},
        "q_residual is given with frequencies; … q meets both terms",
    ),
    (
        {
            "q": f32(2, 2, 63),
            "key_up": f32(2, 8, 63),
            "value_up": f32(2, 8, 65),
            "frequencies": np.ones(32),
        },
        "q has heads of 63; RoPE needs an even width",
    ),
]


def refusal(entry, arguments: dict, changes: dict) -> UnsupportedError:
    arguments = {"scale": 0.1, "backend": "tpu"} | arguments | changes
    traced = {k: v for k, v in arguments.items() if isinstance(v, jax.ShapeDtypeStruct)}
    static = {k: v for k, v in arguments.items() if k not in traced}
    with pytest.raises(UnsupportedError) as caught:
        jax.eval_shape(functools.partial(entry, **static), **traced)
    return caught.value


def refused_by(entry: str, changes: dict) -> UnsupportedError:
    if entry == "merge":
        with pytest.raises(UnsupportedError) as caught:
            merge(Attended(jnp.zeros((2, 3, 4)), jnp.zeros((2, 3))), **changes)
        return caught.value
    if entry == "gqa":
        shape = GQA.replace(num_heads=4, head_dim=64, batch=2, slots=128)
        sizes = {"num_kv_heads": 2, "value_dim": 64}
        return refusal(gqa_decode, shape.arguments() | sizes, changes)
    shape = LRKV.replace(num_heads=2, rank=8, value_dim=64, batch=2, slots=128)
    return refusal(lrkv_decode, shape.arguments(), changes)


REFUSED = [("gqa", *x) for x in REFUSED_GQA] + [("lrkv", *x) for x in REFUSED_LRKV]
REFUSED.append(("merge", {"axis": 2}, "axis is 2, but lse has 2 dimensions"))


@pytest.mark.parametrize(
    ("entry", "changes", "words"), REFUSED, ids=[words for *_, words in REFUSED]
)
def test_what_is_refused_is_named_with_its_value_and_the_fix(entry, changes, words):
    assert issubclass(UnsupportedError, ValueError)
    sentence = str(refused_by(entry, changes))
    begin, *rest = words.split("…")
    assert sentence.startswith(begin)
    for part in rest:
        assert part.strip() in sentence


def test_every_refusal_of_the_entry_points_is_among_these():
    """Each call of `require` and each raise was met by one of the cases above."""
    met = set()
    for entry, changes, _ in REFUSED:
        for frame in traceback.extract_tb(refused_by(entry, changes).__traceback__):
            met.add((Path(frame.filename).stem, frame.lineno))
    for module in ("blocks", "check", "core", "decode", "reference", "rows", "tpu"):
        text = (Path(pallas_kernels.__file__).parent / f"{module}.py").read_text()
        for node in refusals(text):
            lines = {(module, line) for line in range(node.lineno, node.end_lineno + 1)}
            assert lines & met, f"no case above meets {module}.py:{node.lineno}"


def refusals(text: str):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) or (
            isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "require"
        ):
            yield node
