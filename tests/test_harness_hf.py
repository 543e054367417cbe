"""The harness answers alike over a run and, with its own `hf` model, over the exported run."""

import json

import foreign
import local_tasks
import oracle
import pytest
import tiny
from lm_eval.evaluator import evaluate

from vhajax import cli
from vhajax.config import GQA
from vhajax.harness import RunModel
from vhajax.harness_tasks import load_tasks
from vhajax.inference import load

pytestmark = [pytest.mark.slow, foreign.needed]


def test_answers_are_those_of_hf_over_the_exported_run(tmp_path):
    """Within 1e-4 nats; as greedy as there; and the same text."""
    data = tiny.prepare_texts(tmp_path / "data", tiny.TEXTS)
    attention = GQA(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm="none")
    what = tiny.changed(tiny.gqa_experiment(data), {"model.attention": attention})
    run = tiny.save_weights(tmp_path / "run", what, oracle.random_params(what.model))
    tasks = local_tasks.write(tmp_path / "tasks")
    assert cli.main(["export", str(run), "--out", str(tmp_path / "exported")]) == 0
    theirs = tmp_path / "theirs.json"
    foreign.run("harness_hf.py", str(tmp_path / "exported"), str(tasks), str(theirs))

    model = RunModel(*load(run), local_tasks.LENGTH, batch_size=3)
    loaded = load_tasks(local_tasks.NAMES, tasks, num_fewshot=1)
    found = evaluate(model, loaded, bootstrap_iters=0, log_samples=True)
    assert found
    ours = local_tasks.answers(found["samples"])
    expected = json.loads(theirs.read_text())
    assert ours.keys() == expected.keys() == set(local_tasks.NAMES)
    for task, documents in expected.items():
        assert flat(ours[task]) == [
            pytest.approx(x, abs=1e-4, rel=0) if isinstance(x, float | int) else x
            for x in flat(documents)
        ]


def flat(answers: list) -> list:
    """Numbers, booleans and texts one after the other."""
    if not isinstance(answers, list | tuple):
        return [answers]
    return [leaf for answer in answers for leaf in flat(answer)]
