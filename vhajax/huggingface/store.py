"""Tensors in safetensors files: written in shards with their index, read one at a time."""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vhajax.errors import UserError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
UNITS = {"": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def tracked[T](items: Iterable[T], label: str, total: int) -> Iterable[T]:
    """The items, with a progress bar on stderr if that is a terminal."""
    console = Console(stderr=True)
    return track(
        items, label, total, console=console, transient=True, disable=not console.is_terminal
    )


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB (decimal units) or 500MiB (binary ones).

    Raises:
      UserError: it is none, or zero.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    if not found or found[2].lower() not in units or float(found[1]) == 0:
        raise UserError(f"--shard-size is {text!r}; give a size such as 5GB or 500MB.")
    return max(1, int(float(found[1]) * units[found[2].lower()]))


def write(
    folder: Path, sizes: dict[str, int], arrays: Iterable[tuple[str, np.ndarray]], limit: int
) -> None:
    """Writes tensors into one file, or into shards of at most `limit` bytes and their index.

    Args:
      sizes: bytes of every tensor, in the order of `arrays`; one beyond the limit is alone.
    """
    shards = _split(sizes, limit)
    names = [WHOLE] if len(shards) == 1 else _numbered(len(shards))
    left = iter(arrays)
    for file, wanted in zip(names, shards, strict=True):
        part = {name: np.ascontiguousarray(next(left)[1]) for name in wanted}
        _save(part, folder / file)
    if len(shards) > 1:
        where = {name: file for file, part in zip(names, shards, strict=True) for name in part}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _save(part: dict[str, np.ndarray], path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode  # as of other files; that of save_file shuts all but the owner out
    save_file(part, path, metadata={"format": "pt"})
    path.chmod(mode)


def _split(sizes: dict[str, int], limit: int) -> list[list[str]]:
    shards, room = [[]], limit
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _numbered(count: int) -> list[str]:
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


class Store:
    """The tensors of a folder, read one at a time.

    tensors: dtype (as safetensors names it) and shape of each by name.

    Raises:
      UserError: no safetensors files, pickle files instead, or a file that is missing, broken or
        not what the index says.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[Path, list[str]] = {}
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        index = _index(folder)
        for path in sorted({folder / file for file in index.values()}) or [folder / WHOLE]:
            with _reading(path) as opened:
                self.files[path] = list(opened.keys())
                for name in self.files[path]:
                    part = opened.get_slice(name)
                    self.tensors[name] = (part.get_dtype(), tuple(part.get_shape()))
        if index:
            _check_index(folder, index, self.files)

    def read(self, wanted: set[str]) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors that are wanted, file by file; no more than one file is open."""
        for path, names in self.files.items():
            with _reading(path) as opened:
                for name in names:
                    if name in wanted:
                        yield name, opened.get_tensor(name)


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor, empty where there is one file; as transformers chooses them, so
    that what else lies there (adapters, another layout of the same weights) is left alone."""
    path = folder / INDEX
    if (folder / WHOLE).exists():
        return {}
    if path.exists():
        try:
            where = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): str(file) for name, file in where.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is not an index of tensors ({error}); copy it again."
            ) from error
    pickles = sorted(path for kind in PICKLES for path in folder.glob(kind))
    if any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has neither {WHOLE} nor {INDEX}; copy the one that it had.")
    if pickles:
        raise UserError(
            f"{pickles[0]} is a pickle file, which can execute code when it is loaded; save "
            "the model as safetensors and import that."
        )
    raise UserError(f"{folder} has no {WHOLE}; name a folder that holds a model.")


def _check_index(folder: Path, index: dict[str, str], files: dict[Path, list[str]]) -> None:
    listed = {(file, name) for name, file in index.items()}
    there = {(file.name, name) for file, names in files.items() for name in names}
    if listed != there:
        file, name = min(listed ^ there)
        what = "lacks" if (file, name) in there else "lists"
        raise UserError(
            f"{folder / INDEX} {what} {name} of {file}, and {file} "
            f"{'has' if what == 'lacks' else 'lacks'} it; copy the files again."
        )


@contextlib.contextmanager
def _reading(path: Path) -> Iterator:
    try:
        with safe_open(path, framework="numpy") as opened:
            yield opened
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy it again.") from error
