"""launch/compare.py: trains what is not trained yet, and puts every seed into one table."""

import importlib
import json
import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny import TEXTS, after_step, changed, gqa_experiment, prepare_texts

from vhajax import cli, runs, train
from vhajax import experiment as experiments
from vhajax.config import Experiment

pytestmark = [
    pytest.mark.usefixtures("programs_kept"),
    pytest.mark.filterwarnings("ignore:the mesh uses 1 of 8 devices"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict[str, Experiment]:
    data = prepare_texts(tmp_path_factory.mktemp("data") / "rows", TEXTS)
    short = {"model.num_layers": 1, "train.steps": 2, "train.eval_every": 0}
    gqa = changed(gqa_experiment(data), short)
    return {"tiny_gqa": gqa}


@pytest.fixture
def compare(tiny, tmp_path, monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "launch"))
    module = importlib.import_module("compare")
    monkeypatch.setattr(module, "NAMES", tuple(tiny))
    monkeypatch.setattr(module, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(experiments, "load", tiny.__getitem__)
    return module


def test_every_mechanism_is_compared(compare, monkeypatch):
    monkeypatch.undo()
    files = Path(__file__).parent.parent.glob("experiments/small_*.py")
    assert set(compare.NAMES) == {path.stem for path in files}


def test_it_is_interrupted_goes_on_and_trains_nothing_twice(compare, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        after_step(patch, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert compare.main([]) == cli.INTERRUPTED
    printed = capsys.readouterr()
    assert "`make compare` goes on from here" in printed.err
    assert printed.out == ""

    assert compare.main([]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("Training tiny_gqa-seed") == 2
    assert "tiny_gqa" in printed.out
    assert printed.out.count("±") == 3 + 1  # one in the title

    monkeypatch.setattr(train, "train", lambda *_: pytest.fail("trained again"))
    assert compare.main(["--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("finished before") == 2
    check_values(json.loads(printed.out))


def check_values(values: dict[str, Any]) -> None:
    (model,) = values["models"]
    assert values["seeds"] == [0, 1]
    assert model["cache_bytes_per_token"] == 2 * 2 * 8 * 4  # K and V, heads, H, float32
    assert model["parameters"] > 0
    for first, second in (model["bits_per_byte"], model["heldout_loss"]):
        assert first != second


def test_a_run_of_another_experiment_is_refused(compare, tiny, capsys):
    experiment = changed(tiny["tiny_gqa"], {"model.ffn_dim": 32})
    run = compare.RUNS / "tiny_gqa-seed0"
    runs.write_run(run, experiment, Path(experiment.data.path) / runs.TOKENIZER)
    assert cli.guarded(lambda: compare.main([])) == 2
    assert "model.ffn_dim is 48" in capsys.readouterr().err
