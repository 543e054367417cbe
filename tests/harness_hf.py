"""Answers of the harness's own `hf` model over an exported run: FOLDER TASKS OUT.json."""

import json
import sys
from pathlib import Path

import local_tasks
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager


def main(folder: str, tasks: str, out: str) -> None:
    results = simple_evaluate(
        model="hf",
        model_args={"pretrained": folder, "dtype": "float32", "max_length": local_tasks.LENGTH},
        tasks=local_tasks.NAMES,
        num_fewshot=1,
        batch_size=3,
        device="cpu",
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        bootstrap_iters=0,
    )
    assert results
    Path(out).write_text(json.dumps(local_tasks.answers(results["samples"])))


main(*sys.argv[1:])
