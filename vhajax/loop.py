"""The loop: rows in, steps, evaluations, checkpoints; stopped at any step and resumed exactly."""

import collections
import contextlib
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from vhajax import checkpoint, config, cost, hardware, metrics, runs, step
from vhajax.data import Batch, heldout_batches, rows_of_step, train_batches
from vhajax.errors import UserError
from vhajax.evaluate import Evaluation, evaluate, make_score
from vhajax.manifest import Manifest
from vhajax.peers import COMPUTING, Peers
from vhajax.sharding import held_rows, place
from vhajax.stop import Stop, StopAsked

UNFINISHED = Evaluation(math.nan, 0, 0)


@dataclass(frozen=True)
class Result:
    """What a run came to.

    loss: training cross-entropy at the last logged step. tokens_per_second: median over log
    intervals, compilation, evaluation and saving left out. status: 0 where it is finished, else the
    exit status (`errors`) of what stopped it.
    """

    step: int
    loss: float
    heldout: Evaluation
    tokens_per_second: float
    status: int

    @property
    def finished(self) -> bool:
        return self.status == 0


@dataclass(frozen=True)
class Source:
    """The prepared rows that a run reads. token_bytes: [V], UTF-8 bytes of each token."""

    folder: Path
    manifest: Manifest
    token_bytes: np.ndarray


class Loop:
    """One process's part of a run.

    start: the step of the state that `run` gets. profile: first and last step (from 1) of a
    profiler trace, or None.
    """

    def __init__(
        self,
        experiment: config.Experiment,
        run: Path,
        source: Source,
        mesh: jax.sharding.Mesh,
        peers: Peers,
        start: int,
        profile: tuple[int, int] | None = None,
    ):
        self.experiment, self.cfg, self.path = experiment, experiment.train, run
        self.source, self.peers, self.start = source, peers, start
        self.step = jax.jit(step.make_train_step(experiment), donate_argnums=0)
        self.score = make_score(experiment)
        self.where = step.batch_sharding(mesh)
        self.stop = Stop(peers.count)
        self.trace = Trace(run / runs.PROFILE, profile)
        self.speed = Speed(experiment, mesh)
        self.saver = checkpoint.Checkpointer(
            run, experiment, self.cfg.keep_checkpoints, self.cfg.keep_every
        )
        main = peers.index == 0
        self.log = metrics.MetricsLog(run, start) if main else metrics.NoLog()
        self.line = metrics.ProgressLine(run.name, start, self.cfg.steps, shown=main)
        self.was_evaluated, self.skipped = peers.gather("the log", self.log.earlier)[0]
        self.dispatched: collections.deque[tuple[int, dict[str, jax.Array]]] = collections.deque()
        self.values: dict[str, float] = {"loss": math.nan}  # of the last step that was read

    def run(self, state: step.TrainState) -> Result:
        """Trains from step `start` to the last one, or until somebody asks to stop."""
        heldout = UNFINISHED
        with contextlib.closing(self.log), self.stop, self.line, self.trace:
            try:
                with contextlib.suppress(StopAsked):
                    if self._evaluates_after(self.start) and not self.was_evaluated:
                        self._evaluate(state, self.cfg.eval_rows)  # stopped before it could
                    for done in self._steps(state):
                        state = done  # the one before was donated
                    heldout = self._evaluate(state, rows=0)
            except BaseException:
                if self.peers.count == 1:  # else it would wait for the others, who know nothing yet
                    self._finish()
                raise
            self._finish()
        if self.peers.index == 0:
            metrics.plot(self.path)
        loss, speed = self.values["loss"], self.speed.median
        return Result(int(state.step), loss, heldout, speed, self.stop.status)

    def _steps(self, state: step.TrainState) -> Iterator[step.TrainState]:
        """The state after each step; raises StopAsked once it is saved."""
        for done, batch in enumerate(self._batches(), self.start + 1):
            self.trace.before(done)
            if self._first(done):
                self.peers.beat(f"compiling step {done}", patience=config.LONG)
            else:  # some devices compute, and wait for others, in this call
                self.peers.beat(f"{COMPUTING} in step {done}")
            state, values = self.step(state, batch)
            self.dispatched.append((done, values))
            saves, evaluates = self._saves_after(done), self._evaluates_after(done)
            logs, traced = self._logs_after(done), self.trace.ends_after(done)
            # As a rule the step before, while the devices have the next one to do.
            self._settle(done if saves or evaluates or logs or traced else done - 1)
            self.trace.after(done)
            if self._first(done):
                self.speed.begin(done)
            if logs:
                self._log(done)
            asked = self.stop.asked()
            if asked or saves:
                self._settle(done)
                self._save(state, done)
            yield state
            if asked:
                raise StopAsked
            if evaluates:
                try:
                    self._evaluate(state, self.cfg.eval_rows)
                except StopAsked:
                    self._save(state, done)
                    raise

    def _first(self, done: int) -> bool:
        return done == self.start + 1

    def _logs_after(self, done: int) -> bool:
        return done % self.cfg.log_every == 0 or self._first(done) or done == self.cfg.steps

    def _saves_after(self, done: int) -> bool:
        return done % self.cfg.checkpoint_every == 0 or done == self.cfg.steps

    def _evaluates_after(self, done: int) -> bool:
        every = self.cfg.eval_every
        return bool(every) and done % every == 0 and 0 < done < self.cfg.steps

    def _batches(self) -> Iterator[step.Batch]:
        data, shape = self.experiment.data, self.shape
        rows = held_rows(self.where, shape)
        batches = train_batches(
            self.source.folder,
            batch_size=data.batch_size,
            seed=data.seed,
            num_steps=self.cfg.steps,
            start_step=self.start,
            part=rows,
        )
        for done in range(self.start + 1, self.cfg.steps + 1):
            with self.speed.clock.part("data"):
                self.peers.beat(f"reading the batch of step {done}")
                batch = next(batches)
                placed = {name: place(x, self.where, shape, rows) for name, x in batch.items()}
            yield placed

    @property
    def shape(self) -> tuple[int, int]:
        return self.experiment.data.batch_size, self.experiment.data.seq_len

    def _settle(self, upto: int) -> None:
        """Reads what the steps up to `upto` came to, which waits for them."""
        while self.dispatched and self.dispatched[0][0] <= upto:
            done, values = self.dispatched.popleft()
            self.peers.beat(f"{COMPUTING} in step {done}", config.LONG if self._first(done) else 1)
            self.values = {name: float(x) for name, x in jax.device_get(values).items()}
            if not all(math.isfinite(self.values[name]) for name in ("loss", "grad_norm")):
                self._skip(done)

    def _skip(self, done: int) -> None:
        self.skipped += 1
        if self.skipped <= self.cfg.skip_bad_steps:
            self.log.write(done, skipped=self.skipped)
            return
        self.saver.wait()
        data, there = self.experiment.data, checkpoint.steps(self.path)
        rows = rows_of_step(done - 1, data.batch_size, self.source.manifest.train.rows, data.seed)
        last = f"the last good checkpoint is {there[-1]}" if there else "there is no checkpoint yet"
        raise UserError(
            f"The loss is {self.values['loss']} and the gradient's norm "
            f"{self.values['grad_norm']} at step {done}, whose batch is rows "
            f"{', '.join(map(str, rows))} of {self.source.folder}; {last} of {self.path}: go on "
            "from there with a lower rate in a run of its own (--init-from), or allow more than "
            f"{self.cfg.skip_bad_steps} such steps with --skip-bad-steps."
        )

    def _log(self, done: int) -> None:
        self.saver.check()
        values = self.values | self.speed.lap(done) | metrics.memory()
        self.log.write(done, **{n: x for n, x in values.items() if math.isfinite(x)})
        loss, speed = self.values["loss"], self.speed.median
        self.line.update(done, f"loss {loss:.3f}  {speed:,.0f} tokens/s")

    def _save(self, state: step.TrainState, done: int) -> None:
        with self.speed.clock.part("checkpoint"):
            self.peers.beat(f"saving step {done}", patience=config.LONG)
            self.saver.save(state)

    def _finish(self) -> None:
        self.peers.beat("writing its last checkpoint", patience=config.LONG)
        self.saver.finish()

    def _evaluate(self, state: step.TrainState, rows: int) -> Evaluation:
        """Raises StopAsked where somebody does."""
        with self.speed.clock.part("evaluation"):
            batches = self._heldout(int(state.step), rows)
            put = lambda batch: {n: place(x, self.where, self.shape) for n, x in batch.items()}  # noqa: E731
            result = evaluate(self.score, state.params, batches, self.source.token_bytes, put)
            self.log.write(
                int(state.step),
                heldout_loss=result.loss,
                heldout_bits_per_byte=result.bits_per_byte,
            )
        return result

    def _heldout(self, done: int, rows: int) -> Iterator[Batch]:
        batches = heldout_batches(self.source.folder, self.experiment.data.batch_size, rows)
        while True:
            self.peers.beat(f"reading held-out rows after step {done}")
            batch = next(batches, None)
            if batch is None:
                return
            if self.stop.asked():
                raise StopAsked
            self.peers.beat(
                f"{COMPUTING} in the evaluation after step {done}", patience=config.LONG
            )
            yield batch


class Trace:
    """A profiler trace of the first to the last of `steps`, written into a folder; None: none."""

    def __init__(self, folder: Path, steps: tuple[int, int] | None):
        self.folder, self.first, self.last = folder, *(steps or (0, 0))
        self._runs = False

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_: object) -> None:
        if self._runs:
            jax.profiler.stop_trace()

    def before(self, step: int) -> None:
        if step == self.first:
            jax.profiler.start_trace(self.folder)
            self._runs = True

    def ends_after(self, step: int) -> bool:
        return self._runs and step == self.last

    def after(self, step: int) -> None:
        if self.ends_after(step):
            jax.profiler.stop_trace()
            self._runs = False


class Speed:
    """Where the time of a run goes."""

    def __init__(self, experiment: config.Experiment, mesh: jax.sharding.Mesh):
        data, device = experiment.data, mesh.devices.flat[0]
        self.clock = metrics.Clock()
        self._tokens = data.batch_size * data.seq_len
        self._flops = 3 * cost.forward(experiment.model, data.seq_len, data.batch_size).total
        found = hardware.find(device.device_kind)
        self._peak = found.peak * mesh.size if found else None
        self._laps: list[float] = []
        self._since = 0

    def begin(self, done: int) -> None:
        """Starts to count after a step: the first one of a process is compiled, too."""
        self.clock.lap()
        self._since = done

    def lap(self, done: int) -> dict[str, float]:
        """Means over the steps since the last lap: seconds a step by part, tokens/s and MFU.

        MFU: FLOPs of the model's products (`cost`), 3 times the forward's, over the published
        bfloat16 peak of all devices; left out where that is not known. Tokens/s and MFU count the
        time of data and steps, not of checkpoints and evaluations.
        """
        steps, parts = done - self._since, self.clock.lap()
        if not steps:
            return {}
        self._since = done
        seconds = {
            f"{name}_seconds": parts[name] / steps for name in ("data", "compute", "checkpoint")
        }
        training = (parts["data"] + parts["compute"]) / steps
        self._laps.append(self._tokens / training)
        mfu = {"mfu": self._flops / training / self._peak} if self._peak else {}
        return {"tokens_per_second": self._laps[-1], **seconds, **mfu}

    @property
    def median(self) -> float:
        """Tokens/s over laps, NaN before the first."""
        return statistics.median(self._laps) if self._laps else math.nan
