"""Compiles a call for a TPU or GPU that this machine does not have, with the real compilers.

libtpu reads its environment once, when the first topology is asked for: `ENVIRONMENT`, and
LIBTPU_INIT_ARGS (`schedule.flags`). The CUDA plugin needs no driver. Run with JAX_PLATFORMS=cpu, or
JAX looks for a device here.
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
from pallas_kernels.chips import GPU, GPUS
from pallas_kernels.rows import LANES, up
from pallas_kernels.shapes import Shape

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # ask no cloud what machine this is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # other processes may compile too
    "TPU_STDERR_LOG_LEVEL": "1",  # warnings, of replicated arrays for one
}
IN_PLACE = ("any", "hbm")  # memory spaces of what a kernel copies from by itself
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([\w-]+)\(")
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
NOTHING_MADE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "custom-call"}


GPU_CONFIG = """\
platform_name: "CUDA"
device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 8 }}
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared}
  shared_memory_per_core: 233472
  memory_bandwidth: {hbm:.0f}
  device_memory_size: {memory}
  l2_cache_size: {l2}
  clock_rate_ghz: {ghz}
}}
"""


class NoCompilerError(RuntimeError):
    """libtpu, or the CUDA plugin, is not installed."""


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
    """kernels: of a program for a TPU; none where the call was traced for another backend."""

    compiled: Any  # jax.stages.Compiled, whose reports may be None on other backends
    kernels: tuple[Kernel, ...]

    @property
    def temporaries(self) -> int:
        """Bytes of HBM that it needs beside its arguments and results."""
        return self.compiled.memory_analysis().temp_size_in_bytes

    @property
    def estimate(self) -> tuple[float | None, int]:
        """XLA's own count of seconds (None if it has none) and bytes, Pallas kernels apart."""
        costs = self.compiled.cost_analysis() or {}
        seconds = costs.get("optimal_seconds", -1.0)  # it counts −1 for what it does not know
        return seconds if seconds > 0 else None, int(costs.get("bytes accessed", 0))

    def largest_made(self) -> int:
        """Bytes of the largest array that anything but a kernel makes, copies included."""
        _, _, entry = self.compiled.as_text().partition("\nENTRY ")
        made = [shape for shape, name in INSTRUCTION.findall(entry) if name not in NOTHING_MADE]
        arrays = [_bytes(sizes, dtype) for shape in made for dtype, sizes in ARRAY.findall(shape)]
        return max(arrays, default=0)


def require_compiler(chip: str) -> None:
    """Raises NoCompilerError where there is none for a chip."""
    if chip in GPUS and importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise NoCompilerError(
            "Compiling for a GPU needs JAX's CUDA plugin, which is not installed; install the "
            "extra cuda13 or cuda-compile."
        )
    if chip not in GPUS and importlib.util.find_spec("libtpu") is None:
        raise NoCompilerError(
            "Compiling for a TPU needs libtpu, which is not installed; install the extra tpu."
        )


def devices(chip: str, count: int = 1) -> list[Any]:
    """So many devices of a chip of `chips.CHIPS` or `chips.GPUS`, for compiling only.

    Raises:
      NoCompilerError: its compiler is not installed.
    """
    return topology(f"{chip}:{count}" if chip in GPUS else TOPOLOGIES[chip])[:count]


def topology(name: str) -> list[Any]:
    """All devices of a TPU's topology (v5e:4x4) or of so many GPUs (h100:8), for compiling only.

    Raises:
      NoCompilerError: the compiler is not installed.
      jax.errors.JaxRuntimeError: there is no such topology.
    """
    chip, _, size = name.partition(":")
    require_compiler(chip)
    if chip in GPUS:
        found = topologies.get_topology_desc(
            platform="cuda",
            topology_name=chip,
            target_config=_gpu_config(GPUS[chip]),
            topology=f"1x1x{size}",
        )
    else:
        os.environ.update(ENVIRONMENT)
        more = {"chip_config_name": "megacore"} if chip == "v4" else {}  # one device a chip
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **more)
    return list(found.devices)


def device_mesh(chip: str) -> Mesh:
    """One device, see `devices`."""
    return Mesh(np.array(devices(chip)), ("x",))


def _gpu_config(gpu: GPU) -> str:
    """What XLA wants to know of a GPU, as the text of its GpuTargetConfigProto."""
    return GPU_CONFIG.format(
        kind=gpu.kinds[0],
        cores=gpu.cores,
        shared=gpu.shared,
        hbm=gpu.hbm,
        memory=gpu.memory,
        l2=gpu.l2,
        ghz=gpu.clock / 1e9,
    )


def program(function: Any, arguments: dict[str, jax.ShapeDtypeStruct], mesh: Mesh) -> Program:
    """Compiles function(arguments) for the device of a mesh."""
    here = NamedSharding(mesh, PartitionSpec())
    placed = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for name, x in arguments.items()
    }
    with jax.set_mesh(mesh):  # `chips.device` sees the device by this
        traced = jax.jit(function).trace(placed)
        compiled = traced.lower().compile()
    kernels = tuple(map(_kernel, _pallas_calls(traced.jaxpr.jaxpr))) if _is_tpu(mesh) else ()
    return Program(compiled, kernels)


def call(shape: Shape, mesh: Mesh, **options: Any) -> Program:
    """`shape.call` compiled, with its options."""
    return program(lambda arrays: shape.call(arrays, **options), shape.arguments(), mesh)


def _is_tpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "tpu"


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
