"""Muon on matrices and AdamW on the rest, over a flat dict of parameters, sharded or not.

optax's own Muon raises under explicit sharding and takes stacked weights for something else, so the
orthogonalised momentum is written here; everything around it is optax.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from vhajax import config
from vhajax.sharding import data_size, named_params, reshard
from vhajax.transformer import Transformer

# Quintic Newton–Schulz coefficients of Keller Jordan's Muon (github.com/KellerJordan/Muon).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def schedule(cfg: config.Optim, steps: int) -> Callable[[Any], jax.Array]:
    """Step (from 0) → multiple of the peak rate.

    Linear warm-up that reaches 1 at the last warm-up step, then a cosine to `final_fraction` at the
    last step, or a stable phase and a linear fall over `decay_steps`.
    """
    warm, last = cfg.warmup_steps, cfg.final_fraction

    def multiple(step: Any) -> jax.Array:
        done = jnp.asarray(step, jnp.float32) + 1
        if cfg.schedule == "cosine":
            part = jnp.clip((done - warm) / max(1, steps - warm), 0, 1)
            rest = last + (1 - last) * 0.5 * (1 + jnp.cos(jnp.pi * part))
        else:
            part = jnp.clip((done - (steps - cfg.decay_steps)) / max(1, cfg.decay_steps), 0, 1)
            rest = 1 - (1 - last) * part
        return jnp.where(done <= warm, done / max(1, warm), rest)

    return multiple


def labels(model: Transformer) -> dict[str, str]:
    """Optimizer group of every parameter, by path, as its weight declares it."""
    return {name: param.get_metadata("group") for name, param in named_params(model).items()}


def make(cfg: config.Optim, steps: int, model: Transformer) -> optax.GradientTransformation:
    """The optimizer of a run, for parameters by path.

    Rates (each times the schedule): `matrix_lr` for matrices inside blocks; `embedding_lr` for an
    untied embedding; `unembedding_lr` for the unembedding, for vectors, and for a tied embedding,
    whose gradient is mostly an unembedding's.
    """
    shape = schedule(cfg, steps)

    def rate(peak: float) -> Callable:
        return lambda step: peak * shape(step)

    def adamw(peak: float, decay: float = 0.0) -> optax.GradientTransformation:
        return optax.adamw(rate(peak), cfg.beta1, cfg.beta2, cfg.eps, weight_decay=decay)

    if cfg.name == "muon":
        matrices = optax.chain(
            scale_by_muon(named_params(model), cfg.momentum),
            optax.add_decayed_weights(cfg.weight_decay),
            optax.scale_by_learning_rate(rate(cfg.matrix_lr)),
        )
    else:
        matrices = adamw(cfg.matrix_lr, cfg.weight_decay)
    groups: dict[Hashable, optax.GradientTransformation] = {
        "matrix": matrices,
        "embedding": adamw(cfg.embedding_lr),
        "unembedding": adamw(cfg.unembedding_lr),
        "vector": adamw(cfg.unembedding_lr),
    }
    clip = optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity()
    return optax.chain(clip, optax.multi_transform(groups, labels(model)))


class MuonState(NamedTuple):
    """Momentum of every matrix, float32, by path."""

    momentum: Any


def scale_by_muon(weights: Mapping[str, nnx.Param], beta: float) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised, one matrix at a time.

    Args:
      weights: parameters by path, which say how each is sharded and which of its axes are
        batch, rows and columns of a matrix.
      beta: momentum.

    The update of an m × n matrix (input × output) has singular values near √max(1, n/m).
    Source: Muon, K. Jordan 2024 (kellerjordan.github.io/posts/muon).
    """

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        momentum = jax.tree.map(lambda m, g: beta * m + g, state.momentum, updates)
        nesterov = jax.tree.map(lambda m, g: beta * m + g, momentum, updates)
        orthogonal = jax.tree_util.tree_map_with_path(
            lambda path, x: _orthogonal_update(x, weights[path[0].key]), nesterov
        )
        return orthogonal, MuonState(momentum)

    return optax.GradientTransformation(init, update)


def _orthogonal_update(x: jax.Array, param: nnx.Param) -> jax.Array:
    """Orthogonalises [layers, …] with whole matrices on each device, layers spread over `data`."""
    names, matrix = param.get_metadata("names"), param.get_metadata("matrix")
    lead = x.ndim - len(names) + matrix.batch
    split = lead + matrix.rows
    rows, cols = math.prod(x.shape[lead:split]), math.prod(x.shape[split:])
    stored = (None,) * (x.ndim - len(names)) + names
    # One axis at a time, gather before exchange: XLA replicates what moves along two axes at once.
    halfway = tuple(name if name == "data" else None for name in stored)
    spread = ("data" if lead else None,) + (None,) * (x.ndim - 1)
    # Layers that do not divide are filled up with zeros: else every device would do all of them.
    short = -x.shape[0] % data_size() if lead else 0
    filled = jnp.pad(reshard(x, halfway), ((0, short),) + ((0, 0),) * (x.ndim - 1))
    whole = reshard(filled, spread)
    flat = orthogonalize(whole.reshape(*whole.shape[:lead], rows, cols))
    update = flat.reshape(whole.shape) * math.sqrt(max(1.0, cols / rows))
    return reshard(reshard(update, halfway)[: x.shape[0]], stored)


def orthogonalize(x: jax.Array) -> jax.Array:
    """[…, m, n] → nearly U Vᵀ of its singular value decomposition (singular values 0.7 to 1.2)."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
