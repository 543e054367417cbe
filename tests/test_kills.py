"""A run that is killed with SIGKILL at any moment goes on exactly."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
import tiny
from processes import Child
from tiny import changed, rows, stored

from vhajax import checkpoint
from vhajax.config import Experiment

pytestmark = pytest.mark.usefixtures("programs_kept")

STEPS = 40
FIELDS = {
    "train.steps": STEPS,
    "train.eval_every": 15,
    "train.checkpoint_every": 3,
    "train.keep_checkpoints": 2,
    "train.keep_every": 12,
}


@pytest.fixture(scope="module")
def what(tmp_path_factory) -> Experiment:
    data = tiny.prepare_texts(tmp_path_factory.mktemp("kills") / "data", tiny.TEXTS)
    return changed(tiny.vha_experiment(data), FIELDS)


@pytest.fixture(scope="module")
def file(what, tmp_path_factory) -> Path:
    return tiny.write_experiment(tmp_path_factory.mktemp("experiment") / "kills.py", what)


@pytest.fixture(scope="module")
def whole(file, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    child = begin(file, folder)
    assert child.wait() == 0, child.text
    return folder / "run"


def begin(file: Path, folder: Path, **settings: str) -> Child:
    log = folder / f"{len(list(folder.glob('*.log')))}.log"
    log.touch()
    return Child(["train", str(file), "--run-dir", str(folder / "run")], log, **settings)


def kill_once(child: Child, folder: Path, rng: random.Random, in_save: bool) -> str:
    """Kills a run at a random moment inside or outside a save; says which it was in the end."""
    checkpoints, metrics = folder / "run/checkpoints", folder / "run/metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0

    def saving() -> bool:
        return any(checkpoints.glob("*tmp*"))

    def under_way() -> bool:
        return saving() if in_save else metrics.exists() and metrics.stat().st_size > before

    while child.status is None and not under_way():
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, 0.03 if in_save else 0.8))
    while child.status is None and not in_save and saving():  # saves fill most of a busy machine
        time.sleep(rng.uniform(0, 0.05))
    when = "in a save" if saving() else "elsewhere"
    child.signal(signal.SIGKILL)
    status = child.wait()
    assert status in (0, 137), child.text
    return "after the end" if status == 0 else when


def survive(file: Path, folder: Path, whole: Path, kills: int, seed: int) -> dict[str, int]:
    """Kills a run again and again, over several runs where it ends before; counts the kills."""
    rng, counts = random.Random(seed), {"in a save": 0, "elsewhere": 0, "runs": 0}
    while counts["in a save"] + counts["elsewhere"] < kills:
        place = folder / str(counts["runs"])
        place.mkdir(parents=True)
        counts["runs"] += 1
        while counts["in a save"] + counts["elsewhere"] < kills:
            child = begin(file, place)
            fewer = counts["in a save"] <= counts["elsewhere"]
            when = kill_once(child, place, rng, in_save=fewer)
            if when == "after the end":
                break
            counts[when] += 1
        last = begin(file, place)
        assert last.wait() == 0, last.text
        assert_exact(place / "run", whole)
    return counts


def assert_exact(run: Path, whole: Path) -> None:
    """Final weights and moments bitwise; every step there once, with the same numbers."""
    tiny.assert_bitwise(stored(run, STEPS), stored(whole, STEPS))
    assert rows(run) == rows(whole)
    assert [row["step"] for row in rows(run) if "loss" in row] == list(range(1, STEPS + 1))
    kept = {12, 24, 36, STEPS}  # and the last but one, which may have been torn
    assert kept <= set(checkpoint.steps(run)) <= kept | {39}


def test_five_kills(file, whole, tmp_path):
    counts = survive(file, tmp_path, whole, kills=5, seed=0)
    assert counts["in a save"] >= 1


@pytest.mark.slow
def test_twenty_kills(file, whole, tmp_path):
    counts = survive(file, tmp_path, whole, kills=20, seed=1)
    print(json.dumps(counts))
    assert counts["in a save"] >= 4
    assert counts["elsewhere"] >= 4
