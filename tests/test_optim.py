"""Schedules, which weight gets which rate, AdamW and Muon against NumPy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from oracle import assert_near, assert_trees_near

from vhajax import config, optim, transformer
from vhajax.config import GQA, VHA, Optim

SIZE = {"vocab_size": 100, "dim": 16, "num_layers": 3, "ffn_dim": 24}
MODELS = {
    "gqa": config.Model(attention=GQA(num_heads=4, num_kv_heads=2, head_dim=6), **SIZE),
    "tied": config.Model(
        attention=GQA(num_heads=4, num_kv_heads=2, head_dim=6), ffn="relu2", tied=True, **SIZE
    ),
    "vha": config.Model(
        attention=VHA(num_physical_heads=3, num_kv_heads=2, head_dim=6, query_dim=4), **SIZE
    ),
}

# ------------------------------------------------------------------ schedules


def multiples(steps: int, **fields) -> np.ndarray:
    shape = optim.schedule(Optim(**fields), steps)
    return np.array([float(shape(step)) for step in range(steps)])


def test_cosine_schedule():
    actual = multiples(20, warmup_steps=5, final_fraction=0.1)
    np.testing.assert_allclose(actual[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    done = np.arange(1, 16) / 15
    np.testing.assert_allclose(actual[5:], 0.1 + 0.9 * (1 + np.cos(np.pi * done)) / 2, rtol=2e-6)
    assert actual[-1] == pytest.approx(0.1, rel=1e-6)


def test_wsd_schedule():
    actual = multiples(20, schedule="wsd", warmup_steps=4, decay_steps=6, final_fraction=0.25)
    np.testing.assert_allclose(actual[:4], [0.25, 0.5, 0.75, 1], rtol=1e-6)
    assert (actual[4:14] == 1).all()
    np.testing.assert_allclose(actual[14:], 1 - 0.75 * np.arange(1, 7) / 6, rtol=1e-6)


def test_schedules_without_their_optional_phases():
    assert multiples(4, final_fraction=1.0) == pytest.approx([1, 1, 1, 1])
    assert multiples(4, schedule="wsd") == pytest.approx([1, 1, 1, 1])
    assert multiples(4, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1])
    assert multiples(1, final_fraction=0.0) == pytest.approx([0])


# ------------------------------------------------------------------ groups

SHARED = {
    "blocks.attention.key": "matrix",
    "blocks.attention.key_norm.scale": "vector",
    "blocks.attention.out": "matrix",
    "blocks.attention.query": "matrix",
    "blocks.attention.query_norm.scale": "vector",
    "blocks.attention.value": "matrix",
    "blocks.attention_norm.scale": "vector",
    "blocks.ffn.down": "matrix",
    "blocks.ffn.up": "matrix",
    "blocks.ffn_norm.scale": "vector",
    "norm.scale": "vector",
}
GATED = SHARED | {"blocks.ffn.gate": "matrix"}
UNTIED = {"embedding": "embedding", "unembedding": "unembedding"}
MIXES = dict.fromkeys(
    [f"blocks.attention.{name}" for name in ("premix", "postmix_u", "postmix_v")], "matrix"
)
LABELS = {
    "gqa": GATED | UNTIED,
    "tied": SHARED | {"embedding": "unembedding"},
    "vha": GATED | UNTIED | MIXES,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_group_of_every_parameter(name):
    assert optim.labels(transformer.abstract(MODELS[name])) == LABELS[name]


def like(cfg: config.Model, seed: int | None) -> dict[str, jax.Array]:
    """Arrays shaped as the parameters: ones, or noise."""
    params = oracle.random_params(cfg)
    rng = np.random.default_rng(seed)
    draw = (lambda shape: np.ones(shape)) if seed is None else rng.standard_normal
    return {name: jnp.asarray(draw(x.shape), jnp.float32) for name, x in params.items()}


def updates_of(cfg: config.Model, fields: dict, gradients: list[dict], params: dict) -> list[dict]:
    """The update of each step, at a constant rate."""
    settings = Optim(**{"final_fraction": 1.0, "clip_norm": 0.0} | fields)
    tx = optim.make(settings, 10, transformer.abstract(cfg))
    state, update, updates = tx.init(params), jax.jit(tx.update), []
    for gradient in gradients:
        one, state = update(gradient, state, params)
        params = optax.apply_updates(params, one)
        updates.append(one)
    return updates


RATES = {"matrix_lr": 0.5, "embedding_lr": 0.25, "unembedding_lr": 0.125, "weight_decay": 0.0}


@pytest.mark.parametrize("name", ["gqa", "tied"])
def test_unit_gradients_move_each_group_by_its_own_rate(name):
    cfg = MODELS[name]
    (update,) = updates_of(cfg, {"name": "adamw"} | RATES, [like(cfg, None)], like(cfg, None))
    rate = {"matrix": 0.5, "embedding": 0.25, "unembedding": 0.125, "vector": 0.125}
    for path, group in LABELS[name].items():
        np.testing.assert_allclose(update[path], -rate[group], rtol=1e-6, err_msg=path)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_weight_decay_acts_on_matrices_only(kind):
    cfg, params = MODELS["vha"], like(MODELS["vha"], 0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    fields = RATES | {"name": kind, "weight_decay": 0.1}
    (update,) = updates_of(cfg, fields, [zeros], params)
    for path, group in LABELS["vha"].items():
        decay = 0.5 * 0.1 if group == "matrix" else 0.0
        np.testing.assert_allclose(update[path], -decay * params[path], rtol=1e-6, err_msg=path)


# ------------------------------------------------------------------ AdamW


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_adamw_equals_numpys_over_three_steps(kind):
    """With Muon on matrices, everything else is still AdamW."""
    cfg, start = MODELS["vha"], like(MODELS["vha"], 0)
    fields = {"name": kind, "matrix_lr": 0.01, "embedding_lr": 0.03, "unembedding_lr": 0.02}
    fields |= {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.3}
    gradients = [like(cfg, seed) for seed in (1, 2, 3)]
    updates = updates_of(cfg, fields, gradients, start)
    rate = {"matrix": 0.01, "embedding": 0.03, "unembedding": 0.02, "vector": 0.02}
    for path, group in LABELS["vha"].items():
        if kind == "muon" and group == "matrix":
            continue
        decay = 0.3 if group == "matrix" else 0.0
        p = np.asarray(start[path], np.float64)
        mu, nu = np.zeros_like(p), np.zeros_like(p)
        for count, (gradient, update) in enumerate(zip(gradients, updates, strict=True), 1):
            g = np.asarray(gradient[path], np.float64)
            new, mu, nu = oracle.adamw(p, g, mu, nu, count, rate[group], 0.8, 0.9, 1e-3, decay)
            assert_near(update[path], new - p, 1e-5)
            p = new


# ------------------------------------------------------------------ Muon

AS_MATRICES = {  # [layers (and KV groups of Premix), rows in, columns out]
    "blocks.attention.query": lambda x: x.reshape(3, 16, -1),
    "blocks.attention.key": lambda x: x.reshape(3, 16, -1),
    "blocks.attention.value": lambda x: x.reshape(3, 16, -1),
    "blocks.attention.out": lambda x: x.reshape(3, -1, 16),
    "blocks.attention.premix": lambda x: x.reshape(6, 4, 6),
    "blocks.attention.postmix_u": lambda x: x.reshape(3, 6, 1),
    "blocks.attention.postmix_v": lambda x: x.reshape(3, 6, 1),
    "blocks.ffn.gate": lambda x: x.reshape(3, 16, 24),
    "blocks.ffn.up": lambda x: x.reshape(3, 16, 24),
    "blocks.ffn.down": lambda x: x.reshape(3, 24, 16),
}


def test_muon_equals_numpys_over_two_steps_one_matrix_at_a_time():
    cfg, start = MODELS["vha"], like(MODELS["vha"], 0)
    gradients = [like(cfg, seed) for seed in (1, 2)]
    fields = RATES | {"momentum": 0.9, "weight_decay": 0.1}
    updates = updates_of(cfg, fields, gradients, start)
    assert AS_MATRICES.keys() == {
        path for path, group in LABELS["vha"].items() if group == "matrix"
    }
    for path, matrices in AS_MATRICES.items():
        p = matrices(np.asarray(start[path], np.float64))
        momentum = np.zeros_like(p)
        for gradient, update in zip(gradients, updates, strict=True):
            g = matrices(np.asarray(gradient[path], np.float64))
            momentum = 0.9 * momentum + g
            nesterov = 0.9 * momentum + g
            scale = np.sqrt(max(1, p.shape[-1] / p.shape[-2]))
            step = -0.5 * (scale * np.stack([oracle.newton_schulz(m) for m in nesterov]) + 0.1 * p)
            # Five steps multiply small singular values by up to 3.4⁵ = 480, and rounding with them.
            assert_near(matrices(np.asarray(update[path])), step, 1e-5)
            p = p + step


@pytest.mark.parametrize("shape", [(5, 32, 32), (2, 3, 48, 16), (16, 48)])
def test_orthogonalised_updates_have_singular_values_near_one(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    actual = np.asarray(optim.orthogonalize(jnp.asarray(x)), np.float64)
    flat = x.reshape(-1, *shape[-2:])
    exact = np.stack([oracle.newton_schulz(m) for m in flat]).reshape(shape)
    assert_near(actual, exact, 1e-5)
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    singular = np.einsum("...mr,...mn,...rn->...r", u, actual, vt)
    # The smallest of a square matrix may start below what five steps lift.
    lifted = s / np.linalg.norm(s, axis=-1, keepdims=True) > 0.01
    assert lifted.mean() > 0.9
    assert ((singular[lifted] > 0.6) & (singular[lifted] < 1.3)).all()


def test_a_zero_gradient_gives_a_zero_update():
    assert (np.asarray(optim.orthogonalize(jnp.zeros((2, 4, 6)))) == 0).all()


# ------------------------------------------------------------------ clipping


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_the_gradient_is_clipped_by_its_global_norm(limit):
    """Adam's first moment shows what came through: (1 − beta1) times the gradient."""
    cfg, params = MODELS["tied"], like(MODELS["tied"], 0)
    gradient = like(cfg, 1)
    tx = optim.make(Optim(name="adamw", beta1=0.5, clip_norm=limit), 10, transformer.abstract(cfg))
    _, state = jax.jit(tx.update)(gradient, tx.init(params), params)
    norm = np.sqrt(
        sum(float(np.square(np.asarray(g, np.float64)).sum()) for g in gradient.values())
    )
    factor = limit / norm if 0 < limit < norm else 1.0
    seen = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if ".mu" in jax.tree_util.keystr(path):
            seen[path[-1].key] = leaf
    chex.assert_trees_all_equal_shapes(seen, gradient)
    assert_trees_near(
        seen, {path: 0.5 * factor * np.asarray(g) for path, g in gradient.items()}, 1e-6
    )
