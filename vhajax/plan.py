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
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from vhajax import config, cost, hlo, inference, program, sharding, step, transformer
from vhajax.decode import decode_step, init_cache
from vhajax.estimate import Costs, Estimate, costs_of, estimate, extrapolate
from vhajax.program import Memory, Traffic
from vhajax.topology import Target, device_mesh


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


# ------------------------------------------------------------------ training


def train(experiment: config.Experiment, where: Target, tell: Tell = lambda _: None) -> Plan:
    """The training step of an experiment that is `placed` already, compiled and read.

    Raises:
      UserError: no compiler, no such topology, or it needs more memory than a device has.
    """
    mesh = device_mesh(where)
    tell("tracing the step")
    with jax.set_mesh(mesh), program.told_by() as told, _kernels(mesh):
        state, batch = step.abstract_state(experiment, mesh), step.abstract_batch(experiment, mesh)
        kept = _kept(experiment, mesh)
        lowered = jax.jit(step.make_train_step(experiment), donate_argnums=0).lower(state, batch)
        tell("compiling the step (about a minute)")
        compiled, seconds = program.compile_for(where.topology, lowered, told)
        text = compiled.as_text()
        memory = program.memory_of(compiled, state.params, state.opt_state, kept)
        traffic = program.traffic_of(text)
        estimated = _estimate(experiment, mesh, where, sum(t.sent for t in traffic), tell)
        held = {"parameter": state.params, "optimizer": state.opt_state}
        told += program.replicated(held, where.devices)
    return Plan(
        target=where,
        tokens=experiment.data.batch_size * experiment.data.seq_len,
        memory=memory,
        traffic=traffic,
        minimum=fsdp_minimum(experiment),
        estimate=estimated,
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
    return sum(program.shard_bytes(v.aval) for v in kept & made)


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
    update = costs_of(step.make_update(experiment), state, state.params)
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
    return costs_of(gradient, state.params, step.abstract_batch(small, mesh))


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
    with jax.set_mesh(mesh), program.told_by() as told:
        places = sharding.shardings(transformer.abstract(cfg), mesh)
        params = transformer.init_shapes(cfg, places)
        model = _on(mesh, jax.eval_shape(lambda p: inference.decoder(cfg, p), params))
        held = _on(mesh, jax.eval_shape(lambda m: init_cache(m, batch, context), model))
        token = _on(mesh, jax.ShapeDtypeStruct((batch,), jnp.int32))
        lowered = decode_step.lower(model, token, held)
        compiled, seconds = program.compile_for(where.topology, lowered, told)
        arrays = sharding.named_arrays(model)
        told += program.replicated({"parameter": arrays, "cache": held}, where.devices)
    memory = program.memory_of(compiled, arrays, {}, 0)
    traffic = program.traffic_of(compiled.as_text())
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


def _kernels(mesh: jax.sharding.Mesh) -> contextlib.AbstractContextManager:
    """Lets tokamax choose kernels of a TPU that is not here; of a GPU it needs the driver."""
    import tokamax.config  # 7 s

    return tokamax.config.cross_compile(mesh.devices.flat[0].platform == "tpu")
