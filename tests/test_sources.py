"""Reading documents: every kind of input, and what is wrong with its rows."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vhajax.errors import UserError
from vhajax.sources import NOT_STDLIB, BadRows, open_source, stdlib_source


def read(*paths: Path) -> tuple[list[tuple[str, str]], BadRows]:
    bad_rows = BadRows()
    documents = open_source(paths).documents(bad_rows)
    return [(Path(d.name).name, d.text) for d in documents], bad_rows


def json_lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def write_parquet(path: Path, column: pa.Array, name: str = "text") -> None:
    pq.write_table(pa.table({"id": pa.array(range(len(column))), name: column}), path)


def test_every_kind_of_file_in_a_folder_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden").write_text("no")
    (tmp_path / "a.txt").write_bytes("é\r\n".encode())
    (tmp_path / "b" / "no_suffix").write_text("plain")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"zipped"))
    (tmp_path / "d.jsonl").write_bytes(json_lines("one", "two") + b"\n" + json_lines("four"))
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(json_lines("five")))
    write_parquet(tmp_path / "f.parquet", pa.array(["six", "seven"]))
    write_parquet(tmp_path / "g.parquet", pa.array(["eight"], pa.large_string()))
    documents, bad_rows = read(tmp_path)
    assert documents == [
        ("a.txt", "é\r\n"),
        ("no_suffix", "plain"),
        ("c.txt.gz", "zipped"),
        ("d.jsonl:1", "one"),
        ("d.jsonl:2", "two"),
        ("d.jsonl:4", "four"),
        ("e.jsonl.gz:1", "five"),
        ("f.parquet:1", "six"),
        ("f.parquet:2", "seven"),
        ("g.parquet:1", "eight"),
    ]
    assert bad_rows == BadRows()


BAD_LINES = {
    b"{": "not JSON",
    b"[" * 100_000: "not JSON",
    b"[1]": "no field",
    b'{"content": "x"}': "no field",
    b'{"text": 3}': "int, not a string",
    b'{"text": null}': "NoneType, not a string",
    b'{"text": ""}': "empty",
    b'{"text": "\\ud800"}': "lone surrogate",
    b'{"text": "\xff"}': "not UTF-8",
}


def test_bad_json_lines_are_named_and_skipped(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join([*BAD_LINES, b'{"text": "good"}']))
    documents, bad_rows = read(path)
    assert documents == [("x.jsonl:10", "good")]
    assert bad_rows.count == len(BAD_LINES)
    for number, (reason, (name, told)) in enumerate(
        zip(BAD_LINES.values(), bad_rows.first, strict=True), start=1
    ):
        assert name == f"{path}:{number}"
        assert reason in told


def test_bad_parquet_rows_are_named_and_skipped(tmp_path):
    buffers = pa.array(["ok", "xx"]).buffers()
    broken = pa.Array.from_buffers(pa.string(), 2, [None, buffers[1], pa.py_buffer(b"ok\xff\xff")])
    write_parquet(tmp_path / "a.parquet", broken)
    write_parquet(tmp_path / "b.parquet", pa.array([None, "fine"]))
    write_parquet(tmp_path / "c.parquet", pa.array([b"bytes"], pa.binary()))
    write_parquet(tmp_path / "d.parquet", pa.array(["x"]), name="content")
    (tmp_path / "e.parquet").write_bytes(b"PAR1 nonsense")
    documents, bad_rows = read(tmp_path)
    assert documents == [("a.parquet:1", "ok"), ("b.parquet:2", "fine")]
    told = [(Path(name).name, reason) for name, reason in bad_rows.first]
    assert [name for name, _ in told] == [
        "a.parquet:2",
        "b.parquet:1",
        "c.parquet:1",
        "d.parquet",
        "e.parquet",
    ]
    reasons = ["not UTF-8", "NoneType", "bytes", "no column", "corrupt Parquet"]
    for part, (_, reason) in zip(reasons, told, strict=True):
        assert part in reason


def test_corrupt_gzip_keeps_the_rows_before(tmp_path):
    lines = json_lines(*(f"{i} {'x' * (i % 97)}" for i in range(50_000)))
    whole = gzip.compress(lines)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "garbage.gz").write_bytes(b"not gzip")
    (tmp_path / "flipped.gz").write_bytes(whole[:40] + b"\xff\xff\xff\xff" + whole[44:])
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    documents, bad_rows = read(tmp_path)
    assert 0 < len(documents) < 50_000
    assert sorted(Path(name).name for name, _ in bad_rows.first) == [
        "cut.jsonl.gz",
        "flipped.gz",
        "garbage.gz",
        "image.png",
    ]


def test_only_the_first_bad_rows_are_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"bad\n" * 100 + json_lines("good"))
    _, bad_rows = read(path)
    assert (bad_rows.count, len(bad_rows.first)) == (100, 20)


def test_missing_and_empty_inputs_are_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        open_source([tmp_path / "nope"])
    with pytest.raises(UserError, match=r"holds no documents\.$"):
        read(tmp_path)
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    with pytest.raises(UserError, match=r"no documents; the first bad row is .*image.png.*UTF-8"):
        read(tmp_path)


def test_standard_library():
    source = stdlib_source()
    names = [name for name, _ in source.files]
    assert names == sorted(names)
    assert {"json/decoder.py", "argparse.py"} <= set(names)
    assert not NOT_STDLIB & {part for name in names for part in name.split("/")[:-1]}
    assert 8e6 < sum(path.stat().st_size for _, path in source.files) < 20e6
