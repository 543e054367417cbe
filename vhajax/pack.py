"""Packs documents into rows of T + 1 tokens and writes them as ArrayRecord shards."""

import zlib
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from vhajax.errors import UserError
from vhajax.files import disk_errors
from vhajax.manifest import Shard, Split, SplitName, row_dtype, sha256_of
from vhajax.tokenizer import Tokenizer

ROWS_PER_SHARD = 65_536


class SplitWriter:
    """Packs the documents of one split into rows as they come."""

    def __init__(self, folder: Path, split: SplitName, tokenizer: Tokenizer, seq_len: int) -> None:
        self._name = split
        self._seq_len = seq_len
        self._eos = tokenizer.eos
        self._token_bytes = tokenizer.token_bytes
        self._dtype = row_dtype(seq_len, tokenizer.vocab_size)
        self._shards = _ShardWriter(folder, split)
        # Tokens that no full row holds yet, and the document of each.
        self._tokens = np.empty(0, np.int64)
        self._owners = np.empty(0, np.int64)
        self._documents = self._stream_tokens = self._utf8_bytes = self._stream_bytes = 0
        # wbits 31: a gzip file's header and checksum, so that the size is that of `gzip -9`.
        self._gzip = zlib.compressobj(9, wbits=31) if split == "heldout" else None
        self._gzip_bytes = 0

    def add(self, text: str, ids: list[int]) -> None:
        data = text.encode()
        tokens = np.array(ids, np.int64)
        if self._gzip:
            self._gzip_bytes += len(self._gzip.compress(data))
        self._tokens = np.concatenate([self._tokens, tokens])
        self._owners = np.concatenate([self._owners, np.full(len(ids), self._documents)])
        self._documents += 1
        self._stream_tokens += len(ids)
        self._utf8_bytes += len(data)
        self._stream_bytes += int(self._token_bytes[tokens].sum())
        self._write_full_rows()

    def _write_full_rows(self) -> None:
        full = max(0, len(self._tokens) - 1) // self._seq_len
        for start in range(0, full * self._seq_len, self._seq_len):
            row = slice(start, start + self._seq_len + 1)
            owners = self._owners[row]
            self._write(self._tokens[row], owners - owners[0] + 1)
        self._tokens = self._tokens[full * self._seq_len :]
        self._owners = self._owners[full * self._seq_len :]

    def _write(self, tokens: np.ndarray, segments: np.ndarray) -> None:
        row = np.empty((), self._dtype)
        row["tokens"], row["segments"] = tokens, segments
        self._shards.write(row.tobytes())

    def finish(self) -> Split:
        """Writes the last row, filled up with EOS in segment 0, unless nothing is left to score."""
        missing = self._seq_len + 1 - len(self._tokens)
        if len(self._tokens) > 1:
            segments = self._owners - self._owners[0] + 1
            tokens = np.pad(self._tokens, (0, missing), constant_values=self._eos)
            self._write(tokens, np.pad(segments, (0, missing)))
        shards = self._shards.finish()
        if not shards:
            raise UserError(
                f"No document fell into the {self._name} split; add documents or change "
                "--heldout-fraction."
            )
        return Split(
            documents=self._documents,
            tokens=self._stream_tokens,
            rows=sum(shard.rows for shard in shards),
            utf8_bytes=self._utf8_bytes,
            token_bytes=self._stream_bytes,
            gzip9_bytes=self._gzip_bytes + len(self._gzip.flush()) if self._gzip else None,
            shards=shards,
        )


class _ShardWriter:
    """Writes records to as many ArrayRecord files as they need."""

    def __init__(self, folder: Path, split: SplitName) -> None:
        self._folder = folder
        self._split = split
        self._shards: list[Shard] = []
        self._writer: ArrayRecordWriter | None = None
        self._rows = 0

    def write(self, record: bytes) -> None:
        with disk_errors(self._folder, RuntimeError):  # ArrayRecord's
            # One record a group: a row is read alone, in any order.
            writer = self._writer or ArrayRecordWriter(str(self._path()), "group_size:1")
            writer.write(record)
        self._writer = writer
        self._rows += 1
        if self._rows == ROWS_PER_SHARD:
            self._close(writer)

    def _path(self) -> Path:
        """The shard that is being written."""
        return self._folder / f"{self._split}-{len(self._shards):05}.arrayrecord"

    def _close(self, writer: ArrayRecordWriter) -> None:
        path = self._path()
        with disk_errors(self._folder, RuntimeError):  # ArrayRecord's
            writer.close()
            shard = Shard(path.name, self._rows, path.stat().st_size, sha256_of(path))
        self._shards.append(shard)
        self._writer, self._rows = None, 0

    def finish(self) -> tuple[Shard, ...]:
        if self._writer is not None:
            self._close(self._writer)
        return tuple(self._shards)
