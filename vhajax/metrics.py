"""Where numbers of a run go: JSON lines, TensorBoard, a progress line on stderr, a plot."""

import collections
import contextlib
import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vhajax import runs
from vhajax.errors import UserError


class MetricsLog:
    """Appends {step, name: value} to metrics.jsonl and to TensorBoard.

    A run that goes on from an earlier checkpoint first drops what was logged after it.

    Attributes:
      earlier: whether there are held-out numbers of the step it goes on from, and how many bad
        steps were skipped up to there.
    """

    def __init__(self, run: Path, start_step: int):
        from tensorboardX import SummaryWriter  # 2 s to import

        self._run, self._path, self._start = run, run / runs.METRICS, start_step
        kept = [row for row in read(run) if row["step"] <= start_step]
        self._rewrite(kept)
        evaluated = any(row["step"] == start_step and "heldout_loss" in row for row in kept)
        self.earlier = (evaluated, max((row.get("skipped", 0) for row in kept), default=0))
        self._board = SummaryWriter(str(run / runs.TENSORBOARD), purge_step=start_step + 1)

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        runs.write_whole(self._path, "".join(json.dumps(row) + "\n" for row in rows))

    def write(self, step: int, **values: float) -> None:
        if step == self._start:  # the same weights evaluated again: these numbers replace those
            names = {"step", *values}
            self._rewrite([r for r in read(self._run) if r["step"] != step or r.keys() != names])
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be written ({error.strerror}); free the disk or mend the "
                "folder."
            ) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the same numbers are in metrics.jsonl
            self._board.close()


class NoLog:
    """The log of a process that keeps none: process 0 does."""

    earlier = (False, 0)

    def write(self, step: int, **values: float) -> None:
        pass

    def close(self) -> None:
        pass


def read(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a last line that was cut short is left out."""
    path, rows = run / runs.METRICS, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


class ProgressLine:
    """Step, loss, tokens/s and time left on stderr; silent where that is no terminal."""

    def __init__(self, name: str, start: int, total: int, shown: bool = True):
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task(name, total=total, completed=start, note="compiling")

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, step: int, note: str) -> None:
        self._bar.update(self._task, completed=step, note=note)


class Clock:
    """Seconds of a loop by what they went to.

    What no part claims is `compute`: the step is waited for there. An evaluation is a part, too.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._parts: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        before = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] += time.perf_counter() - before

    def lap(self) -> dict[str, float]:
        """Seconds of each part since the last lap, with `data`, `checkpoint` and `compute`."""
        now = time.perf_counter()
        parts = {"data": 0.0, "checkpoint": 0.0, **self._parts}
        parts["compute"] = now - self._start - sum(parts.values())
        self._start, self._parts = now, collections.defaultdict(float)
        return parts


def memory() -> dict[str, float]:
    """Bytes in use: of the process, and of its first device where that keeps count."""
    import jax

    found = {}
    with contextlib.suppress(OSError, ValueError, IndexError):  # Linux
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["host_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
    stats = jax.local_devices()[0].memory_stats() or {}
    for name in ("bytes_in_use", "peak_bytes_in_use"):
        if name in stats:
            found[f"device_{name}"] = stats[name]
    return found


def plot(run: Path) -> None:
    """Writes loss.png: training and held-out cross-entropy over tokens' steps."""
    import matplotlib.figure

    rows = read(run)
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, label, style in (
        ("loss", "training", "-"),
        ("heldout_loss", "held-out", "o-"),
    ):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.set_title(run.name)
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = run / f".{runs.PLOT}"
    try:
        figure.savefig(temporary, format="png", dpi=120)
        temporary.replace(run / runs.PLOT)
    except OSError as error:  # the run is done and saved
        warnings.warn(f"{run / runs.PLOT} cannot be written ({error.strerror})", stacklevel=2)
