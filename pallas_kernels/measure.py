"""Compiles calls for one chip and reads figures of them off the compiler: the roofline's rows.

`python -m pallas_kernels.measure kernels|einsums CHIP FOLDER [--goals]`, which `roofline` runs in
an environment of its own (`environment`), writes FOLDER/rows.jsonl: on each line a `Row`, for a GPU
a `measure_gpu.GPURow`, or the seconds and bytes that XLA expects of einsums.
"""

import argparse
import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from pallas_kernels import ahead, measure_gpu, plain, sass, schedule
from pallas_kernels.chips import CHIPS, GPUS, Chip
from pallas_kernels.rows import up
from pallas_kernels.shapes import GOALS, MAIN, Shape

WHAT = ("kernels", "einsums")
ROWS, DUMPS = "rows.jsonl", "dumps"  # in the folder


@dataclass(kw_only=True)
class Row:
    """One call on one chip; times are those of a core, from figures in `chips`.

    bytes: of HBM that the kernel reads and writes with every slot live. dma: seconds of them at the
      chip's peak bandwidth.
    tile_bytes: of one copy. tile_cycles: of the loop over tiles. around: cycles a sequence beside
      that loop. matmuls: in the loop. tile_ratio: of a tile, compute over its copy. ratio: the same
      of the call, what lies around the loop included.
    padding: elements of a row that hold nothing over those that do. over_mha: bytes a token of MHA
      with the same heads over this cache's.
    vmem: predicted bytes, which the compiler was held to. temporaries: bytes of HBM.
    made: bytes of the largest array made outside the kernel. in_place: of those that it reads where
      they lie. beside: XLA's own estimate of everything outside the kernel, over dma.
    einsum_seconds, einsum_bytes: its own estimate of the same attention by einsums (`plain`), over
      dma and bytes. None: it has none.
    """

    chip: str
    shape: str
    arguments: dict[str, Any]
    goal: float | None
    bytes: int
    dma: float
    tile: int
    tile_bytes: int
    tile_cycles: int
    tile_seconds: float
    around: int
    matmuls: int
    tile_ratio: float
    ratio: float
    padding: float
    over_mha: float
    vmem: int
    temporaries: int
    made: int
    in_place: tuple[int, ...]
    beside: float | None
    einsum_seconds: float | None = None
    einsum_bytes: float | None = None


def environment(dumps: Path | None) -> dict[str, str]:
    """In which libtpu compiles as it would for anyone, and leaves its schedules in the folder.

    Whatever else is set for JAX is left out: a cache of compiled programs would leave no schedules.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "LIBTPU_"))}
    package = str(Path(__file__).resolve().parent.parent)
    path = filter(None, [package, kept.get("PYTHONPATH")])
    kept |= {"PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"}
    kept |= {"TPU_LOG_DIR": "disabled"} | ahead.ENVIRONMENT
    if dumps is None:
        return kept
    return kept | {"LIBTPU_INIT_ARGS": schedule.flags(dumps)} | sass.flags(dumps)


def shapes_of(*, goals: bool) -> tuple[Shape, ...]:
    return GOALS if goals else MAIN


def goal(shape: Shape) -> float | None:
    """What `tile_ratio` may be on v5e and v6e."""
    if shape not in GOALS:
        return None
    return 0.8 if shape.kind == "rope" or shape.num_heads == 6 else 0.7


def token_bytes(shape: Shape) -> int:
    """Of HBM, for a slot of a sequence: its row, and its scales as they are laid out."""
    item = 4 if shape.dtype == "float32" else 2
    return shape.row * item + (up(shape.num_heads, 8) * 4 if shape.scaled else 0)


def mha_bytes(shape: Shape) -> int:
    item = 4 if shape.dtype == "float32" else 2
    return shape.num_heads * (shape.head_dim + shape.v_dim) * item


def kernel_row(shape: Shape, chip: Chip, mesh: Mesh, dumps: Path) -> Row:
    for old in dumps.iterdir():
        old.unlink()
    program = ahead.call(shape, mesh, backend="tpu")
    (kernel,) = program.kernels
    loop = schedule.main_loop(schedule.find(dumps, kernel.name).read_text())
    tile_bytes = kernel.tile * token_bytes(shape)
    tile_dma = tile_bytes / (chip.hbm / chip.cores)  # cores share a chip's bandwidth
    tile_seconds, dma = loop.cycles / chip.clock, kernel.hbm / chip.hbm
    tiles = -(-shape.slots // kernel.tile // kernel.splits)  # of a core, the first outside the loop
    cycles = shape.batch * (loop.around + (tiles - 1) * loop.cycles)
    beside, _ = program.estimate
    return Row(
        chip=chip.name,
        shape=shape.name,
        arguments=dataclasses.asdict(shape),
        goal=goal(shape),
        bytes=kernel.hbm,
        dma=dma,
        tile=kernel.tile,
        tile_bytes=tile_bytes,
        tile_cycles=loop.cycles,
        tile_seconds=tile_seconds,
        around=loop.around,
        matmuls=loop.matmuls,
        tile_ratio=tile_seconds / tile_dma,
        ratio=cycles / chip.clock / dma,
        padding=shape.row / shape.elements - 1,
        over_mha=mha_bytes(shape) / token_bytes(shape),
        vmem=kernel.vmem,
        temporaries=program.temporaries,
        made=program.largest_made(),
        in_place=kernel.in_place,
        beside=None if beside is None else beside / dma,
    )


def einsums(shape: Shape, mesh: Mesh) -> tuple[float | None, int]:
    """XLA's estimate of seconds and bytes."""
    attend = lambda arrays: plain.attend(shape, arrays)  # noqa: E731
    return ahead.program(attend, shape.arguments(), mesh).estimate


def main() -> int:
    parser = argparse.ArgumentParser(prog="pallas_kernels.measure")
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("chip", choices=[*CHIPS, *GPUS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--goals", action="store_true")
    args = parser.parse_args()
    try:
        mesh = ahead.device_mesh(args.chip)
    except ahead.NoCompilerError as error:
        print(error, file=sys.stderr)
        return 2
    dumps, known = args.folder / DUMPS, {}
    with open(args.folder / ROWS, "w") as file:
        for shape in shapes_of(goals=args.goals):
            if args.what == "einsums":
                found = einsums(shape, mesh)
            elif args.chip in GPUS:
                found = vars(measure_gpu.row(shape, GPUS[args.chip], mesh, dumps, known))
            else:
                found = dataclasses.asdict(kernel_row(shape, CHIPS[args.chip], mesh, dumps))
            print(json.dumps(found), file=file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
