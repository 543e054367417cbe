"""Decoding: every way to read a text gives the oracle's logits, and rows keep to themselves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import assert_near, mesh_of

from vhajax import config, decode, transformer
from vhajax.attention.cached import WIDE_TILE
from vhajax.cache import LayerCache
from vhajax.config import GQA, VHA
from vhajax.decode import Cache, decode_step, generate, init_cache, prefill
from vhajax.errors import UserError
from vhajax.sampling import Sampling
from vhajax.sharding import shardings

fast_prefill = jax.jit(prefill, static_argnames="extend")
fast_step = jax.jit(decode_step)
V, B, T, STEPS = 100, 4, 16, 6
CAPACITY = 12 + STEPS  # the longest prompt and its new tokens fill it to the last slot
TOKENS = oracle.random_tokens((B, 12), V)
LENGTHS = [11, 4, 7, 12]
PROMPTS = [row[:n].tolist() for row, n in zip(TOKENS, LENGTHS, strict=True)]


@dataclasses.dataclass(frozen=True)
class Case:
    cfg: config.Model
    params: dict
    model: transformer.Transformer

    def logits(self, tokens) -> np.ndarray:
        """The oracle's at every position of [B, T] tokens, each row one document."""
        tokens = np.asarray(tokens)
        positions, segments = oracle.documents([[tokens.shape[1]]] * len(tokens))
        return oracle.forward(self.cfg, self.params, tokens, positions, segments)


@pytest.fixture(scope="module", params=["gqa", "vha"])
def case(request) -> Case:
    return make_case(request.param)


@pytest.fixture(scope="module")
def vha() -> Case:
    """The mechanism that does all that GQA does and more, where one is enough."""
    return make_case("vha")


def make_case(mechanism: str) -> Case:
    """Rows of 2·K·H = 128 elements: over two devices the cache is split, over four it is not."""
    attention = {
        "gqa": GQA(num_heads=4, num_kv_heads=2, head_dim=32, rope_theta=100.0),
        "vha": VHA(num_physical_heads=2, num_kv_heads=2, head_dim=32, query_dim=16, postmix_rank=3),
    }[mechanism]
    size = {"vocab_size": V, "dim": 32, "num_layers": 2, "ffn_dim": 48}
    cfg = config.Model(attention=attention, tied=mechanism == "vha", **size)
    params = oracle.random_params(cfg)
    return Case(cfg, params, oracle.build(cfg, params))


def padded(left: bool = False, fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The prompts in [B, T], padded with `fill`."""
    tokens, valid = np.full((B, T), fill, np.int32), np.zeros((B, T), bool)
    for i, prompt in enumerate(PROMPTS):
        where = slice(T - len(prompt), T) if left else slice(0, len(prompt))
        tokens[i, where], valid[i, where] = prompt, True
    return tokens, valid


def read_prompts(model, left: bool = False, fill: int = 0) -> tuple[jax.Array, Cache]:
    tokens, valid = padded(left, fill)
    return prefill(model, tokens, init_cache(model, len(tokens), CAPACITY), valid)


# ------------------------------------------------------------------ logits


def test_prefill_of_ragged_rows_equals_the_forward(case):
    tokens, valid = padded()
    cache = init_cache(case.model, B, CAPACITY)
    logits, cache = fast_prefill(case.model, tokens, cache, valid)
    for row, prompt in enumerate(PROMPTS):
        assert_near(logits[row], case.logits([prompt])[0, -1])
    np.testing.assert_array_equal(cache.lengths, LENGTHS)


def test_token_by_token_decode_equals_the_forward_at_every_position(case):
    cache = init_cache(case.model, B, CAPACITY)
    expected = case.logits(TOKENS)
    for t in range(TOKENS.shape[1]):
        logits, cache = fast_step(case.model, TOKENS[:, t], cache)
        assert_near(logits, expected[:, t])


def test_two_ragged_chunks_and_then_decode_equal_the_forward(case):
    first, second = [5, 1, 3, 6], [4, 2, 6, 1]
    cache, expected = init_cache(case.model, B, CAPACITY), case.logits(TOKENS)
    done = np.zeros(B, int)
    for extend, sizes in enumerate((first, second)):
        chunk, valid = np.zeros((B, 6), np.int32), np.zeros((B, 6), bool)
        for row, size in enumerate(sizes):  # the second chunk is padded on the left
            where = slice(6 - size, 6) if extend else slice(0, size)
            chunk[row, where] = TOKENS[row, done[row] : done[row] + size]
            valid[row, where] = True
        logits, cache = fast_prefill(case.model, chunk, cache, valid, extend=bool(extend))
        done += sizes
        assert_near(logits, expected[range(B), done - 1])
    for _ in range(2):
        logits, cache = fast_step(case.model, TOKENS[range(B), done], cache)
        done += 1
        assert_near(logits, expected[range(B), done - 1])


# ------------------------------------------------------------------ rows and padding


def test_a_ragged_row_is_the_row_alone(vha):
    """Up to rounding: a matrix product of one row is summed in another order."""
    logits, cache = read_prompts(vha.model)
    logits, _ = decode_step(vha.model, TOKENS[:, 0], cache)
    tokens, valid = padded()
    alone = init_cache(vha.model, 1, CAPACITY)
    _, alone = fast_prefill(vha.model, tokens[1:2], alone, valid[1:2])
    row, _ = fast_step(vha.model, TOKENS[1:2, 0], alone)
    assert_near(logits[1], row[0], 1e-6)


def test_neighbours_and_padding_change_nothing_bit_for_bit(vha):
    before, cache = read_prompts(vha.model)
    step_before, _ = decode_step(vha.model, TOKENS[:, 0], cache)
    tokens, valid = padded(fill=77)
    tokens[1:], valid[1:] = 55, True
    after, cache = prefill(vha.model, tokens, init_cache(vha.model, B, CAPACITY), valid)
    step_after, _ = decode_step(vha.model, TOKENS[:, 0], cache)
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(step_after[0], step_before[0])


def test_left_padding_is_right_padding_bit_for_bit(vha):
    right, right_cache = read_prompts(vha.model)
    left, left_cache = read_prompts(vha.model, left=True, fill=9)
    np.testing.assert_array_equal(left, right)
    jax.tree.map(np.testing.assert_array_equal, left_cache, right_cache)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_dead_slots_change_nothing_bit_for_bit(vha, poison):
    def poisoned(layer: LayerCache) -> LayerCache:
        dead = jnp.arange(CAPACITY) >= jnp.asarray(LENGTHS)[:, None]
        arrays = tuple(jnp.where(dead[:, None, None], poison, part) for part in layer.arrays)
        return dataclasses.replace(layer, arrays=arrays)

    _, cache = read_prompts(vha.model)
    expected, _ = decode_step(vha.model, TOKENS[:, 0], cache)
    _, cache = read_prompts(vha.model)
    cache = Cache(tuple(poisoned(layer) for layer in cache.layers), cache.lengths)
    actual, _ = decode_step(vha.model, TOKENS[:, 0], cache)
    np.testing.assert_array_equal(actual, expected)


# ------------------------------------------------------------------ the cache


def test_the_cache_is_donated(vha):
    empty = init_cache(vha.model, B, CAPACITY)
    _, first = prefill(vha.model, padded()[0], empty, padded()[1])
    _, second = decode_step(vha.model, TOKENS[:, 0], first)
    for used in (empty, first):
        assert all(array.is_deleted() for array in jax.tree.leaves(used))
    assert not any(array.is_deleted() for array in jax.tree.leaves(second))


def test_a_prompt_longer_than_the_cache_is_refused(vha):
    with pytest.raises(UserError, match=r"16 .* cache of 8"):
        prefill(vha.model, padded()[0], init_cache(vha.model, B, 8))


@pytest.mark.parametrize(("batch", "capacity"), [(0, 4), (4, 0)])
def test_an_empty_cache_is_refused(vha, batch, capacity):
    with pytest.raises(UserError, match=f"{batch} × {capacity}"):
        init_cache(vha.model, batch, capacity)


# ------------------------------------------------------------------ generate


def run(model, prompts=PROMPTS, steps=STEPS, **more) -> list[list[int | None]]:
    return list(generate(model, prompts, steps, capacity=CAPACITY, **more))


@pytest.fixture(scope="module")
def greedy(vha) -> list[list[int]]:
    """By whole forwards of the oracle, one row and one token at a time: [step][row]."""
    rows = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(STEPS):
            text.append(int(vha.logits([text])[0, -1].argmax()))
        rows.append(text[len(prompt) :])
    return [list(step) for step in zip(*rows, strict=True)]


def test_greedy_generation_equals_the_argmax_of_repeated_forwards(vha, greedy):
    assert run(vha.model) == greedy


def test_eos_ends_its_row_and_no_other(vha, greedy):
    by_row = list(zip(*greedy, strict=True))
    row, step = next(
        (r, s)
        for s in range(1, STEPS)
        for r in range(B)
        if sum(ids.count(by_row[r][s]) for ids in by_row) == 1
    )
    expected = [list(ids) for ids in greedy]
    for ids in expected[step:]:
        ids[row] = None
    assert run(vha.model, eos=by_row[row][step]) == expected


def test_the_stream_ends_with_its_last_row(vha, greedy):
    assert run(vha.model, [PROMPTS[0]] * B, eos=greedy[1][0]) == [[greedy[0][0]] * B]


def test_one_step_is_one_step(vha, greedy):
    assert run(vha.model, steps=1) == greedy[:1]


def test_a_rows_draws_depend_on_its_own_seed_and_prompt(vha):
    hot = Sampling(temperature=1.5)
    tokens = run(vha.model, sampling=hot, seeds=[5, 6, 7, 8])
    turned = run(vha.model, PROMPTS[1:] + PROMPTS[:1], sampling=hot, seeds=[6, 7, 8, 5])
    assert [step[1:] + step[:1] for step in tokens] == turned
    same_prompt = run(vha.model, [PROMPTS[0]] * B, sampling=hot, seeds=[5, 6, 5, 7])
    rows = list(zip(*same_prompt, strict=True))
    assert list(rows[0]) == [step[0] for step in tokens]
    assert rows[0] == rows[2]
    assert len({rows[0], rows[1], rows[3]}) == 3


def test_steps_and_prompts_compile_nothing_new(vha):
    run(vha.model)
    compiled = decode.sample_step._cache_size(), prefill._cache_size()
    run(vha.model, [prompt[:8][::-1] for prompt in PROMPTS], steps=STEPS + 3)
    assert (decode.sample_step._cache_size(), prefill._cache_size()) == compiled


@pytest.mark.parametrize(
    ("prompts", "steps", "capacity", "told"),
    [
        ([], 3, None, "no prompt"),
        ([[1], []], 3, None, "prompt 1 has no tokens"),
        ([[1], [2, V]], 3, None, f"prompt 1 has token id {V}"),
        ([[-1]], 3, None, "prompt 0 has token id -1"),
        ([[1]], 0, None, "max_new_tokens is 0"),
        ([[1]], -2, None, "max_new_tokens is -2"),
        ([[1, 2, 3, 4, 5]], 4, 8, "9.*past.* 8"),
    ],
)
def test_bad_requests_are_refused_at_once(vha, prompts, steps, capacity, told):
    with pytest.raises(UserError, match=f"(?i){told}"):
        generate(vha.model, prompts, steps, capacity=capacity)  # before the first token is drawn


@pytest.mark.parametrize("seeds", [[], [1], [1, 2, 3]])
def test_another_number_of_seeds_than_prompts_is_refused(vha, seeds):
    with pytest.raises(UserError, match=f"{len(seeds)} seeds for 2 prompts"):
        generate(vha.model, [[1], [2]], 1, seeds=seeds)


# ------------------------------------------------------------------ several devices


def sharded_model(case: Case, mesh: jax.sharding.Mesh) -> transformer.Transformer:
    where = shardings(transformer.abstract(case.cfg), mesh)
    return oracle.build(case.cfg, jax.device_put(case.params, where))


@pytest.mark.filterwarnings("ignore:a dimension of")
@pytest.mark.parametrize(
    ("layout", "data", "model", "shape"),
    [
        ("rows", 4, 2, (1, CAPACITY, 64)),
        ("rows", 2, 4, (2, CAPACITY, 128)),
        ("columns", 4, 2, (1, 1, 32, CAPACITY)),
        ("columns", 2, 4, (2, 2, 32, CAPACITY)),
    ],
)
def test_sharded_decode_equals_the_forward(vha, layout, data, model, shape):
    tokens, valid = padded(left=True)
    mesh = mesh_of(data, model)
    with jax.set_mesh(mesh):
        sharded = sharded_model(vha, mesh)
        cache = init_cache(sharded, B, CAPACITY, layout)
        logits, cache = fast_prefill(sharded, tokens, cache, valid)
        for step in range(3):
            for array in cache.layers[0].arrays:
                assert array.addressable_shards[0].data.shape == shape
            for row, prompt in enumerate(PROMPTS):
                text = [*prompt, *TOKENS[row, :step]]
                assert_near(np.asarray(logits)[row], vha.logits([text])[0, -1])
            logits, cache = fast_step(sharded, TOKENS[:, step], cache)


@pytest.mark.filterwarnings("ignore:a dimension of")
def test_a_batch_that_does_not_divide_over_the_mesh_is_replicated():
    case, mesh = make_case("gqa"), mesh_of(2, 4)
    with jax.set_mesh(mesh):
        sharded = sharded_model(case, mesh)
        cache = init_cache(sharded, 3, CAPACITY)
        logits, cache = fast_prefill(sharded, TOKENS[:3], cache)
        assert_near(logits, case.logits(TOKENS[:3])[:, -1])
        logits, _ = fast_step(sharded, TOKENS[:3, 0], cache)
    text = np.concatenate([TOKENS[:3], TOKENS[:3, :1]], axis=1)
    assert_near(logits, case.logits(text)[:, -1])


@pytest.mark.filterwarnings("ignore:a dimension of")
@pytest.mark.parametrize("tokens", [1, 3])
def test_long_bfloat16_caches_decode_over_devices(vha, tokens):
    """Read a tile at a time, by loops inside `shard_map`: against the same step on one device."""
    cfg = dataclasses.replace(vha.cfg, dtype="bfloat16")
    case, mesh = Case(cfg, vha.params, oracle.build(cfg, vha.params)), mesh_of(4, 2)
    chunk = TOKENS[:, :tokens]

    def logits(model) -> np.ndarray:
        cache = init_cache(model, B, WIDE_TILE, "columns")
        _, cache = fast_prefill(model, TOKENS[:, :5], cache)
        return np.asarray(fast_prefill(model, chunk, cache, extend=True)[0], np.float32)

    with jax.set_mesh(mesh):
        sharded = logits(sharded_model(case, mesh))
    assert_near(sharded, logits(case.model), 2e-2)  # bfloat16 sums in another order
