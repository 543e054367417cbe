"""Compiles a call for a TPU that this machine does not have, with libtpu's own compiler.

libtpu reads its environment once, when the first topology is asked for: `ENVIRONMENT`, and
LIBTPU_INIT_ARGS (`schedule.flags`). Run with JAX_PLATFORMS=cpu, or JAX looks for a TPU here.
"""

import importlib.util
import math
import os
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.blocks import BUFFERS
from pallas_kernels.rows import LANES, up
from pallas_kernels.shapes import Shape

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # ask no cloud what machine this is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # other processes may compile too
}
IN_PLACE = ("any", "hbm")  # memory spaces of what a kernel copies from by itself
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([\w-]+)\(")
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
NOTHING_MADE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "custom-call"}


class NoCompilerError(RuntimeError):
    """libtpu is not installed."""


@dataclass(frozen=True)
class Kernel:
    """What one Pallas call of a program says of itself.

    tile: rows of a copy. splits: parts of a sequence. vmem: bytes that it may take.
    hbm: bytes that it reads and writes where every slot is live.
    in_place: bytes of each array that it reads from where it lies (cache, scales).
    """

    name: str
    tile: int
    splits: int
    vmem: int
    hbm: int
    in_place: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """kernels: none where the call was traced for another backend."""

    compiled: Any  # jax.stages.Compiled, whose reports may be None on other backends
    kernels: tuple[Kernel, ...]

    @property
    def temporaries(self) -> int:
        """Bytes of HBM that it needs beside its arguments and results."""
        return self.compiled.memory_analysis().temp_size_in_bytes

    @property
    def estimate(self) -> tuple[float | None, int]:
        """XLA's own count of seconds (None if it has none) and bytes, Pallas kernels apart."""
        costs = self.compiled.cost_analysis()
        seconds = costs.get("optimal_seconds", -1.0)  # it counts −1 for what it does not know
        return seconds if seconds > 0 else None, int(costs.get("bytes accessed", 0))

    def largest_made(self) -> int:
        """Bytes of the largest array that anything but a kernel makes, copies included."""
        _, _, entry = self.compiled.as_text().partition("\nENTRY ")
        made = [shape for shape, name in INSTRUCTION.findall(entry) if name not in NOTHING_MADE]
        arrays = [_bytes(sizes, dtype) for shape in made for dtype, sizes in ARRAY.findall(shape)]
        return max(arrays, default=0)


def require_compiler() -> None:
    if importlib.util.find_spec("libtpu") is None:
        raise NoCompilerError(
            "Compiling for a TPU needs libtpu, which is not installed; install the extra tpu."
        )


def device_mesh(chip: str) -> Mesh:
    """One device of a chip of `chips.CHIPS`, for compiling only.

    Raises:
      NoCompilerError: libtpu is not installed.
    """
    require_compiler()
    os.environ.update(ENVIRONMENT)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    return Mesh(np.array(topology.devices[:1]), ("x",))


def program(function: Any, arguments: dict[str, jax.ShapeDtypeStruct], mesh: Mesh) -> Program:
    """Compiles function(arguments) for the device of a mesh."""
    here = NamedSharding(mesh, PartitionSpec())
    placed = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for name, x in arguments.items()
    }
    with jax.set_mesh(mesh):  # `chips.device` sees the device by this
        traced = jax.jit(function).trace(placed)
        compiled = traced.lower().compile()
    return Program(compiled, tuple(map(_kernel, _pallas_calls(traced.jaxpr.jaxpr))))


def call(shape: Shape, mesh: Mesh, **options: Any) -> Program:
    """`shape.call` compiled, with its options."""
    return program(lambda arrays: shape.call(arrays, **options), shape.arguments(), mesh)


def _pallas_calls(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _pallas_calls(inner)


def _kernel(equation: Any) -> Kernel:
    refs = [v.aval for v in equation.params["jaxpr"].invars]
    operands = [v.aval for v in equation.invars]
    results = [v.aval for v in equation.outvars]
    rows = refs[len(operands) + len(results)]  # the first scratch: tiles of the cache
    assert rows.shape[0] == BUFFERS
    splits = results[0].shape[0]
    lies = [str(ref.memory_space).lower() in IN_PLACE for ref in refs[: len(operands)]]
    in_place = tuple(_stored(x) for x, stays in zip(operands, lies, strict=True) if stays)
    fetched = sum(_stored(x) for x, stays in zip(operands, lies, strict=True) if not stays)
    return Kernel(
        equation.params["name"],
        rows.shape[1],
        splits,
        equation.params["compiler_params"].vmem_limit_bytes,
        sum(in_place) + splits * fetched + sum(map(_stored, results)),  # each split fetches
        in_place,
    )


def _stored(x: Any) -> int:
    """Bytes of an array as a TPU lays it out: whole registers in its last two dimensions."""
    *outer, rows, lanes = (1, 1, *x.shape)
    whole = up(rows, 32 // x.dtype.itemsize) if rows > 1 else 1
    return math.prod((*outer, whole, up(lanes, LANES))) * x.dtype.itemsize


def _bytes(sizes: str, dtype: str) -> int:
    """Of an array in HLO: "8,16,128" of "bf16"; pred takes a byte."""
    bits = int(dtype.lstrip(string.ascii_lowercase) or 8)
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8
