"""Folders that are written whole or not at all."""

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from vhajax.errors import UserError


@contextlib.contextmanager
def disk_errors(path: Path, *more: type[Exception]) -> Iterator[None]:
    """Turns a full disk and the like into a refusal; `more` is what else a library raises then."""
    try:
        yield
    except (OSError, *more) as error:
        raise UserError(
            f"{path} cannot be written ({error}); mend that, or name another folder."
        ) from error


@contextlib.contextmanager
def appearing_at_end(out: Path) -> Iterator[Path]:
    """A temporary sibling of `out` that becomes `out` if the block ends well, else is removed."""
    out = out.resolve()
    with disk_errors(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists and is not an empty folder; name a new one.")
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        folder = out.with_name(f"{temporary_prefix(out)}{os.getpid()}")
        folder.mkdir()
    try:
        yield folder
        with disk_errors(out):
            folder.rename(out)  # refused if another process filled `out` meanwhile
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def temporary_prefix(out: Path) -> str:
    return f".{out.name}.preparing-{socket.gethostname()}-"


def _remove_leftovers(out: Path) -> None:
    """Removes what killed preparations of `out` left on this machine."""
    prefix = temporary_prefix(out)
    for folder in out.parent.iterdir():
        process = folder.name.removeprefix(prefix)
        if folder.name.startswith(prefix) and not _is_running(int(process)):
            shutil.rmtree(folder)


def _is_running(process: int) -> bool:
    """Whether another process has this id."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
