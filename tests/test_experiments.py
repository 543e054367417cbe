"""Every experiment file loads, survives JSON and lowers for 64 devices that nobody has here."""

import importlib
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
# Weights too small to spread: every device holds them whole.
SMALL = ("norm.scale", "premix")
# Weights from the input to what all heads share: LRKV's key and value, latents.
SHARED = {f"blocks.attention.{n}" for n in ("key", "value", "latent", "query_latent", "shared_key")}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def experiment(request) -> config.Experiment:
    return experiments.load(str(request.param))


@pytest.fixture
def launch(monkeypatch) -> None:
    """What `python launch/FILE.py` can import."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "launch"))


def test_there_are_experiments():
    assert {path.stem for path in FILES} >= {"demo_gqa", "demo_vha", "small_mla_decoupled"}
    kinds = {type(experiments.load(str(path)).model.attention) for path in FILES}
    assert kinds == set(config.MECHANISMS.values())


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
    attention, small = experiment.model.attention, SMALL
    heads = "model" if attention.num_heads % MESH.model == 0 else None
    if isinstance(attention, config.LRKV) and not heads:
        small = (*SMALL, "key_up", "value_up")  # R × H a head, and nothing else to lie over
    assert spread == {name for name in params if not name.endswith(small)}
    assert params["embedding"].spec == PartitionSpec("model", "data")
    assert params["blocks.ffn.up"].spec == PartitionSpec(None, "data", "model")
    assert params["blocks.attention.out"].spec == PartitionSpec(None, heads, None, "data")
    for name in params.keys() & SHARED:  # no heads to lie over `model`
        if len(params[name].spec) == 3:
            assert params[name].spec == PartitionSpec(None, "data", None)


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


def test_sizes_are_the_papers():
    """VHA authors' Qwen3 shapes, and what is left of MHA's cache in LRKV (Table 7)."""
    sizes = {
        "vha_0b6_gqa": 596_049_920,
        "vha_0b6_vha": 523_570_688,
        "vha_1b7_gqa": 1_720_574_976,
        "vha_1b7_vha": 1_574_695_424,
        "vha_4b_gqa": 4_022_468_096,
        "vha_4b_vha": 3_693_364_736,
    }
    models = {path.stem: experiments.load(path.stem).model for path in FILES}
    assert {name: transformer.num_params(models[name]) for name in sizes} == sizes
    for size, percent in {"128m": 52.60, "1b2": 48.18, "2b5": 48.52, "6b3": 45.31}.items():
        low, full = (
            models[f"lrkv_{size}_{kind}"].attention.cache_row().elements for kind in ("lrkv", "mha")
        )
        assert 100 * low / full == pytest.approx(percent, abs=0.005)


@pytest.mark.usefixtures("launch")
def test_the_table_of_sizes_is_current():
    sizes = importlib.import_module("sizes")
    assert sizes.TABLE.read_text(encoding="utf-8") == sizes.text(), "run `make sizes`"


def test_small_experiments_differ_in_attention_only_and_have_equal_parameters():
    small = [experiments.load(path.stem) for path in FILES if path.stem.startswith("small_")]
    same = {"model.attention": config.GQA(), "model.ffn_dim": 1}
    assert len({changed(one, same) for one in small}) == 1
    counts = [transformer.num_params(one.model) for one in small]
    assert max(counts) < 1.02 * min(counts)
