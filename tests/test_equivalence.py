"""Mechanisms that are each other's special cases, and the claims about RoPE and norms.

Each map of weights is written here in float64 NumPy, apart from the library's.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import assert_near

from vhajax import config, fold, transformer
from vhajax.config import GQA, LRKV, MFA, MLA, VHA
from vhajax.decode import generate

B, T, V, D, L = 2, 9, 50, 32, 2
TOKENS = oracle.random_tokens((B, T), V)
POSITIONS, SEGMENTS = oracle.documents([[9], [4, 5]])
WHOLE, ONE = oracle.documents([[T]] * B)
ATTENTION = "blocks.attention."
Weights = dict[str, np.ndarray]


def model_of(attention: config.Attention, **more) -> config.Model:
    size = {"vocab_size": V, "vocab_multiple": 64, "dim": D, "num_layers": L, "ffn_dim": 40}
    return config.Model(attention=attention, norm_eps=1e-3, **size | more)


def exact(cfg: config.Model, seed: int = 0) -> Weights:
    return {n: np.asarray(x, np.float64) for n, x in oracle.random_params(cfg, seed).items()}


def replaced(params: Weights, drop: tuple[str, ...] = (), **new: np.ndarray) -> Weights:
    """The parameters with attention weights dropped and others put in their place."""
    kept = {n: x for n, x in params.items() if n.removeprefix(ATTENTION) not in drop}
    return kept | {ATTENTION + name: x for name, x in new.items()}


def oracle_logits(cfg: config.Model, params: Weights) -> np.ndarray:
    return oracle.forward(cfg, params, TOKENS, POSITIONS, SEGMENTS)


@jax.jit
def forward(model: transformer.Transformer) -> jax.Array:
    return transformer.forward(model, TOKENS, POSITIONS, SEGMENTS)


def library(cfg: config.Model, params: Weights) -> transformer.Transformer:
    return oracle.build(cfg, {n: jnp.asarray(x, jnp.float32) for n, x in params.items()})


def greedy(cfg: config.Model, params: Weights) -> list:
    model = transformer.unstack(library(cfg, params))
    return list(generate(model, TOKENS[:, :5].tolist(), 4))


def assert_one_function(
    one: tuple[config.Model, Weights], other: tuple[config.Model, Weights]
) -> None:
    """Exactly in float64 by the oracle; the library's `other`, up to rounding."""
    expected = oracle_logits(*one)
    assert_near(oracle_logits(*other), expected, 1e-11)
    assert_near(forward(library(*other)), expected)


# ------------------------------------------------------------------ special cases


def test_mha_is_gqa_with_a_kv_head_a_query_head():
    """And GQA is MHA with heads repeated."""
    gqa = model_of(GQA(num_heads=6, num_kv_heads=2, head_dim=8, value_dim=6, qkv_bias=True))
    mha = model_of(dataclasses.replace(gqa.attention, num_kv_heads=6))
    params = exact(gqa)
    names = ("key", "value", "key_bias", "value_bias")
    heads = {n: np.repeat(params[ATTENTION + n], 3, axis=-2) for n in names}
    assert_one_function((gqa, params), (mha, replaced(params, **heads)))


@pytest.mark.parametrize("position", ["full", "shared"])
def test_lrkv_of_rank_0_is_mqa(position):
    mqa = model_of(GQA(num_heads=3, num_kv_heads=1, head_dim=16, value_dim=10))
    lrkv = model_of(LRKV(num_heads=3, head_dim=16, value_dim=10, rank=0, position=position))
    params = exact(mqa)
    same = replaced(params, **{n: params[ATTENTION + n][:, :, 0] for n in ("key", "value")})
    assert_one_function((mqa, params), (lrkv, same))
    if position == "full":
        assert greedy(mqa, params) == greedy(lrkv, same)


def lrkv_weights(params: Weights, name: str) -> np.ndarray:
    """W_shared + U_n B_nᵀ of every head: [L, D, N, H]."""
    shared, down, up = (params[ATTENTION + name + end] for end in ("", "_down", "_up"))
    return np.stack(
        [shared + down[:, n] @ up[:, n] for n in range(down.shape[1])],
        axis=2,
    )


DROPPED = ("key_down", "key_up", "value_down", "value_up")


@pytest.mark.parametrize("qk_norm", ["none", "weighted"])
def test_lrkv_expands_to_mha(qk_norm):
    lrkv = model_of(LRKV(num_heads=3, head_dim=16, value_dim=10, rank=4, qk_norm=qk_norm))
    mha = model_of(GQA(num_heads=3, num_kv_heads=3, head_dim=16, value_dim=10, qk_norm=qk_norm))
    params = exact(lrkv)
    whole = {n: lrkv_weights(params, n) for n in ("key", "value")}
    assert_one_function((mha, replaced(params, DROPPED, **whole)), (lrkv, params))


def test_lrkv_of_rank_h_is_a_given_mha():
    """The shared matrix is the mean head; the rest of each head is U = the rest, B = I."""
    mha = model_of(GQA(num_heads=3, num_kv_heads=3, head_dim=8))
    lrkv = model_of(LRKV(num_heads=3, head_dim=8, rank=8))
    params, new = exact(mha), {}
    for name in ("key", "value"):
        heads = params[ATTENTION + name]  # [L, D, N, H]
        new[name] = heads.mean(axis=2)
        left, size, right = np.linalg.svd((heads - new[name][:, :, None]).swapaxes(1, 2), False)
        new[name + "_down"], new[name + "_up"] = left * size[..., None, :], right
    same = replaced(params, **new)
    assert_one_function((mha, params), (lrkv, same))
    assert greedy(mha, params) == greedy(lrkv, same)


@pytest.mark.parametrize("qk_norm", ["none", "weighted"])
def test_mla_materialised_is_mha_with_explicit_keys(qk_norm):
    """Position full and no norm on the latent: W_K = W_c W_up."""
    sizes = {"num_heads": 3, "head_dim": 16, "value_dim": 10, "qk_norm": qk_norm}
    mla = model_of(MLA(latent_dim=12, position="full", latent_norm="none", **sizes))
    mha = model_of(GQA(num_kv_heads=3, **sizes))
    params = exact(mla)
    down = params[ATTENTION + "latent"]
    new = {
        name: np.einsum("ldc,lcnh->ldnh", down, params[f"{ATTENTION}{name}_up"])
        for name in ("key", "value")
    }
    drop = ("latent", "key_up", "value_up")
    same = replaced(params, drop, **new)
    assert_one_function((mha, same), (mla, params))


def test_absorbed_attention_is_materialised_attention():
    """DeepSeek's form, one head in NumPy: q (W c) = (q W) c and Σ a (W c) = W Σ a c."""
    rng = np.random.default_rng(0)
    q, c = rng.standard_normal((T, 16)), rng.standard_normal((T, 12))
    key_up, value_up = rng.standard_normal((12, 16)), rng.standard_normal((12, 10))
    weights = oracle.softmax(q @ (c @ key_up).T)
    assert_near(oracle.softmax((q @ key_up.T) @ c.T), weights, 1e-12)
    assert_near((weights @ c) @ value_up, weights @ (c @ value_up), 1e-12)


def test_mfa_without_a_latent_norm_is_mqa():
    sizes = {"num_heads": 5, "head_dim": 24, "value_dim": 10, "logit_cap": 3.0}
    mfa = model_of(MFA(query_latent_dim=7, latent_norm="none", **sizes))
    mqa = model_of(GQA(num_kv_heads=1, **sizes))
    params = exact(mfa)
    down, up = (params[ATTENTION + name] for name in ("query_latent", "query"))
    query = np.einsum("ldc,lcnh->ldnh", down, up)
    same = replaced(params, ("query_latent",), query=query)
    assert_one_function((mqa, same), (mfa, params))


# ------------------------------------------------------------------ fold

FOLDED = {
    "gate and biases": {"output_gate": True, "qkv_bias": True, "out_bias": True},
    "narrow, wide values": {"query_dim": 6, "value_dim": 20, "logit_cap": 2.0},
    "premix only": {"postmix_rank": 0, "qkv_bias": True},
    "postmix only": {"premix": False, "qk_norm": "none", "output_gate": True},
    "neither": {"premix": False, "postmix_rank": 0},
}


@pytest.mark.parametrize("name", FOLDED)
def test_vha_folds_to_gqa(name):
    vha = model_of(
        VHA(num_physical_heads=4, num_kv_heads=2, head_dim=16, **FOLDED[name]), windows=(3, 0)
    )
    params = oracle.random_params(vha)
    gqa, folded = fold.to_gqa(vha, {n: jnp.asarray(x) for n, x in params.items()})
    expected_cfg, expected = oracle.fold(vha, params)
    assert gqa == expected_cfg
    oracle.assert_trees_near(folded, expected, 1e-6)
    assert_one_function((vha, exact(vha)), (gqa, expected))


def test_a_query_norm_before_premix_would_break_the_fold_and_after_it_does_not():
    """At a whole layer's output, with Premix as far from I as training takes it."""
    rng = np.random.default_rng(0)
    vha = VHA(num_physical_heads=2, num_kv_heads=2, head_dim=8, qk_norm="weightless")
    cfg = model_of(vha)
    p = oracle.under(exact(cfg), ATTENTION, 0)
    p["premix"] = np.eye(8) + 0.3 * rng.standard_normal((2, 8, 8))
    x, mask = rng.standard_normal((B, T, D)), oracle.document_mask(ONE)
    folded = p | {
        "query": np.stack([q @ W for W in p["premix"] for q in p["query"].swapaxes(0, 1)], 1)
    }
    gqa = oracle.Layer(cfg, {n: w for n, w in folded.items() if n != "premix"}, WHOLE)
    after = oracle.Layer(cfg, p, WHOLE)
    assert_near(gqa(x, mask), after(x, mask), 1e-12)

    class NormFirst(oracle.Layer):
        def plain_queries(self, x):
            physical = self.qk_norm(self.project(x, "query"), "query")
            return np.stack(
                [physical[:, :, i] @ W for W in self.p["premix"] for i in range(2)], axis=2
            )

        def qk_norm(self, x, side):
            normed = super().qk_norm(x, side)
            return x if side == "query" and x.shape[2] == 4 else normed

    expected = after(x, mask)
    before = NormFirst(cfg, p, WHOLE)(x, mask)
    assert np.abs(before - expected).max() > 0.01 * np.abs(expected).max()


# ------------------------------------------------------------------ RoPE on latents


def test_a_turn_of_the_latent_cannot_stand_for_a_turn_of_the_key():
    """B = e₁ and 90°: P B z = z e₂, orthogonal to everything that B reaches."""
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    up = np.array([[1.0], [0.0]])
    key = turn @ up
    nearest, *_ = np.linalg.lstsq(up, key, rcond=None)
    np.testing.assert_allclose(nearest, 0, atol=1e-15)
    assert np.linalg.norm(up @ nearest - key) == pytest.approx(1)
    # RoPE makes that turn where a phase is 90°.
    quarter = oracle.rotate(up.T[None, None], np.full((1, 1), np.pi / 2), 1.0)[0, 0, 0]
    np.testing.assert_allclose(quarter, key[:, 0], atol=1e-15)


class RotatedLatents(oracle.Layer):
    """What the paper says of decoding: latents are rotated as if they were keys, then B."""

    def lrkv(self, x):
        p = self.p
        q = self.turn(self.qk_norm(self.plain_queries(x), "query"))
        shared = self.turn(self.project(x, "key")[:, :, None])
        latents = self.turn(np.einsum("btd,ndr->btnr", x, p["key_down"]))
        k = shared + np.einsum("btnr,nrh->btnh", latents, p["key_up"])
        return q, k, sum(self.low_rank(x, "value"))


def test_rotating_latents_is_another_model_than_the_trained_one():
    """A random B: the paper's decode is wrong, the library's `full` decode is not."""
    cfg = model_of(LRKV(num_heads=3, head_dim=16, rank=4, qk_norm="none", rope_theta=100.0))
    params = exact(cfg)
    p = oracle.under(params, ATTENTION, 0)
    x, mask = np.random.default_rng(0).standard_normal((B, T, D)), oracle.document_mask(ONE)
    trained = oracle.Layer(cfg, p, WHOLE)(x, mask)
    claimed = RotatedLatents(cfg, p, WHOLE)(x, mask)
    assert np.abs(claimed - trained)[:, 0].max() < 1e-12  # nothing is turned at position 0
    assert np.abs(claimed - trained).max() > 0.05 * np.abs(trained).max()

    layer = transformer.unstack(library(cfg, params)).blocks[0].attention
    held = layer.init_cache(B, T, jnp.float32)
    step = jax.jit(layer.extend)
    for t in range(T):
        at = np.full((B, 1), t, np.int32)
        one = jnp.asarray(x[:, t : t + 1], jnp.float32)
        out, held = step(one, held, at, np.ones((B, 1), bool))
        assert_near(out[:, 0], trained[:, t])
