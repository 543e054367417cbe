"""The pure training step: (state, batch) → (state, metrics), under plain `jax.jit`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from vhajax import config, optim, transformer
from vhajax.layers import compute_dtype
from vhajax.loss import cross_entropy
from vhajax.sharding import operand, reshard, shardings, with_arrays

Batch = Mapping[str, Any]
"""tokens, targets, positions, segments [B, T] int32 and weights [B, T] float32."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a step changes.

    params: float32 arrays by path. opt_state: optax's. step: int32 scalar, steps done. The same
    class holds shapes or shardings of these.
    """

    params: Any
    opt_state: Any
    step: Any


def sums(
    model: transformer.Transformer, batch: Batch, cfg: config.Train, unroll: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Objective (with z-loss) and cross-entropy of a batch, each summed over scored tokens.

    unroll: see `transformer.hidden`.
    """
    inputs = (batch["tokens"], batch["positions"], batch["segments"])
    x = transformer.hidden(model, *inputs, remat=cfg.remat, unroll=unroll)
    table = operand(model.output_table, compute_dtype(model.cfg))
    with jax.named_scope("loss"):
        return cross_entropy(
            x,
            table,
            batch["targets"],
            batch["weights"],
            model.cfg.vocab_size,
            cfg.z_loss,
            cfg.loss_chunk,
        )


def optimizer(experiment: config.Experiment) -> optax.GradientTransformation:
    model = transformer.abstract(experiment.model)
    return optim.make(experiment.optim, experiment.train.steps, model)


def init_state(experiment: config.Experiment) -> TrainState:
    """Initial state, laid out over the mesh in use."""
    params = transformer.init(experiment.model, experiment.train.seed)
    return fresh_state(experiment, params)


def fresh_state(experiment: config.Experiment, params: dict[str, jax.Array]) -> TrainState:
    """Step 0 with given weights."""
    opt_state = jax.jit(optimizer(experiment).init)(params)
    return TrainState(params, opt_state, jnp.zeros((), jnp.int32))


def make_loss(experiment: config.Experiment, unroll: int = 0) -> Callable:
    """(params, batch, scored tokens of the whole step) → objective and cross-entropy."""
    template = transformer.abstract(experiment.model)

    def loss(params: dict[str, jax.Array], batch: Batch, scored: jax.Array):
        objective, nll = sums(with_arrays(template, params), batch, experiment.train, unroll)
        return objective / scored, nll / scored

    return loss


def make_update(experiment: config.Experiment) -> Callable:
    """(state, gradients) → the state after them, and the gradients' norm before clipping."""
    tx = optimizer(experiment)

    @jax.named_scope("optimizer")
    def update(state: TrainState, grads: Any) -> tuple[TrainState, jax.Array]:
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1), optax.tree.norm(grads)

    return update


def make_train_step(
    experiment: config.Experiment,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The step of an experiment: pure, not yet jitted.

    Metrics are float32 scalars: `loss` (mean nats per scored token, without z-loss), `tokens`
    (scored), `grad_norm` (before clipping) and `learning_rate` (multiple of the peak). With
    `train.skip_bad_steps`, a step whose loss or gradient is not finite changes no weight.
    """
    loss, update = make_loss(experiment), make_update(experiment)
    multiple = optim.schedule(experiment.optim, experiment.train.steps)
    accum = experiment.train.grad_accum

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        # Every micro-batch is divided by the whole step's scored tokens: a mean of means would
        # weigh tokens of short micro-batches more.
        scored = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        gradient = jax.grad(loss, has_aux=True)
        if accum == 1:
            grads, nll = gradient(state.params, batch, scored)
        else:
            grads, nll = _accumulate(gradient, state.params, batch, scored, accum)
        after, norm = update(state, grads)
        if experiment.train.skip_bad_steps:
            good = jnp.isfinite(nll) & jnp.isfinite(norm)
            after = _where(good, after, state)
        metrics = {
            "loss": nll,
            "tokens": scored,
            "grad_norm": norm,
            "learning_rate": multiple(state.step),
        }
        return after, metrics

    return train_step


def _where(good: jax.Array, new: Any, old: Any) -> Any:
    """`new` where good; counters always advance, for the schedule is a function of the step."""

    def choose(x: jax.Array, before: jax.Array) -> jax.Array:
        return x if jnp.issubdtype(x.dtype, jnp.integer) else jnp.where(good, x, before)

    return jax.tree.map(choose, new, old)


def _accumulate(gradient: Callable, params: Any, batch: Batch, scored: jax.Array, accum: int):
    """Sums gradients and loss over micro-batches, one at a time."""
    micro = {name: _micro_batches(jnp.asarray(x), accum) for name, x in batch.items()}

    def body(total, one):
        return jax.tree.map(jnp.add, total, gradient(params, one, scored)), None

    zero = (jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32))
    return jax.lax.scan(body, zero, micro)[0]


def _micro_batches(x: jax.Array, accum: int) -> jax.Array:
    """[B, T] → [accum, B/accum, T], rows dealt in turn so that no row changes its device."""
    B, T = x.shape
    x = reshard(x.reshape(B // accum, accum, T), ("data", None, "context"))
    return reshard(x.swapaxes(0, 1), (None, "data", "context"))


def state_shardings(experiment: config.Experiment, mesh: jax.sharding.Mesh) -> TrainState:
    """Where every array of the state lies; call under `jax.set_mesh(mesh)`.

    Optimizer moments lie where their parameter lies, scalars everywhere.
    """
    where = shardings(transformer.abstract(experiment.model), mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = jax.eval_shape(lambda: {n: jnp.zeros(()) for n in where})
    opt_state = jax.eval_shape(optimizer(experiment).init, shapes)
    # A moment's path ends in its parameter's; a counter's ends in a field name.
    place = lambda path, _: where.get(getattr(path[-1], "key", ""), everywhere)  # noqa: E731
    opt = jax.tree_util.tree_map_with_path(place, opt_state)
    return TrainState(where, opt, everywhere)


def abstract_state(experiment: config.Experiment, mesh: jax.sharding.Mesh) -> TrainState:
    """Shapes of the state and where they lie; call under `jax.set_mesh(mesh)`."""
    where = state_shardings(experiment, mesh)
    params = transformer.init_shapes(experiment.model, where.params)
    shapes = jax.eval_shape(optimizer(experiment).init, params)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=where.step)
    return TrainState(params, jax.tree.map(place, shapes, where.opt_state), count)


def abstract_batch(
    experiment: config.Experiment, mesh: jax.sharding.Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one step's rows and where they lie."""
    shape, place = (experiment.data.batch_size, experiment.data.seq_len), batch_sharding(mesh)
    names = ("tokens", "targets", "positions", "segments", "weights")
    kinds = {name: jnp.float32 if name == "weights" else jnp.int32 for name in names}
    return {n: jax.ShapeDtypeStruct(shape, kind, sharding=place) for n, kind in kinds.items()}


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec("data", "context"))
