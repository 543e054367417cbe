"""What `vhajax plan` prints: a plan as plain values and as tables."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from vhajax.cost_report import Table, binary, draw
from vhajax.plan import Plan
from vhajax.program import PARTS


def report(plan: Plan) -> dict[str, Any]:
    """All figures as plain values; a number that is not there is null."""
    where, made = plan.target, plan.estimate
    sends = {part: plan.sent(part) for part in PARTS}
    return {
        "topology": where.topology,
        "devices": where.devices,
        "mesh": dataclasses.asdict(where.mesh),
        "tokens_per_step": plan.tokens,
        "memory_per_device": {
            **dataclasses.asdict(plan.memory),
            "total": plan.memory.total,
            "hbm": where.accelerator.memory,
            "fits": plan.fits,
        },
        "collectives": [dataclasses.asdict(traffic) for traffic in plan.traffic],
        "sent_per_device": sends,
        "fsdp_minimum": plan.minimum,
        "forward_and_backward_over_minimum": _over(sends[PARTS[0]], plan.minimum),
        "estimate": {k: _finite(v) for k, v in dataclasses.asdict(made).items()},
        "warnings": list(plan.warnings),
        "compile_seconds": plan.compile_seconds,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _over(sent: float, minimum: float) -> float | None:
    return sent / minimum if minimum else None


MEMORY = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "inputs": "inputs, padding",
    "activations": "activations kept",
    "temporaries": "temporaries",
    "results": "results",
    "program": "program",
    "total": "total",
    "hbm": "HBM",
}
SECONDS = {
    "compute": "FLOPs / peak",
    "memory": "bytes / bandwidth",
    "collectives": "sent / interconnect",
    "seconds": "a step",
}


@contextlib.contextmanager
def progress(name: str) -> Iterator[Callable[[str], None]]:
    """Tells on stderr what is going on; silent where that is no terminal."""
    # A copy of the descriptor: compilers' own words are caught at the descriptor itself.
    with os.fdopen(os.dup(2), "w") as copy:
        console = Console(file=copy)
        if not console.is_terminal:
            yield lambda _: None
            return
        with console.status(name) as status:
            yield lambda doing: status.update(f"{name}: {doing}")


def describe(values: dict[str, Any]) -> str:
    """A report as tables."""
    axes = ", ".join(f"{axis} {size}" for axis, size in values["mesh"].items() if size > 1)
    head = f"{values['topology']}: {values['devices']} devices ({axes or 'one device'})"
    held = values["memory_per_device"]
    rows = [
        [title, binary(held[name]), f"{held[name] / held['hbm']:.1%}"]
        for name, title in MEMORY.items()
    ]
    sends = [
        [t["part"], t["kind"], f"{t['count']:,}", binary(t["sent"])] for t in values["collectives"]
    ]
    sends += [[part, "all", "", binary(sent)] for part, sent in values["sent_per_device"].items()]
    made = values["estimate"]
    seconds = [[title, f"{made[name]:.4g} s"] for name, title in SECONDS.items()]
    seconds.append(["tokens/s, all devices", f"{values['tokens_per_step'] / made['seconds']:,.0f}"])
    seconds.append(["MFU", f"{made['mfu']:.1%}"])
    tables: list[Table] = [
        (head, ["memory of a device", "", "of HBM"], rows),
        ("Collectives, a step and device", ["part", "kind", "count", "sent"], sends),
        ("Estimate", ["", ""], seconds),
    ]
    return draw(tables, _notes(values))


def _notes(values: dict[str, Any]) -> list[str]:
    held, over = values["memory_per_device"], values["forward_and_backward_over_minimum"]
    told = [] if held["fits"] else ["It does not fit: total is more than HBM."]
    if over is not None:
        told.append(
            f"Forward and backward send {over:.3f} times what FSDP must "
            f"({binary(values['fsdp_minimum'])})."
        )
    whose = "by XLA:TPU's optimal_seconds" if values["estimate"]["optimal"] else "by the sum above"
    told.append(f"Seconds and MFU are an estimate ({whose}): nothing overlaps, nothing waits.")
    return told + [f"Warning: {warning}" for warning in values["warnings"]]
