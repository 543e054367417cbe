"""Every experiment file loads, survives JSON and lowers for 64 devices that nobody has here."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from tiny import changed

from vhajax import config, step, transformer
from vhajax import experiment as experiments
from vhajax.sharding import AXES

FILES = sorted((Path(__file__).parent.parent / "experiments").glob("*.py"))
MESH = config.Mesh(data=16, model=4)


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def experiment(request) -> config.Experiment:
    return experiments.load(str(request.param))


def test_there_are_experiments():
    assert {path.stem for path in FILES} >= {"demo_gqa", "demo_vha"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_bare_name_finds_the_file_from_anywhere(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert experiments.load(path.stem) == experiments.load(str(path))


def test_json_round_trip(experiment):
    assert config.from_json(config.to_json(experiment), "test") == experiment


@pytest.mark.filterwarnings("ignore:a dimension of:UserWarning")  # few heads, many devices
def test_a_training_step_lowers_on_64_devices(experiment):
    batch_size = MESH.data * experiment.train.grad_accum
    experiment = changed(experiment, {"data.batch_size": batch_size, "mesh": MESH})
    mesh = AbstractMesh(MESH.shape, AXES, (AxisType.Explicit,) * 3)
    with jax.sharding.use_abstract_mesh(mesh):
        where = step.state_shardings(experiment, mesh)
        state = abstract_state(experiment, where)
        batch = abstract_batch(experiment, step.batch_sharding(mesh))
        traced = jax.jit(step.make_train_step(experiment), donate_argnums=0).trace(state, batch)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()

    new_state, metrics = traced.out_info
    jax.tree.map(lambda new, place: check_equal(new.sharding, place), new_state, where)
    jax.tree.map(lambda new, old: check_equal(new.shape, old.shape), new_state, state)
    jax.tree.map(lambda new, old: check_equal(new.dtype, old.dtype), new_state, state)
    everywhere = NamedSharding(mesh, PartitionSpec())
    assert {(x.shape, x.dtype.name) for x in metrics.values()} == {((), "float32")}
    assert {x.sharding for x in metrics.values()} == {everywhere}

    assert "mhlo.num_partitions = 64" in text
    assert '"data"=16, "context"=1, "model"=4' in text
    # As an argument: no weight matrix is whole on a device, and every donated buffer is reused.
    assert 'sdy.sharding = #sdy.sharding<@mesh, [{"model"}, {"data"}]>' in text
    params = where.params
    spread = {name for name, place in params.items() if {"data", "model"} & set(place.spec)}
    small = {name for name in params if name.endswith(("norm.scale", "premix"))}
    assert spread == params.keys() - small
    assert params["embedding"].spec == PartitionSpec("model", "data")
    assert params["blocks.ffn.up"].spec == PartitionSpec(None, "data", "model")
    assert params["blocks.attention.out"].spec == PartitionSpec(None, "model", None, "data")


def check_equal(one, other) -> None:
    assert one == other


def abstract_state(experiment: config.Experiment, where: step.TrainState) -> step.TrainState:
    params = transformer.init_shapes(experiment.model, where.params)
    opt_state = jax.eval_shape(step.optimizer(experiment).init, params)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        step.TrainState(params, opt_state, count),
        where,
    )


def abstract_batch(experiment: config.Experiment, where: NamedSharding) -> step.Batch:
    shape = (experiment.data.batch_size, experiment.data.seq_len)
    kinds = dict.fromkeys(("tokens", "targets", "positions", "segments"), jnp.int32)
    return {
        name: jax.ShapeDtypeStruct(shape, kind, sharding=where)
        for name, kind in {**kinds, "weights": jnp.float32}.items()
    }
