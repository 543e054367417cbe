"""Rows and batches, against a slow reading of the same documents."""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vhajax import pack
from vhajax.data import Rows, _row_at, batch_of, heldout_batches, train_batches
from vhajax.errors import UserError
from vhajax.prepare import is_heldout, prepare
from vhajax.sources import BadRows, Document
from vhajax.tokenizer import train_bpe

TEXTS = [f"document {i}: naïve 日本語 😀 {'word ' * (i % 7)}" for i in range(60)]
TOKENIZER = train_bpe(TEXTS, 300)
T = 16


def prepare_texts(out: Path, texts: list[str], seq_len: int = T) -> Path:
    documents = (Document(str(i), text) for i, text in enumerate(texts))
    prepare(
        documents,
        out,
        tokenizer=TOKENIZER,
        seq_len=seq_len,
        description="test",
        bad_rows=BadRows(),
        heldout_fraction=0.2,
    )
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prepared TEXTS, in several shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "ROWS_PER_SHARD", 15)
        return prepare_texts(tmp_path_factory.mktemp("data") / "out", TEXTS)


def all_rows(folder: Path, split) -> tuple[np.ndarray, np.ndarray]:
    rows = Rows(folder, split)
    tokens, segments = zip(*(rows[i] for i in range(len(rows))), strict=True)
    return np.stack(tokens), np.stack(segments)


def slow_stream(texts: list[str], heldout: bool) -> list[tuple[int, int, int]]:
    """(token, document, place in the document) of a split's tokens, in order."""
    kept = [text for text in texts if is_heldout(text, 0.2) == heldout]
    return [
        (token, document, place)
        for document, text in enumerate(kept)
        for place, token in enumerate(TOKENIZER.encode_document(text))
    ]


def slow_batch(stream: list[tuple[int, int, int]], seq_len: int) -> dict[str, list[list]]:
    """What `batch_of` should make of a whole split, one token after another."""
    batch = {name: [] for name in ("tokens", "targets", "segments", "positions", "weights")}
    for start in range(0, len(stream) - 1, seq_len):
        row = stream[start : start + seq_len + 1]
        row += [(TOKENIZER.eos, None, None)] * (seq_len + 1 - len(row))
        order = list(dict.fromkeys(document for _, document, _ in row if document is not None))
        padding = sum(document is None for _, document, _ in row)
        first_place = {document: place for _, document, place in reversed(row)}
        batch["tokens"].append([token for token, _, _ in row[:-1]])
        batch["targets"].append([token for token, _, _ in row[1:]])
        batch["segments"].append([0 if d is None else order.index(d) + 1 for _, d, _ in row[:-1]])
        real = [place - first_place[d] for _, d, place in row if d is not None]
        batch["positions"].append([*real, *range(padding)][:-1])
        pairs = itertools.pairwise(row)
        batch["weights"].append([float(a[1] == b[1] and a[1] is not None) for a, b in pairs])
    return batch


def assert_equals_slow(folder: Path, texts: list[str], seq_len: int) -> None:
    for split in ("train", "heldout"):
        fast = batch_of(*all_rows(folder, split))
        slow = slow_batch(slow_stream(texts, heldout=split == "heldout"), seq_len)
        for name, values in fast.items():
            np.testing.assert_array_equal(values, np.array(slow[name]), name, strict=False)


def test_rows_against_the_slow_oracle(folder):
    assert len(Rows(folder, "train").manifest.train.shards) > 1
    assert_equals_slow(folder, TEXTS, T)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("ab 日😀", min_size=1, max_size=30), max_size=12), st.integers(1, 20))
def test_any_documents_against_the_slow_oracle(texts, seq_len):
    texts = [*texts, *TEXTS[:5]]  # of which some are held out, some not
    with tempfile.TemporaryDirectory() as place:
        assert_equals_slow(prepare_texts(Path(place) / "out", texts, seq_len), texts, seq_len)


def test_types_and_shapes(folder):
    batch = next(train_batches(folder, batch_size=3, seed=0, num_steps=1))
    assert {name: (x.shape, x.dtype.name) for name, x in batch.items()} == {
        "tokens": ((3, T), "int32"),
        "targets": ((3, T), "int32"),
        "segments": ((3, T), "int32"),
        "positions": ((3, T), "int32"),
        "weights": ((3, T), "float32"),
    }


def test_every_token_is_a_target_once_and_scored_bytes_are_the_text(folder):
    for split, heldout in (("train", False), ("heldout", True)):
        tokens, segments = all_rows(folder, split)
        stream = [token for token, _, _ in slow_stream(TEXTS, heldout)]
        assert tokens[:, 1:][segments[:, 1:] > 0].tolist() == stream[1:]
        batch = batch_of(tokens, segments)
        scored = batch["targets"][batch["weights"] > 0]
        told = Rows(folder, split).manifest.split(split)
        assert len(scored) == told.tokens - told.documents  # all but each document's BOS
        assert TOKENIZER.token_bytes[scored].sum() == told.utf8_bytes


def test_splits_share_no_document(folder):
    def texts(split):
        tokens, segments = all_rows(folder, split)
        stream = [tokens[0, 0], *tokens[:, 1:][segments[:, 1:] > 0]]
        ends = np.flatnonzero(np.array(stream) == TOKENIZER.eos) + 1
        return {TOKENIZER.decode(ids) for ids in np.split(stream, ends[:-1])}

    train, heldout = texts("train"), texts("heldout")
    assert not train & heldout
    assert train | heldout == set(TEXTS)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_each_epoch_is_a_permutation(num_rows, seed, epoch):
    order = [_row_at(epoch * num_rows + i, num_rows, seed) for i in range(num_rows)]
    assert sorted(order) == list(range(num_rows))


def test_epochs_and_seeds_differ():
    orders = {
        tuple(_row_at(epoch * 100 + i, 100, seed) for i in range(100))
        for epoch in range(3)
        for seed in range(3)
    }
    assert len(orders) == 9


def test_the_order_is_pinned():
    """A checkpoint resumes in the order in which it began, also with a newer Grain or NumPy."""
    assert [_row_at(i, 10, 7) for i in range(20)] == [
        3,
        8,
        2,
        1,
        0,
        4,
        9,
        5,
        7,
        6,
        7,
        9,
        0,
        8,
        4,
        2,
        5,
        6,
        3,
        1,
    ]


def collect(folder: Path, **more) -> list[dict[str, np.ndarray]]:
    return list(train_batches(folder, **{"batch_size": 4, "seed": 3, "num_steps": 30} | more))


def assert_same(some, others) -> None:
    for one, other in zip(some, others, strict=True):
        for name, values in one.items():
            np.testing.assert_array_equal(values, other[name])


def test_steps_visit_every_row_once_an_epoch(folder):
    rows, _ = all_rows(folder, "train")
    num_rows = len(rows)
    batches = collect(folder, batch_size=1, num_steps=2 * num_rows)
    epochs = np.concatenate([batch["tokens"] for batch in batches]).reshape(2, num_rows, T)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == sorted(rows[:, :-1].tolist())
    assert epochs[0].tolist() != epochs[1].tolist()


@pytest.mark.parametrize("host_count", [2, 4])
def test_any_number_of_hosts_reads_the_same_global_batches(folder, host_count):
    size = 4 // host_count
    parts = [range(i * size, (i + 1) * size) for i in range(host_count)]
    hosts = [collect(folder, part=part) for part in parts]
    joined = [
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for parts in zip(*hosts, strict=True)
    ]
    assert_same(joined, collect(folder))


@pytest.mark.parametrize("step", [0, 1, 17, 30])
def test_resuming_by_step_or_by_state(folder, step):
    whole = collect(folder)
    assert_same(collect(folder, start_step=step), whole[step:])
    first = train_batches(folder, batch_size=4, seed=3, num_steps=30)
    for _ in range(step):
        next(first)
    state = first.get_state()
    assert state == {"next_index": step}
    started = train_batches(folder, batch_size=4, seed=3, num_steps=30, start_step=step)
    assert started.get_state() == state
    # As many hosts as there are may restore it, also an iterator that has begun to read.
    part = train_batches(folder, batch_size=4, seed=3, num_steps=30, part=[2, 3])
    next(part)
    part.set_state(state)
    assert_same(part, [{name: x[2:] for name, x in batch.items()} for batch in whole[step:]])
    assert_same(first, whole[step:])


def test_heldout_batches_are_in_order_and_filled_up(folder):
    whole = batch_of(*all_rows(folder, "heldout"))
    count = len(whole["tokens"])
    batch_size = 7
    assert count % batch_size
    batches = list(heldout_batches(folder, batch_size))
    assert {x.shape for batch in batches for x in batch.values()} == {(batch_size, T)}
    for name, values in whole.items():
        joined = np.concatenate([batch[name] for batch in batches])
        np.testing.assert_array_equal(joined[:count], values)
    assert batches[-1]["weights"][count % batch_size :].sum() == 0
    (first,) = heldout_batches(folder, batch_size, num_rows=3)
    np.testing.assert_array_equal(first["tokens"][:3], whole["tokens"][:3])
    assert first["weights"][3:].sum() == 0
    assert len(list(heldout_batches(folder, batch_size, num_rows=10**9))) == len(batches)


def test_refusals(folder):
    with pytest.raises(UserError, match="starts at step 9, beyond its 8 steps"):
        train_batches(folder, batch_size=4, seed=0, num_steps=8, start_step=9)
    with pytest.raises(UserError, match="is not a folder"):
        train_batches(folder / "nope", batch_size=4, seed=0, num_steps=8)
    rows = Rows(folder, "train")
    for i in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[i]


def test_a_corrupt_shard_is_named(tmp_path):
    folder = prepare_texts(tmp_path / "out", TEXTS)
    shard = folder / "train-00000.arrayrecord"
    shard.write_bytes(bytes(byte ^ 0xFF for byte in shard.read_bytes()))
    with pytest.raises(UserError, match=r"train-00000\.arrayrecord is corrupt at row 3"):
        Rows(folder, "train")[3]
    with pytest.raises(UserError, match=r"train-00000\.arrayrecord is corrupt"):
        collect(folder)
