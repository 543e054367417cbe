"""The kernels' problem in jnp: what CPUs run, and what the kernel is easiest compared with."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core import Attended
from pallas_kernels.wide import Turned, Wide

HIGHEST = jax.lax.Precision.HIGHEST


def solve(problem: Wide) -> Attended:
    """See `core.solve`. Computed in float32; the sequence is never split."""
    slots = jnp.arange(problem.cache.shape[1])
    lengths = jnp.minimum(problem.lengths, len(slots))[:, None]
    live = slots < lengths
    if problem.window:
        live &= slots >= lengths - problem.window
    elements = jnp.arange(problem.cache.shape[2]) < problem.views.row
    # 0 · NaN is NaN: neither dead slots nor padding may meet a product.
    rows = jnp.where(live[:, :, None] & elements, problem.cache, 0).astype(jnp.float32)
    solved = [_view(problem, i, rows, live) for i in range(len(problem.views.views))]
    return Attended(*(jnp.stack(x, axis=1) for x in zip(*solved, strict=True)))


def _view(problem: Wide, index: int, rows: jax.Array, live: jax.Array):
    views = problem.views
    view = views.views[index]
    keys = rows[:, :, view.keys : view.keys + views.key_width]
    values = rows[:, :, view.values : view.values + views.value_width]
    logits = jnp.einsum("BMW,BSW->BMS", problem.q[:, index], keys, precision=HIGHEST)
    if problem.rotation is not None:
        logits += _rotated(rows, problem.rotation)
    logits *= problem.scale
    if problem.scales is not None:
        logits *= problem.scales[:, : logits.shape[1]]
    if problem.cap:
        logits = problem.cap * jnp.tanh(logits / problem.cap)
    logits = jnp.where(live[:, None], logits, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    p = jnp.exp(logits - jnp.where(peak == -jnp.inf, 0, peak))
    total = jnp.sum(p, axis=-1)
    mixed = jnp.einsum("BMS,BSW->BMW", p, values, precision=HIGHEST)
    out = mixed / jnp.where(total == 0, 1, total)[..., None]
    return out, peak[..., 0] + jnp.log(total)


def _rotated(rows: jax.Array, rotation: Turned) -> jax.Array:
    width = rotation.rotor.shape[1]
    latents = rows[:, :, rotation.start : rotation.start + width]
    table = np.concatenate(rotation.table(np.arange(rows.shape[1])), axis=1)
    table = jnp.asarray(rotation.multiplier * table, jnp.float32)
    turned = jnp.einsum("SP,BZP->BSZ", table, rotation.rotor, precision=HIGHEST)
    heads = rotation.heads.astype(jnp.float32)
    return jnp.einsum("BSZ,MZ->BMS", turned * latents, heads, precision=HIGHEST)
