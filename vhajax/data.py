"""Batches of prepared rows, in an order that (seed, step) alone gives.

Letters: B rows of a global batch, T tokens of a row that are inputs.
"""

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordReader
from grain.experimental import index_shuffle, set_next_index

from vhajax.errors import UserError
from vhajax.manifest import SplitName, load_manifest

Batch = dict[str, np.ndarray]

# Enough to hide the reads behind a step: reading a row takes tens of microseconds.
READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


class Rows:
    """The rows of one split of a prepared folder, by index."""

    def __init__(self, folder: Path, split: SplitName) -> None:
        """Checks the folder as `load_manifest` does; opens a shard when one of its rows is read."""
        self.manifest = load_manifest(folder)
        self._folder = folder
        self._shards = self.manifest.split(split).shards
        self._ends = list(itertools.accumulate(shard.rows for shard in self._shards))
        self._dtype = self.manifest.row_dtype
        self._readers: dict[int, ArrayRecordReader] = {}

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Row i: tokens and segment ids, both int32 [T + 1]. Safe in threads.

        Raises:
          UserError: the record is corrupt.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        shard = bisect.bisect_right(self._ends, i)
        first = self._ends[shard - 1] if shard else 0
        path = self._folder / self._shards[shard].name
        try:
            record = self._reader(shard, path).read([i - first])[0]
            (row,) = np.frombuffer(record, self._dtype)
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"The shard {path} is corrupt at row {i - first} ({error}); "
                "copy it again or prepare the data again."
            ) from error
        return row["tokens"].astype(np.int32), row["segments"].astype(np.int32)

    def _reader(self, shard: int, path: Path) -> ArrayRecordReader:
        # Two threads may both open a shard; either reader will do.
        if shard not in self._readers:
            options = "readahead_buffer_size:0,max_parallelism:0"  # for random access
            self._readers[shard] = ArrayRecordReader(str(path), options)
        return self._readers[shard]


def batch_of(tokens: np.ndarray, segments: np.ndarray) -> Batch:
    """What a training step reads, from rows of tokens and segment ids, both int32 [B, T + 1].

    Returns:
      tokens, targets: int32 [B, T], inputs and the token after each.
      segments: int32 [B, T], document of each input within its row from 1; 0 is padding.
      positions: int32 [B, T], from 0 at each start of a segment. A document that continues from
        the row before starts at 0 too: the row does not see what came before.
      weights: float32 [B, T], 1 where the target continues its input's document, else 0.
    """
    inputs, following = segments[:, :-1], segments[:, 1:]
    index = np.arange(inputs.shape[1], dtype=np.int32)
    starts = np.diff(inputs, axis=1, prepend=-1) != 0
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": inputs,
        "positions": index - np.maximum.accumulate(np.where(starts, index, 0), axis=1),
        "weights": ((inputs == following) & (inputs != 0)).astype(np.float32),
    }


class _Steps:
    """Grain's data source with one process's part of the global batch at each step."""

    def __init__(
        self, rows: Rows, seed: int, num_steps: int, batch: int, part: Sequence[int]
    ) -> None:
        self._rows = rows
        self._seed = seed
        self._num_steps = num_steps
        self._batch = batch
        self._part = part

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, index: int) -> Batch:
        """The batch of step `index`."""
        numbers = rows_of_step(index, self._batch, len(self._rows), self._seed)
        tokens, segments = zip(*(self._rows[numbers[j]] for j in self._part), strict=True)
        return batch_of(np.stack(tokens), np.stack(segments))


def rows_of_step(index: int, batch_size: int, num_rows: int, seed: int) -> list[int]:
    """The rows of the global batch of step `index` (from 0), in order."""
    first = index * batch_size
    return [_row_at(i, num_rows, seed) for i in range(first, first + batch_size)]


def _row_at(i: int, num_rows: int, seed: int) -> int:
    """The row at position i of the endless order: one permutation of all rows after another."""
    epoch, index = divmod(i, num_rows)
    return index_shuffle(index, max_index=num_rows - 1, seed=_epoch_seed(seed, epoch), rounds=4)


@functools.lru_cache(maxsize=16)
def _epoch_seed(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])


def train_batches(
    folder: Path,
    *,
    batch_size: int,
    seed: int,
    num_steps: int,
    start_step: int = 0,
    part: Sequence[int] | None = None,
) -> grain.DatasetIterator[Batch]:
    """Batches of the steps from start_step up to num_steps, as `batch_of` makes them.

    Whatever part of it a process reads, the global batch of a step is the same. The iterator's
    state is the number of the next step and nothing else.

    Args:
      batch_size: B, rows of the global batch.
      part: indices into [0, B) of the rows that this process reads; None: all.

    Raises:
      UserError: a folder that is not sound, or start_step beyond num_steps. A corrupt row raises it
        at its step.
    """
    if not 0 <= start_step <= num_steps:
        raise UserError(f"The run starts at step {start_step}, beyond its {num_steps} steps.")
    mine = range(batch_size) if part is None else part
    steps = _Steps(Rows(folder, "train"), seed, num_steps, batch_size, mine)
    iterator = iter(grain.MapDataset.source(steps).to_iter_dataset(READ_OPTIONS))
    set_next_index(iterator, start_step)
    return iterator


def heldout_batches(folder: Path, batch_size: int, num_rows: int = 0) -> Iterator[Batch]:
    """The first num_rows held-out rows (0: all) in order, B at a time, as `batch_of` makes them.

    The last batch is filled up with rows of weight 0, so that every batch has the same shape.

    Raises:
      UserError: a folder that is not sound, or a corrupt row.
    """
    rows = Rows(folder, "heldout")
    count = min(num_rows or len(rows), len(rows))
    shape = (batch_size, rows.manifest.seq_len + 1)
    for start in range(0, count, batch_size):
        tokens = np.full(shape, rows.manifest.eos_id, np.int32)
        segments = np.zeros(shape, np.int32)
        for j, i in enumerate(range(start, min(start + batch_size, count))):
            tokens[j], segments[j] = rows[i]
        yield batch_of(tokens, segments)
