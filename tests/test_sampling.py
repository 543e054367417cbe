"""Sampling: against exact probabilities, at the edges of every setting, row by row."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vhajax.errors import UserError
from vhajax.sampling import Sampling, sample

V = 12
LOGITS = np.random.default_rng(3).standard_normal(V).astype(np.float32)
DRAWS = 4000


def draws(sampling: Sampling, logits: np.ndarray = LOGITS) -> np.ndarray:
    """Always of one shape, so that every operation compiles once."""
    keys = jax.random.split(jax.random.key(0), DRAWS)
    return np.asarray(sample(jnp.asarray(np.tile(logits, (DRAWS, 1))), keys, sampling))


def exact(temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities by going through the tokens from the most likely one down."""
    p = np.exp(LOGITS.astype(np.float64) / temperature)
    order = np.argsort(-p, kind="stable")[: top_k or V]
    p = p / p[order].sum()
    kept, mass = np.zeros(V), 0.0
    for i in order:
        if mass >= top_p:
            break
        kept[i] = p[i]
        mass += p[i]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1, 0, 1), (0.7, 0, 1), (2, 4, 1), (1, V, 1), (1, V + 5, 1), (1, 0, 0.8), (1.3, 5, 0.7)],
)
def test_draws_follow_the_exact_distribution(temperature, top_k, top_p):
    expected = exact(temperature, top_k, top_p) * DRAWS
    counts = np.bincount(draws(Sampling(temperature, top_k, top_p)), minlength=V)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    # χ² with m degrees of freedom: mean m, deviation √(2m); the keys are fixed.
    freedom = possible.sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(top_k=3, top_p=0.5),
        Sampling(temperature=1e-30),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_p=1e-30),
        Sampling(temperature=1e-30, top_k=5, top_p=0.9),
    ],
)
def test_settings_that_leave_one_token_are_greedy(sampling):
    assert (draws(sampling) == LOGITS.argmax()).all()


def test_top_k_of_the_vocabulary_and_more_is_no_top_k():
    plain = draws(Sampling(temperature=1.0))
    for top_k in (V, V + 5):
        np.testing.assert_array_equal(draws(Sampling(temperature=1.0, top_k=top_k)), plain)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(1.0), Sampling(1e-30), Sampling(1.0, top_k=9), Sampling(1.0, top_p=1.0)],
)
def test_padded_ids_are_never_drawn(sampling):
    logits = np.where(np.arange(V) < 5, LOGITS, -np.inf).astype(np.float32)
    assert draws(sampling, logits).max() < 5


def test_ties_go_to_the_lower_id():
    flat = np.zeros(V, np.float32)
    assert (draws(Sampling(), flat) == 0).all()
    assert set(draws(Sampling(1.0, top_k=3), flat)) == {0, 1, 2}


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, top_k=6, top_p=0.9)])
def test_a_rows_draw_depends_on_its_own_logits_and_key(sampling):
    keys = jax.random.split(jax.random.key(1), 6)
    logits = np.random.default_rng(0).standard_normal((6, V)).astype(np.float32)
    together = np.asarray(sample(jnp.asarray(logits), keys, sampling))
    chex.assert_type(together, jnp.int32)
    turned = sample(jnp.asarray(logits[::-1].copy()), keys[::-1], sampling)
    np.testing.assert_array_equal(turned[::-1], together)
    logits[1:] = 7.0
    assert sample(jnp.asarray(logits), keys, sampling)[0] == together[0]


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=V, max_size=V),
    st.sampled_from([1e-30, 0.5, 3.0]),
    st.sampled_from([0, 1, 4, V + 1]),
    st.sampled_from([1e-6, 0.5, 1.0]),
)
@settings(max_examples=30, deadline=None)
def test_a_draw_is_always_one_of_the_top_k(logits, temperature, top_k, top_p):
    logits = np.array(logits, np.float32)
    tokens = draws(Sampling(temperature, top_k, top_p), logits)
    ranks = (logits > logits[:, None]).sum(axis=1)
    assert ranks[tokens].max() < (top_k or V)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": float("nan")}, "top_p is nan"),
    ],
)
def test_refusals(fields, sentence):
    with pytest.raises(UserError, match=f"(?i){sentence}"):
        Sampling(**fields)
