"""Initial values of factored weights, and that Muon sees one head's factor as one matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import assert_near

from vhajax import config, optim, transformer
from vhajax.config import LRKV, MFA, MLA
from vhajax.sharding import Matrix, named_params

D, L, N, H, R, C = 64, 2, 12, 32, 24, 48
SIZE = {"vocab_size": 50, "vocab_multiple": 64, "dim": D, "num_layers": L, "ffn_dim": 40}
SMALL = 0.1**0.5
OUT = (N * H * 2 * L) ** -0.5
DEVIATIONS = {  # 1/√fan-in; both factors of LRKV's residual are smaller by √0.1
    "mla": {
        "query_latent": D**-0.5,
        "query": C**-0.5,
        "latent": D**-0.5,
        "key_up": C**-0.5,
        "value_up": C**-0.5,
        "shared_key": D**-0.5,
        "gate": D**-0.5,
        "out": OUT,
    },
    "mfa": {
        "query_latent": D**-0.5,
        "query": C**-0.5,
        "key": D**-0.5,
        "value": D**-0.5,
        "gate": D**-0.5,
        "out": OUT,
    },
    "lrkv": {
        "query": D**-0.5,
        "key": D**-0.5,
        "value": D**-0.5,
        "key_down": SMALL * D**-0.5,
        "value_down": SMALL * D**-0.5,
        "key_up": SMALL * R**-0.5,
        "value_up": SMALL * R**-0.5,
        "gate": D**-0.5,
        "out": OUT,
    },
}
OPTIONS = {"num_heads": N, "head_dim": H, "qkv_bias": True, "out_bias": True, "output_gate": True}
MODELS = {
    "mla": MLA(latent_dim=C, query_latent_dim=C, rope_dim=16, **OPTIONS),
    "mfa": MFA(query_latent_dim=C, **OPTIONS),
    "lrkv": LRKV(rank=R, **OPTIONS),
}


@pytest.fixture(scope="module")
def initial() -> dict[str, dict[str, np.ndarray]]:
    """The attention weights of each mechanism."""
    found = {}
    for name, attention in MODELS.items():
        params = transformer.init(config.Model(attention=attention, **SIZE), 0)
        arrays = {n: np.asarray(x, np.float64) for n, x in params.items()}
        found[name] = oracle.under(arrays, "blocks.attention.")
    return found


@pytest.mark.parametrize("name", MODELS)
def test_deviations_are_one_over_the_root_of_the_fan_in(initial, name):
    weights, expected = initial[name], DEVIATIONS[name]
    for part, deviation in expected.items():
        # An estimate from n normal values is off by 1/√(2n): 1.6 % at the smallest, four times.
        assert weights[part].std() == pytest.approx(deviation, rel=0.065), part
        assert abs(weights[part].mean()) < 5 * deviation / np.sqrt(weights[part].size), part
        assert not np.array_equal(weights[part][0], weights[part][1]), part
    rest = weights.keys() - expected.keys()
    assert {part.rsplit("_", 1)[-1].rsplit(".", 1)[-1] for part in rest} == {"bias", "scale"}
    for part in rest:
        assert (weights[part] == (1 if part.endswith("scale") else 0)).all(), part


@pytest.mark.parametrize("side", ["key", "value"])
def test_lrkvs_residual_starts_at_a_tenth_of_the_shared_matrix(initial, side):
    weights = initial["lrkv"]
    for layer in range(L):
        shared = np.linalg.norm(weights[side][layer])
        pairs = zip(weights[f"{side}_down"][layer], weights[f"{side}_up"][layer], strict=True)
        ratios = [np.linalg.norm(down @ up) / shared for down, up in pairs]
        assert np.mean(ratios) == pytest.approx(0.1, rel=0.1)
        assert max(ratios) < 0.13


def test_no_two_factors_share_their_noise(initial):
    for a, b in [("key_down", "value_down"), ("key_up", "value_up"), ("key", "value")]:
        first, second = (initial["lrkv"][name].ravel() for name in (a, b))
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.1
    heads = initial["lrkv"]["key_down"][0].reshape(N, -1)
    assert (np.abs(np.corrcoef(heads) - np.eye(N)) < 0.15).all()


# ------------------------------------------------------------------ the optimizer


@pytest.mark.parametrize("name", MODELS)
def test_biases_and_norms_are_vectors_and_everything_else_a_matrix(name):
    labels = optim.labels(transformer.abstract(config.Model(attention=MODELS[name], **SIZE)))
    for path, group in oracle.under(labels, "blocks.attention.").items():
        assert group == ("vector" if path.endswith(("bias", "scale")) else "matrix"), path


def test_muon_orthogonalises_one_heads_factor_at_a_time():
    """[L, N, D, R]: each D × R on its own, not N·R columns side by side."""
    cfg = config.Model(attention=LRKV(num_heads=3, head_dim=8, rank=4), **SIZE)
    weights = {
        name: param
        for name, param in named_params(transformer.abstract(cfg)).items()
        if name.endswith(("_down", "_up"))
    }
    assert {name.rsplit(".", 1)[-1] for name in weights} == {
        "key_down",
        "key_up",
        "value_down",
        "value_up",
    }
    assert all(param.get_metadata("matrix") == Matrix(1) for param in weights.values())
    rng = np.random.default_rng(0)
    gradients = {name: rng.standard_normal(p.get_value().shape) for name, p in weights.items()}
    tx = optim.scale_by_muon(weights, 0.5)
    params = {name: jnp.zeros(g.shape, jnp.float32) for name, g in gradients.items()}
    given = {name: jnp.asarray(g, jnp.float32) for name, g in gradients.items()}
    updates, _ = jax.jit(tx.update)(given, tx.init(params))
    for name, gradient in gradients.items():
        rows, cols = gradient.shape[-2:]
        heads = gradient.reshape(-1, rows, cols)
        assert len(heads) == 3 * L
        expected = np.stack([oracle.newton_schulz(1.5 * head) for head in heads])
        expected = expected.reshape(gradient.shape) * max(1, cols / rows) ** 0.5
        assert_near(updates[name], expected, 1e-5)
