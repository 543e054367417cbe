"""The benchmark's command, in JAX's interpreter and by a clock that the tests set."""

import argparse
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import benchmark, timing
from pallas_kernels.benchmark import Report
from pallas_kernels.shapes import GOALS, MAIN, Shape
from pallas_kernels.timing import Contender, Settings

TINY = ["--interpret", "--shapes", "none N 6 R"]
LRKV = Shape(kind="lrkv", num_heads=16, rank=64)
GQA = Shape(kind="gqa", num_heads=16, num_kv_heads=2)
MIB = 2**20


class Clock:
    """What is timed lasts these seconds, again and again: loops with calls and without in turn."""

    def __init__(self, *seconds: float):
        steps = itertools.chain.from_iterable((0, s) for s in itertools.cycle(seconds))
        self.times = itertools.accumulate(steps)

    def __call__(self) -> float:
        return next(self.times)


def three_and_one() -> Clock:
    """A call of 2 s, as the interpreter's loops are of one call."""
    return Clock(3, 1)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("benchmark") / "found.json"
    assert benchmark.main([*TINY, "--json", "--out", str(out)], three_and_one()) == 0
    assert [path.name for path in out.parent.iterdir()] == ["found.json"]
    return json.loads(out.read_text())


# ------------------------------------------------------------------ the report


def test_json_says_on_what_and_how(found):
    about = found["about"]
    assert about["label"] == "interpreter: no timing means anything"
    assert about["card"] == "cpu"
    assert about["command"].startswith("python -m pallas_kernels.benchmark --interpret --shapes")
    assert {"date", "jax", "lengths", "repeats"} <= about.keys()
    assert found["copy"] == 2 * MIB / 2  # 1 MiB read, 1 MiB written, 2 s
    assert found["read"] == MIB / 2
    assert found["left_out"] == []


def test_a_row_is_of_bytes_and_of_the_times_of_three_contenders(found):
    """A row of 128 + 128 + 2·4·4 elements is padded to 384, 768 bytes; outputs are float32."""
    (row,) = found["rows"]
    size = 2 * 128 * 768 + 2 * 4 * 128 * (2 + 4)
    expected = {
        "shape": "LRKV none N 4 R 4 H 128",
        "batch": 2,
        "slots": 128,
        "live": 256,
        "bytes": size,
        "seconds": 2,
        "least": 2,
        "most": 2,
        "speed": size / 2,
        "of_copy": size / 2 / MIB,
        "of_published": None,
        "over_xla": 1,
        "over_mha": 1,
        "goal": None,
        "times": {"kernel": [2], "xla": [2], "mha": [2]},
    }
    assert row == expected


def test_markdown_is_a_table_under_its_label(capsys):
    """Ragged: fewer live slots, the same compiled calls."""
    assert benchmark.main([*TINY, "--ragged"], three_and_one()) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "- label: interpreter: no timing means anything\n" in captured.out
    assert "- lengths: drawn from an eighth of the slots up\n" in captured.out
    header, rule, row = [line for line in captured.out.splitlines() if line.startswith("|")]
    titles, cells = (line.strip("| ").split(" | ") for line in (header, row))
    assert titles == [title for title, *_ in benchmark.COLUMNS]
    assert len(cells) == len(titles) == rule.count("|") - 1
    live = int(timing.lengths_of(GQA.replace(batch=2, slots=128), ragged=True).sum())
    assert live < 256
    size = live * 768 + 2 * 4 * 128 * 6
    assert cells[:4] == ["LRKV none N 4 R 4 H 128", "2", "128", f"{size / MIB:.1f}"]
    assert cells[4:7] == ["2000000.0"] * 3
    assert cells[9:] == ["–", "1.00", "1.00", "–"]


def test_goals_are_met_or_missed_from_batch_8_up():
    to = Settings(published=1e12)
    size = timing.bytes_of(GQA.replace(batch=8), 8)

    def row(batch: int, part: float) -> dict:
        times = {"kernel": [size / (part * 1e9)]}
        found = benchmark.row(GQA.replace(batch=batch), 8, times, to, 1e9)
        assert (found["over_xla"], found["over_mha"]) == (None, None)
        return found

    assert row(8, 0.86)["goal"] is True
    assert row(8, 0.84)["goal"] is False
    assert row(1, 0.86)["goal"] is None
    assert row(8, 0.86)["of_copy"] == pytest.approx(0.86)
    assert row(8, 0.86)["of_published"] == pytest.approx(0.86e-3)
    lines = benchmark.document(Report({}, 1e9, 1e9, [row(8, 0.86), row(8, 0.84)], ["x"]))
    assert [line.split(" | ")[-1] for line in lines.splitlines() if line[:5] == "| GQA"] == [
        "met |",
        "**missed** |",
    ]
    assert lines.endswith("\nLeft out:\n\n- x\n")


# ------------------------------------------------------------------ what is called


@pytest.mark.parametrize(
    ("shape", "token"),
    [
        (GQA, 2 * 256 * 2),
        (LRKV, (256 + 2 * 1024) * 2),
        (LRKV.replace(kind="rope", num_heads=6, rank=46), 896 * 2),  # 808 elements
        (LRKV.replace(scaled=True), (256 + 2 * 1024) * 2 + 16 * 4),
    ],
)
def test_bytes_are_those_of_live_rows_scales_queries_and_outputs(shape, token):
    shape = shape.replace(batch=3, slots=1000)
    heads = 3 * shape.num_heads * 128 * 6
    assert timing.bytes_of(shape, 2000) == 2000 * token + heads


def test_mha_has_as_many_heads_as_wide():
    for shape in MAIN:
        found = timing.mha(shape)
        assert found.row == 2 * shape.num_heads * shape.head_dim
        assert (found.batch, found.slots, found.num_heads) == (
            shape.batch,
            shape.slots,
            shape.num_heads,
        )


def test_ragged_lengths_are_drawn_evenly_and_alike_each_time():
    shape = GQA.replace(batch=4096, slots=8192)
    lengths = timing.lengths_of(shape, ragged=True)
    assert lengths.dtype == np.int32
    assert lengths.min() >= 1024
    assert lengths.max() <= 8192
    assert abs(lengths.mean() - (1024 + 8192) / 2) < 100
    np.testing.assert_array_equal(lengths, timing.lengths_of(shape, ragged=True))
    assert (timing.lengths_of(shape, ragged=False) == 8192).all()


@pytest.mark.parametrize(
    ("shape", "room", "words"),
    [
        (timing.mha(GQA).replace(batch=64, slots=8192), np.inf, "has 2147483648 elements"),
        (timing.mha(GQA).replace(batch=64, slots=8184), np.inf, None),
        (GQA.replace(batch=8, slots=1024), 8 * MIB, "takes 8.0 MiB and 8.0 are left"),  # with q
        (GQA.replace(batch=8, slots=1024), 9 * MIB, None),
        (GQA.replace(batch=8, slots=1024), -1, "and 0.0 are left"),
    ],
)
def test_what_does_not_fit_is_refused(shape, room, words):
    found = timing.refusal(shape, room)
    assert (found is None) == (words is None)
    assert words is None or words in found


@pytest.mark.parametrize(
    ("memory", "rows", "left_out"), [(100_000, 0, ["kernel"]), (500_000, 1, ["mha"])]
)
def test_what_is_left_out_is_said(memory, rows, left_out, capsys):
    """The kernel's arrays are of 215 kB, MHA's of 530, and the flush has its share."""
    assert benchmark.main([*TINY, "--memory", str(memory)], three_and_one()) == 0
    captured = capsys.readouterr()
    assert captured.out.count("| LRKV none N 4 R 4 H 128 |") == rows
    lines = captured.out.partition("Left out:\n\n")[2].splitlines()
    start = "- LRKV none N 4 R 4 H 128, batch 2, 128 slots, "
    assert [line.partition(":")[0] for line in lines] == [start + name for name in left_out]
    assert all("MiB and" in line for line in lines)
    assert captured.err == ""


def test_cases_are_shapes_by_batch_and_slots():
    def cases(*words: str) -> list[Shape]:
        return benchmark.cases(benchmark._arguments().parse_args(words))

    assert len(cases()) == len(GOALS) * 9
    assert len(cases("--shapes", "all")) == len(MAIN) * 9
    (case,) = cases("--shapes", "gqa-2 g 64", "--batch", "3", "--slots", "640")
    assert case == Shape(kind="gqa", num_heads=128, num_kv_heads=2, batch=3, slots=640)
    tiny = cases("--interpret", "--shapes", "all")
    assert len(set(tiny)) == len(tiny)
    assert all((s.batch, s.slots) == (2, 128) and s.num_heads <= 4 for s in tiny)


# ------------------------------------------------------------------ time


def test_a_call_is_the_difference_of_two_loops_over_its_calls():
    order = []

    def contender(name: str, n: int) -> Contender:
        return Contender(n, lambda: order.append(name), lambda: order.append(f"{name} flush"))

    contenders = {"kernel": contender("kernel", 10), "xla": contender("xla", 4)}
    times = timing.interleave(contenders, 2, Clock(30, 10, 13, 5, 60, 20, 21, 5))
    assert times == {"kernel": [2, 4], "xla": [2, 4]}
    assert order == ["kernel", "kernel flush", "xla", "xla flush"] * 2


def test_ratios_are_of_the_same_repeat():
    times = {"kernel": [1.0, 2.0, 4.0], "xla": [3.0, 4.0, 4.0]}
    assert timing.ratio(times, "xla") == 2  # of medians: also 2; of means: 1.6
    assert timing.ratio(times | {"mha": [4.0, 2.0, 2.0]}, "mha") == 1
    assert timing.ratio(times, "mha") is None


def test_loops_grow_until_they_last():
    made = []

    def loop(n: int):
        made.append(n)
        return lambda: None

    n, _ = timing.enough(loop, 10, 20e-3, Clock(5e-3, 19e-3, 25e-3))
    assert made == [10, 48, 61]  # 1.2 · 10 · 20/5, 1.2 · 48 · 20/19
    assert n == 61
    assert timing.enough(loop, 1, 0, Clock())[0] == 1  # the clock is not asked


def test_the_loop_makes_each_pass_and_each_call():
    state = (jnp.zeros(8), jnp.zeros(2))
    add = lambda arrays, seed: arrays["x"] + seed  # noqa: E731
    flushed, out = timing._chain(add, 5, {"x": jnp.arange(2.0)}, state, np.float32(0))
    np.testing.assert_array_equal(flushed, np.full(8, 5))
    np.testing.assert_array_equal(out, [0, 1])


def test_a_call_that_cannot_be_told_from_the_flush_has_no_time(monkeypatch):
    nothing = Contender(1, lambda: None, lambda: None)
    monkeypatch.setattr(benchmark, "prepare", lambda *_: nothing)
    monkeypatch.setattr(benchmark, "check", lambda *_: None)
    shape = LRKV.replace(num_heads=2, batch=2, slots=128)
    to = Settings("gpu_interpret", 2)
    row, notes = benchmark.compare(shape, to, 1, Clock(3, 1, 1, 1, 3, 1, 3, 1, 3, 1, 3, 1))
    assert row is not None
    assert row["times"] == {"kernel": [2, 2], "mha": [2, 2]}
    assert notes == ["xla: too short to be told from the flush"]
    assert benchmark.compare(shape.replace(slots=10**12), to, 1, Clock(1))[0] is None  # refused
    row, notes = benchmark.compare(shape, to, 1, Clock(1))
    assert row is None
    assert [note.partition(":")[0] for note in notes] == ["kernel", "xla", "mha"]


@pytest.mark.parametrize(
    ("words", "note"), [("RESOURCE_EXHAUSTED: 9 GiB", "out of memory"), ("INTERNAL: x", None)]
)
def test_a_contender_without_memory_is_left_out(monkeypatch, words, note):
    def fail(*_):
        raise jax.errors.JaxRuntimeError(words)

    monkeypatch.setattr(benchmark, "prepare", fail)
    monkeypatch.setattr(benchmark, "check", lambda *_: None)
    shape = LRKV.replace(num_heads=2, batch=2, slots=128)
    if note:
        found = benchmark.compare(shape, Settings("gpu_interpret"), 1, Clock(1))
        assert found == (None, [f"kernel: {note}"])
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            benchmark.compare(shape, Settings("gpu_interpret"), 1, Clock(1))


def test_a_clock_that_stands_still_is_an_error(capsys):
    assert benchmark.main(TINY, Clock(1)) == 1
    assert capsys.readouterr() == (
        "",
        "pallas_kernels.benchmark: A copy took no longer than nothing, so the clock is of no "
        "use.\n",
    )


# ------------------------------------------------------------------ refusals


def test_no_wrong_kernel_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(timing, "LIMIT", 0)
    timing.check.cache_clear()
    assert benchmark.main(TINY, three_and_one()) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        "pallas_kernels.benchmark: The kernel of LRKV none N 4 R 4 H 128 is off by 0.0"
    )
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no Hopper GPU here (JAX finds cpu); --interpret runs tiny shapes"),
        (["--tiles"], "unrecognized arguments: --tiles"),
        (["--slots", "8k"], "argument --slots: '8k' is not a whole number of at least 1"),
        (["--batch", "8", "0"], "argument --batch: '0' is not a whole number of at least 1"),
        (["--shapes", "MLA"], "--shapes 'MLA' is part of no shape's name"),
        (["--interpret", "--batch", "8"], "--batch cannot be chosen with --interpret"),
        (["--out", "no/such/folder/x.md"], "--out no/such/folder/x.md cannot be written"),
        (["--out", "/"], "--out / cannot be written"),
    ],
)
def test_bad_flags_are_refused_in_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.main(arguments)
    captured = capsys.readouterr()
    assert (stopped.value.code, captured.out) == (2, "")
    assert captured.err.startswith("pallas_kernels.benchmark: ")
    assert words in captured.err
    assert captured.err.endswith(".\n")
    assert captured.err.count("\n") == 1


class Device:
    platform, device_kind, core_count, compute_capability = "gpu", "NVIDIA H200", 132, "9.0"
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 13000")

    def memory_stats(self) -> dict:
        return {"bytes_limit": 100 * MIB}


def test_a_gpu_says_what_it_is(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    args = benchmark._arguments().parse_args(["--repeats", "3", "--ragged"])
    to = benchmark.on_gpu(args)
    assert to == Settings("gpu", 3, True, memory=100 * MIB, published=4.8e12)
    about = benchmark.about(to, "x")
    assert (about["card"], about["multiprocessors"]) == ("NVIDIA H200", 132)
    assert about["platform"] == "PJRT C API cuda 13000"
    assert "label" not in about
    monkeypatch.setattr(Device, "device_kind", "NVIDIA GH200 480GB")
    args = benchmark._arguments().parse_args(["--memory", "7"])
    assert benchmark.on_gpu(args) == Settings("gpu", 10, memory=7, published=None)


def test_no_device_is_no_hopper_gpu(monkeypatch, capsys):
    def none():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", none)
    with pytest.raises(SystemExit) as stopped:
        benchmark.main([])
    assert stopped.value.code == 2
    assert "no Hopper GPU here (JAX finds no device)" in capsys.readouterr().err


def test_progress_is_for_a_terminal(monkeypatch, capsys):
    benchmark._progress(1, 4, 60)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(benchmark.sys.stderr, "isatty", lambda: True)
    benchmark._progress(0, 4, 0)
    benchmark._progress(1, 4, 60)
    benchmark._progress(4, 4, 0)
    lines = capsys.readouterr().err.replace("\x1b[K", "")
    assert lines == (
        "timed 0 of 4 calls\rtimed 1 of 4 calls, 3 min left\rtimed 4 of 4 calls, 0 min left\n"
    )


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    out = tmp_path / "found.md"
    out.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    monkeypatch.setattr(benchmark, "report", lambda *_: Report({"card": "one"}, 1e9, 1e9, [], []))
    with pytest.raises(SystemExit) as stopped:
        benchmark.main([*TINY, "--out", str(out)])
    assert stopped.value.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["found.md"]
    assert out.read_text() == "old"
    captured = capsys.readouterr()
    assert "- card: one\n" in captured.out  # rather than lost
    assert captured.err.endswith("cannot be written (No space left on device), see stdout.\n")


def test_the_interpreter_has_a_thread_for_each_warpgroup(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x")
    args = argparse.Namespace(ragged=False, memory=None)
    assert benchmark.interpreted(args).backend == "gpu_interpret"
    flags = benchmark.os.environ["XLA_FLAGS"]
    assert flags == "--xla_dump_to=/x --xla_force_host_platform_device_count=8"
    benchmark.interpreted(args)
    assert benchmark.os.environ["XLA_FLAGS"] == flags
