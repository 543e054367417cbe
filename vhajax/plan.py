"""Compiles a training step or a decode step for devices that nobody here owns, and reads it.

Bytes that collectives send are those of `hlo.Collective.sent`: what each device of a ring sends.
By the same count FSDP must send, a micro-batch, for every weight that lies over the n devices of
`data`, w bytes in compute dtype (one `model` shard of it):

  matrices of blocks   3·w·(n−1)/n: gathered for the forward pass, gathered again for the backward
                       pass (which is what dropping them after use costs; with `train.remat` none
                       they are kept, and 2 remain), their gradient reduce-scattered
  tables               2·w·(n−1)/n: gathered once, their gradient reduce-scattered once

and that `train.grad_accum` times, as gradients of a micro-batch end where they are accumulated, in
pieces. Gradients of what is replicated (norms, mixers), the loss's sums and anything over `model`
are left out, so the figure is a lower bound.

The estimate. XLA counts the body of a loop once, so costs come from programs without loops: the
gradient of one micro-batch with one and with two layers (g₁, g₂), its logits in one piece, and the
optimizer's update of all layers (u).

  cost = accum · (g₁ + (L−1)·(g₂−g₁)) + u

  seconds = max(FLOPs / peak, bytes / bandwidth) + sent bytes / interconnect

with FLOPs (no fewer than the model's, as XLA does not see into kernels) and bytes accessed as XLA
counts them, and sent bytes of the whole program; or, where XLA:TPU has a count of all three
programs that makes sense, the same sum of its `optimal_seconds`. Nothing overlaps and nothing
waits: it is an estimate.
"""

import contextlib
import dataclasses
import math
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import UnsupportedError, ahead
from vhajax import config, cost, hardware, hlo, inference, sharding, step, transformer
from vhajax.decode import decode_step, init_cache
from vhajax.errors import UserError
from vhajax.mechanisms import require

CHIPS = (*ahead.TOPOLOGIES, "v4", *ahead.GPUS)
CORES = {"tpu7x": 2}  # JAX devices of a chip
LARGE = 2**24  # bytes of an array that should not lie on every device
INVOLUNTARY = "Involuntary full rematerialization"
PARTS = ("forward and backward", "optimizer")


@dataclass(frozen=True)
class Target:
    """topology: as libtpu names it, or `h100:8`. mesh: over all of its devices."""

    topology: str
    accelerator: hardware.Accelerator
    mesh: config.Mesh

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.shape)


@dataclass(frozen=True)
class Memory:
    """Bytes a device.

    inputs: rows of a batch, or tokens and cache of a decode step; and the padding of all arguments.
    activations: kept between forward and backward pass. temporaries: everything else that lives
    inside a step, gradients included. results: what is not written over an argument.
    program: the code.
    """

    parameters: int
    optimizer: int
    inputs: int
    activations: int
    temporaries: int
    results: int
    program: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in a step. part: of PARTS. sent: bytes a device."""

    part: str
    kind: str
    count: int
    sent: float


@dataclass(frozen=True)
class Costs:
    """A device's. optimal: seconds by XLA:TPU; nan where it has none."""

    flops: float
    accessed: float
    optimal: float

    def plus(self, other: "Costs", times: float = 1) -> "Costs":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Costs(*(a + times * b for a, b in pairs))


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, and what they are made of; mfu: model FLOPs over what peak would do."""

    seconds: float
    compute: float
    memory: float
    collectives: float
    mfu: float
    optimal: float


@dataclass(frozen=True)
class Plan:
    """What one step needs. tokens: that it trains on or makes. minimum: bytes FSDP must send."""

    target: Target
    tokens: int
    memory: Memory
    traffic: tuple[Traffic, ...]
    minimum: float
    estimate: Estimate
    warnings: tuple[str, ...]
    compile_seconds: float

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.target.accelerator.memory

    def sent(self, part: str, kind: str = "") -> float:
        return sum(t.sent for t in self.traffic if t.part == part and kind in ("", t.kind))


Tell = Callable[[str], None]
"""Called with what happens next."""


# ------------------------------------------------------------------ what is asked for


def target(topology: str, mesh: str | None) -> Target:
    """`v5e:16x16` or `h100:8`, and `data=64,model=4` (default: data over all devices).

    Raises:
      UserError: a name or a size that there is not, or a mesh of another number of devices.
    """
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", topology)
    require(
        found is not None and found[1] in CHIPS,
        f"--topology is {topology!r}; write a chip ({', '.join(CHIPS)}) and its size, as in "
        "v5e:4x4, v5p:2x2x1 or h100:8.",
    )
    assert found
    count = math.prod(map(int, found[2].split("x"))) * CORES.get(found[1], 1)
    require(count > 0, f"--topology is {topology!r}, which has no devices; make it larger.")
    require(
        found[1] not in ahead.GPUS or "x" not in found[2],
        f"--topology is {topology!r}; of GPUs write how many, as in {found[1]}:8.",
    )
    made = _mesh(mesh, count)
    require(
        math.prod(made.shape) == count,
        f"--mesh is {mesh} of {math.prod(made.shape)} devices, but {topology} has {count}; "
        "make them equal.",
    )
    return Target(topology, hardware.ACCELERATORS[found[1]], made)


def _mesh(text: str | None, count: int) -> config.Mesh:
    if text is None:
        return config.Mesh(data=count)
    parts = [part.partition("=") for part in text.split(",")]
    sizes = {name: int(size) for name, _, size in parts if size.isdecimal()}
    require(
        len(sizes) == len(parts) and sizes.keys() <= set(sharding.AXES),
        f"--mesh is {text!r}; write sizes by axis, as in data=64,model=4.",
    )
    return config.Mesh(**sizes)


def elsewhere(experiment: config.Experiment) -> config.Experiment:
    """The experiment without its mesh, which is about other devices than the target's."""
    return dataclasses.replace(experiment, mesh=config.Mesh())


def placed(experiment: config.Experiment, where: Target) -> config.Experiment:
    """The experiment on the target's mesh.

    Raises:
      UserError: its batch or its sizes do not divide over that mesh, or it has one of its own.
    """
    require(
        experiment.mesh == config.Mesh(),
        f"mesh is {experiment.mesh.shape}; of a plan it is given as --mesh data=D,model=M.",
    )
    return dataclasses.replace(experiment, mesh=where.mesh)


def device_mesh(where: Target) -> jax.sharding.Mesh:
    """
    Raises:
      UserError: the compiler is not installed, or it knows no such topology.
    """
    try:
        with _hushed():
            devices = ahead.topology(where.topology)
            return sharding.make_mesh(where.mesh, devices)
    except ahead.NoCompilerError as error:
        raise UserError(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"--topology is {where.topology!r}, which the compiler refuses ({_line(error)}); "
            "choose one that is built."
        ) from error


# ------------------------------------------------------------------ training


def train(experiment: config.Experiment, where: Target, tell: Tell = lambda _: None) -> Plan:
    """The training step of an experiment that is `placed` already, compiled and read.

    Raises:
      UserError: no compiler, no such topology, or it needs more memory than a device has.
    """
    mesh = device_mesh(where)
    tell("tracing the step")
    with jax.set_mesh(mesh), _told() as told, _kernels(mesh):
        state, batch = step.abstract_state(experiment, mesh), step.abstract_batch(experiment, mesh)
        kept = _kept(experiment, mesh)
        lowered = jax.jit(step.make_train_step(experiment), donate_argnums=0).lower(state, batch)
        tell("compiling the step (about a minute)")
        compiled, seconds = _compile(lowered, where, told)
        text = compiled.as_text()
        memory = _memory(compiled, state.params, state.opt_state, kept)
        traffic = _traffic(text)
        estimate = _estimate(experiment, mesh, where, sum(t.sent for t in traffic), tell)
        told += _replicated({"parameter": state.params, "optimizer": state.opt_state}, where)
    return Plan(
        target=where,
        tokens=experiment.data.batch_size * experiment.data.seq_len,
        memory=memory,
        traffic=traffic,
        minimum=fsdp_minimum(experiment),
        estimate=estimate,
        warnings=tuple(dict.fromkeys(told)),
        compile_seconds=seconds,
    )


def fsdp_minimum(experiment: config.Experiment) -> float:
    """Bytes that each device must send in forward and backward passes; see the module."""
    mesh, model = experiment.mesh, experiment.model
    itemsize = 4 if model.dtype == "float32" else 2
    passes = 2 if experiment.train.remat == "none" else 3
    total = 0.0
    for name, param in sharding.named_params(transformer.abstract(model)).items():
        names, size = param.get_metadata("names"), param.get_value().size
        if "data" not in names:
            continue
        if "model" in names and _axis_size(param, "model") % mesh.model == 0:
            size /= mesh.model
        times = passes if name.startswith("blocks.") else 2
        total += times * hlo.sent(size * itemsize, "all-gather", mesh.data)
    return total * experiment.train.grad_accum


def _axis_size(param: Any, axis: str) -> int:
    names, shape = param.get_metadata("names"), param.get_value().shape
    return shape[len(shape) - len(names) + names.index(axis)]


def _micro(experiment: config.Experiment) -> config.Experiment:
    """One micro-batch as a whole step, its logits in one piece."""
    data, train = experiment.data, experiment.train
    rows = data.batch_size // train.grad_accum
    tokens = rows * data.seq_len // experiment.mesh.data
    return dataclasses.replace(
        experiment,
        data=dataclasses.replace(data, batch_size=rows),
        train=dataclasses.replace(train, grad_accum=1, loss_chunk=tokens),
    )


def _kept(experiment: config.Experiment, mesh: jax.sharding.Mesh) -> int:
    """Bytes a device of what one micro-batch's forward pass keeps for its backward pass."""
    micro = _micro(experiment)
    loss, state = step.make_loss(micro), step.abstract_state(micro, mesh)

    def forward(params: Any, batch: Any) -> list[jax.Array]:
        return jax.tree.leaves(jax.vjp(lambda p: loss(p, batch, 1.0)[0], params)[1])

    traced = jax.make_jaxpr(forward)(state.params, step.abstract_batch(micro, mesh)).jaxpr
    made = {v for equation in traced.eqns for v in equation.outvars}
    kept = {v for v in traced.outvars if not hasattr(v, "val")}  # no literals
    return sum(_shard_bytes(v.aval) for v in kept & made)


def _estimate(
    experiment: config.Experiment,
    mesh: jax.sharding.Mesh,
    where: Target,
    sent: float,
    tell: Tell,
) -> Estimate:
    model, data = experiment.model, experiment.data
    one, two = (_gradient_costs(experiment, mesh, layers, tell) for layers in (1, 2))
    tell("compiling the optimizer for the estimate")
    state = step.abstract_state(experiment, mesh)
    update = _costs(step.make_update(experiment), state, state.params)
    total = update.plus(extrapolate(one, two, model.num_layers), experiment.train.grad_accum)
    flops = 3 * cost.forward(model, data.seq_len, data.batch_size).total
    return estimate(where, total, sent, flops)


def _gradient_costs(
    experiment: config.Experiment, mesh: jax.sharding.Mesh, layers: int, tell: Tell
) -> Costs:
    """Of a micro-batch's gradient with so many layers and no loop."""
    tell(f"compiling {layers} of its layers for the estimate")
    micro = _micro(experiment)
    small = dataclasses.replace(micro, model=dataclasses.replace(micro.model, num_layers=layers))
    loss = step.make_loss(small, unroll=layers)

    def gradient(params: Any, batch: Any) -> Any:
        scored = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        return jax.grad(loss, has_aux=True)(params, batch, scored)

    state = step.abstract_state(small, mesh)
    return _costs(gradient, state.params, step.abstract_batch(small, mesh))


def extrapolate(one: Costs, two: Costs, layers: int) -> Costs:
    """Costs of so many layers from those of one and of two."""
    return one.plus(two.plus(one, -1), layers - 1)


def estimate(where: Target, costs: Costs, sent: float, model_flops: float) -> Estimate:
    """See the module. model_flops: of the whole step, over all devices."""
    chip = where.accelerator
    compute = max(costs.flops, model_flops / where.devices) / chip.peak
    memory, collectives = costs.accessed / chip.bandwidth, sent / chip.interconnect
    seconds = costs.optimal if costs.optimal > 0 else max(compute, memory) + collectives
    mfu = model_flops / (seconds * where.devices * chip.peak)
    return Estimate(seconds, compute, memory, collectives, mfu, costs.optimal)


def _costs(function: Callable, *arguments: Any) -> Costs:
    with _hushed(), warnings.catch_warnings(action="ignore"):
        compiled = jax.jit(function).lower(*arguments).compile()
    found = compiled.cost_analysis() or _counted(compiled)
    seconds = found.get("optimal_seconds", -1.0)
    return Costs(found["flops"], found["bytes accessed"], seconds if seconds > 0 else math.nan)


def _counted(compiled: Any) -> dict[str, float]:
    """XLA's own count of a program for a GPU, whose plugin has none without a GPU."""
    # Not public; what `Lowered.cost_analysis` calls.
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    (module,) = compiled.runtime_executable().hlo_modules()
    return _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)


# ------------------------------------------------------------------ decoding


def decode(
    experiment: config.Experiment,
    where: Target,
    context: int,
    batch: int,
    tell: Tell = lambda _: None,
) -> Plan:
    """The decode step of the experiment's model (VHA folded) over a cache of `context` slots.

    Seconds are those of reading weights and cache once and of what is sent.

    Raises:
      UserError: as `train`; or a cache of nothing.
    """
    mesh, cfg = device_mesh(where), cost.folded(experiment.model)
    tell("compiling the decode step")
    with jax.set_mesh(mesh), _told() as told:
        places = sharding.shardings(transformer.abstract(cfg), mesh)
        params = transformer.init_shapes(cfg, places)
        model = _on(mesh, jax.eval_shape(lambda p: inference.decoder(cfg, p), params))
        held = _on(mesh, jax.eval_shape(lambda m: init_cache(m, batch, context), model))
        token = _on(mesh, jax.ShapeDtypeStruct((batch,), jnp.int32))
        compiled, seconds = _compile(decode_step.lower(model, token, held), where, told)
        arrays = sharding.named_arrays(model)
        told += _replicated({"parameter": arrays, "cache": held}, where)
    memory, traffic = _memory(compiled, arrays, {}, 0), _traffic(compiled.as_text())
    read = memory.parameters + memory.inputs
    flops = cost.decode(cfg, context, batch).total
    costs = Costs(flops / where.devices, read, math.nan)
    made = estimate(where, costs, sum(t.sent for t in traffic), flops)
    return Plan(where, batch, memory, traffic, 0.0, made, tuple(dict.fromkeys(told)), seconds)


def _on(mesh: jax.sharding.Mesh, tree: Any) -> Any:
    """Abstract arrays on devices, as they lie already or whole."""

    def place(x: Any) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec() if x.sharding is None else x.sharding.spec
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


# ------------------------------------------------------------------ reading a program


def _compile(lowered: Any, where: Target, told: list[str]) -> tuple[Any, float]:
    start = time.perf_counter()
    try:
        with _hushed() as heard:
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            f"The step does not fit the memory of {where.topology} ({_line(error)}); take more "
            "devices, raise train.grad_accum, or set train.remat to full."
        ) from error
    except UnsupportedError as error:
        raise UserError(str(error)) from error
    told += [" ".join(line.split()) for line in heard if INVOLUNTARY in line]
    return compiled, time.perf_counter() - start


def _memory(compiled: Any, parameters: Any, optimizer: Any, kept: int) -> Memory:
    found = compiled.memory_analysis()
    weights, moments = _tree_bytes(parameters), _tree_bytes(optimizer)
    activations = min(kept, found.temp_size_in_bytes)
    return Memory(
        parameters=weights,
        optimizer=moments,
        inputs=found.argument_size_in_bytes - weights - moments,
        activations=activations,
        temporaries=found.temp_size_in_bytes - activations,
        results=found.output_size_in_bytes - found.alias_size_in_bytes,
        program=found.generated_code_size_in_bytes,
    )


def _traffic(text: str) -> tuple[Traffic, ...]:
    """The optimizer's is what carries its scope, which the global norm of clipping does too."""
    totals: dict[tuple[str, str], list[float]] = {}
    for one in hlo.collectives(text):
        part = PARTS["optimizer" in one.name.split("/")]
        entry = totals.setdefault((part, one.kind), [0, 0.0])
        entry[0] += one.times
        entry[1] += one.total
    order = sorted(totals, key=lambda key: (PARTS.index(key[0]), hlo.KINDS.index(key[1])))
    return tuple(Traffic(*key, int(totals[key][0]), totals[key][1]) for key in order)


def _replicated(trees: dict[str, Any], where: Target) -> list[str]:
    """Sentences about large arrays of which every device holds all."""
    told = []
    for kind, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            size = _shard_bytes(x)
            if where.devices > 1 and size >= LARGE and x.sharding.is_fully_replicated:
                name = jax.tree_util.keystr(path)
                told.append(f"{kind} {name} of {size:,} bytes lies whole on every device")
    return told


def _tree_bytes(tree: Any) -> int:
    return sum(map(_shard_bytes, jax.tree.leaves(tree)))


def _shard_bytes(x: Any) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


# ------------------------------------------------------------------ what compilers say


def _kernels(mesh: jax.sharding.Mesh) -> contextlib.AbstractContextManager:
    """Lets tokamax choose kernels of a TPU that is not here; of a GPU it needs the driver."""
    import tokamax.config  # 7 s

    return tokamax.config.cross_compile(mesh.devices.flat[0].platform == "tpu")


@contextlib.contextmanager
def _told() -> Iterator[list[str]]:
    """Python's warnings of the block as sentences, each once."""
    told: list[str] = []
    sharding._warn_replicated.cache_clear()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield told
    told += [str(one.message) for one in heard]


@contextlib.contextmanager
def _hushed() -> Iterator[list[str]]:
    """What the compilers, which are C++, write to stderr, as lines once the block has ended."""
    lines: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile(mode="w+", errors="replace") as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            lines += file.read().splitlines()


def _line(error: Exception) -> str:
    """The first lines of a compiler's error, without its full stop."""
    return " ".join(str(error).split())[:300].rstrip(". ")
