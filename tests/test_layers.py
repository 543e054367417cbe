"""Norms, the feed-forward network, the embedding and every weight's initial value."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import assert_near, mesh_of

from vhajax import config, transformer
from vhajax.attention.vha import fold_postmix
from vhajax.layers import FeedForward, RMSNorm, embed, rms_norm
from vhajax.sharding import named_arrays, with_arrays

RNG = np.random.default_rng(0)


def noise(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# ------------------------------------------------------------------ RMSNorm


@pytest.mark.parametrize("scale", [None, noise(24)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(scale, eps):
    x = noise(2, 5, 24) * 3
    assert_near(rms_norm(x, scale, eps), oracle.rms_norm(x.astype(np.float64), scale, eps), 1e-6)


def test_rms_norm_of_bfloat16_rounds_once():
    x, scale = jnp.asarray(noise(4, 64) * 100, jnp.bfloat16), noise(64)
    actual = rms_norm(x, scale, 1e-6)
    chex.assert_type(actual, jnp.bfloat16)
    exact = oracle.rms_norm(np.asarray(x, np.float64), scale, 1e-6)
    # One rounding to 8 significant bits; intermediate bfloat16 would cost several.
    np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=2**-8)


def test_rms_norm_kinds_hold_what_their_name_says():
    x = noise(3, 8)
    assert list(named_arrays(RMSNorm(8, "weighted", 1e-6))) == ["scale"]
    assert not named_arrays(RMSNorm(8, "weightless", 1e-6))
    assert RMSNorm(8, "none", 1e-6)(x) is x


# ------------------------------------------------------------------ feed-forward


@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
def test_feed_forward(kind):
    cfg = config.Model(dim=24, ffn_dim=40, ffn=kind)
    template = jax.eval_shape(lambda: FeedForward(cfg, jax.random.key(0)))
    weights = {name: noise(*w.shape) / 5 for name, w in named_arrays(template).items()}
    params = {f"ffn.{name}": w.astype(np.float64) for name, w in weights.items()}
    x = noise(2, 3, 24)
    assert_near(
        jax.jit(with_arrays(template, weights).__call__)(x),
        oracle.feed_forward(cfg, params, x.astype(np.float64)),
    )


# ------------------------------------------------------------------ embedding


@pytest.mark.parametrize("mesh", [None, (8, 1), (2, 4), (1, 8)])
def test_embedding_rows_and_their_gradient_wherever_the_vocabulary_lies(mesh):
    table, tokens, slope = noise(32, 16), oracle.random_tokens((8, 5), 32), noise(8, 5, 16)

    @jax.jit
    def run(table, tokens, slope):
        return jax.value_and_grad(lambda t: jnp.sum(embed(t, tokens) * slope))(table)

    @jax.jit
    def rows(table, tokens):
        return embed(table, tokens)

    if mesh is None:
        found, (_, gradient) = rows(table, tokens), run(table, tokens, slope)
    else:
        with jax.set_mesh(mesh_of(*mesh)):
            found, (_, gradient) = rows(table, tokens), run(table, tokens, slope)
    np.testing.assert_array_equal(found, table[tokens])
    expected = np.zeros((32, 16))
    np.add.at(expected, tokens, slope)
    assert_near(gradient, expected, 1e-6)


# ------------------------------------------------------------------ initial weights

D, F, L, P, K, H = 64, 96, 2, 32, 2, 32
SIZE = {"vocab_size": 250, "dim": D, "ffn_dim": F, "num_layers": L}


@pytest.fixture(scope="module")
def initial() -> dict:
    vha = config.VHA(num_physical_heads=P, num_kv_heads=K, head_dim=H)
    params = transformer.init(config.Model(attention=vha, **SIZE), 0)
    return {name: np.asarray(value, np.float64) for name, value in params.items()}


DEVIATIONS = {
    "embedding": 1,
    "unembedding": D**-0.5,
    "blocks.attention.query": D**-0.5,
    "blocks.attention.key": D**-0.5,
    "blocks.attention.value": D**-0.5,
    "blocks.attention.out": (K * P * H * 2 * L) ** -0.5,
    "blocks.attention.postmix_u": 0.01,
    "blocks.ffn.gate": D**-0.5,
    "blocks.ffn.up": D**-0.5,
    "blocks.ffn.down": (F * 2 * L) ** -0.5,
}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_initial_deviation_is_one_over_the_root_of_the_fan_in(initial, name):
    # The estimate of a deviation from n normal values is off by 1/√(2n): 1.6 % at the smallest.
    assert initial[name].std() == pytest.approx(DEVIATIONS[name], rel=0.05)
    assert abs(initial[name].mean()) < 5 * DEVIATIONS[name] / np.sqrt(initial[name].size)


def test_every_weight_of_the_model_is_covered_here(initial):
    scales = {name for name in initial if name.endswith("scale")}
    others = {"blocks.attention.premix", "blocks.attention.postmix_v"}
    assert initial.keys() == DEVIATIONS.keys() | scales | others
    assert all((initial[name] == 1).all() for name in scales)
    assert len(scales) == 5


def test_no_two_weights_share_their_noise(initial):
    for name in DEVIATIONS:
        if name.startswith("blocks."):
            assert not np.array_equal(initial[name][0], initial[name][1])
    for a, b in [("key", "value"), ("key", "query")]:
        first, second = (initial[f"blocks.attention.{x}"].ravel()[:4000] for x in (a, b))
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.1
    gate, up = initial["blocks.ffn.gate"], initial["blocks.ffn.up"]
    assert abs(np.corrcoef(gate.ravel(), up.ravel())[0, 1]) < 0.05


def test_premix_starts_near_the_identity(initial):
    moved = initial["blocks.attention.premix"] - np.eye(H)
    assert moved.std() == pytest.approx(0.1 / np.sqrt(H), rel=0.05)
    assert abs(moved.mean()) < 0.01 / np.sqrt(H)


def test_postmix_starts_as_exactly_the_identity(initial):
    u, v, out = (
        jnp.asarray(initial[f"blocks.attention.{name}"][0], jnp.float32)
        for name in ("postmix_u", "postmix_v", "out")
    )
    np.testing.assert_array_equal(fold_postmix(u, v, out), out)


def test_a_narrow_premix_starts_orthogonal_and_keeps_the_size_of_queries(initial):
    narrow = config.VHA(num_physical_heads=2, num_kv_heads=3, head_dim=16, query_dim=6)
    cfg = config.Model(attention=narrow, tied=True, **SIZE)
    params = transformer.init(cfg, 1)
    premix = np.asarray(params["blocks.attention.premix"], np.float64)
    assert premix.shape == (L, 3, 6, 16)
    grams = premix @ premix.swapaxes(-1, -2)
    np.testing.assert_allclose(grams, np.broadcast_to(16 / 6 * np.eye(6), grams.shape), atol=1e-5)
    assert not np.allclose(premix[0, 0], premix[0, 1], atol=0.1)
    # A tied table is an unembedding: it starts at 1/√D.
    table = np.asarray(params["embedding"])
    assert table.std() == pytest.approx(D**-0.5, rel=0.05)
    # Another seed gives other noise.
    assert abs(np.corrcoef(table.ravel(), initial["embedding"].ravel())[0, 1]) < 0.05
