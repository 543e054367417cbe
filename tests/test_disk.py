"""Disks that are full or read-only: one clear error, and what was there stays."""

import os
import shutil
from pathlib import Path

import pytest
import tiny
from processes import Child
from tiny import assert_bitwise, changed, rows, stored

from vhajax import checkpoint, train
from vhajax.config import Experiment

pytestmark = pytest.mark.usefixtures("programs_kept")


@pytest.fixture(scope="module")
def what(tmp_path_factory) -> Experiment:
    data = tiny.prepare_texts(tmp_path_factory.mktemp("disk") / "data", tiny.TEXTS)
    return changed(tiny.gqa_experiment(data), {"train.steps": 8, "train.eval_every": 0})


@pytest.fixture(scope="module")
def file(what, tmp_path_factory) -> Path:
    return tiny.write_experiment(tmp_path_factory.mktemp("experiment") / "disk.py", what)


@pytest.fixture(scope="module")
def whole(what, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    assert train.train(what, run).finished
    return run


@pytest.fixture
def half(whole, tmp_path) -> Path:
    """The run as it was at step 4."""
    run = shutil.copytree(whole, tmp_path / "run")
    for number in (6, 8):
        shutil.rmtree(run / f"checkpoints/{number}")
    return run


def goes_on(file: Path, run: Path, *args: str, **settings: str) -> Child:
    command = ["train", str(file), "--run-dir", str(run), *args]
    child = Child(command, run.parent / "log", **settings)
    child.wait()
    return child


KEEP_ONE = ("--train.keep-checkpoints", "1")  # a save that failed must not cost the one before


@pytest.mark.parametrize("size", [2_000, 30_000])
def test_a_full_disk_ends_the_run_and_leaves_its_checkpoints(size, file, half, whole):
    """A limit on the size of files stands for the disk: the small ones are written, others not."""
    before = {n: stored(half, n) for n in (2, 4)}
    child = goes_on(file, half, *KEEP_ONE, TEST_FILE_SIZE=f"0:{size}")
    assert child.status == 2, child.text
    told = child.text.strip().splitlines()
    assert told[-1].startswith("vhajax: ")
    assert str(half) in told[-1]
    assert "could not be written (" in told[-1] or "cannot be written (" in told[-1]
    assert "Traceback" not in child.text
    assert checkpoint.steps(half) == [2, 4]
    for number, arrays in before.items():
        assert_bitwise(stored(half, number), arrays)
    again = goes_on(file, half)
    assert again.status == 0, again.text
    assert_bitwise(stored(half, 8), stored(whole, 8))
    assert rows(half) == rows(whole)


@pytest.mark.parametrize("folder", [".", "checkpoints"])
def test_a_read_only_folder_ends_the_run(folder, file, half, whole):
    (half / folder).chmod(0o555)
    try:
        child = goes_on(file, half, TEST_POWERLESS="1")
        assert child.status == 2, child.text
        (told,) = child.text.strip().splitlines()
        assert told.startswith("vhajax: ")
        assert str(half) in told
        assert "ermission denied" in told
        assert checkpoint.steps(half) == [2, 4]
    finally:
        (half / folder).chmod(0o755)
    assert goes_on(file, half).status == 0
    assert_bitwise(stored(half, 8), stored(whole, 8))


def test_a_new_run_where_nothing_can_be_written_is_refused_at_once(file, tmp_path):
    (tmp_path / "there").mkdir(mode=0o555)
    os.chmod(tmp_path / "there", 0o555)
    child = Child(
        ["train", str(file), "--run-dir", str(tmp_path / "there/run")],
        tmp_path / "log",
        TEST_POWERLESS="1",
    )
    assert child.wait() == 2
    assert child.text.startswith(
        f"vhajax: {tmp_path}/there/run/tokenizer.json cannot be written (P"
    )
