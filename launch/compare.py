"""What `make compare` runs: every mechanism at one size under one recipe, two seeds each."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import Outcome, Row, comparison, gzip_bits_per_byte, trained
from rich.console import Console

from vhajax import config, experiment, transformer
from vhajax.cli import INTERRUPTED, guarded
from vhajax.evaluate import open_data
from vhajax.manifest import Manifest

RUNS = Path("runs/compare")
SEEDS = (0, 1)
NAMES = (
    "small_mha",
    "small_gqa",
    "small_mqa",
    "small_mla_decoupled",
    "small_mla_simplified",
    "small_mfa",
    "small_vha",
    "small_lrkv",
)
WIDE = 120  # columns where output goes to no terminal


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compare", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(argv)
    say = Console(stderr=True, highlight=False, soft_wrap=True)
    experiments = {name: experiment.load(name) for name in NAMES}
    _, manifest = open_data(experiments[NAMES[0]])
    try:
        rows = train_all(experiments, say)
    except KeyboardInterrupt:  # between the steps of two runs; training itself saves and returns
        rows = None
    if rows is None:
        say.print("Stopped; `make compare` goes on from here.")
        return INTERRUPTED
    if options.json:
        print(json.dumps(as_json(rows, manifest)))
    else:
        width = None if sys.stdout.isatty() else WIDE
        Console(highlight=False, width=width).print(comparison(rows, manifest))
    return 0


def train_all(experiments: dict[str, config.Experiment], say: Console) -> list[Row] | None:
    """Every experiment with every seed; None if interrupted.

    Seeds are the outer loop, so that each mechanism has one result as early as can be.
    """
    done: dict[str, list[Outcome]] = {name: [] for name in experiments}
    for seed in SEEDS:
        for name, exp in experiments.items():
            result = trained(with_seed(exp, seed), RUNS / f"{name}-seed{seed}", say.print)
            if result is None:
                return None
            done[name].append(result)
    return [Row(name, exp.model, tuple(done[name])) for name, exp in experiments.items()]


def with_seed(exp: config.Experiment, seed: int) -> config.Experiment:
    """The experiment with other initial weights and another order of the rows."""
    return dataclasses.replace(
        exp,
        data=dataclasses.replace(exp.data, seed=seed),
        train=dataclasses.replace(exp.train, seed=seed),
    )


def as_json(rows: list[Row], manifest: Manifest) -> dict[str, Any]:
    """The table's numbers, each seed by itself."""
    models = [
        {
            "name": row.name,
            "mechanism": row.model.attention.summary(),
            "parameters": transformer.num_params(row.model),
            "cache_bytes_per_token": row.cache_bytes,
            "heldout_loss": row.values("loss"),
            "bits_per_byte": row.values("bits_per_byte"),
            "tokens_per_second": [
                speed if math.isfinite(speed) else None for speed in row.values("tokens_per_second")
            ],
        }
        for row in rows
    ]
    return {
        "seeds": list(SEEDS),
        "heldout_bytes": manifest.heldout.utf8_bytes,
        "gzip9_bits_per_byte": gzip_bits_per_byte(manifest),
        "models": models,
    }


if __name__ == "__main__":
    sys.exit(guarded(main))
