"""What a folder of prepared rows says of itself: `manifest.json`, written last and read first."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vhajax.errors import UserError

FORMAT_VERSION = 1
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"

SplitName = Literal["train", "heldout"]


@dataclass(frozen=True)
class Shard:
    """One ArrayRecord file."""

    name: str
    rows: int
    bytes: int
    """Size of the file."""
    sha256: str


@dataclass(frozen=True)
class Split:
    documents: int
    tokens: int
    """Tokens of the stream, BOS and EOS of every document included."""
    rows: int
    utf8_bytes: int
    """UTF-8 bytes of the documents."""
    token_bytes: int
    """Σ `Tokenizer.token_bytes` over the stream; not utf8_bytes if the tokenizer edits text."""
    gzip9_bytes: int | None
    """Size of the documents, joined without separator, after `gzip -9`; held-out only."""
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    format_version: int
    vhajax_version: str
    source: str
    """What the documents are, in words."""
    policy: str
    """How documents became rows, in words."""
    heldout_fraction: float
    seq_len: int
    """T; a row is T + 1 tokens."""
    vocab_size: int
    bos: str | None
    bos_id: int | None
    eos: str
    eos_id: int
    bad_rows: int
    """Rows of the source that were skipped."""
    first_bad_rows: tuple[tuple[str, str], ...]
    """Name and reason of the first 20 of them."""
    train: Split
    heldout: Split

    def split(self, name: SplitName) -> Split:
        return self.train if name == "train" else self.heldout

    @property
    def row_dtype(self) -> np.dtype:
        return row_dtype(self.seq_len, self.vocab_size)


def row_dtype(seq_len: int, vocab_size: int) -> np.dtype:
    """One record of a shard: T + 1 `tokens`, then T + 1 `segments`, in the fewest bytes."""

    def unsigned(largest: int) -> str:
        return "<u2" if largest < 2**16 else "<u4"

    width = seq_len + 1  # a row holds at most as many documents
    return np.dtype(
        [("tokens", unsigned(vocab_size - 1), width), ("segments", unsigned(width), width)]
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def load_manifest(folder: Path, *, verify: bool = False) -> Manifest:
    """Reads the manifest, and checks that the files are there in full.

    Args:
      folder: a folder that `vhajax data prepare` wrote.
      verify: also read every shard and compare its SHA-256.

    Raises:
      UserError: no folder, no or a corrupt manifest, another format, or a file missing or changed.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; prepare one with `vhajax data prepare`.")
    if not path.is_file():
        raise UserError(f"{folder} has no {MANIFEST}; prepare it with `vhajax data prepare`.")
    manifest = _parse(path)
    if not (folder / TOKENIZER).is_file():
        raise UserError(f"{folder} has lost its {TOKENIZER}; prepare it again.")
    for shard in manifest.train.shards + manifest.heldout.shards:
        _check_shard(folder / shard.name, shard, verify)
    return manifest


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parse(path: Path) -> Manifest:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        version = tree["format_version"]
        if version != FORMAT_VERSION:
            raise UserError(
                f"{path} has format version {version}, this vhajax reads {FORMAT_VERSION}; "
                "prepare the data again."
            )
        for split in ("train", "heldout"):
            tree[split] = _parse_split(tree[split])
        tree["first_bad_rows"] = tuple((name, reason) for name, reason in tree["first_bad_rows"])
        return Manifest(**tree)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is not a manifest of prepared data ({cause}).") from error


def _parse_split(tree: dict) -> Split:
    return Split(**{**tree, "shards": tuple(Shard(**shard) for shard in tree["shards"])})


def _check_shard(path: Path, shard: Shard, verify: bool) -> None:
    if not path.is_file():
        raise UserError(f"The shard {path} is missing; copy it again or prepare the data again.")
    size = path.stat().st_size
    if size != shard.bytes:
        raise UserError(
            f"The shard {path} has {size} bytes, not {shard.bytes} as its manifest says; "
            "copy it again or prepare the data again."
        )
    if verify and sha256_of(path) != shard.sha256:
        raise UserError(
            f"The shard {path} is not the file that its manifest describes (its SHA-256 differs); "
            "copy it again or prepare the data again."
        )
