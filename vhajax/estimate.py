"""Seconds of a step from what XLA counts: an estimate, in which nothing overlaps and nothing waits.

XLA counts the body of a loop once, so costs come from programs without loops: the gradient of one
micro-batch with one and with two layers (g₁, g₂), its logits in one piece, and the optimizer's
update of all layers (u).

  cost = accum · (g₁ + (L−1)·(g₂−g₁)) + u

  seconds = max(FLOPs / peak, bytes / bandwidth) + sent bytes / interconnect

with FLOPs (no fewer than the model's, as XLA does not see into kernels) and bytes accessed as XLA
counts them, and sent bytes of the whole program; or, where XLA:TPU has a count of all three
programs that makes sense, the same sum of its `optimal_seconds`.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from vhajax.program import hushed
from vhajax.topology import Target


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


def costs_of(function: Callable, *arguments: Any) -> Costs:
    with hushed(), warnings.catch_warnings(action="ignore"):
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
