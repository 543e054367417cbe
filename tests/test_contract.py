"""The contract of every mechanism: training, prefill, chunks and decode are one function.

And it keeps to itself: rows, documents and dead slots do not matter to each other.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import variants
from oracle import assert_near
from variants import ROWS, SWITCHES, VARIANTS, V

from vhajax import transformer
from vhajax.cache import LayerCache
from vhajax.decode import Cache, decode_step, init_cache, prefill
from vhajax.errors import UserError

B, T = 3, 11
TOKENS = oracle.random_tokens((B, T), V)
POSITIONS, SEGMENTS = oracle.documents([[11], [5, 6], [1, 7, 3]])
ONE, ONE_SEGMENT = oracle.documents([[T]] * B)
LAYOUTS = ("rows", "columns")
KERNELS = [(name, row) for name, row in ROWS if not name.startswith("mla")]
WAYS = [
    *[(name, row, "xla") for name, row in ROWS],
    *[pytest.param(name, row, "kernels", marks=pytest.mark.slow) for name, row in KERNELS],
]
NAMES = [
    *[(name, "xla") for name in VARIANTS],
    *[pytest.param(name, "kernels", marks=pytest.mark.slow) for name, row in KERNELS if row == 0],
]
FAST_ON_GPU = {("gqa", 0), ("lrkv", 0)}
ON_GPU = [
    pytest.param(name, row, marks=[] if (name, row) in FAST_ON_GPU else pytest.mark.slow)
    for name, row in KERNELS
]
"""Every row of options by XLA in one of the layouts, and by the interpreted kernels."""
BFLOAT16 = 0.05
"""Twice the largest error seen: some thirty roundings of 2⁻⁹ on the way through two layers."""


class Case:
    """A model, what the oracle says of it, and its compiled programs."""

    def __init__(self, name: str, row: int):
        self.cfg = variants.model(name, row)
        # Each variant is decoded in both layouts, one a row of options.
        self.layout = LAYOUTS[(list(VARIANTS).index(name) + row) % 2]
        self.params = oracle.random_params(self.cfg, seed=row)
        self.model = transformer.unstack(oracle.build(self.cfg, self.params))
        self.expected = oracle.forward(self.cfg, self.params, TOKENS, ONE, ONE_SEGMENT)
        self.prefill = jax.jit(prefill, static_argnames="extend")
        self.step = jax.jit(decode_step)

    def empty(self, way: str) -> Cache:
        if way == "kernels":  # which want 128 slots where there are scales
            return init_cache(self.model, B, 128, backend="tpu_interpret")
        return init_cache(self.model, B, 13, self.layout)


case_of = functools.cache(Case)


def test_the_rows_cover_every_pair_of_choices():
    rows = [variants.options(*row) for row in ROWS]
    for a, b in itertools.combinations((*SWITCHES, "qk_norm", "scaling"), 2):
        values = ({row[name] for row in rows} for name in (a, b))
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(*values)), (a, b)
    widths = {variants.model(*row).attention.head_dim for row in ROWS}
    assert {16, 40, 64, 80, 128, 192} <= widths


# ------------------------------------------------------------------ one function


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_the_training_forward_of_packed_documents_equals_the_oracle(name, row):
    case = case_of(name, row)
    model = oracle.build(case.cfg, case.params)
    run = jax.jit(functools.partial(transformer.hidden, unroll=1))
    actual = np.asarray(run(model, TOKENS, POSITIONS, SEGMENTS), np.float64)
    logits = actual @ np.asarray(case.params["unembedding"][:V], np.float64).T
    expected = oracle.forward(case.cfg, case.params, TOKENS, POSITIONS, SEGMENTS)
    assert_near(logits, expected[..., :V])


@pytest.mark.parametrize(("name", "row", "way"), WAYS)
def test_token_by_token_decode_equals_the_oracle(name, row, way):
    case = case_of(name, row)
    cache = case.empty(way)
    for t in range(T):
        logits, cache = case.step(case.model, TOKENS[:, t], cache)
        assert_near(logits, case.expected[:, t])
    np.testing.assert_array_equal(cache.lengths, [T] * B)


@pytest.mark.parametrize(("name", "row"), KERNELS)
def test_decode_by_the_kernels_equals_the_oracle(name, row):
    case = case_of(name, row)
    cache = case.empty("kernels")
    for t in range(4):  # past the window of 3
        logits, cache = case.step(case.model, TOKENS[:, t], cache)
        assert_near(logits, case.expected[:, t])


@pytest.mark.parametrize(("name", "row", "way"), WAYS)
def test_prefill_and_two_ragged_chunks_equal_the_oracle(name, row, way):
    """Each continues in decode steps that are compiled already."""
    case = case_of(name, row)
    sizes = np.array([4, 1, 5])
    tokens, valid = TOKENS[:, :5], np.arange(5) < sizes[:, None]
    logits, cache = case.prefill(case.model, tokens, case.empty(way), valid)
    assert_near(logits, case.expected[range(B), sizes - 1])
    chunk = np.stack([TOKENS[b, n : n + 5] for b, n in enumerate(sizes)])
    more = np.array([5, 2, 3])
    valid = np.arange(5) < more[:, None]
    done = sizes + more
    logits, cache = case.prefill(case.model, chunk, cache, valid, extend=True)
    assert_near(logits, case.expected[range(B), done - 1])
    for _ in range(2):
        logits, cache = case.step(case.model, TOKENS[range(B), done], cache)
        done += 1
        assert_near(logits, case.expected[range(B), done - 1])


# ------------------------------------------------------------------ keeping to itself

LENGTHS = np.array([6, 2, 5], np.int32)


def filled(case: Case, way: str) -> Cache:
    """A cache with noise in it, as if so many tokens had been read."""
    rng = np.random.default_rng(0)
    noise = lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype)  # noqa: E731
    cache = case.empty(way)
    layers = [
        dataclasses.replace(
            layer,
            arrays=tuple(noise(x) for x in layer.arrays),
            scales=None if layer.scales is None else abs(noise(layer.scales)),
        )
        for layer in cache.layers
    ]
    return Cache(tuple(layers), jnp.asarray(LENGTHS))


def poisoned(cache: Cache, poison: float) -> Cache:
    """Dead slots of arrays and of scales, and the padding of rows."""

    def layer_of(layer: LayerCache) -> LayerCache:
        dead = np.arange(layer.capacity) >= LENGTHS[:, None]
        if layer.layout == "rows":
            lanes = np.arange(layer.row.padded) >= layer.row.elements
            arrays = [jnp.where(dead[:, :, None] | lanes, poison, x) for x in layer.arrays]
        else:
            arrays = [jnp.where(dead[:, None, None], poison, x) for x in layer.arrays]
        scales = layer.scales
        if scales is not None:
            scales = jnp.where(dead[:, None], poison, scales)
        return dataclasses.replace(layer, arrays=tuple(arrays), scales=scales)

    return Cache(tuple(map(layer_of, cache.layers)), cache.lengths)


@pytest.mark.parametrize(("name", "row", "way"), WAYS)
def test_dead_slots_change_nothing_bit_for_bit(name, row, way):
    case = case_of(name, row)
    expected, _ = case.step(case.model, TOKENS[:, 0], filled(case, way))
    assert np.isfinite(expected[:, :V]).all()
    for poison in (np.nan, np.inf, -np.inf, 1e30):
        dirty = poisoned(filled(case, way), poison)
        actual, _ = case.step(case.model, TOKENS[:, 0], dirty)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("name", "way"), NAMES)
def test_neighbours_change_nothing_bit_for_bit(name, way):
    case = case_of(name, 0)
    before = filled(case, way)
    expected, _ = case.step(case.model, TOKENS[:, 0], before)
    others = lambda x: x.at[1:].set(7.0) if x.dtype == jnp.float32 else x  # noqa: E731
    after = Cache(jax.tree.map(others, before.layers), jnp.asarray([6, 9, 0], jnp.int32))
    tokens = TOKENS[:, 0].copy()
    tokens[1:] = 3
    actual, _ = case.step(case.model, tokens, after)
    np.testing.assert_array_equal(actual[0], expected[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_prompt_past_the_cache_is_refused_before_anything_compiles(name):
    case = case_of(name, 0)
    with pytest.raises(UserError, match=r"11 .* cache of 4"):
        prefill.trace(case.model, TOKENS, init_cache(case.model, B, 4))


# ------------------------------------------------------------------ bfloat16


@pytest.mark.parametrize(("name", "way"), NAMES)
def test_bfloat16_is_close_to_float32(name, way):
    case = case_of(name, 0)
    kernels = {"backend": "tpu_interpret"}
    assert_decodes_in_bfloat16(case, kernels if way == "kernels" else {"layout": case.layout})


@pytest.mark.parametrize(("name", "row"), ON_GPU)
def test_so_are_the_gpu_kernels_which_have_no_float32(name, row):
    assert_decodes_in_bfloat16(case_of(name, row), {"backend": "gpu_interpret"})


def assert_decodes_in_bfloat16(case: Case, options: dict):
    cfg = dataclasses.replace(case.cfg, dtype="bfloat16")
    model = oracle.build(cfg, case.params)
    cache = init_cache(model, B, 128, **options)
    assert all(x.dtype == jnp.bfloat16 for layer in cache.layers for x in layer.arrays)
    chosen = [layer.scales for layer in cache.layers if layer.scales is not None]
    assert all(x.dtype == jnp.float32 for x in chosen)
    step = jax.jit(decode_step)
    for t in range(4):
        logits, cache = step(model, TOKENS[:, t], cache)
        assert logits.dtype == jnp.float32
        assert_near(logits, case.expected[:, t], BFLOAT16)
