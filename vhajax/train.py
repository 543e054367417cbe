"""Begins a run, or goes on with one: checks, the run directory, the first state, then the loop."""

import contextlib
import dataclasses
import importlib.metadata
import sys
import time
from pathlib import Path

import jax

from vhajax import checkpoint, config, runs, sharding, step
from vhajax.errors import UserError
from vhajax.evaluate import open_data
from vhajax.loop import Loop, Result, Source
from vhajax.manifest import MANIFEST, TOKENIZER
from vhajax.peers import Peers
from vhajax.tokenizer import load_tokenizer


def train(
    experiment: config.Experiment,
    run: Path,
    *,
    init_from: Path | None = None,
    peers: Peers | None = None,
    profile: tuple[int, int] | None = None,
) -> Result:
    """Trains, or goes on with, a run.

    Args:
      run: the run directory, made if it is not there; all processes must see it.
      init_from: a run whose newest weights (only) this one starts with.
      peers: all processes of the run, each of which calls this; None: there is one.
      profile: first and last step (from 1) of a profiler trace in the run's `profile` folder.

    Raises:
      UserError: anything that a person can fix, before anything is compiled where it shows there.
    """
    peers = peers or Peers()
    with peers.together():
        return _train(experiment, run, init_from, peers, profile)


def _train(
    experiment: config.Experiment,
    run: Path,
    init_from: Path | None,
    peers: Peers,
    profile: tuple[int, int] | None,
) -> Result:
    folder, manifest = open_data(experiment)
    bos = manifest.bos or ""  # none, even if the tokenizer has one
    tokenizer = load_tokenizer(folder / TOKENIZER, manifest.eos, bos)
    mesh = sharding.make_mesh(experiment.mesh)
    if init_from is not None:
        check_init(experiment, init_from, folder / TOKENIZER)
    peers.agree(_identity(experiment, folder, init_from))
    with contextlib.ExitStack() as held:
        start = newest = 0
        if peers.index == 0:
            start = _first_step(experiment, run, init_from)
            newest = checkpoint.latest(init_from) if init_from else 0
            runs.create(run, experiment, folder / TOKENIZER)
            held.enter_context(runs.locked(run))
            runs.write_special_tokens(run, manifest.eos, bos)
            for name, text in runs.read_companions(init_from).items() if init_from else ():
                runs.write_whole(run / name, text)
            for sentence in checkpoint.set_torn_aside(run):
                print(f"vhajax: warning: {sentence}", file=sys.stderr)
        start, newest = peers.gather("the run directory", [start, newest])[0]
        _wait_for(run, experiment, start)
        _check_profile(profile, start)
        held.enter_context(jax.set_mesh(mesh))
        peers.beat("restoring the last checkpoint", patience=config.LONG)
        weights = (init_from, newest) if init_from else None
        state = _start_state(experiment, run, start, weights, mesh)
        source = Source(folder, manifest, tokenizer.token_bytes)
        return Loop(experiment, run, source, mesh, peers, start, profile).run(state)


def _check_profile(profile: tuple[int, int] | None, start: int) -> None:
    if profile is not None and profile[0] <= start:
        raise UserError(
            f"--profile begins at step {profile[0]}, but the run goes on after step {start}; name "
            "later steps."
        )


def _identity(experiment: config.Experiment, folder: Path, init_from: Path | None) -> dict:
    """What must be the same on all hosts, by what a person calls it."""
    return {
        "version of vhajax": importlib.metadata.version("vhajax"),
        "version of JAX": jax.__version__,
        "number of devices": jax.device_count(),
        "manifest of the data (SHA-256)": runs.digest(folder / MANIFEST),
        "tokenizer (SHA-256)": runs.digest(folder / TOKENIZER),
        "--init-from": str(init_from),
    } | {name: str(value) for name, value in runs.flatten(experiment).items()}


def _first_step(experiment: config.Experiment, run: Path, init_from: Path | None) -> int:
    """The step to go on from, if nothing stands against it."""
    there = checkpoint.steps(run)
    if init_from is not None and there:
        raise UserError(
            f"The run {run} has checkpoints and --init-from would discard them; "
            "leave it out to go on, or name another --run-dir."
        )
    start = there[-1] if there else 0
    if start > experiment.train.steps:
        raise UserError(
            f"The run {run} is at step {start}, past train.steps = {experiment.train.steps}; "
            "raise it to go on."
        )
    return start


def _wait_for(run: Path, experiment: config.Experiment, start: int) -> None:
    """A network's file system may show what process 0 wrote a little later."""
    for _ in range(30):
        if (run / runs.CONFIG).exists() and (not start or start in checkpoint.steps(run)):
            runs.check_same(run, runs.read_config(run), experiment)
            return
        time.sleep(1)
    raise UserError(
        f"The run directory {run} of process 0 (step {start}) is not what this host sees there; "
        "name one on a file system that all hosts share."
    )


def _start_state(
    experiment: config.Experiment,
    run: Path,
    start: int,
    weights: tuple[Path, int] | None,
    mesh: jax.sharding.Mesh,
) -> step.TrainState:
    """weights: run and step of those that a new run starts with."""
    if not start and not weights:
        return step.init_state(experiment)
    target = step.abstract_state(experiment, mesh)
    if weights:
        params = checkpoint.restore_params(*weights, target.params)
        return step.fresh_state(experiment, params)
    return checkpoint.restore_state(run, start, target)


def check_init(experiment: config.Experiment, source: Path, tokenizer: Path) -> None:
    """Refuses weights that are not there, or of another model or tokenizer.

    Raises:
      UserError: names the first field of the model that differs.
    """
    ours = experiment.model  # weights are float32 whatever a run computes in
    theirs = dataclasses.replace(runs.read_config(source).model, dtype=ours.dtype)
    for name, before, after in runs.changes(config.Experiment(theirs), config.Experiment(ours)):
        raise UserError(
            f"{name} is {after!r}, but the weights of {source} were trained with {before!r}; "
            "change it, or leave --init-from out."
        )
    runs.check_tokenizer(source, tokenizer)
    checkpoint.latest(source)
