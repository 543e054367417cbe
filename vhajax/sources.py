"""Documents of text files, folders, JSON Lines and Parquet, one at a time.

A row that cannot be a document is not an error of the whole input: it is named, counted, skipped.
"""

import gzip
import json
import platform
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vhajax.errors import UserError

NAMED_BAD_ROWS = 20
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
"""Folders whose files are left out of the standard library's source."""


@dataclass(frozen=True)
class Document:
    name: str
    """File, or file:row with rows from 1."""
    text: str
    """Not empty, and valid Unicode."""


@dataclass
class BadRows:
    """The rows that were skipped."""

    count: int = 0
    first: list[tuple[str, str]] = field(default_factory=list)
    """Name and reason of the first 20."""

    def add(self, name: str, reason: str) -> None:
        self.count += 1
        if len(self.first) < NAMED_BAD_ROWS:
            self.first.append((name, reason))


@dataclass(frozen=True)
class Source:
    """Files in the order in which they are read; it can be read more than once."""

    description: str
    files: tuple[tuple[str, Path], ...]
    """Name and place of each."""

    def documents(self, bad_rows: BadRows) -> Iterator[Document]:
        """Streams the documents, and adds what it had to skip to `bad_rows`.

        Raises:
          UserError: at the end, if there was no document at all.
        """
        empty = True
        for name, path in self.files:
            for document in _file_documents(name, path, bad_rows):
                empty = False
                yield document
        if empty:
            why = (
                "; the first bad row is {}: {}".format(*bad_rows.first[0]) if bad_rows.count else ""
            )
            raise UserError(f"{self.description} holds no documents{why}.")


def open_source(paths: Sequence[Path]) -> Source:
    """The documents of files, and of folders' files in sorted order, hidden ones left out.

    `.jsonl` and `.parquet` files have a document per row, in the field `text`; any other file is
    one document; `.gz` may follow `.jsonl` or any text file's name.

    Raises:
      UserError: a path that does not exist.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files.extend(_visible_files(path))
        elif path.exists():
            files.append(path)
        else:
            raise UserError(f"{path} does not exist; name a file or a folder of documents.")
    return Source(", ".join(map(str, paths)), tuple((str(path), path) for path in files))


def stdlib_source() -> Source:
    """The standard library's `.py` files without its tests, about 11 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    wanted = [name for name in names if not NOT_STDLIB & set(name.split("/")[:-1])]
    description = f"the source of Python {platform.python_version()}'s standard library"
    return Source(description, tuple((name, root / name) for name in wanted))


def _visible_files(folder: Path) -> list[Path]:
    def hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(folder).parts)

    return sorted(path for path in folder.rglob("*") if path.is_file() and not hidden(path))


def _file_documents(name: str, path: Path, bad_rows: BadRows) -> Iterator[Document]:
    suffixes = path.suffixes[-2:]
    zipped = suffixes[-1:] == [".gz"]
    kind = "".join(suffixes[:-1] if zipped else suffixes[-1:])
    try:
        if kind == ".parquet" and not zipped:
            yield from _parquet_documents(name, path, bad_rows)
            return
        with gzip.open(path) if zipped else path.open("rb") as file:
            if kind == ".jsonl":
                yield from _jsonl_documents(name, file, bad_rows)
            else:
                yield from _text_document(name, file.read(), bad_rows)
    except (OSError, EOFError, zlib.error) as error:  # corrupt, cut short, or not readable
        bad_rows.add(name, f"cannot be read ({error})")


def _text_document(name: str, data: bytes, bad_rows: BadRows) -> Iterator[Document]:
    try:
        text = _checked(data.decode("utf-8"))
    except ValueError as error:
        bad_rows.add(name, _reason(error))
    else:
        yield Document(name, text)


def _jsonl_documents(name: str, lines: Iterable[bytes], bad_rows: BadRows) -> Iterator[Document]:
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        row = f"{name}:{number}"
        try:
            # Decoded here, because json guesses UTF-16 and UTF-32 in bytes.
            text = _checked(_text_field(json.loads(line.decode("utf-8"))))
        except (ValueError, RecursionError) as error:
            bad_rows.add(row, _reason(error))
        else:
            yield Document(row, text)


def _parquet_documents(name: str, path: Path, bad_rows: BadRows) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                bad_rows.add(name, "it has no column `text`")
                return
            batches = file.iter_batches(batch_size=1024, columns=["text"])
            values = (value for batch in batches for value in batch.column("text"))
            for number, value in enumerate(values, start=1):
                row = f"{name}:{number}"
                try:
                    text = _checked(value.as_py())
                except ValueError as error:
                    bad_rows.add(row, _reason(error))
                else:
                    yield Document(row, text)
    except pa.ArrowException as error:
        raise OSError(f"corrupt Parquet: {error}") from error


def _text_field(record: Any) -> Any:
    if not isinstance(record, dict) or "text" not in record:
        raise ValueError("it has no field `text`")
    return record["text"]


def _checked(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"`text` is {type(text).__name__}, not a string")
    if not text:
        raise ValueError("it is empty")
    text.encode("utf-8")  # JSON can spell lone surrogates, which no tokenizer takes
    return text


def _reason(error: Exception) -> str:
    match error:
        case json.JSONDecodeError() | RecursionError():
            return f"it is not JSON ({error})"
        case UnicodeDecodeError():
            return f"it is not UTF-8 ({error.reason} at byte {error.start})"
        case UnicodeEncodeError():
            return "it has a lone surrogate"
    return str(error)
