"""The roofline's pages on GPUs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pallas_kernels.chips import GPUS, MIB
from pallas_kernels.measure_gpu import OCCUPANCY_BATCHES, GPURow

Columns = Sequence[tuple[str, Callable[[Any], str]]]  # of a table: name, and what it shows of a row

TEXT = """\
# GPUs

With {versions}. Nothing here ran on a GPU: registers and spills are ptxas's own words,
instructions are counted in the machine code that it wrote, and the rest is arithmetic on what the
kernel copies.

## How to read it

A multiprocessor's share of the bandwidth brings {arrival}.
All ratios are over the time in which the bytes of a tile of 64 rows, for one part of the heads,
arrive at that rate, and 1 is where the kernel would stop being bound by bytes:

- `issue`: instructions of a consumer for the tile. Each of the four schedulers has one warp of
  every warpgroup, and issues one instruction a cycle, so below 1 the instructions fit.
- `schedule`: cycles that ptxas has a warp of one consumer wait between its instructions, over the
  tiles of all consumers, which take turns. Waits for products, barriers and the maxima of other
  warps are not in it and come on top; the ring (`slots` chunks of 8 KiB a consumer) goes on filling
  meanwhile.
- `tensor`: matrix instructions, each of 64 rows and n columns counted as max(16, n/2) cycles, the
  longer of reading its rows from shared memory and multiplying.

`MiB` is what the call reads and writes in HBM with every slot live, at {hbm}; `read` the bytes of
rows that multiprocessors copy over those of the rows: where heads are split into `parts`, the
blocks of a team read k_shared and v_shared at the same time, from HBM once, and chunks begin at
multiples of 64 lanes. `busy` is how evenly tiles fall on the multiprocessors, at batch {batches}.

## Goals

No spills, and `issue` and `schedule` below 1, for {goals}: {met}.
"""


def document(rows: Sequence[GPURow], versions: str) -> str:
    chips = list(dict.fromkeys(row.chip for row in rows))
    missed = [f"{r.shape} on {r.chip}" for r in rows if r.goal and not met(r)]
    rates = ((c, GPUS[c].hbm / GPUS[c].clock / GPUS[c].cores) for c in chips)
    arrival = (f"{rate:.1f} bytes a cycle on {chip}" for chip, rate in rates)
    text = TEXT.format(
        versions=versions,
        arrival=" and ".join(arrival),
        hbm=" and ".join(f"{GPUS[c].hbm / 1e12} TB/s ({c})" for c in chips),
        batches=" and ".join(map(str, OCCUPANCY_BATCHES)),
        goals=", ".join(dict.fromkeys(r.shape for r in rows if r.goal)),
        met="**missed by " + ", ".join(missed) + "**" if missed else "met",
    )
    tables = ["\n".join(table(chip, COLUMNS, rows)) for chip in chips]
    return "\n".join([text, *tables])


def met(row: GPURow) -> bool:
    return not row.spilled and max(row.issue, row.schedule) < 1


COLUMNS = (
    ("MiB", lambda r: f"{r.bytes / MIB:.0f}"),
    ("DMA, µs", lambda r: f"{r.dma * 1e6:.0f}"),
    ("read", lambda r: f"{r.read:.2f}"),
    ("issue", lambda r: f"**{r.issue:.2f}**"),
    ("schedule", lambda r: f"**{r.schedule:.2f}**"),
    ("tensor", lambda r: f"{r.tensor:.2f}"),
    ("busy", lambda r: ", ".join(f"{x:.0%}" for x in r.occupancy)),
    ("parts", lambda r: str(r.parts)),
    ("consumers", lambda r: str(r.consumers)),
    ("slots", lambda r: str(r.ring)),
    ("shared, KiB", lambda r: f"{r.shared / 1024:.0f}"),
    ("registers", lambda r: str(r.registers)),
    ("spilled, bytes", lambda r: str(r.spilled)),
    ("HGMMA", lambda r: str(r.products)),
    ("instructions", lambda r: f"{r.instructions:.0f}"),
    ("temporaries, MiB", lambda r: f"{r.temporaries / MIB:.1f}"),
)


def table(chip: str, columns: Columns, rows: Sequence[Any]) -> Iterator[str]:
    """Lines of a chip's section: a row for each shape, a column for each figure."""
    yield f"## {chip}\n"
    yield f"| shape | {' | '.join(name for name, _ in columns)} |"
    yield f"|---|{'--:|' * len(columns)}"
    for row in (r for r in rows if r.chip == chip):
        yield f"| {row.shape} | {' | '.join(show(row) for _, show in columns)} |"
    yield ""
