"""What the compilers say of the GPU kernel: the roofline's rows for a GPU.

Issue time: every instruction of a warp takes one cycle of its scheduler, and each of the four
schedulers has one warp of every warpgroup; so the consumers' instructions for a tile, over the
cycles in which its bytes arrive at this multiprocessor's share of the bandwidth, must stay below 1.
Schedule: the cycles that ptxas itself has a warp wait between instructions, over as many tiles'
bytes as there are consumers, which take turns; waits for products, barriers and maxima of other
warps come on top. Products: a matrix instruction of 64 rows and n columns takes max(16, n / 2)
cycles: reading its rows from shared memory, or multiplying.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels import ahead, balance, gpu, parts, sass
from pallas_kernels.chips import GPU
from pallas_kernels.core import Problem, Rotation
from pallas_kernels.gpu import Spec
from pallas_kernels.sass import Resources, Work
from pallas_kernels.shapes import Shape

OCCUPANCY_BATCHES = (1, 8)


@dataclass(kw_only=True)
class GPURow:
    """One call on one GPU.

    bytes: of HBM: live rows and scales once, tables, A, queries and partial results. dma: seconds
      of them at peak bandwidth. read: bytes that multiprocessors read of rows (lanes that several
      parts or chunks want, more than once, from L2) over those of rows.
    registers, spilled (bytes), serialized, shared (bytes): of a block. products: matrix
      instructions of a tile. issue, schedule, tensor: over the time of a tile's bytes, see above.
    occupancy: at batch 1 and 8, mean over largest stretch of a block, idle ones included.
    """

    chip: str
    shape: str
    arguments: dict[str, Any]
    goal: bool
    parts: int
    consumers: int
    ring: int
    bytes: int
    dma: float
    read: float
    registers: int
    spilled: int
    serialized: bool
    shared: int
    products: int
    instructions: float
    issue: float
    schedule: float
    tensor: float
    occupancy: tuple[float, ...]
    temporaries: int
    made: int


def is_goal(shape: Shape) -> bool:
    """Whether it must be bound by bytes, without a spill."""
    if shape.kind == "gqa":
        groups = shape.num_heads // shape.num_kv_heads
        return shape.num_kv_heads == 2 and groups in (8, 16, 64) and shape.head_dim == 128
    return shape.rank == 64 and shape.num_heads in (8, 16, 32) and not shape.scaled


def problem_of(shape: Shape) -> Problem:
    """Of shapes instead of arrays: enough to plan."""
    x, item = shape.arguments(), jnp.float32
    B, N, H = x["q"].shape
    latents = jax.ShapeDtypeStruct((B, N, shape.rank), item)
    rotor = jax.ShapeDtypeStruct((B, N, shape.rank, H), item)
    rotated = shape.kind == "rope"
    given: dict[str, Any] = {"q": x["q"], "cache": x["cache"], "lengths": x["lengths"]}
    return Problem(
        name="gqa_decode" if shape.kind == "gqa" else "lrkv_decode",
        **given,
        num_kv_heads=shape.num_kv_heads or 1,
        value_dim=shape.v_dim,
        scale=1.0,
        window=None,
        cap=0.0,
        first=0,
        total=N,
        partial=False,
        rank=shape.rank,
        absorbed=None if shape.kind == "gqa" or rotated else latents,  # type: ignore[arg-type]
        scales=x.get("key_scales"),  # type: ignore[arg-type]
        rotation=Rotation(rotor, shape.frequencies, 1.0) if rotated else None,  # type: ignore[arg-type]
    )


Assembled = dict[str, tuple[Resources, Work]]  # by the kernel's text before any pass


def row(shape: Shape, chip: GPU, mesh: Mesh, dumps: Path, known: Assembled) -> GPURow:
    """Compiles a call, and reads what the compilers left in a folder, unless they did before."""
    for old in dumps.iterdir():
        old.unlink()
    program = ahead.call(shape, mesh, backend="gpu")
    problem = problem_of(shape)
    plan, _ = parts.divide(problem)
    spec = gpu.specify(problem, plan, chip)
    products = sum(spec.products.values())
    (path,) = dumps.glob("*.before_layout_inference.txt")
    text = path.read_text().replace(path.name.partition(".")[0], "")
    for ptx in dumps.glob("*.ptx"):  # none where the same kernel was compiled before
        code = sass.assemble(ptx)
        words = sass.resources(ptx.with_suffix(".ptxas").read_text())
        known[text] = words, sass.work(code, sass.main_loop(code), products)
    words, work = known[text]
    cycle_bytes = chip.hbm / chip.clock / chip.cores
    copied = spec.stages * gpu.CHUNK_BYTES + (plan.columns * 4 * gpu.TILE if spec.scaled else 0)
    arrival = copied / cycle_bytes
    tensor = sum(count * max(16, n / 2) for n, count in spec.products.items())
    size = call_bytes(shape, spec, chip)
    row_bytes = shape.row * problem.cache.dtype.itemsize * gpu.TILE
    return GPURow(
        chip=chip.name,
        shape=shape.name,
        arguments=dataclasses.asdict(shape),
        goal=is_goal(shape),
        parts=plan.parts,
        consumers=spec.consumers,
        ring=spec.ring,
        bytes=size,
        dma=size / chip.hbm,
        read=plan.parts * (spec.stages - spec.table) * gpu.CHUNK_BYTES / row_bytes,
        registers=words.registers,
        spilled=words.spilled,
        serialized=words.serialized,
        shared=spec.shared,
        products=products,
        instructions=work.instructions,
        issue=work.instructions / arrival,
        schedule=work.cycles / (spec.consumers * arrival),
        tensor=tensor / arrival,
        occupancy=tuple(occupancy(shape, plan.parts, chip, B) for B in OCCUPANCY_BATCHES),
        temporaries=program.temporaries,
        made=program.largest_made(),
    )


def call_bytes(shape: Shape, spec: Spec, chip: GPU) -> int:
    """Of HBM for one call with every slot live; the rest of a call's arrays fits into L2."""
    plan, item = spec.plan, 2
    places = chip.cores // plan.parts + shape.batch
    results = 4 * plan.parts * places * spec.consumers
    results *= plan.columns * (parts.lanes_of(plan.values) + 2) + parts.lanes_of(plan.own)
    queries = item * shape.batch * plan.parts * plan.columns * parts.lanes_of(plan.keys)
    table = item * gpu.LANES * spec.table
    rotor = table * shape.batch * plan.parts * parts.lanes_of(plan.latents)
    scales = 4 * shape.num_heads if shape.scaled else 0
    rows = shape.batch * shape.slots * (shape.row * item + scales)
    return rows + 2 * results + queries + table * shape.slots + rotor


def occupancy(shape: Shape, number: int, chip: GPU, batch: int) -> float:
    """Mean over largest stretch of all blocks, every sequence full: what of the card has work."""
    tiles = batch * math.ceil(shape.slots / gpu.TILE)
    teams = max(chip.cores // number, 1)
    share = max(math.ceil(tiles / teams), balance.FEWEST)
    return tiles * number / (share * chip.cores)
