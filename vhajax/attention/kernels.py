"""Decode steps on the Pallas kernels: when, and on which part of a cache."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import Backend, UnsupportedError, choose
from pallas_kernels.chips import is_hopper
from vhajax.attention.core import Window
from vhajax.cache import LayerCache, Layout, placements, row_axis
from vhajax.errors import UserError
from vhajax.sharding import axis_for, head_axes, local, platform

log = logging.getLogger(__name__)


class Rows(NamedTuple):
    """A device's share of a cache in rows, and how to read it.

    rows: [B, S, W]. groups: KV heads in a row. scales: [B, N padded, S] float32 or None.
    options: what every kernel takes: lengths, window, cap, heads, backend.
    """

    rows: jax.Array
    groups: int
    scales: jax.Array | None
    options: dict[str, Any]


def check(backend: Backend, layout: Layout | None, has_kernel: bool) -> None:
    """Refuses what an explicit backend cannot do; `auto` takes the jnp form there.

    Raises:
      UserError.
    """
    try:
        chosen = choose(backend)
    except UnsupportedError as reason:
        raise UserError(str(reason)) from reason
    if backend == "auto" or chosen == "jnp":
        return
    if not has_kernel:
        raise UserError(
            f"backend is {backend!r}, but MLA has no decode kernel yet; use auto, which decodes it "
            "with XLA."
        )
    if layout == "columns":
        raise UserError(
            f"layout is 'columns', but backend {backend!r} reads rows; use layout='rows' or leave "
            "it out."
        )
    if backend in ("tpu", "gpu") and platform() != backend:
        raise UserError(
            f"backend is {backend!r}, but this program is for a {platform()}; use auto, or "
            f"{backend}_interpret to run the kernel in JAX's interpreter."
        )
    if backend == "gpu" and not is_hopper():
        raise UserError(
            "backend is 'gpu', but the kernel needs a Hopper GPU (H100, H200, GH200); use auto, "
            "which decodes with XLA elsewhere."
        )


def applies(cache: LayerCache, has_kernel: bool) -> bool:
    """Whether a decode step on this cache is a kernel's."""
    return has_kernel and cache.layout == "rows" and choose(cache.backend) != "jnp"


def read(
    form: Callable[..., jax.Array],
    q: jax.Array,
    cache: LayerCache,
    live: jax.Array,
    window: Window,
    cap: float,
    weights: Sequence[jax.Array],
) -> jax.Array | None:
    """One new token a sequence over a cache that holds it already, on each device's heads.

    Args:
      form: (q [B, N, ·], `Rows`, *weights) → [B, N, H_v] float32: the mechanism's kernel.
      q: [B, 1, N, ·]. live: [B] int32 slots in use.
      weights: [N, …] each, split as the query heads are.
    Returns:
      [B, 1, N, H_v] in q's dtype; None where the kernel cannot and the cache's backend is `auto`.
    Raises:
      UserError: where the kernel cannot and was asked for by name.
    """
    N, row = q.shape[2], cache.row
    axis = row_axis(row, N)
    q_axis, _ = head_axes(N, row.groups * max(heads for heads, _ in row.parts))
    batch, scaled = axis_for("data", q.shape[0]), cache.scales is not None

    def run(q, live, rows, *rest):
        mine = q.shape[2]
        part = q_axis is not None and axis is None  # some of the heads, all of the row
        heads = (jax.lax.axis_index(q_axis) * mine, N) if part else None
        groups = row.groups if axis is None else rows.shape[-1] // row.group_elements
        options = {"lengths": live, "window": window, "cap": cap, "heads": heads}
        options["backend"] = cache.backend
        scales, rest = (rest[0], rest[1:]) if scaled else (None, rest)
        return form(q[:, 0], Rows(rows, groups, scales, options), *rest)[:, None]

    held = [*cache.arrays, *([cache.scales] if scaled else [])]
    own = [(q_axis, *[None] * (w.ndim - 1)) for w in weights]
    heads = (batch, None, q_axis, None)
    places = [heads, (batch,), *placements(cache, N), *own]
    try:
        run_local = local(run, places, heads, differentiable=False)
        return run_local(q, live.astype(jnp.int32), *held, *weights).astype(q.dtype)
    except UnsupportedError as reason:
        if cache.backend != "auto":
            raise UserError(str(reason)) from reason
        _warn(str(reason))
        return None


@functools.cache
def _warn(reason: str) -> None:
    """Once, not once a layer."""
    log.warning("decoding with XLA instead of the kernel: %s", reason)
