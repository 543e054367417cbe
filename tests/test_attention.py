"""Attention over documents and over a cache, and what a cache holds."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import assert_near, mesh_of

from vhajax import config
from vhajax.attention import KVCache
from vhajax.attention.core import append, attend, attend_reference, document_mask, read

RNG = np.random.default_rng(1)
LENGTHS = [[9], [4, 5], [1, 1, 6, 1], [3, 3, 3]]
_, SEGMENTS = oracle.documents(LENGTHS)
B, T, N, H = 4, 9, 4, 6
BFLOAT16 = 2**-7
"""Weights and results are each rounded to 8 bits: 2⁻⁹ of the largest value, twice, and doubled."""


reference = jax.jit(attend_reference)


def noise(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# ------------------------------------------------------------------ training


def test_document_mask():
    np.testing.assert_array_equal(document_mask(SEGMENTS), oracle.document_mask(SEGMENTS))


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


@pytest.mark.parametrize("K", [4, 2, 1])
def test_the_reference_takes_any_mask(K):
    q, k, v = noise(2, 3, N, H), noise(2, 11, K, H), noise(2, 11, K, H)
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("K", "H", "logical", "stored"), WIDTHS)
def test_cache_widths_and_bytes(K, H, logical, stored, dtype):
    gqa = config.GQA(num_heads=6 * K, num_kv_heads=K, head_dim=H)
    vha = config.VHA(num_physical_heads=3, num_kv_heads=K, head_dim=H)
    for cfg in (gqa, vha):
        assert KVCache.logical_width(cfg) == logical
        assert KVCache.stored_width(cfg) == stored
        rows = KVCache.create(cfg, 3, 7, dtype).rows
        on_device = sum(shard.data.nbytes for shard in rows.addressable_shards)
        assert rows.nbytes == on_device == 3 * 7 * stored * dtype(0).itemsize


@pytest.mark.parametrize(("K", "H", "parts"), [(4, 16, 4), (2, 64, 1), (4, 6, 1)])
def test_a_cache_is_split_over_model_only_where_its_rows_split_into_heads(K, H, parts):
    cfg = config.GQA(num_heads=4, num_kv_heads=K, head_dim=H)
    with jax.set_mesh(mesh_of(2, 4)):
        rows = KVCache.create(cfg, 4, 5, jnp.float32).rows
    stored = KVCache.stored_width(cfg)
    assert rows.addressable_shards[0].data.shape == (2, 5, stored // parts)


def cache_rows(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """[K_0 | V_0 | K_1 | V_1 | … | zeros]."""
    parts = [x[:, :, head] for head in range(k.shape[2]) for x in (k, v)]
    row = np.concatenate(parts, axis=-1)
    return np.pad(row, ((0, 0), (0, 0), (0, -row.shape[-1] % 128)))


def test_append_writes_valid_tokens_at_their_slots_and_nothing_else():
    k, v = noise(2, 3, 3, 6), noise(2, 3, 3, 6)
    old = noise(2, 8, 128)
    positions = np.array([[2, 3, 4], [6, 7, 8]], np.int32)  # 8 is past the end
    valid = np.array([[True, True, False], [True, True, True]])
    expected, new = old.copy(), cache_rows(k, v)
    expected[0, 2:4], expected[1, 6:8] = new[0, :2], new[1, :2]
    actual = append(jnp.asarray(old), k, v, positions, valid)
    np.testing.assert_array_equal(actual, expected)


S, K = 11, 2
POSITIONS = np.array([[4, 5, 6], [0, 1, 2]], np.int32)
LIVE = np.array([7, 2], np.int32)  # row 1's last token is padding


@pytest.fixture(scope="module")
def cached():
    return noise(2, 3, N, H), noise(2, S, K, H), noise(2, S, K, H)


def visible() -> np.ndarray:
    """[B, T, S]: a query sees slots up to its own, as far as they are live."""
    slots = np.arange(S)
    return (slots <= POSITIONS[:, :, None]) & (slots < LIVE[:, None, None])


def test_reading_a_cache(cached):
    q, k, v = cached
    actual = read(q, jnp.asarray(cache_rows(k, v)), K, POSITIONS, LIVE)
    assert_near(actual, oracle.attention(q, k, v, visible()), 2e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_dead_slots_and_padded_lanes_change_nothing(cached, poison):
    q, k, v = cached
    rows = cache_rows(k, v)
    before = read(q, jnp.asarray(rows), K, POSITIONS, LIVE)
    rows[0, 7:], rows[1, 2:], rows[:, :, 2 * K * H :] = poison, poison, poison
    after = read(q, jnp.asarray(rows), K, POSITIONS, LIVE)
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_a_row_without_live_slots_harms_no_other(cached, poison):
    q, k, v = cached
    rows = cache_rows(k, v)
    before = read(q, jnp.asarray(rows), K, POSITIONS, LIVE)
    rows[1] = poison
    after = read(q, jnp.asarray(rows), K, POSITIONS, np.array([7, 0], np.int32))
    np.testing.assert_array_equal(after[0], before[0])
