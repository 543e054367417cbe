"""Tasks of EleutherAI's lm-evaluation-harness, and what a run reaches on them.

A task's file can name Python functions, which then run: it is code, as an experiment is. Code from
a model hub is not run, nor are the tasks that run what the model writes.
"""

import os
import random
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict
from lm_eval.utils import make_table

from vhajax import harness
from vhajax.errors import UserError
from vhajax.harness import RunModel
from vhajax.inference import load

RESAMPLES = 1000
"""Draws behind the standard error of a metric that has no formula for it."""

TOLD = (
    "results",
    "groups",
    "group_subtasks",
    "versions",
    "n-shot",
    "n-samples",
    "higher_is_better",
)


def evaluate_run(
    run: Path,
    tasks: TaskDict,
    *,
    max_length: int,
    batch_size: int,
    limit: int | None = None,
) -> dict[str, Any]:
    """The newest weights of a run on tasks: the harness's results, without the texts.

    Args:
      tasks: see `load_tasks`.
      max_length: tokens that the model reads at most.
      batch_size: requests at one time.
      limit: so many documents of each task, the first ones (None: all).
    Raises:
      UserError: see `inference.load` and `RunModel`; or a task whose documents cannot be used.
    """
    model = RunModel(*load(run), max_length, batch_size)
    for task in tasks["tasks"].values():
        if task.get_config("output_type") == "generate_until":
            model.plan(task.get_config("generation_kwargs") or {})  # before anything is scored
    os.environ["DISABLE_MULTIPROC"] = "1"  # resampling forks, which JAX's threads do not survive
    try:
        found: Any = evaluate(
            model, tasks, limit=limit, log_samples=False, bootstrap_iters=RESAMPLES
        )
    except Exception as error:
        if _in_the_model(error):
            raise
        raise _task_error(tasks["tasks"], error) from error
    return {name: found[name] for name in TOLD if name in found}


def _in_the_model(error: Exception) -> bool:
    """Whether it was raised below the model, not by a task or by the harness."""
    return any(
        frame.f_code.co_filename == harness.__file__
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _task_error(names: Iterable[str], error: Exception) -> UserError:
    return UserError(
        f"The harness fails on {', '.join(names)} ({type(error).__name__}: {error}); see to the "
        "files and the data of these tasks."
    )


def load_tasks(
    names: Sequence[str], folder: Path | None = None, num_fewshot: int | None = None
) -> TaskDict:
    """Tasks by name or pattern, with their data, ready to be evaluated.

    Args:
      folder: where more task files lie, besides the harness's own.
      num_fewshot: examples before each question, but where a task's file says 0.
    Raises:
      UserError: an unknown name, a task whose file or data cannot be read, or one that needs more
        than a language model for text.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name one that holds task files (.yaml).")
    manager = _manager(names, folder)
    for name in names:
        if not manager.match_tasks([name]):
            raise UserError(
                f"The harness has no task {name!r} (task files with mistakes are passed over); "
                "name one that `lm-eval ls tasks` lists, or the folder of its file by "
                "--harness-path."
            )
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    try:
        tasks = manager.load(manager.match_tasks(list(names)))
    except Exception as error:  # a task's file and its data can go wrong in any way
        raise _task_error(names, error) from error
    for task in tasks["tasks"].values():
        _set_up(task, num_fewshot)
    return tasks


def _manager(names: Sequence[str], folder: Path | None) -> TaskManager:
    """Reading the harness's own thousands of tasks takes ten seconds: not where none is meant."""
    if folder is not None:
        own = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(own.all_subtasks):
            return own
    return TaskManager(include_path=folder)


def _set_up(task: Task, num_fewshot: int | None) -> None:
    """As the harness's `simple_evaluate` does."""
    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        raise UserError(
            f"The task {task.task_name} runs code that the model writes, or shows it more than "
            "text, which vhajax does not do; leave it out."
        )
    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config("num_fewshot", num_fewshot or 0)
    task.set_fewshot_seed(DEFAULT_OTHER_SEED)


def table(results: dict[str, Any]) -> str:
    """The results for people."""
    parts = [make_table(results)]
    if "groups" in results:
        parts.append(make_table(results, "groups"))
    return "\n".join(parts).rstrip()
