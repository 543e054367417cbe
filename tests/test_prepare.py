"""Preparation: all or nothing, the same bytes each time, and splits that do not meet."""

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from vhajax import files, pack, prepare
from vhajax.errors import UserError
from vhajax.manifest import Manifest, load_manifest
from vhajax.prepare import default_data_dir, is_heldout
from vhajax.sources import BadRows, Document, Source
from vhajax.tokenizer import load_tokenizer, train_bpe

TEXTS = [f"document {i}: naïve 日本語 😀 {'word ' * (i % 7)}" for i in range(60)]
TOKENIZER = train_bpe(TEXTS, 300)


def documents(texts: Iterable[str] = TEXTS) -> Iterator[Document]:
    return (Document(str(i), text) for i, text in enumerate(texts))


def run(out: Path, source: Iterable[Document] | None = None, **more) -> Manifest:
    options = {"tokenizer": TOKENIZER, "seq_len": 16, "heldout_fraction": 0.2}
    options |= {"description": "test", "bad_rows": BadRows(), **more}
    return prepare.prepare(documents() if source is None else source, out, **options)


def test_manifest_counts_what_was_written(tmp_path):
    bad_rows = BadRows()
    bad_rows.add("x:1", "it is empty")
    manifest = run(tmp_path / "out", bad_rows=bad_rows)
    assert load_manifest(tmp_path / "out", verify=True) == manifest
    heldout = [text for text in TEXTS if is_heldout(text, 0.2)]
    train = [text for text in TEXTS if not is_heldout(text, 0.2)]
    for split, texts in ((manifest.train, train), (manifest.heldout, heldout)):
        tokens = sum(len(TOKENIZER.encode_document(text)) for text in texts)
        assert (split.documents, split.tokens) == (len(texts), tokens)
        assert split.rows == -(-(tokens - 1) // 16)
        assert split.utf8_bytes == split.token_bytes == len("".join(texts).encode())
    assert manifest.train.gzip9_bytes is None
    assert manifest.heldout.gzip9_bytes == len(gzip.compress("".join(heldout).encode(), 9))
    assert (manifest.bad_rows, manifest.first_bad_rows) == (1, (("x:1", "it is empty"),))
    assert (manifest.bos_id, manifest.eos_id, manifest.vocab_size) == (0, 1, TOKENIZER.vocab_size)
    saved = load_tokenizer(tmp_path / "out" / "tokenizer.json", manifest.eos, manifest.bos)
    assert saved.encode(TEXTS[0]) == TOKENIZER.encode(TEXTS[0])


def test_two_preparations_are_identical(tmp_path):
    first = run(tmp_path / "one")
    assert first == run(tmp_path / "two")
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_batches_and_shards_change_no_row(tmp_path, monkeypatch):
    whole = run(tmp_path / "one")
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 50)
    assert run(tmp_path / "two") == whole
    monkeypatch.setattr(pack, "ROWS_PER_SHARD", 7)
    sharded = run(tmp_path / "three")
    assert [shard.rows for shard in sharded.train.shards[:-1]] == [7] * (whole.train.rows // 7)
    assert sharded.train.rows == whole.train.rows
    assert sharded.train.shards[1].name == "train-00001.arrayrecord"


def test_a_document_keeps_its_side():
    sides = {text: is_heldout(text, 0.05) for text in map(str, range(20_000))}
    assert 0.045 < sum(sides.values()) / len(sides) < 0.055
    assert all(is_heldout(text, 0.2) for text, heldout in sides.items() if heldout)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, UserError])
def test_an_interruption_leaves_nothing(tmp_path, monkeypatch, error):
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 50)

    def interrupted():
        yield from documents()
        raise error

    with pytest.raises(error):
        run(tmp_path / "out", interrupted())
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_killed_preparations_are_replaced(tmp_path):
    out = tmp_path / "out"
    prefix = files.temporary_prefix(out)
    own, dead, running = (f"{prefix}{pid}" for pid in (os.getpid(), 2**30, os.getppid()))
    for name in (own, dead, running, ".out.preparing-elsewhere-1", ".other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train-00000.arrayrecord").write_text("old")
    run(out)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out", running, ".out.preparing-elsewhere-1", ".other"}


def test_out_must_be_new(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    run(out)  # an empty folder is as good as none
    before = sorted(out.iterdir())
    with pytest.raises(UserError, match="not an empty folder"):
        run(out)
    with pytest.raises(UserError, match="not an empty folder"):
        run(out / "manifest.json")
    assert sorted(out.iterdir()) == before
    with pytest.raises(UserError, match="cannot be written"):
        run(out / "manifest.json" / "below")


def test_a_race_for_the_same_folder_has_one_winner(tmp_path):
    out = tmp_path / "out"

    def overtaken():
        yield from documents()
        (out / "winner").mkdir(parents=True)

    with pytest.raises(UserError, match="cannot be written"):
        run(out, overtaken())
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "winner"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"seq_len": 0}, "sequence length is 0"),
        ({"heldout_fraction": 0.0}, "held-out fraction is 0.0"),
        ({"heldout_fraction": 1.0}, "held-out fraction is 1.0"),
        ({"heldout_fraction": 1e-9}, "heldout split"),
        ({"heldout_fraction": 1 - 1e-9}, "train split"),
        ({"source": []}, "train split"),
    ],
)
def test_refusals(tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "out", **more)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def prepared(tmp_path):
    run(tmp_path / "out")
    return tmp_path / "out"


def test_load_manifest_refuses(prepared):
    path = prepared / "manifest.json"
    good = path.read_text()
    tree = json.loads(good)
    with pytest.raises(UserError, match="is not a folder"):
        load_manifest(prepared / "nope")
    for text, message in (
        (good[:-20], "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError: 'format_version'"),
        (json.dumps(tree | {"extra": 1}), "extra"),
        (json.dumps({k: v for k, v in tree.items() if k != "train"}), "train"),
        (json.dumps(tree | {"format_version": 99}), "format version 99"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            load_manifest(prepared)
    path.write_text(good)
    (prepared / "tokenizer.json").rename(prepared / "away")
    with pytest.raises(UserError, match=r"lost its tokenizer\.json"):
        load_manifest(prepared)
    (prepared / "away").rename(prepared / "tokenizer.json")
    path.unlink()
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        load_manifest(prepared)


def test_load_manifest_checks_shards(prepared):
    shard = prepared / "train-00000.arrayrecord"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    load_manifest(prepared)
    with pytest.raises(UserError, match=r"train-00000.*SHA-256"):
        load_manifest(prepared, verify=True)
    shard.write_bytes(data[:-1])
    with pytest.raises(UserError, match=r"train-00000.* bytes, not"):
        load_manifest(prepared)
    shard.unlink()
    with pytest.raises(UserError, match=r"train-00000.* is missing"):
        load_manifest(prepared)


def test_full_disk_is_refused(tmp_path, monkeypatch):
    class FullDisk:
        def __init__(self, *_):
            pass

        def write(self, _):
            raise RuntimeError("write() failed: No space left on device")

    monkeypatch.setattr(pack, "ArrayRecordWriter", FullDisk)
    with pytest.raises(UserError, match="No space left"):
        run(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_default_data_is_prepared_once(tmp_path, monkeypatch):
    files = []
    for i, text in enumerate(TEXTS):
        path = tmp_path / f"{i:02}.py"
        path.write_text(text)
        files.append((path.name, path))
    monkeypatch.setattr(prepare, "stdlib_source", lambda: Source("tiny", tuple(files)))
    monkeypatch.setattr(prepare, "DEFAULT_VOCAB_SIZE", 280)
    monkeypatch.delenv("VHAJAX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = default_data_dir(8)
    assert folder.parent == tmp_path / "xdg" / "vhajax"
    assert "v280" in folder.name
    assert load_manifest(folder).source == "tiny"
    monkeypatch.setattr(prepare, "prepare", None)
    assert default_data_dir(8) == folder
    monkeypatch.setenv("VHAJAX_CACHE", str(tmp_path / "cache"))
    with pytest.raises(TypeError):  # not there yet, so it would be prepared
        default_data_dir(8)


def test_default_data_takes_what_another_process_prepared(tmp_path, monkeypatch):
    monkeypatch.setenv("VHAJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(prepare, "stdlib_source", lambda: Source("tiny", ()))
    monkeypatch.setattr(prepare, "train_tokenizer", lambda *_: TOKENIZER)
    whole = prepare.prepare

    def overtaken(_, out, **options):
        whole(documents(), out, **options)
        raise UserError("exists and is not an empty folder")

    monkeypatch.setattr(prepare, "prepare", overtaken)
    assert load_manifest(default_data_dir(8)).seq_len == 8


def test_tokenizer_never_sees_heldout_documents(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    source = Source("x", (("x.jsonl", tmp_path / "x.jsonl"),))
    seen = [text for text in TEXTS if not is_heldout(text, 0.2)]
    trained = prepare.train_tokenizer(source, 280, 0.2)
    assert trained._library.to_str() == train_bpe(seen, 280)._library.to_str()
