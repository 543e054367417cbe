"""Where numbers of a run go: JSON lines, TensorBoard, a progress line on stderr, a plot."""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vhajax import runs


class MetricsLog:
    """Appends {step, name: value} to metrics.jsonl and to TensorBoard.

    A run that goes on from an earlier checkpoint first drops what was logged after it.

    Attributes:
      start_is_evaluated: whether there are held-out numbers of the step it goes on from.
    """

    def __init__(self, run: Path, start_step: int):
        from tensorboardX import SummaryWriter  # 2 s to import

        self._run, self._path, self._start = run, run / runs.METRICS, start_step
        kept = [row for row in read(run) if row["step"] <= start_step]
        self._rewrite(kept)
        self.start_is_evaluated = any(
            row["step"] == start_step and "heldout_loss" in row for row in kept
        )
        self._board = SummaryWriter(str(run / runs.TENSORBOARD), purge_step=start_step + 1)

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        runs.write_whole(self._path, "".join(json.dumps(row) + "\n" for row in rows))

    def write(self, step: int, **values: float) -> None:
        if step == self._start:  # the same weights evaluated again: these numbers replace those
            names = {"step", *values}
            self._rewrite([r for r in read(self._run) if r["step"] != step or r.keys() != names])
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._board.close()


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

    def __init__(self, name: str, start: int, total: int):
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=total, completed=start, note="compiling")

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, step: int, note: str) -> None:
        self._bar.update(self._task, completed=step, note=note)


class Stopwatch:
    """Seconds of training, without what happens between `pause` and `resume`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._paused_at = 0.0

    def pause(self) -> None:
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        self._start += time.perf_counter() - self._paused_at

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        return seconds


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
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(run / runs.PLOT)
