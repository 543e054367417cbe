"""Training from end to end: interrupted, resumed, moved to other meshes, started from weights."""

import dataclasses
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from tiny import after_step, assert_bitwise, changed, rows, save_weights, stored

from vhajax import (
    checkpoint,
    cli,
    config,
    experiment,
    fold,
    hardware,
    inference,
    loop,
    runs,
    sharding,
    step,
    train,
    transformer,
    weights,
)
from vhajax.config import GQA, Mesh
from vhajax.data import Rows, train_batches
from vhajax.errors import UserError
from vhajax.manifest import load_manifest
from vhajax.prepare import is_heldout
from vhajax.tokenizer import load_tokenizer

pytestmark = [
    pytest.mark.usefixtures("programs_kept"),
    pytest.mark.filterwarnings(
        "ignore:the mesh uses:UserWarning", "ignore:a dimension of:UserWarning"
    ),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny.prepare_texts(tmp_path_factory.mktemp("train") / "data", tiny.TEXTS)


@pytest.fixture(scope="module")
def vha(data) -> config.Experiment:
    return tiny.vha_experiment(data)


@pytest.fixture(scope="module")
def gqa(data) -> config.Experiment:
    return tiny.gqa_experiment(data)


@pytest.fixture(scope="module")
def vha_run(vha, tmp_path_factory) -> Path:
    """Six steps without disturbance. Tests read it, or change a copy."""
    run = tmp_path_factory.mktemp("runs") / "vha"
    assert train.train(vha, run).finished
    return run


@pytest.fixture(scope="module")
def gqa_run(gqa, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "gqa"
    assert train.train(gqa, run).finished
    return run


@pytest.fixture
def copied(vha_run, tmp_path) -> Path:
    return shutil.copytree(vha_run, tmp_path / "copy")


def interrupt(signal_number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), signal_number)


def interrupted(at: int, what: config.Experiment, run: Path) -> train.Result:
    with pytest.MonkeyPatch.context() as patch:
        after_step(patch, at, interrupt)
        return train.train(what, run)


def expected_rows(steps: int, eval_every: int) -> list[tuple[int, str]]:
    found = []
    for number in range(1, steps + 1):
        found.append((number, "loss"))
        if number % eval_every == 0 or number == steps:
            found.append((number, "heldout_loss"))
    return found


def kinds(run: Path) -> list[tuple[int, str]]:
    return [(row["step"], "loss" if "loss" in row else "heldout_loss") for row in rows(run)]


# What a run leaves behind.


def test_a_run_directory(vha, vha_run, data):
    assert sorted(path.name for path in vha_run.iterdir()) == [
        "checkpoints",
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "special_tokens.json",
        "tensorboard",
        "tokenizer.json",
    ]
    assert runs.read_config(vha_run) == vha
    assert (vha_run / "tokenizer.json").read_bytes() == (data / "tokenizer.json").read_bytes()
    assert (vha_run / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert checkpoint.steps(vha_run) == [2, 4, 6]


def test_metrics_of_a_run(vha_run):
    assert kinds(vha_run) == expected_rows(6, 2)
    losses = [row["loss"] for row in rows(vha_run) if "loss" in row]
    assert abs(losses[0] - math.log(tiny.VOCAB)) < 1.5
    assert losses[-1] < losses[0] - 0.5
    rates = [row["learning_rate"] for row in rows(vha_run) if "loss" in row]
    part = [0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(1, 5)]
    np.testing.assert_allclose(rates, [0.5, 1, *(0.1 + 0.9 * x for x in part)], rtol=1e-6)
    assert all(0 < row["tokens"] <= tiny.BATCH * tiny.T for row in rows(vha_run) if "loss" in row)


def tensorboard(run: Path) -> list[tuple[int, str, float]]:
    """Scalars of the event files: each record is a length, a checksum, an Event, a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((run / "tensorboard").glob("events.out.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + size])
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            at += 12 + size + 4
    return found


def test_tensorboard_holds_the_same_numbers(vha_run):
    wanted = [(r["step"], n, r[n]) for r in rows(vha_run) for n in r if n != "step"]
    scalars = {(number, name): value for number, name, value in tensorboard(vha_run)}
    for number, name, value in wanted:
        assert scalars[number, name] == pytest.approx(value, rel=1e-6)


def test_what_a_checkpoint_says_of_itself(vha, vha_run):
    meta = checkpoint.read_meta(vha_run, 4)
    assert meta["step"] == 4
    assert meta["data_iterator"] == {"next_index": 4}
    assert meta["weights_only"] is False
    assert config.from_json(meta["config"], "meta") == vha
    assert len(meta["tokenizer_sha256"]) == 64


def test_only_the_newest_checkpoints_are_kept(gqa, tmp_path):
    what = changed(gqa, {"train.checkpoint_every": 1, "train.keep_checkpoints": 2})
    train.train(what, tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run") == [5, 6]


# Interruption and resumption.


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("vha", 3),  # Muon, between two checkpoints
        ("gqa", 4),  # AdamW, where a checkpoint and an evaluation are due
    ],
)
def test_three_steps_and_three_are_six_bitwise(name, at, request, tmp_path, capsys):
    what, whole = request.getfixturevalue(name), request.getfixturevalue(f"{name}_run")
    run = tmp_path / "run"
    first = interrupted(at, what, run)
    assert (first.step, first.finished) == (at, False)
    assert "Stopping after this step" in capsys.readouterr().err
    assert checkpoint.steps(run)[-1] == at
    for number in checkpoint.steps(run):
        if number in checkpoint.steps(whole):
            assert_bitwise(stored(run, number), stored(whole, number))
    assert train.train(what, run).finished
    assert_bitwise(stored(run, 6), stored(whole, 6))
    assert rows(run) == rows(whole)
    assert (run / "config.json").read_bytes() == (whole / "config.json").read_bytes()


def test_two_signals_stop_at_once(gqa, gqa_run, tmp_path):
    run, before = tmp_path / "run", signal.getsignal(signal.SIGINT)

    def twice():
        interrupt(signal.SIGTERM)
        interrupt(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        after_step(patch, 3, twice)
        with pytest.raises(KeyboardInterrupt):
            train.train(gqa, run)
    assert signal.getsignal(signal.SIGINT) is before
    assert checkpoint.steps(run) == [2]
    train.train(gqa, run)
    assert_bitwise(stored(run, 6), stored(gqa_run, 6))
    assert rows(run) == rows(gqa_run)


def test_a_signal_to_a_real_process(gqa, gqa_run, tmp_path):
    """`vhajax train` ends with status 130 after ^C, and the same command finishes the run."""
    file = tiny.write_experiment(tmp_path / "slow.py", gqa)
    # An experiment is Python: this one gives us time to press ^C.
    file.write_text(file.read_text() + SLOW_STEPS)
    command = ["train", str(file), "--run-dir", str(tmp_path / "run"), "--json"]
    settings = {name.upper(): str(value) for name, value in tiny.CACHE_SETTINGS.items()}
    process = subprocess.Popen(
        [sys.executable, "-m", "vhajax.cli", *command],
        env={**os.environ, **settings, "TEST_SECONDS_A_STEP": "0.5"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        metrics = tmp_path / "run/metrics.jsonl"
        deadline = time.monotonic() + 120
        while not metrics.exists() or '"step": 2, "grad_norm"' not in metrics.read_text():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    told = json.loads(out)
    assert (told["finished"], told["bits_per_byte"]) == (False, None)
    assert 2 <= told["step"] < 6
    assert checkpoint.steps(tmp_path / "run")[-1] == told["step"]
    assert "Stopping after this step; once more to stop at once.\n" in err
    assert "Traceback" not in err
    assert cli.main(command) == 0
    assert_bitwise(stored(tmp_path / "run", 6), stored(gqa_run, 6))
    assert rows(tmp_path / "run") == rows(gqa_run)


SLOW_STEPS = """
import os, time
from vhajax import metrics

if seconds := float(os.environ.get("TEST_SECONDS_A_STEP", 0)):
    write = metrics.MetricsLog.write

    def slow_write(self, *args, **values):
        write(self, *args, **values)
        time.sleep(seconds)

    metrics.MetricsLog.write = slow_write
"""


def test_a_finished_run_stays_as_it_is(gqa, gqa_run, tmp_path):
    run = shutil.copytree(gqa_run, tmp_path / "run")
    again = train.train(gqa, run)
    assert again.finished
    assert again.heldout.loss == rows(gqa_run)[-1]["heldout_loss"]
    assert rows(run) == rows(gqa_run)
    assert_bitwise(stored(run, 6), stored(gqa_run, 6))


def test_rows_after_the_checkpoint_are_dropped_and_half_a_line_too(gqa, gqa_run, tmp_path):
    run = shutil.copytree(gqa_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints/6")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    train.train(gqa, run)
    assert rows(run) == rows(gqa_run)


def test_a_longer_run_goes_on(gqa, gqa_run, tmp_path):
    run = shutil.copytree(gqa_run, tmp_path / "run")
    longer = changed(gqa, {"train.steps": 8, "train.eval_every": 3, "train.log_every": 2})
    train.train(longer, run)
    old, new = rows(gqa_run), rows(run)
    assert new[: len(old)] == old
    assert kinds(run)[len(old) :] == [(7, "loss"), (8, "loss"), (8, "heldout_loss")]
    assert checkpoint.steps(run)[-1] == 8
    assert runs.read_config(run) == longer
    with pytest.raises(UserError, match=r"is at step 8, past train\.steps = 6; raise it"):
        train.train(gqa, run)


FROZEN = {
    "data.seed": 1,
    "data.batch_size": 8,
    "model.dim": 64,
    "model.ffn": "relu2",
    "model.attention.head_dim": 16,
    "optim.matrix_lr": 0.5,
    "optim.name": "adamw",
    "optim.warmup_steps": 3,
    "train.seed": 5,
    "train.grad_accum": 2,
    "train.z_loss": 0.1,
}


@pytest.mark.parametrize("name", FROZEN)
def test_what_cannot_change_on_resume(name, vha, vha_run):
    old, new = runs.flatten(vha)[name], FROZEN[name]
    before = (vha_run / "config.json").read_bytes()
    with pytest.raises(UserError) as caught:
        train.train(changed(vha, {name: new}), vha_run)
    message = str(caught.value)
    assert message.startswith(f"{name} is {new!r}, but the run {vha_run} was started with {old!r} ")
    assert "\n" not in message
    assert (vha_run / "config.json").read_bytes() == before


def test_another_mechanism_cannot_resume(vha, vha_run):
    with pytest.raises(UserError, match=r"model\.attention\.kind is 'GQA', .* with 'VHA'"):
        train.train(
            changed(vha, {"model.attention": GQA(num_heads=4, num_kv_heads=2, head_dim=8)}), vha_run
        )


def test_what_may_change_on_resume(vha, vha_run):
    free = {
        "hosts.join_timeout": 1,
        "hosts.silence_timeout": 2,
        "hosts.progress_timeout": 3,
        "train.keep_every": 14,
        "train.skip_bad_steps": 2,
        "train.steps": 9,
        "train.eval_every": 5,
        "train.eval_rows": 1,
        "train.checkpoint_every": 7,
        "train.keep_checkpoints": 1,
        "train.log_every": 3,
        "train.loss_chunk": 64,
        "train.remat": "full",
        "mesh": Mesh(data=2, model=2),
        "data.path": "/elsewhere",
    }
    runs.check_same(vha_run, vha, changed(vha, free))
    leaves = {f"mesh.{n}" for n in ("data", "model")} | (free.keys() - {"mesh"})
    assert leaves == runs.FREE
    assert {*FROZEN} <= runs.flatten(vha).keys() - runs.FREE


def test_data_of_another_tokenizer_cannot_resume(vha, vha_run, tmp_path):
    from vhajax.tokenizer import train_bpe

    other = tiny.prepare_texts(tmp_path / "data", tiny.TEXTS)
    train_bpe([text[::-1] for text in tiny.TEXTS], tiny.VOCAB).save(other / "tokenizer.json")
    with pytest.raises(UserError, match=r"is not the one that the run .* was trained with"):
        train.train(changed(vha, {"data.path": str(other)}), vha_run)


def test_a_folder_that_is_not_a_run(vha, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not a run; name another --run-dir"):
        train.train(vha, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_loss_that_is_not_finite_stops_the_run(gqa, tmp_path):
    params = unigram_weights(gqa, np.random.default_rng(0))
    params["unembedding"][0, 0] = np.nan
    bad = save_weights(tmp_path / "bad", gqa, params)
    numbers = rows_of(gqa, 1)
    with pytest.raises(UserError) as caught:
        train.train(gqa, tmp_path / "run", init_from=bad)
    message = str(caught.value)
    assert message.startswith("The loss is nan and the gradient's norm nan at step 1, whose batch ")
    assert f"is rows {', '.join(map(str, numbers))} of {gqa.data.path};" in message
    assert f"there is no checkpoint yet of {tmp_path / 'run'}" in message


def rows_of(what: config.Experiment, number: int) -> list[int]:
    """Rows of a step's batch, found by their content."""
    folder, data = Path(what.data.path), what.data
    everything = [tokens[:-1].tobytes() for tokens, _ in Rows(folder, "train")]
    batches = train_batches(
        folder, batch_size=data.batch_size, seed=data.seed, num_steps=number, start_step=number - 1
    )
    return [everything.index(tokens.tobytes()) for tokens in next(batches)["tokens"]]


def spoil(monkeypatch, *steps: int) -> None:
    """Batches of these steps have NaN for weights."""
    batches = loop.Loop._batches

    def spoilt(self):
        for done, batch in enumerate(batches(self), self.start + 1):
            bad = {"weights": batch["weights"] * np.nan} if done in steps else {}
            yield {**batch, **bad}

    monkeypatch.setattr(loop.Loop, "_batches", spoilt)


@pytest.mark.parametrize("name", ["gqa", "vha"])
def test_a_bad_step_is_skipped_counted_and_goes_into_the_log(name, request, tmp_path, monkeypatch):
    what = changed(request.getfixturevalue(name), {"train.skip_bad_steps": 2})
    whole = request.getfixturevalue(f"{name}_run")
    run = tmp_path / "run"
    spoil(monkeypatch, 2, 4)
    assert interrupted(3, what, run).step == 3  # the count outlives an interruption
    assert train.train(what, run).finished
    assert [(r["step"], r["skipped"]) for r in rows(run) if "skipped" in r] == [(2, 1), (4, 2)]
    logged = {r["step"]: r for r in rows(run) if "learning_rate" in r}
    assert {n for n, row in logged.items() if "loss" in row} == {1, 3, 5, 6}
    rates = [r["learning_rate"] for r in rows(whole) if "loss" in r]
    assert [row["learning_rate"] for row in logged.values()] == rates  # of the step, skipped or not
    assert all(math.isfinite(x) for row in rows(run) for x in row.values())
    first, second = stored(run, 4), stored(run, 2)
    assert all(np.isfinite(x).all() for x in (*first.values(), *second.values()))
    assert any((first[n] != second[n]).any() for n in first)


def test_one_bad_step_too_many_ends_the_run(gqa, tmp_path, monkeypatch):
    run, what = tmp_path / "run", changed(gqa, {"train.skip_bad_steps": 1})
    spoil(monkeypatch, 3, 5)
    with pytest.raises(UserError) as caught:
        train.train(what, run)
    numbers = ", ".join(map(str, rows_of(gqa, 5)))
    assert str(caught.value) == (
        "The loss is nan and the gradient's norm nan at step 5, whose batch is rows "
        f"{numbers} of {gqa.data.path}; the last good checkpoint is 4 of {run}: go on from there "
        "with a lower rate in a run of its own (--init-from), or allow more than 1 such steps with "
        "--skip-bad-steps."
    )
    assert checkpoint.steps(run) == [2, 4]


def test_a_bad_step_between_two_log_lines_is_found_at_once(gqa, tmp_path, monkeypatch):
    run, what = tmp_path / "run", changed(gqa, {"train.log_every": 6, "train.eval_every": 0})
    spoil(monkeypatch, 3)
    with pytest.raises(UserError, match="at step 3, whose batch is rows"):
        train.train(what, run)
    assert checkpoint.steps(run) == [2]


# What else is written.


def test_a_profile_of_two_steps(gqa, tmp_path):
    train.train(changed(gqa, {"train.steps": 3}), tmp_path / "run", profile=(2, 3))
    (trace,) = (tmp_path / "run/profile").rglob("*.xplane.pb")
    assert b"train_step" in trace.read_bytes()


def test_mfu_is_the_models_flops_over_the_peak_of_all_devices(gqa, monkeypatch):
    """2 · (projections + FFN + logits + scores), three times, by hand."""
    peak = dataclasses.replace(hardware.ACCELERATORS["v5e"], peak=1e9)
    monkeypatch.setattr(hardware, "find", lambda _: peak)
    D, F, V, L, N, K, H = 32, 48, 384, 2, 4, 2, 8
    matrices = L * (D * H * (2 * N + 2 * K) + 3 * D * F) + V * D
    scores = L * N * 2 * H * tiny.T / 2
    flops = 3 * 2 * tiny.BATCH * tiny.T * (matrices + scores)
    speed = loop.Speed(gqa, sharding.make_mesh(Mesh(data=2)))
    speed.begin(4)
    time.sleep(0.02)
    values = speed.lap(8)
    seconds = values["data_seconds"] + values["compute_seconds"]
    assert values["mfu"] == pytest.approx(flops / seconds / 2e9, rel=1e-6)
    assert values["tokens_per_second"] == pytest.approx(tiny.BATCH * tiny.T / seconds)
    assert speed.lap(8) == {}


# Starting from another run's weights.


@pytest.fixture
def start_only(monkeypatch) -> list[tuple[step.TrainState, int]]:
    return tiny.only_starts(monkeypatch)


def test_init_from_takes_the_weights_and_nothing_else(vha, vha_run, tmp_path, start_only):
    what = changed(vha, {"optim.name": "adamw", "data.seed": 9, "train.steps": 50})
    train.train(what, tmp_path / "run", init_from=vha_run)
    ((state, start),) = start_only
    assert (start, int(state.step)) == (0, 0)
    weights = {n: x for n, x in stored(vha_run, 6).items() if n.startswith("params.")}
    assert_bitwise({f"params.{n}": np.asarray(x) for n, x in state.params.items()}, weights)
    assert all(not np.any(x) for x in jax.tree.leaves(state.opt_state))
    fresh = jax.eval_shape(step.optimizer(what).init, state.params)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(fresh)


def test_init_from_another_model_is_refused(vha, vha_run, tmp_path, start_only):
    what = changed(vha, {"model.ffn_dim": 64})
    with pytest.raises(UserError, match=r"model\.ffn_dim is 64, but the weights of .* with 48"):
        train.train(what, tmp_path / "run", init_from=vha_run)
    assert not (tmp_path / "run").exists()
    assert not start_only


def test_init_from_weights_of_another_tokenizer_is_refused(vha, copied, tmp_path, start_only):
    (copied / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not the one that the run .* was trained with"):
        train.train(vha, tmp_path / "run", init_from=copied)
    assert not (tmp_path / "run").exists()
    assert not start_only


def test_init_from_a_run_without_weights_is_refused(vha, copied, tmp_path):
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(UserError, match="has no complete checkpoint; train it first"):
        train.train(vha, tmp_path / "run", init_from=copied)
    assert not (tmp_path / "run").exists()


def test_init_into_a_run_with_checkpoints_is_refused(vha, vha_run, copied):
    with pytest.raises(UserError, match="has checkpoints and --init-from would discard them"):
        train.train(vha, copied, init_from=vha_run)


def test_a_run_that_is_being_trained_is_refused(gqa, gqa_run, tmp_path):
    run = shutil.copytree(gqa_run, tmp_path / "run")
    TORN["names missing"](run / "checkpoints/6")
    with (
        runs.locked(run),
        pytest.raises(UserError, match="is being trained by another process; wait for it"),
    ):
        train.train(gqa, run)
    assert (run / "checkpoints/6").is_dir()  # it may be the other one's, half written
    assert train.train(gqa, run).finished


def test_a_refused_command_renames_nothing(gqa, gqa_run, tmp_path):
    run = shutil.copytree(gqa_run, tmp_path / "run")
    TORN["sizes missing"](run / "checkpoints/6")
    with pytest.raises(UserError, match=r"data\.seed is 1, but the run"):
        train.train(changed(gqa, {"data.seed": 1}), run)
    assert (run / "checkpoints/6").is_dir()


def test_a_profile_of_steps_that_are_past_is_refused(gqa, gqa_run, tmp_path):
    run = shutil.copytree(gqa_run, tmp_path / "run")
    longer = changed(gqa, {"train.steps": 8})
    with pytest.raises(UserError, match="--profile begins at step 6, but the run goes on after"):
        train.train(longer, run, profile=(6, 7))


# Checkpoints that are not what they should be.


def test_a_bare_folder_is_no_checkpoint(gqa, gqa_run, tmp_path):
    run = tmp_path / "run"
    interrupted(3, gqa, run)
    (run / "checkpoints/9/default").mkdir(parents=True)
    (run / "checkpoints/6").mkdir()  # where the run will save
    assert checkpoint.steps(run) == [2, 3]
    train.train(changed(gqa, {"train.keep_checkpoints": 1}), run)
    assert checkpoint.steps(run) == [6]
    assert_bitwise(stored(run, 6), stored(gqa_run, 6))


def largest(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scramble(path: Path) -> None:
    path.write_bytes(bytes(255 - x for x in path.read_bytes()))


def weights_in(c: Path, item: str = "params") -> list[Path]:
    return [p for p in (c / item).rglob("d/*") if p.is_file()]


TORN = {
    "weights cut short": lambda c: [truncate(p) for p in weights_in(c)],
    "moments cut short": lambda c: [truncate(p) for p in weights_in(c, "opt_state")],
    "weights' index cut short": lambda c: truncate(c / "params/manifest.ocdbt"),
    "names cut short": lambda c: truncate(c / "params/_METADATA"),
    "names missing": lambda c: (c / "params/_METADATA").unlink(),
    "meta cut short": lambda c: truncate(c / "meta/metadata"),
    "moments missing": lambda c: shutil.rmtree(c / "opt_state"),
    "weights emptied": lambda c: shutil.rmtree(c / "params") or (c / "params").mkdir(),
    "sizes cut short": lambda c: truncate(c / "files.json"),
    "sizes missing": lambda c: (c / "files.json").unlink(),
    "nothing but a folder": lambda c: shutil.rmtree(c) or (c / "default").mkdir(parents=True),
}


@pytest.mark.parametrize("tear", TORN)
def test_a_torn_checkpoint_is_named_kept_and_skipped(tear, copied, recwarn):
    TORN[tear](copied / "checkpoints/6")
    before = {p: p.read_bytes() for p in (copied / "checkpoints/6").rglob("*") if p.is_file()}
    assert checkpoint.steps(copied) == [2, 4]
    assert checkpoint.latest(copied) == 4
    (warning,) = recwarn
    assert str(warning.message).startswith(f"the checkpoint {copied}/checkpoints/6 is torn (")
    (sentence,) = checkpoint.set_torn_aside(copied)
    assert sentence.startswith(f"the checkpoint {copied}/checkpoints/6 is torn (")
    assert sentence.endswith("), kept as 6.torn and skipped")
    for path, content in before.items():
        aside = copied / "checkpoints/6.torn" / path.relative_to(copied / "checkpoints/6")
        assert aside.read_bytes() == content


def test_a_run_goes_on_from_the_checkpoint_before_a_torn_one(vha, vha_run, copied, capsys):
    TORN["weights cut short"](copied / "checkpoints/6")
    (copied / "checkpoints/6.torn").mkdir()  # of an earlier accident
    (copied / "checkpoints/5.orbax-checkpoint-tmp/params").mkdir(parents=True)
    assert train.train(vha, copied).finished
    told = capsys.readouterr().err
    assert "checkpoints/6 is torn (params/d/" in told or "checkpoints/6 is torn (params/" in told
    assert "kept as 6.torn2 and skipped" in told
    assert "its writing was cut short), kept as 5.torn and skipped" in told
    assert_bitwise(stored(copied, 6), stored(vha_run, 6))
    assert rows(copied) == rows(vha_run)
    names = {path.name for path in (copied / "checkpoints").iterdir()}
    assert {"2", "4", "6", "5.torn", "6.torn", "6.torn2"} <= names


BREAKAGES = {
    "weights": lambda c: [scramble(p) for p in weights_in(c)],
    "weights' index": lambda c: scramble(c / "params/manifest.ocdbt"),
    "names": lambda c: scramble(c / "params/_METADATA"),
    "meta": lambda c: scramble(c / "meta/metadata"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_corrupt_checkpoint_is_named(breakage, vha, copied):
    """Every file is there at its length: found when it is read."""
    folder = copied / "checkpoints/6"
    BREAKAGES[breakage](folder)
    assert checkpoint.steps(copied)[-1] == 6
    with pytest.raises(UserError) as caught:
        train.train(vha, copied)
    message = str(caught.value)
    assert message.startswith(f"The checkpoint 6 of {copied} is corrupt (")
    assert message.endswith(f"remove the folder {folder} to use an earlier one.")
    assert "\n" not in message
    shutil.rmtree(folder)
    assert checkpoint.latest(copied) == 4


def test_a_checkpoint_of_another_format_is_refused(vha, copied):
    meta = copied / "checkpoints/6/meta/metadata"
    text = meta.read_text()
    assert '"format_version": 2' in text
    meta.write_text(text.replace('"format_version": 2', '"format_version": 1'))
    with pytest.raises(UserError, match="has format version 1, this vhajax reads 2; read it with"):
        train.train(vha, copied)


@pytest.mark.parametrize("item", ["_CHECKPOINT_METADATA", "meta", "params"])
def test_a_checkpoint_without_its_parts_does_not_count(item, copied):
    path = copied / "checkpoints/6" / item
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert checkpoint.steps(copied) == [2, 4]


MISFITS = {
    "mis-shaped": (
        {"model.ffn_dim": 64},
        ["blocks.ffn.up is float32[2, 32, 48], not float32[2, 32, 64]", "blocks.ffn.down is"],
    ),
    "missing": (
        {"model.attention": GQA(num_heads=4, num_kv_heads=2, head_dim=8), "model.norm": "weighted"},
        [
            "blocks.attention.premix is not in the model",
            "blocks.attention.postmix_u is not in the model",
            "blocks.attention.query is float32[2, 32, 2, 8], not float32[2, 32, 4, 8]",
        ],
    ),
    "tied": ({"model.tied": True}, ["unembedding is not in the model"]),
}


def edit_config(run: Path, fields: dict) -> None:
    (run / "config.json").write_text(config.to_json(changed(runs.read_config(run), fields)))


@pytest.mark.parametrize("misfit", MISFITS)
def test_weights_that_do_not_fit_are_listed(misfit, vha, copied):
    fields, expected = MISFITS[misfit]
    edit_config(copied, fields)
    for act in (lambda: train.train(changed(vha, fields), copied), lambda: inference.load(copied)):
        with pytest.raises(UserError) as caught:
            act()
        message = str(caught.value)
        assert message.startswith(f"The checkpoint 6 of {copied} does not fit its configuration: ")
        for words in expected:
            assert words in message


def test_weights_that_are_missing_are_listed(gqa_run, tmp_path):
    run = shutil.copytree(gqa_run, tmp_path / "run")
    edit_config(
        run, {"model.attention": config.VHA(num_physical_heads=2, num_kv_heads=2, head_dim=8)}
    )
    with pytest.raises(UserError, match=r"blocks\.attention\.premix is missing"):
        inference.load(run)


def test_an_optimizer_that_does_not_fit_is_listed(vha, copied):
    edit_config(copied, {"optim.name": "adamw"})
    with pytest.raises(UserError, match=r"does not fit .*nu\.blocks\.ffn\.up is missing") as caught:
        train.train(changed(vha, {"optim.name": "adamw"}), copied)
    assert "momentum.blocks.ffn.up is not in the model" in str(caught.value)


def test_another_dtype_is_listed(vha_run):
    wanted = transformer.init_shapes(runs.read_config(vha_run).model, None)
    name = "blocks.ffn.up"
    wanted[name] = jax.ShapeDtypeStruct(wanted[name].shape, jax.numpy.bfloat16)
    with pytest.raises(UserError, match=r"ffn\.up is float32\[2, 32, 48\], not bfloat16"):
        checkpoint.restore_params(vha_run, 6, wanted)


# Weights alone.


@pytest.fixture(scope="module")
def folded_run(vha_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("folded") / "run"
    assert fold.fold_run(vha_run, out) < 1e-5
    return out


def test_weights_alone_cannot_be_resumed(folded_run):
    with pytest.raises(UserError, match="holds weights only and cannot be resumed; start another"):
        train.train(runs.read_config(folded_run), folded_run)


def test_weights_alone_are_evaluated_and_sampled(folded_run, vha_run, capsys):
    told = []
    for run in (vha_run, folded_run):
        assert cli.main(["eval", str(run), "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
        prompt = ["--prompt", "def", "--max-new-tokens", "3", "--temperature", "0", "--json"]
        assert cli.main(["generate", str(run), *prompt]) == 0
        told[-1] |= json.loads(capsys.readouterr().out)
    one, other = told
    assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert other["bits_per_byte"] == pytest.approx(one["bits_per_byte"], abs=1e-5)
    assert (other["tokens"], other["bytes"]) == (one["tokens"], one["bytes"])
    assert other["text"] == one["text"]


def test_weights_alone_start_a_run(folded_run, tmp_path, start_only):
    train.train(runs.read_config(folded_run), tmp_path / "run", init_from=folded_run)
    ((state, start),) = start_only
    assert (start, int(state.step)) == (0, 0)
    folded = weights.read(folded_run)[1]
    assert_bitwise(
        {name: np.asarray(x) for name, x in state.params.items()},
        {name: np.asarray(x) for name, x in folded.items()},
    )


# Bits per byte.


def unigram_weights(what: config.Experiment, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A model whose logits do not depend on its input.

    Embeddings are all ones and blocks add nothing, so the last norm puts out 1/√(1 + eps)
    everywhere and a token's logit is the sum of its unembedding row times that.
    """
    params = {
        name: rng.normal(size=x.shape).astype(np.float32)
        for name, x in transformer.init_shapes(what.model, None).items()
    }
    for name in ("blocks.attention.out", "blocks.ffn.down"):
        params[name][:] = 0
    params["embedding"][:] = 1
    params["norm.scale"][:] = 1
    return params


def heldout_ids(data: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(data / "tokenizer.json")
    heldout = [text for text in tiny.TEXTS if is_heldout(text, tiny.HELDOUT)]
    return [tokenizer.encode_document(text) for text in heldout]


def heldout_bytes() -> int:
    return sum(len(text.encode()) for text in tiny.TEXTS if is_heldout(text, tiny.HELDOUT))


def test_bits_per_byte_of_a_uniform_model(gqa, data, tmp_path, capsys):
    params = unigram_weights(gqa, np.random.default_rng(0))
    params["unembedding"][:] = 0
    run = save_weights(tmp_path / "run", gqa, params)
    assert cli.main(["eval", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    tokens = sum(len(ids) - 1 for ids in heldout_ids(data))  # all but BOS; EOS has a cost too
    assert told["tokens"] == tokens
    assert told["bytes"] == heldout_bytes() == load_manifest(data).heldout.utf8_bytes
    assert told["loss"] == pytest.approx(math.log(tiny.VOCAB), rel=1e-6)
    bits = math.log2(tiny.VOCAB) * tokens / heldout_bytes()
    assert told["bits_per_byte"] == pytest.approx(bits, rel=1e-6)


def test_bits_per_byte_against_a_sum_by_hand(gqa, data, tmp_path, capsys):
    params = unigram_weights(gqa, np.random.default_rng(1))
    run = save_weights(tmp_path / "run", gqa, params)
    assert cli.main(["eval", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    table = params["unembedding"].astype(np.float64)[: tiny.VOCAB]
    logits = table.sum(axis=1) / math.sqrt(1 + gqa.model.norm_eps)
    log_total = logits.max() + math.log(np.exp(logits - logits.max()).sum())
    nats = sum(log_total - logits[token] for ids in heldout_ids(data) for token in ids[1:])
    assert told["loss"] == pytest.approx(nats / told["tokens"], rel=1e-6)
    assert told["bits_per_byte"] == pytest.approx(nats / math.log(2) / heldout_bytes(), rel=1e-6)


def test_the_heldout_text_splits_characters_between_tokens(data):
    pieces = load_tokenizer(data / "tokenizer.json")._pieces

    def half(piece: bytes) -> bool:
        return "�" in piece.decode(errors="replace")

    assert any(half(pieces[token]) for ids in heldout_ids(data) for token in ids)


def test_a_run_tells_the_bits_per_byte_of_its_whole_heldout_text(vha_run, capsys):
    assert cli.main(["eval", str(vha_run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    last = rows(vha_run)[-1]
    assert last["heldout_loss"] == pytest.approx(told["loss"], rel=1e-6)
    assert last["heldout_bits_per_byte"] == pytest.approx(told["bits_per_byte"], rel=1e-6)
    assert told["bytes"] == heldout_bytes()
    assert cli.main(["eval", str(vha_run), "--rows", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] <= tiny.T


# Meshes. `tests/conftest.py` simulates eight devices.


def on_mesh(what: config.Experiment) -> jax.sharding.Mesh:
    return sharding.make_mesh(what.mesh)


def restored(what: config.Experiment, run: Path, number: int) -> step.TrainState:
    mesh = on_mesh(what)
    with jax.set_mesh(mesh):
        return train._start_state(what, run, number, None, mesh)


def flat(state: step.TrainState) -> dict[str, np.ndarray]:
    leaves = checkpoint.named_leaves(state.opt_state)
    arrays = {f"params.{n}": np.asarray(x) for n, x in state.params.items()}
    return arrays | {f"opt_state.{n}": np.asarray(x) for n, x in leaves.items()}


@pytest.mark.parametrize("shape", [(4, 2), (1, 8)])
def test_checkpoints_move_between_meshes(shape, vha, vha_run, tmp_path):
    data_size, model_size = shape
    spread = changed(vha, {"data.batch_size": 8, "mesh": Mesh(data=data_size, model=model_size)})
    here = restored(vha, vha_run, 6)
    there = restored(spread, vha_run, 6)
    assert_bitwise(flat(there), stored(vha_run, 6))
    with jax.set_mesh(on_mesh(spread)):
        where = step.state_shardings(spread, on_mesh(spread))
    jax.tree.map(lambda x, place: check_place(x, place), there, where)
    table = there.params["embedding"]
    assert len(table.sharding.device_set) == 8
    assert table.addressable_shards[0].data.size == table.size // 8

    run = tmp_path / "run"
    runs.write_run(run, spread, vha_run / "tokenizer.json")
    saver = checkpoint.Checkpointer(run, spread, keep=1)
    saver.save(there)
    saver.finish()
    back = restored(vha, run, 6)
    assert len(back.params["embedding"].sharding.device_set) == 1
    assert_bitwise(flat(back), flat(here))
    assert_bitwise(
        {n: np.asarray(x) for n, x in weights.read(run)[1].items()},
        {n: np.asarray(x) for n, x in here.params.items()},
    )


def check_place(x: jax.Array, place) -> None:
    assert x.sharding.is_equivalent_to(place, x.ndim)


@pytest.mark.slow
def test_eight_devices_learn_what_one_does(vha, vha_run, tmp_path):
    run = tmp_path / "run"
    interrupted(3, changed(vha, {"mesh": Mesh(data=2, model=4)}), run)
    losses = [row["loss"] for row in rows(run) if "loss" in row]
    wanted = [row["loss"] for row in rows(vha_run) if "loss" in row]
    np.testing.assert_allclose(losses, wanted[:3], atol=1e-5)
    assert train.train(vha, run).finished  # on one device
    losses = [row["loss"] for row in rows(run) if "loss" in row]
    np.testing.assert_allclose(losses, wanted, atol=1e-4)


def test_an_experiment_file_is_what_it_says(gqa, tmp_path):
    file = tiny.write_experiment(tmp_path / "exported.py", gqa)
    assert experiment.load(str(file)) == gqa
    assert dataclasses.asdict(experiment.load(str(file))) == dataclasses.asdict(gqa)
