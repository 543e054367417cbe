"""Attention over documents and over a cache, and what a cache holds."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import assert_near, mesh_of

from vhajax import cache, config
from vhajax.attention import core
from vhajax.attention.cached import TILE, WIDE_TILE, mix, read, rotated_scores, scores, softmax
from vhajax.attention.core import attend as attend_scaled
from vhajax.attention.core import attend_reference, document_mask
from vhajax.cache import LayerCache
from vhajax.mechanisms import CacheRow, RopeScaling

RNG = np.random.default_rng(1)
LENGTHS = [[9], [4, 5], [1, 1, 6, 1], [3, 3, 3]]
_, SEGMENTS = oracle.documents(LENGTHS)
B, T, N, H, V = 4, 9, 4, 6, 10
SCALE = H**-0.5
BFLOAT16 = 2**-7
"""Weights and results are each rounded to 8 bits: 2⁻⁹ of the largest value, twice, and doubled."""


reference = jax.jit(attend_reference, static_argnames=("scale", "cap"))


def attend(q, k, v, segments, window=None, scale=SCALE, cap=0.0):
    return attend_scaled(q, k, v, segments, window, scale=scale, cap=cap)


def noise(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# ------------------------------------------------------------------ training


@pytest.mark.parametrize("window", [None, 0, 1, 3, 9])
def test_document_mask(window):
    expected = oracle.document_mask(SEGMENTS, window or 0)
    np.testing.assert_array_equal(document_mask(SEGMENTS, window), expected)
    if window is not None:  # a scan over layers gives it as an array
        np.testing.assert_array_equal(document_mask(SEGMENTS, jnp.int32(window)), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("K", [4, 2, 1])
def test_attention_stays_inside_documents(K, dtype):
    q, k, v = (jnp.asarray(noise(B, T, n, H) * 2, dtype) for n in (N, K, K))
    expected = oracle.attention(q, k, v, oracle.document_mask(SEGMENTS))
    for actual in (
        jax.jit(attend)(q, k, v, SEGMENTS),
        reference(q, k, v, document_mask(SEGMENTS)),
    ):
        chex.assert_type(actual, dtype)
        assert_near(actual, expected, 2e-6 if dtype == jnp.float32 else BFLOAT16)


@pytest.mark.parametrize(("window", "cap", "scale"), [(4, 0.0, 0.3), (0, 1.5, SCALE)])
def test_windows_caps_scales_and_wide_values(window, cap, scale):
    q, k, v = noise(B, T, N, H) * 3, noise(B, T, 2, H), noise(B, T, 2, V)
    expected = oracle.attention(q, k, v, oracle.document_mask(SEGMENTS, window), scale, cap)
    actual = attend(q, k, v, SEGMENTS, window, scale, cap)
    chex.assert_shape(actual, (B, T, N, V))
    assert_near(actual, expected, 2e-6)


@pytest.mark.parametrize("K", [4, 2, 1])
def test_the_reference_takes_any_mask(K):
    q, k, v = noise(2, 3, N, H), noise(2, 11, K, H), noise(2, 11, K, V)
    mask = RNG.random((2, 3, 11)) < 0.4
    mask[:, :, 5] = True
    assert_near(reference(q, k, v, mask), oracle.attention(q, k, v, mask), 2e-6)


@pytest.mark.filterwarnings("ignore:a dimension of")
@pytest.mark.parametrize(
    ("mesh", "heads", "kv_heads"),
    [
        ((2, 4), 8, 4),  # both kinds of heads are sharded
        ((2, 4), 8, 2),  # query heads are, a device reads one of the replicated KV heads
        ((1, 8), 8, 2),
        ((4, 2), 12, 3),  # a device's query heads would need parts of two groups: nothing is
        ((2, 4), 6, 2),  # query heads do not divide
        ((4, 2), 2, 1),
    ],
)
def test_sharded_attention_equals_attention_on_one_device(mesh, heads, kv_heads):
    q, k, v = noise(B, T, heads, H), noise(B, T, kv_heads, H), noise(B, T, kv_heads, H)
    with jax.set_mesh(mesh_of(*mesh)):
        actual = jax.jit(attend)(q, k, v, SEGMENTS)
    assert_near(actual, oracle.attention(q, k, v, oracle.document_mask(SEGMENTS)), 2e-6)


@pytest.mark.filterwarnings("ignore:a dimension of")
@pytest.mark.parametrize(
    ("mesh", "heads", "kv_heads"),
    [((2, 4), 8, 4), ((2, 4), 8, 2), ((4, 2), 2, 1), ((4, 2), 12, 3), ((2, 4), 6, 2)],
)
def test_gradients_of_accelerators_attention_over_devices(mesh, heads, kv_heads, monkeypatch):
    """tokamax's XLA form, in the untracked `shard_map` that its kernels need."""
    q, k, v = noise(B, T, heads, H), noise(B, T, kv_heads, H), noise(B, T, kv_heads, H)
    objective = lambda *qkv: jnp.sum(jnp.sin(attend(*qkv, SEGMENTS)))  # noqa: E731
    expected = jax.grad(objective, argnums=(0, 1, 2))(q, k, v)
    monkeypatch.setattr(core, "platform", lambda: "gpu")
    with jax.set_mesh(mesh_of(*mesh)):
        found = jax.jit(jax.grad(objective, argnums=(0, 1, 2)))(q, k, v)
    for actual, wanted in zip(found, expected, strict=True):
        assert_near(actual, wanted, 5e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_another_row_cannot_change_a_result(poison):
    q, k, v = noise(B, T, N, H), noise(B, T, 2, H), noise(B, T, 2, H)
    before = attend(q, k, v, SEGMENTS)
    k[1:], v[1:] = poison, poison
    np.testing.assert_array_equal(attend(q, k, v, SEGMENTS)[0], before[0])


def test_another_document_cannot_change_a_result():
    q, k, v = noise(B, T, N, H), noise(B, T, 2, H), noise(B, T, 2, H)
    before = attend(q, k, v, SEGMENTS)
    k[1, :4], v[1, :4] = 1e30, -1e30  # the first document of row 1
    after = attend(q, k, v, SEGMENTS)
    np.testing.assert_array_equal(after[1, 4:], before[1, 4:])
    assert not np.array_equal(after[1, :4], before[1, :4])


# ------------------------------------------------------------------ cache

WIDTHS = [  # K, H → logical and stored elements a token and layer
    (2, 64, 256, 256),
    (2, 128, 512, 512),
    (1, 6, 12, 128),
    (3, 20, 120, 128),
    (3, 22, 132, 256),
]


def held_bytes(layer: LayerCache) -> int:
    arrays = jax.tree.leaves(layer)
    assert sum(s.data.nbytes for x in arrays for s in x.addressable_shards) == sum(
        x.nbytes for x in arrays
    )
    return sum(x.nbytes for x in arrays)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("K", "H", "logical", "stored"), WIDTHS)
def test_cache_widths_and_bytes(K, H, logical, stored, dtype):
    gqa = config.GQA(num_heads=6 * K, num_kv_heads=K, head_dim=H)
    vha = config.VHA(num_physical_heads=3, num_kv_heads=K, head_dim=H)
    for cfg in (gqa, vha):
        row = cfg.cache_row()
        assert (row.elements, row.padded, row.scales) == (logical, stored, 0)
        for layout, width in (("rows", stored), ("columns", logical)):
            layer = cache.create(row, cfg.num_heads, 3, 7, dtype, layout)
            assert (layer.layout, layer.capacity) == (layout, 7)
            assert held_bytes(layer) == 3 * 7 * width * dtype(0).itemsize


@pytest.mark.parametrize(("K", "H", "parts"), [(4, 16, 4), (2, 64, 1), (4, 6, 1)])
def test_a_cache_is_split_over_model_only_where_its_rows_split_into_heads(K, H, parts):
    row = config.GQA(num_heads=4, num_kv_heads=K, head_dim=H).cache_row()
    with jax.set_mesh(mesh_of(2, 4)):
        rows = cache.create(row, 4, 4, 5, jnp.float32, "rows")
        columns = cache.create(row, 4, 4, 5, jnp.float32, "columns")
    assert rows.arrays[0].addressable_shards[0].data.shape == (2, 5, row.padded // parts)
    heads = 1 if K == 4 else K  # columns need no whole rows
    for part in columns.arrays:
        assert part.addressable_shards[0].data.shape == (2, heads, H, 5)


MIXED = CacheRow(((1, 6), (3, 4), (1, 10), (3, 2)), scales=3)
GROUPED = CacheRow(((1, 6), (1, 10)), groups=3)


def parts_of(row: CacheRow, B: int, S: int) -> list[np.ndarray]:
    """Noise for every part, [B, S, heads, width]."""
    return [noise(B, S, row.groups * heads, width) for heads, width in row.parts]


def as_rows(row: CacheRow, parts: list[np.ndarray]) -> np.ndarray:
    """[group 0's parts | group 1's | … | zeros]."""
    found = []
    for group in range(row.groups):
        for (heads, _), part in zip(row.parts, parts, strict=True):
            found += [part[:, :, group * heads + i] for i in range(heads)]
    whole = np.concatenate(found, axis=-1)
    assert whole.shape[-1] == row.elements
    return np.pad(whole, ((0, 0), (0, 0), (0, -whole.shape[-1] % 128)))


def held(row: CacheRow, layout: str, parts: list[np.ndarray], scales=None) -> LayerCache:
    """A cache that holds these parts in every slot."""
    if layout == "rows":
        arrays = [as_rows(row, parts)]
    else:
        arrays = [part.transpose(0, 2, 3, 1) for part in parts]
    if scales is not None:
        scales = scales.swapaxes(1, 2)
        if layout == "rows":
            scales = np.pad(scales, ((0, 0), (0, -scales.shape[1] % 8), (0, 0)))
        scales = jnp.asarray(scales)
    return LayerCache(tuple(map(jnp.asarray, arrays)), scales, row)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("row", [MIXED, GROUPED], ids=["mixed", "grouped"])
def test_append_writes_valid_tokens_at_their_slots_and_nothing_else(row, layout):
    new, old = parts_of(row, 2, 3), parts_of(row, 2, 8)
    new_scales, old_scales = (noise(2, n, 3) if row.scales else None for n in (3, 8))
    positions = np.array([[2, 3, 4], [6, 7, 8]], np.int32)  # 8 is past the end
    valid = np.array([[True, True, False], [True, True, True]])
    before = held(row, layout, [x.copy() for x in old], old_scales)
    actual = cache.append(before, new, new_scales, positions, valid, 3)
    both = [*zip(old, new, strict=True), *([(old_scales, new_scales)] if row.scales else [])]
    for x, y in both:
        x[0, 2:4], x[1, 6:8] = y[0, :2], y[1, :2]
    expected = held(row, layout, old, old_scales)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("row", [MIXED, GROUPED], ids=["mixed", "grouped"])
def test_both_layouts_give_the_same_parts(row):
    parts = parts_of(row, 2, 5)
    for layout in ("rows", "columns"):
        for found, part in zip(
            cache.columns(held(row, layout, parts).arrays, row), parts, strict=True
        ):
            np.testing.assert_array_equal(found, part.transpose(0, 2, 3, 1))


S, K = 11, 2
ROW = CacheRow(((1, H), (1, V)), groups=K)
POSITIONS = np.array([[4, 5, 6], [0, 1, 2]], np.int32)
LIVE = np.array([7, 2], np.int32)  # row 1's last token is padding
LAYOUTS = pytest.mark.parametrize("layout", ["rows", "columns"])


@pytest.fixture(scope="module")
def cached():
    return noise(2, 3, N, H), noise(2, S, K, H), noise(2, S, K, V)


def visible(window: int = S) -> np.ndarray:
    """[B, T, S]: a query sees slots up to its own, as far as they are live and in its window."""
    slots = np.arange(S)
    behind = POSITIONS[:, :, None] - slots
    return (behind >= 0) & (behind < window) & (slots < LIVE[:, None, None])


def grouped(q, parts, scales, mask):
    """The simplest form: KV heads as they are stored."""
    assert scales is None
    return mix(softmax(scores(q, parts[0]) * SCALE, mask, 0.0), parts[1], mask)


def read_cache(q, layer: LayerCache, live=LIVE, window=None) -> jax.Array:
    return read(grouped, q, layer, POSITIONS, live, window)


@LAYOUTS
@pytest.mark.parametrize("window", [None, 0, 2])
def test_reading_a_cache(cached, layout, window):
    q, k, v = cached
    actual = read_cache(q, held(ROW, layout, [k, v]), window=window)
    mask = visible(window or S)
    mask[1, 2, 0] |= not mask[1, 2].any()  # padding that sees nothing live is given slot 0
    assert_near(actual, oracle.attention(q, k, v, mask), 2e-6)


def poisoned(layer: LayerCache, live: np.ndarray, poison: float) -> LayerCache:
    dead = np.arange(S) >= live[:, None]
    if layer.layout == "columns":
        arrays = [jnp.where(dead[:, None, None], poison, x) for x in layer.arrays]
    else:  # padded lanes too
        lanes = np.arange(ROW.padded) >= ROW.elements
        arrays = [jnp.where(dead[:, :, None] | lanes, poison, x) for x in layer.arrays]
    return LayerCache(tuple(arrays), layer.scales, layer.row)


@LAYOUTS
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_dead_slots_and_padded_lanes_change_nothing(cached, layout, poison):
    q, k, v = cached
    layer = held(ROW, layout, [k, v])
    after = read_cache(q, poisoned(layer, LIVE, poison))
    np.testing.assert_array_equal(after, read_cache(q, layer))


@LAYOUTS
@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_a_row_without_live_slots_harms_no_other(cached, layout, poison):
    q, k, v = cached
    layer, live = held(ROW, layout, [k, v]), np.array([7, 0], np.int32)
    after = read_cache(q, poisoned(layer, live, poison), live)
    np.testing.assert_array_equal(after[0], read_cache(q, layer)[0])


# ------------------------------------------------------------------ tiles

YARN = RopeScaling(kind="yarn", factor=4.0, original_length=256)


@pytest.mark.parametrize("heads", [3, 1], ids=["own latents", "one latent"])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("slots", [TILE - 3, 2 * TILE, TILE + 100])
def test_rotated_scores_equal_rotated_keys(slots, queries, heads):
    """q · P_s(B z_s) with every key formed in float64, across tiles and their remainder."""
    q, up = noise(2, 3, queries, 8), noise(3, 5, 8)
    latents = noise(2, heads, 5, slots)
    keys = np.einsum("bnrs,nrh->bsnh", np.repeat(latents, 3 // heads, axis=1).astype(float), up)
    at = np.tile(np.arange(slots), (2, 1))
    expected = np.einsum("bnth,bsnh->bnts", q, oracle.rotate(keys, at, 1e4, YARN))
    run = jax.jit(rotated_scores, static_argnums=(3, 4))
    assert_near(run(q, latents, up, 1e4, YARN), expected)


def test_long_bfloat16_caches_are_read_in_tiles():
    q, slots = noise(2, 6, 1, 8), 2 * WIDE_TILE
    keys, values = (jnp.asarray(noise(2, 2, w, slots), jnp.bfloat16) for w in (8, 5))
    k, v = (np.repeat(np.asarray(x, np.float64), 3, axis=1) for x in (keys, values))
    expected = np.einsum("bnth,bnhs->bnts", q, k)
    logits = jax.jit(scores)(q, keys)
    assert_near(logits, expected, 2e-6)
    mask = RNG.random((2, 1, 1, slots)) < 0.5
    weights = jax.jit(softmax, static_argnums=2)(logits, mask, 1.5)
    exact = oracle.softmax(np.where(mask, 1.5 * np.tanh(expected / 1.5), -np.inf))
    assert_near(weights, exact, 2e-6)
    run = jax.jit(mix)
    mixed = run(weights, values, mask)
    assert_near(mixed, np.einsum("bnts,bnhs->bnth", exact, v), 5e-6)
    for poison in (jnp.nan, jnp.inf, 1e30):  # where the mask is off
        dirty = jnp.where(mask[:, 0, 0, None, None], values, poison)
        np.testing.assert_array_equal(run(weights, dirty, mask), mixed)
