"""The training step: gradients, accumulation, purity, precision, and the same step on a mesh."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import assert_trees_near, mesh_of

from vhajax import checkpoint, config, step
from vhajax.config import GQA, VHA, Data, Experiment, Optim, Train

T, B = 12, 8
LENGTHS = [[12], [5, 7], [4, 4, 4], [11, 1], [12], [2, 10], [6, 6], [3, 9]]
SIZE = {"vocab_size": 100, "dim": 32, "num_layers": 2, "ffn_dim": 64}
GQA_MODEL = config.Model(
    attention=GQA(num_heads=4, num_kv_heads=2, head_dim=8),
    ffn="relu2",
    norm="weightless",
    tied=True,
    dtype="float32",
    **SIZE,
)
VHA_MODEL = config.Model(
    attention=VHA(num_physical_heads=4, num_kv_heads=2, head_dim=8, query_dim=4),
    dtype="float32",
    **SIZE,
)
# Adam's usual eps turns rounding of a gradient that is nearly 0 into a whole step.
OPTIM = Optim(eps=1e-3, clip_norm=0.0, warmup_steps=2, embedding_lr=0.02)


def experiment_of(model: config.Model, optim: Optim = OPTIM, **train) -> Experiment:
    fields = {"steps": 20, "loss_chunk": 16, "z_loss": 0.01} | train
    return Experiment(model, Data(seq_len=T, batch_size=B), optim, Train(**fields))


@dataclasses.dataclass(frozen=True)
class Case:
    experiment: Experiment
    params: dict
    state: step.TrainState
    batch: dict
    step: Any
    """The compiled step of one device, which donates nothing."""
    after: list[tuple[step.TrainState, dict]]
    """States and metrics after the first steps."""


def make_case(experiment: Experiment) -> Case:
    params = oracle.random_params(experiment.model)
    state = step.fresh_state(experiment, {n: jnp.asarray(x) for n, x in params.items()})
    batch = oracle.random_batch(experiment.model, LENGTHS)
    compiled = jax.jit(step.make_train_step(experiment))
    after = [compiled(state, batch)]
    after.append(compiled(after[0][0], batch))
    return Case(experiment, params, state, batch, compiled, after)


@pytest.fixture(scope="module")
def gqa() -> Case:
    return make_case(experiment_of(GQA_MODEL))


@pytest.fixture(scope="module")
def vha() -> Case:
    return make_case(experiment_of(VHA_MODEL))


@pytest.fixture(params=["gqa", "vha"])
def case(request) -> Case:
    return request.getfixturevalue(request.param)


def first_gradients(state: step.TrainState) -> dict[str, np.ndarray]:
    """What the optimizer was given in the first step, read from its unclipped moments."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        if ".momentum" in jax.tree_util.keystr(path):
            found[path[-1].key] = np.asarray(leaf)
        elif ".mu" in jax.tree_util.keystr(path):
            found[path[-1].key] = np.asarray(leaf) / (1 - OPTIM.beta1)
    return found


# ------------------------------------------------------------------ gradients


def test_gradients_equal_finite_differences_of_the_oracle(case):
    """In float64 and for every weight apart, along random directions."""
    cfg, gradients = case.experiment.model, first_gradients(case.after[0][0])
    assert gradients.keys() == case.params.keys()
    rng = np.random.default_rng(0)
    exact = {name: np.asarray(value, np.float64) for name, value in case.params.items()}

    def objective(name: str, move: np.ndarray) -> float:
        return oracle.objective(cfg, exact | {name: exact[name] + move}, case.batch, 0.01)

    for name, gradient in gradients.items():
        assert np.linalg.norm(gradient) > 0
        for _ in range(2):
            direction = rng.standard_normal(gradient.shape)
            direction /= np.linalg.norm(direction)
            h = 1e-4
            slope = (objective(name, h * direction) - objective(name, -h * direction)) / (2 * h)
            # float32 sums, and h² times a third derivative.
            error = abs(slope - np.vdot(gradient, direction))
            assert error < 1e-5 * np.linalg.norm(gradient), name


def test_metrics(case):
    _, metrics = case.after[0]
    nll = oracle.objective(case.experiment.model, case.params, case.batch)
    norm = np.sqrt(sum(float((g**2).sum()) for g in first_gradients(case.after[0][0]).values()))
    assert float(metrics["loss"]) == pytest.approx(nll, rel=2e-6)
    assert float(metrics["tokens"]) == case.batch["weights"].sum()
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert [float(m["learning_rate"]) for _, m in case.after] == [0.5, 1.0]
    chex.assert_type(list(metrics.values()), jnp.float32)
    assert [int(state.step) for state, _ in case.after] == [1, 2]


def test_tokens_of_weight_zero_do_not_matter(gqa):
    batch = dict(gqa.batch)
    batch["targets"] = np.where(batch["weights"] > 0, batch["targets"], 3)
    chex.assert_trees_all_equal(gqa.step(gqa.state, batch), gqa.after[0])


def test_a_batch_without_scored_tokens_is_no_division_by_zero(gqa):
    nothing = gqa.batch | {"weights": np.zeros((B, T), np.float32)}
    state, metrics = gqa.step(gqa.state, nothing)
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0
    assert all(np.isfinite(x).all() for x in state.params.values())


def test_a_bad_step_that_is_skipped_changes_counters_only(case):
    """The step after it is the one that there would have been, at its own rate."""
    bad = case.batch | {"weights": case.batch["weights"] * np.nan}
    what = dataclasses.replace(
        case.experiment, train=dataclasses.replace(case.experiment.train, skip_bad_steps=1)
    )
    compiled = jax.jit(step.make_train_step(what))
    skipped, metrics = compiled(case.after[0][0], bad)
    assert not np.isfinite(metrics["loss"])
    assert not np.isfinite(metrics["grad_norm"])
    assert int(skipped.step) == 2
    before = checkpoint.named_leaves(case.after[0][0])
    for name, x in checkpoint.named_leaves(skipped).items():
        if jnp.issubdtype(x.dtype, jnp.integer):
            assert int(x) == int(before[name]) + 1, name
        else:
            np.testing.assert_array_equal(x, before[name], err_msg=name)
    good, _ = compiled(case.state, case.batch)
    chex.assert_trees_all_close(good, case.after[0][0], rtol=1e-6, atol=1e-7)


def test_the_loss_falls_on_a_repeated_batch(case):
    state, losses = case.state, []
    for _ in range(12):
        state, metrics = case.step(state, case.batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5


def test_the_step_is_pure(case):
    before = jax.tree.map(np.array, case.state)
    chex.assert_trees_all_equal(case.step(case.state, case.batch), case.after[0])
    chex.assert_trees_all_equal(jax.tree.map(np.array, case.state), before)


# ------------------------------------------------------------------ accumulation


@pytest.mark.parametrize("accum", [2, 4])
def test_accumulated_gradients_are_those_of_the_whole_batch(gqa, accum):
    experiment = experiment_of(GQA_MODEL, grad_accum=accum)
    state, metrics = jax.jit(step.make_train_step(experiment))(gqa.state, gqa.batch)
    expected, expected_metrics = gqa.after[0]
    assert_trees_near(first_gradients(state), first_gradients(expected), 1e-6)
    assert_trees_near(state.params, expected.params, 1e-6)
    assert_trees_near(metrics, expected_metrics, 1e-6)


@pytest.mark.parametrize("accum", [2, 4])
def test_a_mean_of_micro_batch_means_would_be_another_loss(gqa, accum):
    micro = [{name: x[i::accum] for name, x in gqa.batch.items()} for i in range(accum)]
    means = np.mean([oracle.objective(GQA_MODEL, gqa.params, one) for one in micro])
    assert abs(means - float(gqa.after[0][1]["loss"])) > 1e-3


# ------------------------------------------------------------------ recomputation


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of the ones inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                yield from equations(getattr(value, "jaxpr", value))


def test_remat_recomputes_and_gives_the_same_gradients(gqa):
    scored = gqa.batch["weights"].sum()
    products, expected = {}, first_gradients(gqa.after[0][0])
    for remat in ("none", "dots", "full"):
        train = experiment_of(GQA_MODEL, remat=remat).train

        def objective(params, batch, train=train):
            return step.sums(oracle.build(GQA_MODEL, params), batch, train)[0] / scored

        traced = jax.jit(jax.grad(objective)).trace(gqa.params, gqa.batch)
        names = [equation.primitive.name for equation in equations(traced.jaxpr.jaxpr)]
        products[remat] = names.count("dot_general")
        if remat != "none":
            gradients = traced.lower().compile()(gqa.params, gqa.batch)
            assert_trees_near(gradients, expected, 1e-6)
    assert products["none"] < products["dots"] < products["full"]


# ------------------------------------------------------------------ several devices


@pytest.mark.filterwarnings("ignore:a dimension of")
@pytest.mark.parametrize(
    ("mechanism", "mesh"),
    [
        ("vha", (8, 1)),
        ("vha", (4, 2)),
        ("vha", (2, 4)),
        ("gqa", (2, 4)),
        pytest.param("gqa", (8, 1), marks=pytest.mark.slow),
        pytest.param("gqa", (4, 2), marks=pytest.mark.slow),
    ],
)
def test_a_sharded_step_equals_the_step_of_one_device(request, mechanism, mesh):
    case = request.getfixturevalue(mechanism)
    devices = mesh_of(*mesh)
    with jax.set_mesh(devices):
        where = step.state_shardings(case.experiment, devices)
        state = jax.device_put(case.state, where)
        batch = jax.device_put(case.batch, step.batch_sharding(devices))
        run = jax.jit(step.make_train_step(case.experiment))
        for _ in range(2):
            state, metrics = run(state, batch)
    assert run._cache_size() == 1  # the state comes back laid out as it went in
    expected, expected_metrics = case.after[1]
    assert_trees_near(state.params, expected.params)
    assert_trees_near(metrics, expected_metrics)
    chex.assert_trees_all_equal_structs(state, where)
    for (path, leaf), place in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(where), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim), jax.tree_util.keystr(path)
    split = state.params["blocks.ffn.up"].addressable_shards[0].data
    assert split.shape == (2, 32 // mesh[0], 64 // mesh[1])


# ------------------------------------------------------------------ the program


def jaxpr_of(experiment: Experiment) -> Any:
    params = oracle.random_params(experiment.model)
    state = jax.eval_shape(lambda: step.fresh_state(experiment, params))
    batch = oracle.random_batch(experiment.model, LENGTHS)
    return jax.make_jaxpr(step.make_train_step(experiment))(state, batch).jaxpr


@pytest.mark.parametrize("model", [GQA_MODEL, VHA_MODEL], ids=["gqa", "vha"])
def test_the_program_does_not_grow_with_the_layers(model):
    counts = []
    for layers in (2, 6):
        deeper = dataclasses.replace(model, num_layers=layers)
        counts.append(
            collections.Counter(
                e.primitive.name for e in equations(jaxpr_of(experiment_of(deeper)))
            )
        )
    assert counts[0] == counts[1]


def test_no_array_is_float64_even_where_float64_is_enabled():
    with jax.enable_x64(True):
        jaxpr = jaxpr_of(experiment_of(VHA_MODEL, grad_accum=2, remat="dots"))
    avals = [var.aval for e in equations(jaxpr) for var in (*e.invars, *e.outvars)]
    arrays = {str(aval.dtype) for aval in avals if getattr(aval, "ndim", 0)}
    assert "float32" in arrays
    assert "float64" not in arrays  # optax corrects its bias with float64 scalars there


def test_a_bfloat16_model_trains_its_float32_weights(gqa):
    optim = dataclasses.replace(OPTIM, name="adamw")
    experiment = experiment_of(dataclasses.replace(GQA_MODEL, dtype="bfloat16"), optim)
    run = jax.jit(step.make_train_step(experiment), donate_argnums=0)
    state = step.fresh_state(experiment, jax.tree.map(jnp.asarray, gqa.params))
    losses = []
    for _ in range(8):
        used, (state, metrics) = state, run(state, gqa.batch)
        # Donated: the old state is gone, so a step needs the memory of one.
        assert all(x.is_deleted() for x in jax.tree.leaves(used))
        losses.append(float(metrics["loss"]))
    # One rounding to 8 bits moves a logit by 2⁻⁹ of its size.
    assert losses[0] == pytest.approx(float(gqa.after[0][1]["loss"]), rel=2**-7)
    assert losses[-1] < losses[0] - 0.3
    for name, value in state.params.items():
        chex.assert_type(value, jnp.float32)
        assert not np.array_equal(value, gqa.params[name])
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    chex.assert_type(moments, jnp.float32)
