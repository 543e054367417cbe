"""The whole model against the oracle, documents that cannot see each other, and the fold."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import assert_near, assert_trees_near

from vhajax import config, fold, transformer
from vhajax.config import GQA, VHA
from vhajax.errors import UserError

H = 12  # N·H ≠ D, and T ≠ N
MECHANISMS = {
    "gqa": GQA(num_heads=4, num_kv_heads=2, head_dim=H),
    "mha": GQA(num_heads=3, num_kv_heads=3, head_dim=H),
    "mqa": GQA(num_heads=4, num_kv_heads=1, head_dim=H),
    "vha": VHA(num_physical_heads=3, num_kv_heads=2, head_dim=H, postmix_rank=4),
    "narrow vha": VHA(num_physical_heads=2, num_kv_heads=3, head_dim=H, query_dim=8),
}
QK_NORMS = ("none", "weightless", "weighted")
POSITIONS, SEGMENTS = oracle.documents([[11], [5, 6]])
TOKENS = oracle.random_tokens(POSITIONS.shape, 100)


def model_of(mechanism: str, qk_norm: str = "weighted", **more) -> config.Model:
    attention = dataclasses.replace(MECHANISMS[mechanism], qk_norm=qk_norm, rope_theta=100.0)
    size = {"vocab_size": 100, "dim": 32, "num_layers": 2, "ffn_dim": 40, "norm_eps": 1e-3}
    return config.Model(attention=attention, **size | more)


def covering_configs() -> list[tuple]:
    """Every pair of choices occurs, in 15 of 120 combinations."""
    rows = []
    for i, mechanism in enumerate(MECHANISMS):
        for j, qk_norm in enumerate(QK_NORMS):
            ffn = ("swiglu", "relu2")[(i + j) % 2]
            norm = ("weighted", "weightless")[(j > 0) ^ (i & 1)]
            rows.append((mechanism, qk_norm, ffn, norm, bool((j == 2) ^ (i >> 1 & 1))))
    return rows


def test_the_configurations_below_cover_every_pair_of_choices():
    choices = [list(MECHANISMS), QK_NORMS, ("swiglu", "relu2"), ("weighted", "weightless")]
    choices.append((False, True))
    for a, b in itertools.combinations(range(5), 2):
        pairs = {(row[a], row[b]) for row in covering_configs()}
        assert pairs == set(itertools.product(choices[a], choices[b]))


@jax.jit
def forward(model, tokens, positions, segments):
    return transformer.forward(model, tokens, positions, segments)


def logits_of(cfg: config.Model, params: dict, tokens=TOKENS) -> np.ndarray:
    return np.asarray(forward(oracle.build(cfg, params), tokens, POSITIONS, SEGMENTS))


@pytest.mark.parametrize(("mechanism", "qk_norm", "ffn", "norm", "tied"), covering_configs())
def test_logits_equal_the_oracles(mechanism, qk_norm, ffn, norm, tied):
    cfg = model_of(mechanism, qk_norm, ffn=ffn, norm=norm, tied=tied)
    params = oracle.random_params(cfg)
    expected = oracle.forward(cfg, params, TOKENS, POSITIONS, SEGMENTS)
    assert np.isneginf(expected[..., 100:]).all()
    assert_near(logits_of(cfg, params), expected)


@pytest.mark.parametrize(("mechanism", "unroll"), [("gqa", 1), ("vha", 2)])
def test_the_scanned_training_forward_equals_the_oracle(mechanism, unroll):
    cfg = model_of(mechanism)
    params = oracle.random_params(cfg)
    run = jax.jit(lambda *args: transformer.hidden(*args, unroll=unroll))
    actual = run(oracle.build(cfg, params), TOKENS, POSITIONS, SEGMENTS)
    assert_near(actual, oracle.hidden(cfg, params, TOKENS, POSITIONS, SEGMENTS))


def test_an_unstacked_model_is_the_same_model():
    cfg = model_of("gqa")
    model = oracle.build(cfg, oracle.random_params(cfg))
    listed = transformer.unstack(model)
    assert len(listed.blocks) == cfg.num_layers
    expected = forward(model, TOKENS, POSITIONS, SEGMENTS)
    np.testing.assert_array_equal(forward(listed, TOKENS, POSITIONS, SEGMENTS), expected)


@pytest.mark.parametrize("mechanism", ["gqa", "narrow vha"])
def test_tokens_of_one_document_cannot_change_another(mechanism):
    cfg = model_of(mechanism)
    params = oracle.random_params(cfg)
    before = logits_of(cfg, params)
    for start, end in ((0, 5), (5, 11)):
        tokens = TOKENS.copy()
        tokens[1, start:end] = (tokens[1, start:end] + 1) % 100
        after = logits_of(cfg, params, tokens)
        same = np.ones(TOKENS.shape, bool)
        same[1, start:end] = False
        np.testing.assert_array_equal(after[same], before[same])
        assert (after[~same] != before[~same]).any(axis=-1).all()


# ------------------------------------------------------------------ fold

FOLDED = [("vha", "none"), ("vha", "weighted"), ("narrow vha", "weightless")]


@pytest.mark.parametrize(("mechanism", "qk_norm"), FOLDED)
def test_the_folded_model_is_the_oracles_fold_and_computes_the_same(mechanism, qk_norm):
    cfg = model_of(mechanism, qk_norm)
    params = oracle.random_params(cfg)
    gqa_cfg, folded = fold.to_gqa(cfg, {name: jnp.asarray(x) for name, x in params.items()})
    expected_cfg, expected = oracle.fold(cfg, params)
    assert gqa_cfg == expected_cfg
    assert_trees_near(folded, expected, 1e-6)
    logits = logits_of(gqa_cfg, folded)
    assert_near(logits, oracle.forward(gqa_cfg, expected, TOKENS, POSITIONS, SEGMENTS))
    assert_near(logits, oracle.forward(cfg, params, TOKENS, POSITIONS, SEGMENTS))
    assert_near(logits, logits_of(cfg, params))
    shapes = transformer.named_arrays(transformer.abstract(gqa_cfg))
    assert {n: x.shape for n, x in folded.items()} == {n: x.shape for n, x in shapes.items()}


def test_the_oracles_fold_is_exact():
    """Two float64 models, so what is left above is rounding."""
    cfg = model_of("narrow vha")
    params = oracle.random_params(cfg)
    gqa, folded = oracle.fold(cfg, params)
    expected = oracle.forward(cfg, params, TOKENS, POSITIONS, SEGMENTS)
    assert_near(oracle.forward(gqa, folded, TOKENS, POSITIONS, SEGMENTS), expected, 1e-12)


def test_the_fold_leaves_its_input_alone():
    cfg = model_of("vha")
    params = oracle.random_params(cfg)
    names = set(params)
    fold.to_gqa(cfg, params)
    assert set(params) == names


def test_only_vha_folds():
    with pytest.raises(UserError, match=r"Only VHA folds .* GQA N 4"):
        fold.to_gqa(model_of("gqa"), {})


def test_a_query_norm_before_premix_would_break_the_fold():
    rng = np.random.default_rng(0)
    x, query = rng.standard_normal((7, 32)), rng.standard_normal((32, H))
    premix = np.eye(H) + 0.3 * rng.standard_normal((H, H))
    norm = lambda q: oracle.rms_norm(q, None, 1e-6)  # noqa: E731
    folded = norm(x @ (query @ premix))
    assert_near(folded, norm((x @ query) @ premix), 1e-12)
    before = norm(x @ query) @ premix
    assert np.abs(folded - before).max() > 0.1


def test_premix_drift():
    rng = np.random.default_rng(0)
    move = rng.standard_normal((3, 2, 20, 20))
    together = np.broadcast_to(move[:, :1], move.shape)
    size, spread = fold.premix_drift(np.eye(20) + together)
    assert size == pytest.approx(np.mean([np.linalg.norm(m) for m in together[:, 0]]), rel=1e-6)
    assert spread == pytest.approx(0, abs=1e-12)
    _, spread = fold.premix_drift(np.eye(20) + move)
    assert spread == pytest.approx(2, rel=0.1)
