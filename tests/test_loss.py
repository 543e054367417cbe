"""The chunked cross-entropy: value, gradients, sharding, and that no logits array is whole."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import assert_near, mesh_of

from vhajax.loss import cross_entropy

B, T, D, V, PADDED = 8, 6, 16, 53, 64
RNG = np.random.default_rng(2)
X = RNG.standard_normal((B, T, D)).astype(np.float32)
TABLE = RNG.standard_normal((PADDED, D)).astype(np.float32)
TARGETS = oracle.random_tokens((B, T), V)
WEIGHTS = (RNG.random((B, T)) < 0.7) * RNG.uniform(0.5, 2, (B, T)).astype(np.float32)


@pytest.fixture(scope="module")
def run():
    """Objective, cross-entropy and the gradients of twice the objective, compiled once a case."""

    def scaled(x, table, targets, weights, vocab_size, z_loss, chunk):
        objective, nll = cross_entropy(x, table, targets, weights, vocab_size, z_loss, chunk)
        return 2 * objective, (objective, nll)

    gradients = jax.grad(scaled, argnums=(0, 1), has_aux=True)
    return jax.jit(gradients, static_argnums=(4, 5, 6))


@pytest.mark.parametrize("chunk", [1, 7, 48, 1000])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_value_and_gradients_equal_the_oracles_at_every_chunk_size(run, chunk, z_loss):
    gradients, values = run(X, TABLE, TARGETS, WEIGHTS, V, z_loss, chunk)
    *expected, dx, dtable = oracle.cross_entropy(X, TABLE, TARGETS, WEIGHTS, V, z_loss)
    for actual, value in zip(values, expected, strict=True):
        assert float(actual) == pytest.approx(value, rel=2e-6)
    assert_near(gradients[0], 2 * dx, 2e-6)
    assert_near(gradients[1], 2 * dtable, 2e-6)
    assert (np.asarray(gradients[1])[V:] == 0).all()
    assert (np.asarray(gradients[0])[WEIGHTS == 0] == 0).all()


def test_the_oracles_gradients_are_those_of_a_naive_loss():
    def naive(x, table):
        logits = x @ table[:V].T
        lse = jax.nn.logsumexp(logits, axis=-1)
        hit = jnp.take_along_axis(logits, TARGETS[..., None], axis=-1)[..., 0]
        return jnp.sum(WEIGHTS * (lse - hit + 0.1 * lse**2))

    value, gradients = jax.value_and_grad(naive, argnums=(0, 1))(X, TABLE)
    objective, _, dx, dtable = oracle.cross_entropy(X, TABLE, TARGETS, WEIGHTS, V, 0.1)
    assert float(value) == pytest.approx(objective, rel=2e-6)
    assert_near(gradients[0], dx, 2e-6)
    assert_near(gradients[1], dtable, 2e-6)


def test_a_vocabulary_without_padding(run):
    table, targets = TABLE[:V], TARGETS
    gradients, _ = run(X, table, targets, WEIGHTS, V, 0.0, 16)
    assert_near(gradients[1], 2 * oracle.cross_entropy(X, table, targets, WEIGHTS, V)[3], 2e-6)


def test_values_without_gradients_are_the_same():
    objective, nll = cross_entropy(X, TABLE, TARGETS, WEIGHTS, V, 0.1, 7)
    expected = oracle.cross_entropy(X, TABLE, TARGETS, WEIGHTS, V, 0.1)
    assert float(objective) == pytest.approx(expected[0], rel=2e-6)
    assert float(nll) == pytest.approx(expected[1], rel=2e-6)


def test_huge_logits_do_not_overflow(run):
    gradients, values = run(100 * X, TABLE, TARGETS, WEIGHTS, V, 0.0, 7)
    expected = oracle.cross_entropy(100 * X, TABLE, TARGETS, WEIGHTS, V)
    assert float(values[0]) == pytest.approx(expected[0], rel=2e-6)
    # Logits near 1,000 are off by 1,000 · 2⁻²³ · √D, and so are probabilities that are not 0 or 1.
    assert_near(gradients[0], 2 * expected[2], 1e-3)


def test_bfloat16_hidden_states_are_scored_in_float32(run):
    x, table = jnp.asarray(X, jnp.bfloat16), jnp.asarray(TABLE, jnp.bfloat16)
    gradients, values = run(x, table, TARGETS, WEIGHTS, V, 0.0, 7)
    wide = np.asarray(x, np.float64), np.asarray(table, np.float64)
    expected = oracle.cross_entropy(*wide, TARGETS, WEIGHTS, V)
    # Logits in bfloat16 would put the value off by 2⁻⁹ of a logit, a thousand times as much.
    assert float(values[0]) == pytest.approx(expected[0], rel=2e-6)
    assert gradients[0].dtype == gradients[1].dtype == jnp.bfloat16
    # Slopes, dlogits and results are rounded to 8 bits.
    assert_near(gradients[0], 2 * expected[2], 2**-7)
    assert_near(gradients[1], 2 * expected[3], 2**-7)


@pytest.mark.parametrize("mesh", [(8, 1), (2, 4), (1, 8)])
def test_a_vocabulary_sharded_over_model_gives_the_same(run, mesh):
    with jax.set_mesh(mesh_of(*mesh)):
        gradients, values = run(X, TABLE, TARGETS, WEIGHTS, V, 0.1, 4)
    *expected, dx, dtable = oracle.cross_entropy(X, TABLE, TARGETS, WEIGHTS, V, 0.1)
    for actual, value in zip(values, expected, strict=True):
        assert float(actual) == pytest.approx(value, rel=2e-6)
    assert_near(gradients[0], 2 * dx, 2e-6)
    assert_near(gradients[1], 2 * dtable, 2e-6)


def test_no_array_of_batch_by_sequence_by_vocabulary_exists():
    batch, length, vocab, dim = 8, 64, 8192, 4
    whole = batch * length * vocab * 4

    def loss(x, table, targets, weights):
        return cross_entropy(x, table, targets, weights, vocab, 0.0, 16)[0]

    def naive(x, table, targets, weights):
        logits = jnp.einsum("BTD,VD->BTV", x, table)
        hit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=-1) - hit))

    shape = jax.ShapeDtypeStruct
    tokens = (shape((batch, length), jnp.int32), shape((batch, length), jnp.float32))
    args = (shape((batch, length, dim), jnp.float32), shape((vocab, dim), jnp.float32), *tokens)

    def temporaries(function) -> int:
        compiled = jax.jit(jax.grad(function, argnums=(0, 1))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(naive) >= whole
    assert temporaries(loss) < whole / 4
