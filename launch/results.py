"""Runs that are trained once and read ever after, and the table that compares them."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from vhajax import config, metrics, runs, train, transformer
from vhajax.evaluate import open_data
from vhajax.manifest import TOKENIZER, Manifest


@dataclass(frozen=True)
class Outcome:
    """What a finished run logged: held-out nats per token, bits per byte, median tokens/s."""

    loss: float
    bits_per_byte: float
    tokens_per_second: float


@dataclass(frozen=True)
class Row:
    """One model: its outcomes, one a seed."""

    name: str
    model: config.Model
    outcomes: tuple[Outcome, ...]

    @property
    def cache_bytes(self) -> int:
        """Logical bytes of one token over all layers, in compute dtype."""
        size = np.dtype(transformer.compute_dtype(self.model)).itemsize
        return self.model.attention.cache_row().logical_bytes(size) * self.model.num_layers

    def values(self, field: str) -> list[float]:
        return [getattr(outcome, field) for outcome in self.outcomes]


def outcome(experiment: config.Experiment, run: Path) -> Outcome | None:
    """What a run came to, or None if it is not finished.

    Raises:
      UserError: the run is another experiment's, or of data with another tokenizer.
    """
    if not (run / runs.CONFIG).exists():
        return None
    runs.check_same(run, runs.read_config(run), experiment)
    runs.check_tokenizer(run, open_data(experiment)[0] / TOKENIZER)
    rows = metrics.read(run)
    # Evaluations on the way may read fewer rows; only the last one is comparable.
    last = rows[-1] if rows else {}
    if last.get("step") != experiment.train.steps or "heldout_loss" not in last:
        return None
    speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    speed = statistics.median(speeds) if speeds else math.nan
    return Outcome(last["heldout_loss"], last["heldout_bits_per_byte"], speed)


def trained(
    experiment: config.Experiment, run: Path, announce: Callable[[str], Any]
) -> Outcome | None:
    """The outcome of a run, which is trained unless it is finished; None if interrupted."""
    if (known := outcome(experiment, run)) is not None:
        announce(f"{run.name}: finished before.")
        return known
    data = experiment.data
    announce(
        f"Training {run.name}: {experiment.model.attention.summary()}, {experiment.train.steps} "
        f"steps of {data.batch_size} × {data.seq_len} tokens …"
    )
    return outcome(experiment, run) if train.train(experiment, run).finished else None


def spread(values: list[float], digits: int) -> str:
    """Mean and half of the range; the value where there is one."""
    mean = f"{statistics.fmean(values):,.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {(max(values) - min(values)) / 2:,.{digits}f}"


def gzip_bits_per_byte(manifest: Manifest) -> float:
    """gzip -9 of the held-out text."""
    return 8 * (manifest.heldout.gzip9_bytes or 0) / manifest.heldout.utf8_bytes


def comparison(rows: list[Row], manifest: Manifest) -> Table:
    """One line a model; gzip -9 of the same held-out text beside them."""
    seeds = len(rows[0].outcomes)
    how = f"; {seeds} seeds, mean ± half of their range" if seeds > 1 else ""
    table = Table(title=f"Held-out: {manifest.heldout.utf8_bytes:,} bytes{how}")
    for heading in ("model", "parameters", "cache a token", "tokens/s", "nats/token", "bits/byte"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{transformer.num_params(row.model):,}",
            f"{row.cache_bytes:,} B",
            spread(row.values("tokens_per_second"), 0),
            spread(row.values("loss"), 3),
            spread(row.values("bits_per_byte"), 3),
        )
    table.add_row("gzip -9", "", "", "", "", f"{gzip_bits_per_byte(manifest):.3f}")
    return table
