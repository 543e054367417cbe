"""A run directory: configuration, tokenizer, checkpoints, metrics and the plot of its loss.

No JAX here: commands refuse a bad directory at once.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from vhajax import config
from vhajax.errors import UserError

CONFIG, TOKENIZER, CHECKPOINTS = "config.json", "tokenizer.json", "checkpoints"
SPECIAL_TOKENS = "special_tokens.json"
"""EOS and BOS by name, which tokenizer.json does not say."""
COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What a model of Hugging Face came with, kept for its export."""
METRICS, TENSORBOARD, PLOT = "metrics.jsonl", "tensorboard", "loss.png"
PROFILE = "profile"

# What may differ when a run is continued: how long, how often, where, never what.
FREE = {
    "data.path",
    "train.steps",
    "train.eval_every",
    "train.eval_rows",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.keep_every",
    "train.skip_bad_steps",
    "train.log_every",
    "train.loss_chunk",
    "train.remat",
    "mesh.data",
    "mesh.model",
    "hosts.join_timeout",
    "hosts.silence_timeout",
    "hosts.progress_timeout",
}


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all.

    Raises:
      UserError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(
            f"{path} cannot be written ({error.strerror}); choose another folder."
        ) from error


def create(folder: Path, experiment: config.Experiment, tokenizer: Path) -> None:
    """Makes a run directory, or checks that an existing one may go on with this experiment.

    Raises:
      UserError: the directory cannot be written, is something else, or holds a run that differs in
        a field that cannot change on resume, which is named.
    """
    if (folder / CONFIG).exists():
        check_same(folder, read_config(folder), experiment)
        check_tokenizer(folder, tokenizer)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not a run; name another --run-dir.")
    write_run(folder, experiment, tokenizer)


def write_run(folder: Path, experiment: config.Experiment, tokenizer: Path) -> None:
    """Writes the two files that make a folder a run; the configuration, which marks it, last."""
    if tokenizer.resolve() != (folder / TOKENIZER).resolve():
        write_whole(folder / TOKENIZER, tokenizer.read_text(encoding="utf-8"))
    write_whole(folder / CONFIG, config.to_json(experiment))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from training the same run; a file system without locks lets them.

    Raises:
      UserError: somebody does already.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"The run {folder} is being trained by another process; wait for it, or name "
                    "another --run-dir."
                ) from error
        yield
    finally:
        os.close(held)


def read_config(folder: Path) -> config.Experiment:
    """The experiment of a run.

    Raises:
      UserError: no such folder, not a run, or a broken configuration.
    """
    path = folder / CONFIG
    if not path.is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise UserError(f"The run {folder} {what}; name a folder that `vhajax train` made.")
    return config.from_json(_read(path), str(path))


def special_tokens(eos: str, bos: str | None) -> str:
    """The text of special_tokens.json."""
    return json.dumps({"eos": eos, "bos": bos}) + "\n"


def write_special_tokens(folder: Path, eos: str, bos: str | None) -> None:
    write_whole(folder / SPECIAL_TOKENS, special_tokens(eos, bos))


def read_texts(folder: Path) -> dict[str, str]:
    """The tokenizer's files of a run by name, those among them that a model came with."""
    names = [TOKENIZER] + [SPECIAL_TOKENS] * (folder / SPECIAL_TOKENS).exists()
    return {name: _read(folder / name) for name in names} | read_companions(folder)


def read_companions(folder: Path) -> dict[str, str]:
    """What a model of Hugging Face came with, by name, as far as it is there."""
    return {name: _read(folder / name) for name in COMPANIONS if (folder / name).exists()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore the file.") from error


def check_same(folder: Path, old: config.Experiment, new: config.Experiment) -> None:
    """Refuses a resume that would change the run, naming the first such field."""
    for name, before, after in changes(old, new):
        if name not in FREE:
            raise UserError(
                f"{name} is {after!r}, but the run {folder} was started with {before!r} and it "
                "cannot change on resume; use another --run-dir, with --init-from to keep the "
                "weights."
            )


def changes(old: config.Experiment, new: config.Experiment) -> list[tuple[str, object, object]]:
    """(dotted name, old value, new value) of every field that differs, by name."""
    before, after = flatten(old), flatten(new)
    names = sorted(before.keys() | after.keys())
    found = [(name, before.get(name), after.get(name)) for name in names]
    return [change for change in found if change[1] != change[2]]


def check_tokenizer(folder: Path, tokenizer: Path) -> None:
    """Refuses data whose tokenizer is not the run's."""
    if digest(folder / TOKENIZER) != digest(tokenizer):
        raise UserError(
            f"The tokenizer {tokenizer} is not the one that the run {folder} was trained with; "
            "use data prepared with the run's, or another run."
        )


def flatten(experiment: config.Experiment) -> dict[str, object]:
    """Every leaf of a configuration by its dotted name."""
    flat: dict[str, object] = {}

    def visit(prefix: str, value: object) -> None:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            flat[prefix + "kind"] = type(value).__name__
            for field in dataclasses.fields(value):
                visit(f"{prefix}{field.name}.", getattr(value, field.name))
        else:
            flat[prefix.removesuffix(".")] = value

    visit("", experiment)
    return flat


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); restore the file.") from error
