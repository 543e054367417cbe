"""`python -m pallas_kernels.roofline`: the static roofline of every kernel, shape and chip.

Nothing runs on a device: the kernels are compiled ahead of time, and their schedules counted. Each
chip is compiled for in a process of its own (`measure`), since libtpu reads its settings once and
writes to the terminal what no user can act on. What is said of GPUs is in `roofline_gpu`.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pallas_kernels import ahead, measure, roofline_gpu
from pallas_kernels.chips import CHIPS, GPUS, MIB
from pallas_kernels.measure import Row
from pallas_kernels.measure_gpu import GPURow

NAME = "pallas_kernels.roofline"
GOAL_CHIPS = ("v5e", "v6e")
INTERRUPTED = 130
NAMES = (*CHIPS, *GPUS)
NO_ESTIMATE = ("einsums", True)  # XLA has none for a GPU that is not here

TEXT = """\
# The static roofline of the decode kernels

Written by `{command}`
with {versions}. Every figure is static: it comes from the compiler's schedule
and from published speeds, and no device ran.

## How to read it

`compute / DMA` is the time that the compiler's schedule gives one tile of rows over the time that
the tile's copy takes at the chip's peak bandwidth: below 1 the kernel is bound by bytes, which is
the physical limit, above 1 by its own instructions; `call` is the same for the whole call, the
cycles `around` the loop, once a sequence, included. `beside` is XLA's own estimate of what runs
before and after the kernel, and `plain XLA` its own estimate of the same attention written with
einsums over the same rows, both over the DMA time of the kernel's bytes (1 is ideal, more is more,
– where XLA has no estimate); `its bytes` are those that XLA counts, over the kernel's. `× MHA` is
what the bytes allow at most over multi-head attention with as many heads, and `padding` what a row
holds for the sake of whole registers.

## Assumptions

- A call has {calls}, all full, in bfloat16.
- `MiB` is all that the kernel reads and writes in HBM: rows, scales, queries laid out over the row,
  rotors and tables, outputs and log-sum-exp.
- A schedule counts the stalls that the compiler foresees, not waits for memory, and a region that
  runs only if a condition holds as if it always ran.
- Clocks are derived from published peak FLOPS, which is an assumption:

| chip | peak HBM, GB/s | clock, GHz | cores |
|---|--:|--:|--:|
{chips}

Two cores share the bandwidth of their chip, and each takes half of every sequence.

## Goals for compute / DMA

{goals}
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}.\n")


@dataclass
class Job:
    """A process that compiles for one chip, kernels or einsums, and its folder."""

    what: str
    chip: str
    folder: Path
    process: subprocess.Popen | None = None

    def start(self, *, goals: bool) -> None:
        dumps = self.folder / measure.DUMPS
        dumps.mkdir(parents=True)
        command = [sys.executable, "-m", "pallas_kernels.measure", self.what, self.chip]
        with open(self.folder / "log", "w") as log:
            self.process = subprocess.Popen(
                [*command, str(self.folder), *(["--goals"] if goals else [])],
                env=measure.environment(dumps if self.what == "kernels" else None),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def running(self) -> bool:
        """Raises RuntimeError with its last words if it failed."""
        if self.process is None or self.process.poll() is None:
            return self.process is not None
        if self.process.returncode:
            words = (self.folder / "log").read_text(errors="replace").split("\n")
            last = next((line for line in reversed(words) if line.strip()), "it said nothing")
            raise RuntimeError(
                f"Compiling the {self.what} for {self.chip} failed: {last.strip(' .')}."
            )
        return False

    def lines(self) -> list[str]:
        path = self.folder / measure.ROWS
        return path.read_text().splitlines() if path.exists() else []


def collect(chips: Sequence[str], *, goals: bool = False, plain: bool = True) -> list[Row | GPURow]:
    """Rows by chip, then shape; as many processes at once as there are processors.

    Raises:
      NoCompilerError: a chip's compiler is not installed.
      RuntimeError: a call did not compile.
    """
    for chip in chips:
        ahead.require_compiler(chip)
    with tempfile.TemporaryDirectory() as folder:
        kinds = measure.WHAT if plain else measure.WHAT[:1]
        pairs = itertools.product(kinds, chips)
        pairs = [(w, c) for w, c in pairs if (w, c in GPUS) != NO_ESTIMATE]
        jobs = [Job(w, c, Path(folder) / f"{c}-{w}") for w, c in pairs]
        try:
            _run(jobs, goals)
        finally:
            for job in jobs:
                if job.process is not None and job.process.poll() is None:
                    job.process.kill()
                    job.process.wait()
        found = {(job.what, job.chip): map(json.loads, job.lines()) for job in jobs}
    rows: list[Row | GPURow] = []
    for chip in chips:
        if chip in GPUS:
            rows += [GPURow(**row) for row in found["kernels", chip]]
            continue
        mine = [Row(**row) for row in found["kernels", chip]]
        if plain:
            for row, (seconds, size) in zip(mine, found["einsums", chip], strict=True):
                row.einsum_seconds = None if seconds is None else seconds / row.dma
                row.einsum_bytes = size / row.bytes
        rows += mine
    return rows


def _run(jobs: list[Job], goals: bool) -> None:
    waiting, limit = list(jobs), os.cpu_count() or 1
    total = len(jobs) * len(measure.shapes_of(goals=goals))
    while True:
        running = sum(job.running() for job in jobs)
        while waiting and running < limit:
            waiting.pop(0).start(goals=goals)
            running += 1
        if sys.stderr.isatty():
            done = sum(len(job.lines()) for job in jobs)
            end = "\r" if running else "\n"
            print(f"compiled {done} of {total} calls", end=end, file=sys.stderr, flush=True)
        if not running:
            return
        time.sleep(0.1)


# ------------------------------------------------------------------ what is printed


def document(rows: Sequence[Row | GPURow], chips: Sequence[str], command: str) -> str:
    tpus = [r for r in rows if isinstance(r, Row)]
    gpus = [r for r in rows if isinstance(r, GPURow)]
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    pages = []
    if tpus:
        pages.append(_tpu_page(tpus, [c for c in chips if c in CHIPS], command, used))
    if gpus:
        pages.append(roofline_gpu.document(gpus, used))
    return "\n".join(pages)


def _tpu_page(rows: Sequence[Row], chips: Sequence[str], command: str, used: str) -> str:
    calls = sorted({(r.arguments["batch"], r.arguments["slots"]) for r in rows}, reverse=True)
    text = TEXT.format(
        command=command,
        versions=used,
        calls=" or ".join(f"{batch} sequences of {slots} slots" for batch, slots in calls),
        chips="\n".join(_chip_row(chip) for chip in chips),
        goals="\n".join(_goals(rows)),
    )
    tables = ["\n".join(roofline_gpu.table(chip, COLUMNS, rows)) for chip in chips]
    return "\n".join([text, *tables])


def versions() -> dict[str, str]:
    names = ("jax", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
    installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in names if name in installed}


def _chip_row(name: str) -> str:
    chip = CHIPS[name]
    return f"| {name} | {chip.hbm / 1e9:.0f} | {chip.clock / 1e9:.2f} | {chip.cores} |"


def _goals(rows: Sequence[Row]) -> Iterator[str]:
    chips = [chip for chip in GOAL_CHIPS if any(row.chip == chip for row in rows)]
    if not chips:
        yield f"They are for {' and '.join(GOAL_CHIPS)}."
        return
    yield f"| shape | at most | {' | '.join(chips)} | met |"
    yield f"|---|--:|{'--:|' * len(chips)}---|"
    for shape in dict.fromkeys(row.shape for row in rows if row.goal is not None):
        mine = [r for chip in chips for r in rows if (r.chip, r.shape) == (chip, shape)]
        ratios = " | ".join(f"{r.tile_ratio:.2f}" for r in mine)
        met = "yes" if all(r.goal and r.tile_ratio <= r.goal for r in mine) else "**no**"
        yield f"| {shape} | {mine[0].goal} | {ratios} | {met} |"


COLUMNS = (
    ("MiB", lambda r: f"{r.bytes / MIB:.1f}"),
    ("DMA, µs", lambda r: f"{r.dma * 1e6:.0f}"),
    ("tile, rows", lambda r: str(r.tile)),
    ("tile, MiB", lambda r: f"{r.tile_bytes / MIB:.2f}"),
    ("tile, cycles", lambda r: str(r.tile_cycles)),
    ("tile, µs", lambda r: f"{r.tile_seconds * 1e6:.2f}"),
    ("around, cycles", lambda r: str(r.around)),
    ("compute / DMA", lambda r: f"**{r.tile_ratio:.2f}**"),
    ("call", lambda r: f"{r.ratio:.2f}"),
    ("beside", lambda r: _or_dash(r.beside)),
    ("plain XLA", lambda r: _or_dash(r.einsum_seconds)),
    ("its bytes", lambda r: _or_dash(r.einsum_bytes)),
    ("× MHA", lambda r: f"{r.over_mha:.2f}"),
    ("padding", lambda r: f"{r.padding:.0%}"),
    ("VMEM, MiB", lambda r: f"{r.vmem / MIB:.0f}"),
)


def _or_dash(x: float | None) -> str:
    return "–" if x is None else f"{x:.2f}"


def as_json(rows: Sequence[Row | GPURow], chips: Sequence[str], command: str) -> str:
    known = CHIPS | GPUS
    assumed = [{k: getattr(known[c], k) for k in ("name", "cores", "hbm", "clock")} for c in chips]
    found = {"command": command, **versions(), "static": True, "chips": assumed}
    return json.dumps(found | {"rows": [vars(row) for row in rows]}) + "\n"


# ------------------------------------------------------------------ command line


def main(argv: Sequence[str] | None = None) -> int:
    parser = _Parser(
        prog=NAME, description="Static roofline of the decode kernels; no device needed."
    )
    add = parser.add_argument
    add("--json", action="store_true", help="one JSON object, times in seconds")
    add("--chip", choices=NAMES, nargs="+", action="extend", help="these only")
    add("--goals", action="store_true", help="only the shapes that have a goal")
    add("--kernels-only", action="store_true", help="without the plain XLA path: half the time")
    add("--out", type=Path, help="write there what would be printed")
    args = parser.parse_args(argv)
    if args.out and not args.out.parent.is_dir():
        parser.error(f"--out {args.out} is in a folder that does not exist")
    chips = [chip for chip in NAMES if chip in (args.chip or NAMES)]
    try:
        rows = collect(chips, goals=args.goals, plain=not args.kernels_only)
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except (ahead.NoCompilerError, RuntimeError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ahead.NoCompilerError) else 1
    text = (as_json if args.json else document)(rows, chips, _command(args, chips))
    if args.out:
        args.out.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


def _command(args: argparse.Namespace, chips: Sequence[str]) -> str:
    flags = {"--json": args.json, "--goals": args.goals, "--kernels-only": args.kernels_only}
    words = ["python -m", NAME, *(flag for flag, given in flags.items() if given)]
    return " ".join(words + (["--chip", *chips] if len(chips) < len(NAMES) else []))


if __name__ == "__main__":
    sys.exit(main())
