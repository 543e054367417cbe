"""Reads the schedule that the TPU compiler writes down: one line a cycle, stalls included.

libtpu leaves it where LIBTPU_INIT_ARGS says (`flags`), read once, before JAX is imported.
"""

import collections
import re
from dataclasses import dataclass
from pathlib import Path

LINE = re.compile(r"\s*(0x[0-9a-f]+|\d+)\s*([A-Z]{2})?\s*:\s*(>*)\s*(.*)")


@dataclass(frozen=True)
class Loop:
    """cycles: of one iteration, but for the loops inside it. around: all cycles outside it."""

    cycles: int
    around: int
    matmuls: int


def flags(folder: Path) -> str:
    """What LIBTPU_INIT_ARGS must be for schedules to be written into a folder that exists."""
    passes = ".*(packed-bundles-post-ra).*"
    return (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex={passes}"
    )


def find(folder: Path, name: str) -> Path:
    """The newest schedule of a kernel of that name."""
    found = [
        path
        for path in folder.glob(f"*{name}*packed-bundles-post-ra.txt")
        if "schedule-analysis" not in path.name
    ]
    if not found:
        raise FileNotFoundError(f"The compiler left no schedule of {name} in {folder}.")
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def main_loop(text: str) -> Loop:
    """The innermost loop that multiplies matrices.

    A region that runs only if a condition holds is counted as if it always ran.
    """
    cycles, matmuls = collections.Counter(), collections.Counter()
    opened = {0: (0, "")}  # by depth, the loop that began last there: lines may stray out of order
    depth, total = 0, 0
    for line in text.splitlines():
        match = LINE.match(line)
        if not match:
            continue
        address, marker, arrows, bundle = match.groups()
        if arrows or not bundle.startswith("{}"):  # an empty line carries no depth
            depth = len(arrows)
        if marker == "LB":
            opened[depth] = (depth, address)
        cycles[opened[depth]] += 1
        matmuls[opened[depth]] += bundle.count("matmul")
        total += 1
    main = max((loop[0], count, loop) for loop, count in matmuls.items() if count)[2]
    return Loop(cycles[main], total - cycles[main], matmuls[main])
