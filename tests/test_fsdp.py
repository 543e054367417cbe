"""Weights gathered along `data`, and gradients reduce-scattered: in one step, and as on a torus."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from oracle import mesh_of

from vhajax import hlo, layers, loss, sharding

RNG = np.random.default_rng(5)
B, T, D, N, H, V = 8, 3, 8, 4, 6, 32
X = RNG.standard_normal((B, T, D)).astype(np.float32)
OUT = RNG.standard_normal((B, T, N, H)).astype(np.float32)
TOKENS = RNG.integers(0, V, (B, T)).astype(np.int32)
TORUS = [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]  # columns and rows of 2 × 2
WEIGHTS = {
    "BTD,DNH->BTNH": ((D, N, H), ("data", "model", None)),
    "BTD,NDH->BTNH": ((N, D, H), ("model", "data", None)),
    "BTD,NHD->BTNH": ((N, H, D), ("model", None, "data")),
}


@pytest.fixture(params=["one step", "torus"])
def way(request, monkeypatch):
    if request.param == "torus":
        monkeypatch.setattr(sharding, "phases", lambda *_: TORUS)
        monkeypatch.setattr(sharding, "SUMMED_DEVICES", 4)


def on_mesh(mesh, x, *names):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*names)))


def near(actual, expected) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("equation", WEIGHTS)
def test_products_and_gradients_equal_those_of_whole_weights(equation):
    shape, names = WEIGHTS[equation]
    w = RNG.standard_normal(shape).astype(np.float32)
    mesh = mesh_of(4, 2)

    def objective(x, w):
        made = sharding.gather(w, names, jnp.float32)
        assert isinstance(made, sharding.Whole)
        y = sharding.einsum(equation, x, made, out=("data", "context", "model", None))
        return jnp.sum(y * out), y

    with jax.set_mesh(mesh):
        out = on_mesh(mesh, OUT, "data", "context", "model", None)
        args = on_mesh(mesh, X, "data", "context", None), on_mesh(mesh, w, *names)
        run = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))
        (dx, dw), y = run(*args)
        assert dw.sharding.is_equivalent_to(args[1].sharding, dw.ndim)
        kinds = {one.kind for one in hlo.collectives(run.lower(*args).compile().as_text())}
    assert "all-gather" in kinds
    left, right, result = re.split(",|->", equation)
    near(y, np.einsum(equation, X, w))
    near(dx, np.einsum(f"{result},{right}->{left}", OUT, w))
    near(dw, np.einsum(f"{left},{result}->{right}", X, OUT))


@pytest.mark.usefixtures("way")
def test_an_embedding_and_the_loss_give_a_table_its_gradient():
    table = RNG.standard_normal((V, D)).astype(np.float32)
    mesh, names = mesh_of(4, 2), ("model", "data")
    scored = np.ones((B, T), np.float32)

    def objective(table, gather):
        whole = gather(table)
        x = layers.embed(whole, TOKENS)
        return loss.cross_entropy(jnp.sin(x), whole, TOKENS, scored, V, 0.1, 5)[0]

    expected = jax.grad(lambda t: objective(t, lambda t: t))(jnp.asarray(table))
    with jax.set_mesh(mesh):
        placed = on_mesh(mesh, table, *names)
        gather = lambda t: sharding.gather(t, names, jnp.float32)  # noqa: E731
        found = jax.jit(jax.grad(lambda t: objective(t, gather)))(placed)
        assert found.sharding.is_equivalent_to(placed.sharding, 2)
    near(found, expected)


@pytest.mark.parametrize("size", [16, 64, 256])
def test_steps_over_a_torus_leave_each_device_its_part(size):
    """Each device holds `size` numbers; after all steps device d has the sum of numbers d."""
    held = {device: RNG.integers(0, 100, size) for device in range(size)}
    expected = sum(held.values())
    for groups in sharding.phases(size, "tpu"):
        assert sorted(device for group in groups for device in group) == list(range(size))
        after = {}
        for group in groups:
            total = sum(held[device] for device in group)
            after |= dict(zip(group, np.split(total, len(group)), strict=True))
        held = after
    assert [held[device].item() for device in range(size)] == expected.tolist()


@pytest.mark.parametrize(
    ("size", "platform"), [(16, "cpu"), (16, "gpu"), (4, "tpu"), (8, "tpu"), (32, "tpu")]
)
def test_elsewhere_one_step_does(size, platform):
    assert sharding.phases(size, platform) == [None]
