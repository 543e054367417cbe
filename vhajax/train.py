"""The loop: rows in, steps, evaluations, checkpoints; interrupted and resumed exactly."""

import contextlib
import dataclasses
import math
import signal
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vhajax import checkpoint, config, metrics, runs, sharding, step
from vhajax.data import heldout_batches, train_batches
from vhajax.errors import UserError
from vhajax.evaluate import Evaluation, evaluate, make_score, open_data
from vhajax.manifest import TOKENIZER
from vhajax.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Result:
    """What a run came to.

    loss: training cross-entropy at the last logged step. tokens_per_second: median over log
    intervals, compilation, evaluation and saving left out. finished: not interrupted.
    """

    step: int
    loss: float
    heldout: Evaluation
    tokens_per_second: float
    finished: bool


def train(experiment: config.Experiment, run: Path, *, init_from: Path | None = None) -> Result:
    """Trains, or goes on with, a run.

    Args:
      run: the run directory, made if it is not there.
      init_from: a run whose newest weights (only) this one starts with.

    Raises:
      UserError: anything that a person can fix, before anything is compiled where it shows there.
    """
    folder, manifest = open_data(experiment)
    tokenizer = load_tokenizer(folder / TOKENIZER, manifest.eos, manifest.bos)
    mesh = sharding.make_mesh(experiment.mesh)
    if init_from is not None and checkpoint.steps(run):
        raise UserError(
            f"The run {run} has checkpoints and --init-from would discard them; "
            "leave it out to go on, or name another --run-dir."
        )
    start = checkpoint.steps(run)[-1] if checkpoint.steps(run) else 0
    if start > experiment.train.steps:
        raise UserError(
            f"The run {run} is at step {start}, past train.steps = {experiment.train.steps}; "
            "raise it to go on."
        )
    if init_from is not None:
        check_init(experiment, init_from, folder / TOKENIZER)
    runs.create(run, experiment, folder / TOKENIZER)
    runs.write_special_tokens(run, manifest.eos, manifest.bos)
    with jax.set_mesh(mesh):
        state = _start_state(experiment, run, start, init_from, mesh)
        loop = _Loop(experiment, run, folder, tokenizer.token_bytes, mesh)
        return loop.run(state, start)


def _start_state(
    experiment: config.Experiment,
    run: Path,
    start: int,
    init_from: Path | None,
    mesh: jax.sharding.Mesh,
) -> step.TrainState:
    if not start and not init_from:
        return step.init_state(experiment)
    target = step.abstract_state(experiment, mesh)
    if init_from:
        newest = checkpoint.latest(init_from)
        params = checkpoint.restore_params(init_from, newest, target.params)
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


class _Loop:
    """One run's fixed parts: compiled step, data, where numbers and checkpoints go."""

    def __init__(
        self,
        experiment: config.Experiment,
        run: Path,
        folder: Path,
        token_bytes: np.ndarray,
        mesh: jax.sharding.Mesh,
    ):
        self.experiment, self.folder, self.mesh = experiment, folder, mesh
        self.cfg, self.path = experiment.train, run
        self.step = jax.jit(step.make_train_step(experiment), donate_argnums=0)
        self.score = make_score(experiment)
        self.token_bytes = token_bytes
        self.where = step.batch_sharding(mesh)

    def run(self, state: step.TrainState, start: int) -> Result:
        data = self.experiment.data
        batches = train_batches(
            self.folder,
            batch_size=data.batch_size,
            seed=data.seed,
            num_steps=self.cfg.steps,
            start_step=start,
            host_index=jax.process_index(),
            host_count=jax.process_count(),
        )
        log = metrics.MetricsLog(self.path, start)
        saver = checkpoint.Checkpointer(self.path, self.experiment, self.cfg.keep_checkpoints)
        line = metrics.ProgressLine(self.path.name, start, self.cfg.steps)
        with contextlib.closing(log), _stop_on_signals() as stopped, line:
            try:
                if self._evaluates_after(start) and not log.start_is_evaluated:
                    self._evaluate(state, log, self.cfg.eval_rows)  # interrupted before it could
                state, loss, speed = self._steps(state, start, batches, log, saver, line, stopped)
            finally:
                saver.finish()
            finished = int(state.step) == self.cfg.steps
            heldout = self._evaluate(state, log, rows=0) if finished else Evaluation(math.nan, 0, 0)
        metrics.plot(self.path)
        return Result(int(state.step), loss, heldout, speed, finished)

    def _steps(self, state, start, batches, log, saver, line, stopped):
        cfg, watch, speeds, loss, speed = self.cfg, metrics.Stopwatch(), [], math.nan, math.nan
        tokens = self.experiment.data.batch_size * self.experiment.data.seq_len
        logged = start
        for done in range(start + 1, cfg.steps + 1):
            state, values = self.step(state, self._place(next(batches)))
            if done == start + 1:  # compiled here: not counted
                jax.block_until_ready(values)
                watch.lap()
                logged = done
            if done % cfg.log_every == 0 or done in (start + 1, cfg.steps):
                loss = self._finite_loss(values, done)
                if done > logged:
                    speeds.append(tokens * (done - logged) / watch.lap())
                    speed, logged = statistics.median(speeds), done
                    values["tokens_per_second"] = speeds[-1]
                log.write(done, **{name: float(value) for name, value in values.items()})
                line.update(done, f"loss {loss:.3f}  {speed:,.0f} tokens/s")
            ends = done == cfg.steps or stopped()
            if ends or self._evaluates_after(done) or done % cfg.checkpoint_every == 0:
                self._finite_loss(values, done)  # also waits for the step, whose time is training
                watch.pause()
                if ends or done % cfg.checkpoint_every == 0:
                    saver.save(state)
                if ends:
                    break
                if self._evaluates_after(done):
                    self._evaluate(state, log, self.cfg.eval_rows)
                watch.resume()
        return state, loss, speed

    def _evaluates_after(self, done: int) -> bool:
        every = self.cfg.eval_every
        return bool(every) and done % every == 0 and 0 < done < self.cfg.steps

    def _finite_loss(self, values: dict[str, jax.Array], done: int) -> float:
        loss = float(values["loss"])
        if not math.isfinite(loss):
            raise UserError(
                f"The loss is {loss} at step {done}; go on from the last checkpoint of "
                f"{self.path} with a lower rate, in a run of its own (--init-from)."
            )
        return loss

    def _evaluate(self, state: step.TrainState, log: metrics.MetricsLog, rows: int) -> Evaluation:
        data = self.experiment.data
        batches = heldout_batches(self.folder, data.batch_size, rows)
        result = evaluate(self.score, state.params, batches, self.token_bytes, self._put)
        log.write(
            int(state.step), heldout_loss=result.loss, heldout_bits_per_byte=result.bits_per_byte
        )
        return result

    def _place(self, batch: step.Batch) -> step.Batch:
        """This host's rows as its part of the global arrays."""
        make = jax.make_array_from_process_local_data
        return {name: make(self.where, np.asarray(x)) for name, x in batch.items()}

    def _put(self, batch: step.Batch) -> step.Batch:
        """A batch that every host holds in full."""
        return jax.device_put(dict(batch), self.where)


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C or SIGTERM into a flag that the loop reads; the second interrupts."""
    caught: list[int] = []

    def note(number: int, _frame: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        print("Stopping after this step; once more to stop at once.", file=sys.stderr)

    try:
        before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's
        yield lambda: False
        return
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
