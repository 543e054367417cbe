"""A data set, experiments and runs so small that the whole program can be tested on them."""

import dataclasses
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vhajax import cli, metrics
from vhajax.config import GQA, VHA, Data, Experiment, Hosts, Mesh, Model, Optim, Train
from vhajax.prepare import prepare
from vhajax.sources import BadRows, Document
from vhajax.tokenizer import train_bpe

T, BATCH, VOCAB, HELDOUT = 16, 4, 300, 0.2
# Few characters beyond ASCII repeat, so the tokenizer splits most of them.
TEXTS = [
    f"def f{i}(x):\n    return {i * 79 % 97} * x  # naïve {chr(0x65E5 + 7 * i)}{chr(0x1F300 + i)}"
    for i in range(100)
]

# Programs compiled by one test are read back by the next, also by those of subprocesses.
CACHE = tempfile.TemporaryDirectory(prefix="vhajax-test-programs-")
CACHE_SETTINGS = {
    "jax_compilation_cache_dir": CACHE.name,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextmanager
def programs_kept() -> Iterator[None]:
    """Compiled programs are written to, and read from, one folder of this session."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    for name, value in CACHE_SETTINGS.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def prepare_texts(out: Path, texts: list[str], seq_len: int = T) -> Path:
    """The texts as a data folder; every fifth or so is held out."""
    prepare(
        (Document(str(i), text) for i, text in enumerate(texts)),
        out,
        tokenizer=train_bpe(TEXTS, VOCAB),
        seq_len=seq_len,
        description="test",
        bad_rows=BadRows(),
        heldout_fraction=HELDOUT,
    )
    return out


def vha_experiment(data: Path) -> Experiment:
    """VHA under Muon, float32, 6 steps with evaluations and checkpoints on the way."""
    return Experiment(
        model=Model(
            vocab_size=VOCAB,
            dim=32,
            num_layers=2,
            attention=VHA(num_physical_heads=2, num_kv_heads=2, head_dim=8),
            ffn_dim=48,
            dtype="float32",
        ),
        data=Data(path=str(data), seq_len=T, batch_size=BATCH),
        optim=Optim(warmup_steps=2),
        train=Train(steps=6, eval_every=2, checkpoint_every=2, keep_checkpoints=9, log_every=1),
    )


def gqa_experiment(data: Path) -> Experiment:
    """The same with GQA under AdamW."""
    return changed(
        vha_experiment(data),
        {
            "model.attention": GQA(num_heads=4, num_kv_heads=2, head_dim=8),
            "optim.name": "adamw",
            "optim.matrix_lr": 0.003,
        },
    )


def changed(experiment: Experiment, fields: dict[str, Any]) -> Experiment:
    """The experiment with fields replaced, by dotted name."""
    for name, value in fields.items():
        experiment = _replaced(experiment, name.split("."), value)
    return experiment


def _replaced(part: Any, path: list[str], value: Any) -> Any:
    if len(path) > 1:
        value = _replaced(getattr(part, path[0]), path[1:], value)
    return dataclasses.replace(part, **{path[0]: value})


def write_experiment(path: Path, experiment: Experiment) -> Path:
    """An experiment file: a dataclass's repr is the code that makes it."""
    names = ", ".join(kind.__name__ for kind in (GQA, VHA, Data, Experiment, Hosts, Mesh, Model))
    path.write_text(
        f"from vhajax.config import {names}, Optim, Train\n"
        "from vhajax.mechanisms import RopeScaling\n\n"
        f"EXPERIMENT = {experiment!r}\n"
    )
    return path


def save_weights(run: Path, what: Experiment, params: dict[str, Any]) -> Path:
    """A run that holds weights only."""
    import jax.numpy as jnp

    from vhajax import checkpoint, runs, step

    runs.write_run(run, what, Path(what.data.path) / "tokenizer.json")
    saver = checkpoint.Checkpointer(run, what, keep=1)
    arrays = {name: jnp.asarray(x) for name, x in params.items()}
    saver.save(step.TrainState(arrays, (), jnp.int32(1)), weights_only=True)
    saver.finish()
    return run


def stored(run: Path, number: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, as Orbax alone reads it."""
    import orbax.checkpoint as ocp

    arrays = {}
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        for item in ("params", "opt_state"):
            path = (run / "checkpoints" / str(number) / item).resolve()
            there = reader.metadata(path).item_metadata
            wanted = {name: np.empty(x.shape, x.dtype) for name, x in there.items()}
            tree = reader.restore(path, args=ocp.args.StandardRestore(wanted))
            arrays |= {f"{item}.{name}": x for name, x in tree.items()}
    return arrays


def assert_bitwise(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert (x.dtype, x.shape) == (other[name].dtype, other[name].shape), name
        assert x.tobytes() == np.asarray(other[name]).tobytes(), name


def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock or the machine's memory says."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    measured = ("tokens_per_second", "_seconds", "_bytes")
    return [
        {name: value for name, value in json.loads(line).items() if not name.endswith(measured)}
        for line in lines
    ]


def after_step(monkeypatch, step: int, action) -> None:
    """Calls `action` as soon as the training row of a step is written."""
    write = metrics.MetricsLog.write

    def write_and_act(self, done: int, **values: float) -> None:
        write(self, done, **values)
        if done == step and "loss" in values:
            action()

    monkeypatch.setattr(metrics.MetricsLog, "write", write_and_act)


def only_starts(monkeypatch) -> list[tuple[Any, int]]:
    """Training ends before its first step, as after SIGTERM; what it would have begun with."""
    from vhajax import loop
    from vhajax.errors import PREEMPTED

    seen: list[tuple[Any, int]] = []
    result = loop.Result(0, math.nan, loop.UNFINISHED, math.nan, PREEMPTED)
    monkeypatch.setattr(
        loop.Loop, "run", lambda self, state: seen.append((state, self.start)) or result
    )
    return seen


def run_json(capsys, *args: str) -> dict:
    """What a command that works prints: one JSON object and nothing else on stdout."""
    capsys.readouterr()
    assert cli.main([*args, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    value = json.loads(out)
    assert isinstance(value, dict)
    return value
