"""Documents to a folder of rows: split, tokenise, pack, write, and only then let it be seen."""

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vhajax.errors import UserError
from vhajax.files import appearing_at_end, disk_errors
from vhajax.manifest import FORMAT_VERSION, MANIFEST, TOKENIZER, Manifest, write_manifest
from vhajax.pack import SplitWriter
from vhajax.sources import BadRows, Document, Source, open_source, stdlib_source
from vhajax.tokenizer import Tokenizer, load_tokenizer, train_bpe

BATCH_CHARACTERS = 2**22
"""Text that is tokenised at one time; a document is never cut."""
HELDOUT_FRACTION = 0.05
DEFAULT_VOCAB_SIZE = 4096


def is_heldout(text: str, fraction: float) -> bool:
    """Whether a document is held out: a property of its text alone.

    So it keeps its side when documents are added, renamed or reordered, and a document that occurs
    twice is never on both sides.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def train_tokenizer(
    source: Source, vocab_size: int, fraction: float = HELDOUT_FRACTION
) -> Tokenizer:
    """BPE of the documents that `prepare` will not hold out, which it reads as a whole."""
    documents = source.documents(BadRows())
    return train_bpe((d.text for d in documents if not is_heldout(d.text, fraction)), vocab_size)


def prepare(
    documents: Iterable[Document],
    out: Path,
    *,
    tokenizer: Tokenizer,
    seq_len: int,
    description: str,
    bad_rows: BadRows,
    heldout_fraction: float = HELDOUT_FRACTION,
    progress: bool = False,
) -> Manifest:
    """Writes the documents as rows of T + 1 tokens, with stride T, into the new folder `out`.

    Each split is one stream of documents in the order given. The last token of a row is the first
    of the next, so every token but the stream's first is a target once. Memory holds a few batches
    of documents at a time. Until the folder is complete it does not exist; an interruption leaves
    nothing.

    Args:
      seq_len: T.
      description: what the documents are, for the manifest.
      bad_rows: what the iteration over `documents` skips; read when that has ended.
      progress: show a progress line on stderr, if that is a terminal.

    Raises:
      UserError: `out` exists and is not empty or cannot be written, or a split has no documents.
    """
    if seq_len < 1:
        raise UserError(f"The sequence length is {seq_len}; it must be greater than 0.")
    if not 0 < heldout_fraction < 1:
        raise UserError(
            f"The held-out fraction is {heldout_fraction}; it must lie between 0 and 1."
        )
    with appearing_at_end(out) as folder:
        train = SplitWriter(folder, "train", tokenizer, seq_len)
        heldout = SplitWriter(folder, "heldout", tokenizer, seq_len)
        for batch in _show_progress(_batches(documents), progress):
            ids = tokenizer.encode_documents([document.text for document in batch])
            for document, document_ids in zip(batch, ids, strict=True):
                split = heldout if is_heldout(document.text, heldout_fraction) else train
                split.add(document.text, document_ids)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            vhajax_version=_library_version(),
            source=description,
            policy=_policy(tokenizer, seq_len),
            heldout_fraction=heldout_fraction,
            seq_len=seq_len,
            vocab_size=tokenizer.vocab_size,
            bos=tokenizer.bos_name,
            bos_id=tokenizer.bos,
            eos=tokenizer.eos_name,
            eos_id=tokenizer.eos,
            bad_rows=bad_rows.count,
            first_bad_rows=tuple(bad_rows.first),
            train=train.finish(),
            heldout=heldout.finish(),
        )
        with disk_errors(folder):
            tokenizer.save(folder / TOKENIZER)
            write_manifest(folder, manifest)
    return manifest


def prepare_paths(
    paths: Sequence[Path],
    out: Path,
    *,
    seq_len: int,
    tokenizer: Path | None,
    vocab_size: int,
    eos: str | None,
    bos: str | None,
    heldout_fraction: float,
) -> Manifest:
    """`prepare` for files: text, folders, .gz, .jsonl and .parquet; none is the standard library.

    Args:
      tokenizer: a tokenizer.json, with its special tokens eos and bos by name where they are not
        common ones; None trains a byte-level BPE of vocab_size on the training documents.
    """
    source, bad_rows = open_source(paths) if paths else stdlib_source(), BadRows()
    if tokenizer is None:
        chosen = train_tokenizer(source, vocab_size, heldout_fraction)
    else:
        chosen = load_tokenizer(tokenizer, eos, bos)
    return prepare(
        source.documents(bad_rows),
        out,
        tokenizer=chosen,
        seq_len=seq_len,
        description=source.description,
        bad_rows=bad_rows,
        heldout_fraction=heldout_fraction,
        progress=True,
    )


def default_data_dir(seq_len: int) -> Path:
    """The prepared source of the standard library, prepared on first use.

    It lies in $VHAJAX_CACHE, else $XDG_CACHE_HOME/vhajax, else ~/.cache/vhajax.

    Raises:
      UserError: the cache cannot be written.
    """
    python = platform.python_version()
    name = f"stdlib-{python}-t{seq_len}-v{DEFAULT_VOCAB_SIZE}-f{FORMAT_VERSION}"
    folder = _cache() / name
    if (folder / MANIFEST).is_file():
        return folder
    source, bad_rows = stdlib_source(), BadRows()
    try:
        prepare(
            source.documents(bad_rows),
            folder,
            tokenizer=train_tokenizer(source, DEFAULT_VOCAB_SIZE),
            seq_len=seq_len,
            description=source.description,
            bad_rows=bad_rows,
            progress=True,
        )
    except UserError:
        # Another process may have prepared it meanwhile; then its folder is as good.
        if not (folder / MANIFEST).is_file():
            raise
    return folder


def _cache() -> Path:
    if path := os.environ.get("VHAJAX_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vhajax"


def _library_version() -> str:
    try:
        return importlib.metadata.version("vhajax")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "not installed"


def _policy(tokenizer: Tokenizer, seq_len: int) -> str:
    start = f"{tokenizer.bos_name} + " if tokenizer.bos_name else ""
    return (
        "A document is held out if the first 8 bytes of its text's BLAKE2b-64, as a fraction of "
        f"2^64, are below heldout_fraction. A document is {start}text + {tokenizer.eos_name}; a "
        f"split is its documents in source order; a row is {seq_len + 1} tokens of it, the next "
        f"starts {seq_len} later, and the last is filled up with segment 0. Loss does not cross "
        "documents."
    )


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _show_progress(batches: Iterable[list[Document]], progress: bool) -> Iterator[list[Document]]:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    enabled = progress and console.is_terminal
    documents = characters = 0
    with Progress(*columns, console=console, transient=True, disable=not enabled) as bar:
        task = bar.add_task("Reading documents")
        for batch in batches:
            yield batch
            documents += len(batch)
            characters += sum(len(document.text) for document in batch)
            done = f"Prepared {documents:,} documents, {characters / 1e6:,.1f} M characters"
            bar.update(task, description=done)
