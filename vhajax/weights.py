"""A run's weights without a training state: read, and written as a run of their own."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from vhajax import checkpoint, config, files, runs, transformer
from vhajax.errors import UserError
from vhajax.step import TrainState

Params = dict[str, Any]
"""float32 arrays by path, layers stacked: `blocks.attention.*` [L, …]."""


def read(run: Path) -> tuple[config.Model, dict[str, jax.Array]]:
    """A run's model and its newest weights, on one device.

    Raises:
      UserError: not a run, or no sound checkpoint.
    """
    model = runs.read_config(run).model
    shapes = transformer.init_shapes(model, None)
    return model, checkpoint.restore_params(run, checkpoint.latest(run), shapes)


def refuse_existing(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} exists; name a new folder for the model.")


def write_derived(run: Path, out: Path, model: config.Model, params: Params) -> None:
    """Writes a model made of a run's, with all else as the run has it."""
    experiment = dataclasses.replace(runs.read_config(run), model=model)
    write(out, experiment, params, checkpoint.latest(run), runs.read_texts(run))


def write(
    out: Path, experiment: config.Experiment, params: Params, step: int, texts: dict[str, str]
) -> None:
    """Writes a run that holds weights only: whole or not at all.

    Args:
      texts: its files of text by name, `runs.TOKENIZER` among them.
    Raises:
      UserError: `out` cannot be written.
    """
    with files.appearing_at_end(out) as folder, files.disk_errors(out):
        for name, text in texts.items():
            runs.write_whole(folder / name, text)
        saver = checkpoint.Checkpointer(folder, experiment, keep=1)
        arrays = {name: jnp.asarray(x, jnp.float32) for name, x in params.items()}
        saver.save(TrainState(arrays, (), jnp.int32(step)), weights_only=True)
        saver.finish()
        runs.write_whole(folder / runs.CONFIG, config.to_json(experiment))
