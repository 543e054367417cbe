"""Runs of several real processes (gloo on this machine): stopped, killed, stuck, moved, resumed."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny
from processes import Child, free_port, several
from tiny import changed, rows, stored

from vhajax import checkpoint, train
from vhajax.config import Experiment, Mesh

pytestmark = pytest.mark.usefixtures("programs_kept")

HOST = socket.gethostname()
FIELDS = {
    "train.steps": 12,
    "train.eval_every": 6,
    "train.checkpoint_every": 4,
    "mesh": Mesh(data=2, model=2),
    "hosts.silence_timeout": 8,
    "hosts.progress_timeout": 20,
    "hosts.join_timeout": 60,
}

# An experiment is Python: these hooks give a test time, or do harm at a step.
HOOKS = """
import os, signal, time
from vhajax import data, loop, metrics

after = loop.Loop._settle
step = int(os.environ.get("TEST_STEP", -1))

def settle(self, upto):
    after(self, upto)
    time.sleep(float(os.environ.get("TEST_SLEEP", 0)))
    mine = str(self.peers.index) == os.environ.get("TEST_PROCESS")
    if upto == step and self.start == 0 and mine and os.environ.pop("TEST_STEP", ""):
        os.kill(os.getpid(), int(os.environ["TEST_SIGNAL"]))

loop.Loop._settle = settle

evaluate = loop.Loop._heldout

def heldout(self, done, rows):
    for number, batch in enumerate(evaluate(self, done, rows)):
        if os.environ.get("TEST_EVALUATION") == f"{done}:{self.peers.index}" and number == 1:
            os.kill(os.getpid(), int(os.environ["TEST_SIGNAL"]))
            time.sleep(2)
        yield batch

loop.Loop._heldout = heldout

read = data._Steps.__getitem__

def slow_read(self, index):
    if os.environ.get("TEST_STUCK") == f"{index + 1}:{min(self._part)}":
        time.sleep(1000)
    return read(self, index)

data._Steps.__getitem__ = slow_read
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny.prepare_texts(tmp_path_factory.mktemp("hosts") / "data", tiny.TEXTS)


@pytest.fixture(scope="module")
def what(data) -> Experiment:
    return changed(tiny.vha_experiment(data), FIELDS)


@pytest.fixture(scope="module")
def file(what, tmp_path_factory) -> Path:
    path = tiny.write_experiment(tmp_path_factory.mktemp("experiment") / "hosts.py", what)
    path.write_text(path.read_text() + HOOKS)
    return path


@pytest.fixture(scope="module")
def whole(file, tmp_path_factory) -> Path:
    """Twelve steps of 2 processes × 2 devices without disturbance."""
    folder = tmp_path_factory.mktemp("whole")
    children = pair(file, folder)
    assert [child.wait() for child in children] == [0, 0], children[0].text
    return folder / "run"


def pair(file: Path, folder: Path, *args: str, **settings: str) -> list[Child]:
    command = ["train", str(file), "--run-dir", str(folder / "run"), "--json", *args]
    number = len(list(folder.glob("logs*")))
    return several(command, folder / f"logs{number}", 2, 2, **settings)


def last_line(child: Child) -> str:
    return child.text.strip().splitlines()[-1]


def assert_same_run(run: Path, whole: Path) -> None:
    """Bitwise, and every step logged once."""
    steps = checkpoint.steps(whole)
    assert checkpoint.steps(run)[-1] == steps[-1]
    tiny.assert_bitwise(stored(run, steps[-1]), stored(whole, steps[-1]))
    assert rows(run) == rows(whole)


# ------------------------------------------------------------------ an undisturbed run


def test_two_processes_train_as_one_does(what, whole, tmp_path):
    """Process 0 alone writes what is not sharded; losses are those of one process."""
    assert train.train(what, tmp_path / "run").finished
    one, two = rows(tmp_path / "run"), rows(whole)
    assert [row.keys() for row in one] == [row.keys() for row in two]
    for a, b in zip(one, two, strict=True):
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=2e-5), name
    names = lambda run: sorted(p.name for p in run.iterdir())  # noqa: E731
    assert names(whole) == names(tmp_path / "run")
    first, second = (whole.parent / f"logs0/{i}.log" for i in range(2))
    (told,) = [json.loads(x) for x in first.read_text().splitlines() if x.startswith("{")]
    assert (told["step"], told["finished"]) == (12, True)
    assert not [x for x in second.read_text().splitlines() if x.startswith("{")]


def test_the_time_of_a_step_is_in_the_log(whole):
    written = [json.loads(x) for x in (whole / "metrics.jsonl").read_text().splitlines()]
    timed = [row for row in written if "compute_seconds" in row]
    assert [row["step"] for row in timed] == list(range(2, 13))  # the first one is compiled
    for row in timed:
        assert row["data_seconds"] >= 0
        assert row["compute_seconds"] > 0
        seconds = row["data_seconds"] + row["compute_seconds"]
        assert row["tokens_per_second"] == pytest.approx(tiny.BATCH * tiny.T / seconds)
        assert row["host_bytes"] > 1e8
        assert "mfu" not in row  # no peak is published for a CPU
    # The checkpoint of step 4 was begun in the lap that ends with step 5.
    assert [row["checkpoint_seconds"] > 0 for row in timed].count(True) == 2


# ------------------------------------------------------------------ told to stop


@pytest.mark.parametrize(
    "settings",
    [
        {"TEST_STEP": "5", "TEST_PROCESS": "1", "TEST_SIGNAL": "15"},
        pytest.param(
            {"TEST_STEP": "5", "TEST_PROCESS": "0", "TEST_SIGNAL": "15"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"TEST_STEP": "4", "TEST_PROCESS": "1", "TEST_SIGNAL": "2"}, marks=pytest.mark.slow
        ),
        pytest.param({"TEST_EVALUATION": "6:1", "TEST_SIGNAL": "15"}, marks=pytest.mark.slow),
        pytest.param({"TEST_EVALUATION": "12:0", "TEST_SIGNAL": "15"}, marks=pytest.mark.slow),
    ],
    ids=lambda s: "-".join(s.values()),
)
def test_a_signal_to_one_stops_all_at_one_step(settings, file, whole, tmp_path):
    children = pair(file, tmp_path, **settings, TEST_SLEEP="0.2")
    statuses = [child.wait() for child in children]
    wanted = [75, 75]
    if settings["TEST_SIGNAL"] == "2":
        wanted[int(settings["TEST_PROCESS"])] = 130
    assert statuses == wanted, children[0].text
    run = tmp_path / "run"
    told = json.loads(last_line(children[0]))
    assert told["finished"] is False
    assert checkpoint.steps(run)[-1] == told["step"]
    if "TEST_STEP" in settings:
        assert int(settings["TEST_STEP"]) <= told["step"] <= int(settings["TEST_STEP"]) + 3
    else:
        assert told["step"] == int(settings["TEST_EVALUATION"].partition(":")[0])
    assert [child.wait() for child in pair(file, tmp_path)] == [0, 0]
    assert_same_run(run, whole)


@pytest.mark.slow
def test_a_signal_before_the_first_step_stops_all(file, whole, tmp_path):
    """While it compiles, for example: as soon as it asks."""
    children = pair(file, tmp_path, TEST_SLEEP="0.2")
    children[1].until(lambda: "Gloo" in children[1].text)
    children[1].signal(signal.SIGTERM)
    assert [child.wait() for child in children] == [75, 75], children[0].text
    assert json.loads(last_line(children[0]))["step"] <= 3
    assert [child.wait() for child in pair(file, tmp_path)] == [0, 0]
    assert_same_run(tmp_path / "run", whole)


# ------------------------------------------------------------------ killed, stopped, stuck


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_process_ends_the_others_with_its_name(victim, file, whole, tmp_path):
    children = pair(file, tmp_path, TEST_STEP="6", TEST_PROCESS=str(victim), TEST_SIGNAL="9")
    assert children[victim].wait() == 137
    before = time.monotonic()
    other = children[1 - victim]
    assert other.wait(20) == 76, other.text
    assert time.monotonic() - before < 8
    assert (
        f"vhajax: process {victim} ({HOST}) ended unexpectedly; the same command goes on from the "
        "last checkpoint." in other.text
    )
    assert "Traceback" not in other.text
    assert [child.wait() for child in pair(file, tmp_path)] == [0, 0]
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_ends_the_others_in_time(victim, file, tmp_path):
    children = pair(file, tmp_path, TEST_STEP="6", TEST_PROCESS=str(victim), TEST_SIGNAL="19")
    other = children[1 - victim]
    try:
        assert other.wait() == 76, other.text
    finally:
        children[victim].signal(signal.SIGKILL)
    assert f"process {victim} ({HOST}) gave no sign of life for 8 s (it was " in other.text


def test_a_process_that_reads_for_ever_ends_all_with_its_name(file, tmp_path):
    """Its heart beats: only its progress tells."""
    children = pair(file, tmp_path, "--hosts.progress-timeout", "4", TEST_STUCK="7:2")
    assert [child.wait() for child in children] == [76, 76], children[0].text
    for child in children:
        assert re.search(
            rf"vhajax: the run stands still: process 1 \({HOST}\) has been reading the batch of "
            r"step 7 for [4-9] s; the same command",
            child.text,
        )


@pytest.mark.slow
def test_a_full_disk_on_one_host_ends_all(file, tmp_path):
    children = pair(file, tmp_path, TEST_FILE_SIZE="1:2000")
    assert [child.wait() for child in children] == [2, 2], children[0].text
    assert "could not be written (" in children[0].text


def test_a_process_that_does_not_come_is_named(file, tmp_path):
    command = ["train", str(file), "--run-dir", str(tmp_path / "run"), "--hosts.join-timeout", "2"]
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    child = Child([*command, *where, "--process-id", "0"], tmp_path / "log", 2)
    assert child.wait() == 76
    assert child.text == (
        "vhajax: Process 1 did not join in 2 s; see their logs, then start all of them again.\n"
    )
    assert not (tmp_path / "run").exists()


def test_processes_with_other_settings_are_refused(file, tmp_path):
    command = ["train", str(file), "--run-dir", str(tmp_path / "run")]
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2", "--process-id"]
    children = [
        Child([*command, *where, str(i), "--data.seed", str(i)], tmp_path / f"{i}.log", 2)
        for i in range(2)
    ]
    assert [child.wait() for child in children] == [2, 2]
    for child in children:
        assert f"process 1 ({HOST}) has another data.seed than process 0 (1, not 0)" in child.text
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------ launchers


@pytest.mark.slow
def test_the_launcher_starts_a_killed_run_again(file, whole, tmp_path):
    launcher = start_launcher(file, tmp_path, "--restarts", "1", TEST_SIGNAL="9")
    out, err = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, err
    assert "process 1" in err
    assert "SIGKILL" in err
    assert json.loads(out.strip().splitlines()[-1])["step"] == 12
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_ctrl_c_at_the_launcher_saves(file, whole, tmp_path):
    launcher = start_launcher(file, tmp_path, TEST_SLEEP="0.3")
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 100
    while not metrics.exists() or '"step": 2' not in metrics.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=100)
    assert launcher.returncode == 130, err
    told = json.loads(out.strip().splitlines()[-1])
    assert told["finished"] is False
    assert checkpoint.steps(tmp_path / "run")[-1] == told["step"]
    assert [child.wait() for child in pair(file, tmp_path)] == [0, 0]
    assert_same_run(tmp_path / "run", whole)


def start_launcher(file: Path, folder: Path, *args: str, **settings: str) -> subprocess.Popen:
    launcher = Path(__file__).parent.parent / "launch/local.py"
    cache = {name.upper(): str(value) for name, value in tiny.CACHE_SETTINGS.items()}
    steps = {"TEST_STEP": "6", "TEST_PROCESS": "1"} if "TEST_SIGNAL" in settings else {}
    flags = ["--processes", "2", "--devices-per-process", "2", "--log-dir", str(folder / "logs")]
    vhajax = [sys.executable, "-m", "vhajax.cli"]
    command = [*vhajax, "train", str(file), "--run-dir", str(folder / "run"), "--json"]
    return subprocess.Popen(
        [sys.executable, launcher, *flags, *args, "--", *command],
        env={**os.environ, **cache, **steps, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# ------------------------------------------------------------------ SLURM


@pytest.mark.slow
def test_slurm_tells_each_task_its_place(file, tmp_path):
    """JAX takes the port from the number of the job."""
    job = str(4096 * 3 + 1234)
    command = ["train", str(file), "--run-dir", str(tmp_path / "run"), "--train.steps", "1"]
    slurm = {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    children = [
        Child(
            [*command, "--optim.warmup-steps", "0", "--json"],
            tmp_path / f"{i}.log",
            2,
            **slurm,
            SLURM_PROCID=str(i),
            SLURM_LOCALID=str(i),
        )
        for i in range(2)
    ]
    assert [child.wait() for child in children] == [0, 0], children[0].text
    assert json.loads(last_line(children[0]))["step"] == 1


# ------------------------------------------------------------------ other numbers of processes


@pytest.fixture(scope="module")
def saved(file, tmp_path_factory) -> Path:
    """A run of 2 × 2 that stops at step 4 of 24."""
    folder = tmp_path_factory.mktemp("saved")
    children = pair(
        file, folder, *LONGER, TEST_STEP="2", TEST_PROCESS="1", TEST_SIGNAL="15", TEST_SLEEP="0.2"
    )
    assert [child.wait() for child in children] == [75, 75]
    return folder / "run"


LONGER = ("--train.steps", "24", "--train.eval-every", "0")
SHAPES = [  # processes, devices each, mesh
    (1, 4, Mesh(data=4)),
    (1, 1, Mesh()),
    pytest.param(4, 1, Mesh(data=4), marks=pytest.mark.slow),
    pytest.param(4, 1, Mesh(data=2, model=2), marks=pytest.mark.slow),
    pytest.param(2, 2, Mesh(data=1, model=4), marks=pytest.mark.slow),
    pytest.param(2, 2, Mesh(data=4), marks=pytest.mark.slow),
    pytest.param(2, 1, Mesh(model=2), marks=pytest.mark.slow),
    pytest.param(1, 8, Mesh(data=4, model=2), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def stayed(file, saved, tmp_path_factory) -> Path:
    """The same run, gone on with as it was."""
    folder = tmp_path_factory.mktemp("stayed")
    shutil.copytree(saved, folder / "run")
    assert [child.wait() for child in pair(file, folder, *LONGER)] == [0, 0]
    return folder / "run"


@pytest.mark.parametrize(("count", "devices", "mesh"), SHAPES, ids=str)
def test_a_run_goes_on_with_other_processes(count, devices, mesh, file, saved, stayed, tmp_path):
    """Restored state bit-equal, next batch identical, 20 steps with the same losses."""
    run = shutil.copytree(saved, tmp_path / "run")
    start = checkpoint.latest(run)
    np.savez(tmp_path / "expected.npz", **stored(run, start))
    where = ["--mesh.data", str(mesh.data), "--mesh.model", str(mesh.model)]
    command = [str(file), "--run-dir", str(run), *LONGER, *where]
    check = [str(tmp_path / "expected.npz"), *command]
    for main, args in (("restored:main", check), ("vhajax.cli:main", ["train", *command])):
        children = several(args, tmp_path / main, count, devices, main=main)
        assert [child.wait() for child in children] == [0] * count, children[0].text
    ours, theirs = rows(run), rows(stayed)
    assert [row["step"] for row in ours if "loss" in row] == list(range(1, 25))
    for a, b in zip(ours, theirs, strict=True):
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=3e-5), (a["step"], name)
