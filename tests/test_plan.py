"""`vhajax plan`: compiled for chips that nobody here owns, against figures worked out by hand."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_kernel_compile import pytestmark  # noqa: F401 (libtpu's wheels)
from tiny import run_json

from pallas_kernels import ahead
from vhajax import cli, estimate, experiment, hardware, plan, plan_report, program, topology
from vhajax.config import GQA, VHA, Data, Experiment, Mesh, Model, Optim, Train
from vhajax.errors import UserError

D, F, N, K, H, LAYERS, VOCAB, T, ACCUM = 512, 512, 4, 2, 128, 3, 512, 128, 2
TINY = Experiment(
    Model(VOCAB, D, LAYERS, GQA(num_heads=N, num_kv_heads=K, head_dim=H), ffn_dim=F),
    Data(seq_len=T, batch_size=8),
    Optim(name="muon"),
    Train(grad_accum=ACCUM, remat="dots"),
)
LAYER = 2 * D * N * H + 2 * D * K * H + 3 * D * F  # elements of a layer's seven matrices
TABLES = 2 * VOCAB * D
NORMS = (2 * LAYERS + 1) * D + LAYERS * 2 * H  # QK-norm's too


@functools.cache
def planned(name: str, mesh: str | None = None) -> plan.Plan:
    where = topology.target(name, mesh)
    return plan.train(topology.placed(TINY, where), where)


def traffic(made: plan.Plan, part: str) -> dict[str, tuple[int, float]]:
    return {t.kind: (t.count, t.sent) for t in made.traffic if t.part == part}


# ------------------------------------------------------------------ what is asked for


def test_a_topology_and_a_mesh_are_read():
    assert topology.target("v5e:4x4", None).mesh == Mesh(data=16)
    assert topology.target("v6e:8x8", "data=16,model=4").mesh == Mesh(data=16, model=4)
    assert topology.target("h100:8", "model=2,data=4").mesh == Mesh(data=4, model=2)
    assert topology.target("v5p:2x2x1", None).devices == 4
    assert topology.target("tpu7x:2x2x1", None).devices == 8  # two cores a chip
    assert topology.target("v4:2x2x1", None).accelerator is hardware.ACCELERATORS["v4"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    {
        ("--topology", "v9:2x2"): r"--topology is 'v9:2x2'; write a chip \(v5e, ",
        ("--topology", "v5e"): "--topology is 'v5e'; write a chip",
        ("--topology", "v5e:0x4"): "has no devices",
        ("--topology", "h100:2x2"): "of GPUs write how many, as in h100:8",
        ("--topology", "v5e:4x4", "--mesh", "data=4"): "of 4 devices, but v5e:4x4 has 16",
        ("--topology", "v5e:4x4", "--mesh", "rows=16"): "write sizes by axis",
        ("--topology", "v5e:4x4", "--mesh", "data=x"): "write sizes by axis",
        ("--topology", "v5e:4x4", "--mesh", "context=16"): "context parallelism is not built",
        ("--topology", "v5e:4x4", "--data.batch-size", "24"): r"data\.batch_size is 24, not a mult",
        ("--topology", "v5e:3x5", "--model.dim", "120", "--data.batch-size", "15"): "refuses",
        ("--topology", "v5e:4x4", "--mesh.data", "8"): "it is given as --mesh",
        ("--topology", "v5e:2x2", "--decode", "--batch", "0"): "holds nothing",
    }.items(),
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(options, sentence, capfd):
    assert cli.main(["plan", "small_gqa", *options]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert re.search(sentence, err), err


def test_a_missing_compiler_is_named(monkeypatch):
    def missing(_):
        raise ahead.NoCompilerError("Compiling for a TPU needs libtpu, which is not installed.")

    monkeypatch.setattr(ahead, "topology", missing)
    with pytest.raises(UserError, match="needs libtpu"):
        topology.device_mesh(topology.target("v5e:2x2", None))


# ------------------------------------------------------------------ by hand


@pytest.mark.parametrize(("remat", "passes"), [("none", 2), ("dots", 3), ("full", 3)])
@pytest.mark.parametrize(("data", "model"), [(4, 1), (2, 2), (1, 4)])
def test_what_fsdp_must_send(remat, passes, data, model):
    train = Train(grad_accum=ACCUM, remat=remat)
    what = dataclasses.replace(TINY, train=train, mesh=Mesh(data=data, model=model))
    # K = 2 heads lie whole on each of four devices.
    kv = 2 * D * K * H
    sharded = (passes * LAYERS * (LAYER - kv) + 2 * TABLES) / model
    heads = passes * LAYERS * kv / (model if K % model == 0 else 1)
    assert plan.fsdp_minimum(what) == ACCUM * 2 * (sharded + heads) * (data - 1) / data


def test_what_is_replicated_needs_not_be_gathered():
    cfg = VHA(num_physical_heads=4, num_kv_heads=2, head_dim=H)
    model = dataclasses.replace(TINY.model, attention=cfg)
    what = dataclasses.replace(TINY, model=model, mesh=Mesh(data=4))
    assert cfg.num_heads == 8
    layer = (4 + 2 * 2 + 8) * H * D + 3 * D * F  # query of 4 heads, out of 8
    assert plan.fsdp_minimum(what) == ACCUM * 2 * 3 / 4 * (9 * layer + 2 * TABLES)


def test_the_estimate():
    where = topology.target("v5e:2x2", None)  # 197e12 FLOP/s, 819e9 and 200e9 bytes/s
    costs = estimate.Costs(flops=197e12, accessed=2 * 819e9, optimal=math.nan)
    made = estimate.estimate(where, costs, sent=50e9, model_flops=4 * 98.5e12)
    assert (made.compute, made.memory, made.collectives) == (1, 2, 0.25)
    assert made.seconds == 2.25
    assert made.mfu == pytest.approx(0.5 / 2.25)
    sane = estimate.estimate(where, dataclasses.replace(costs, optimal=3.0), 50e9, 4 * 98.5e12)
    assert sane.seconds == 3
    assert sane.mfu == pytest.approx(0.5 / 3)


def test_costs_of_layers():
    one, two = estimate.Costs(10, 100, math.nan), estimate.Costs(13, 150, 1)
    made = estimate.extrapolate(one, two, 4)
    assert (made.flops, made.accessed) == (19, 250)
    assert math.isnan(made.optimal)


# ------------------------------------------------------------------ compiled


def test_collectives_of_a_small_model_are_those_that_fsdp_needs():
    made = planned("v5e:2x2")
    share = ACCUM * 2 * 3 / 4  # bytes of bfloat16 that one of 4 devices sends, micro-batches
    gathers = 2 * LAYERS * LAYER + TABLES
    found = traffic(made, program.PARTS[0])
    assert found["all-gather"] == (ACCUM * (2 * LAYERS * 7 + 2), share * gathers)
    assert found.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    # XLA sums some small weights' gradients whole (twice the bytes), as it must those of norms,
    # unless it does that once for all micro-batches, with the optimizer's sums.
    summed = found["reduce-scatter"][1] + found["all-reduce"][1] / 2
    expected = share * (LAYERS * LAYER + TABLES)
    assert expected <= summed < expected + ACCUM * 3 / 4 * 4 * NORMS + 100  # the loss
    assert found["reduce-scatter"][1] > 0.8 * share * (LAYERS * LAYER + TABLES)
    assert made.minimum == share * (gathers + LAYERS * LAYER + TABLES)


def test_muon_exchanges_layers_and_gathers_none():
    found = traffic(planned("v5e:2x2"), program.PARTS[1])
    # 3 layers, filled up to 4, to whole matrices and back, float32.
    assert found["all-to-all"] == (14, 2 * 3 / 4 * 4 * LAYER * 4 / 4)
    assert found.keys() == {"all-to-all", "all-reduce"}


def test_memory_is_what_the_compiler_counts(monkeypatch):
    seen = []
    read = program.memory_of
    monkeypatch.setattr(program, "memory_of", lambda c, *rest: seen.append(c) or read(c, *rest))
    monkeypatch.setattr(plan, "_estimate", lambda *_: None)
    where = topology.target("v5e:2x2", None)
    held = plan.train(topology.placed(TINY, where), where).memory
    found = seen[0].memory_analysis()
    assert held.parameters + held.optimizer + held.inputs == found.argument_size_in_bytes
    assert held.activations + held.temporaries == found.temp_size_in_bytes
    made = found.output_size_in_bytes - found.alias_size_in_bytes
    assert held.total == sum(
        (
            found.argument_size_in_bytes,
            found.temp_size_in_bytes,
            made,
            found.generated_code_size_in_bytes,
        )
    )
    assert held.parameters == 4 * ((LAYERS * LAYER + TABLES) / 4 + NORMS)
    # Muon's momentum; Adam's two moments of tables and norms; a few counters.
    moments = 4 * (LAYERS * LAYER / 4 + 2 * (TABLES / 4 + NORMS))
    assert moments <= held.optimizer < moments + 100
    assert 0 <= held.inputs < 2**20


@pytest.mark.parametrize("name", ["v5e:2x2", pytest.param("h100:2", marks=pytest.mark.slow)])
def test_a_plan_is_told_as_json_and_as_text(name):
    made = planned(name)
    values = plan_report.report(made)
    text = plan_report.describe({"experiment": "tiny", **values})
    assert values["memory_per_device"]["fits"] is True
    assert values["devices"] == made.target.devices
    assert 0 < values["estimate"]["mfu"] < 1
    assert values["sent_per_device"][program.PARTS[0]] > 0
    assert name in text
    assert "an estimate" in text
    assert values["warnings"] == []
    assert 1 <= values["forward_and_backward_over_minimum"] < 1.1


def test_a_decode_step_is_planned(capsys):
    options = ("--topology", "v5e:1x1", "--decode", "--context", "1024", "--batch", "4")
    made = run_json(capsys, "plan", "small_gqa", *options)
    cfg = experiment.load("small_gqa").model
    row = cfg.attention.cache_row().stored_bytes(2)
    cache = 4 * 1024 * cfg.num_layers * row
    held = made["memory_per_device"]
    assert cache <= held["inputs"] < cache + 2**20
    assert held["optimizer"] == held["activations"] == 0
    assert made["collectives"] == []
    seconds = (held["parameters"] + held["inputs"]) / 819e9
    assert made["estimate"]["seconds"] == pytest.approx(seconds)


def test_a_step_that_the_compiler_cannot_fit_is_refused():
    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
                "space hbm. Used 18.26G of 15.75G hbm. Exceeded hbm capacity by 2.51G."
            )

    where = topology.target("v5e:1x1", None)
    with pytest.raises(UserError, match=r"not fit the memory of v5e:1x1 \(.*Used 18.26G of 15.75G"):
        program.compile_for(where.topology, Lowered(), [])


def test_an_involuntary_rematerialisation_is_heard():
    """A canary: if the compiler's warning changes its words, or is not written, this fails."""
    with program.hushed():
        devices = ahead.topology("v5e:2x2")
    mesh = jax.make_mesh((2, 2), ("a", "b"), (AxisType.Explicit,) * 2, devices=devices)
    spec = PartitionSpec(None, "a", "b")
    x = jax.ShapeDtypeStruct((4, 512, 512), jnp.float32, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        move = jax.jit(lambda x: jax.reshard(jnp.sin(x), PartitionSpec(("a", "b"), None, None)))
        told: list[str] = []
        program.compile_for("v5e:2x2", move.lower(x), told)
    assert len(told) == 1
    assert program.INVOLUNTARY in told[0]


def test_a_large_array_on_every_device_is_told():
    with program.hushed():
        devices = ahead.topology("v5e:2x2")
    mesh = jax.make_mesh((4,), ("a",), (AxisType.Explicit,), devices=devices)

    def array(size: int, *spec: str) -> jax.ShapeDtypeStruct:
        where = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct((size,), jnp.float32, sharding=where)

    tree = {"big": array(2**22), "small": array(2**20), "spread": array(2**25, "a")}
    told = program.replicated({"parameter": tree}, 4)
    assert told == ["parameter ['big'] of 16,777,216 bytes lies whole on every device"]


# ------------------------------------------------------------------ the plans of PLANS.md

SHOWN = {  # one of each model and each slice: a compilation takes minutes
    ("vha_1b7_vha", "v5e:4x4"): [],
    ("lrkv_2b5_lrkv", "v6e:8x8"): ["--data.batch-size", "256", "--train.grad-accum", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "slice_"), SHOWN)
def test_plans_that_are_shown(name, slice_, monkeypatch):
    if (name, slice_) != ("vha_1b7_vha", "v5e:4x4"):  # three more programs each
        nothing = estimate.Costs(1.0, 1.0, 1.0)
        made = estimate.estimate(topology.target(slice_, None), nothing, 0.0, 1.0)
        monkeypatch.setattr(plan, "_estimate", lambda *_: made)
    where = topology.target(slice_, None)
    options = [*SHOWN[name, slice_], "--train.remat", "dots"]
    found = experiment.override(topology.elsewhere(experiment.load(name)), options, "plan")
    made = plan.train(topology.placed(found, where), where)
    assert made.fits
    assert traffic(made, program.PARTS[0]).keys() <= {
        "all-gather",
        "reduce-scatter",
        "all-reduce",
        "collective-permute",
    }
    assert made.minimum <= made.sent(program.PARTS[0]) <= 1.2 * made.minimum
    assert not [warning for warning in made.warnings if program.INVOLUNTARY in warning]
    assert 0 < made.estimate.mfu < 1
    assert (made.sent(program.PARTS[1], "all-to-all") > 0) == (found.optim.name == "muon")
