"""The roofline's command and document, and the parser of schedules; nothing is compiled here."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ahead, measure_gpu, plain, roofline, roofline_gpu, schedule
from pallas_kernels.chips import CHIPS, GPUS
from pallas_kernels.schedule import Loop
from pallas_kernels.shapes import GOALS, MAIN

DOCUMENT = Path(roofline.__file__).with_name("ROOFLINE.md")

SCHEDULE = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = smov 0 }
   0x1   :  {}
   0x2 LB: > { %s2 = sphi %s1  ;;  %v1 = vmatmul.bf16.gmra.mxu0 %v0 }
   0x3   : > { %s3 = sadd.s32 1, %s2 }
   0x4 LB: >> { %v2 = vmatmul.bf16.gmra.mxu0 %v1  ;;  %v3 = vmatmul.bf16.gmra.mxu1 %v1 }
   0x5   :  {}
   0x6   :  {} /* End region 7 */
   0x7 LB: >>> { %s4 = dma.done.wait %s3
hlo: a_kernel.1
 */ }
   0x8   :  {}
   0x9   : >> { %v4 = vmatmul.bf16.gmra.mxu0 %v3 }
   0xa   : > { %s5 = sadd.s32 1, %s4 }
   0xb   : >> { %v5 = vadd.f32 %v4, %v4 }
   0xc   : > { %s6 = sbr.rel target bundleno = 2 (0x2) }
   0xd   :  { %s7 = shalt.err }
"""


def test_a_schedule_is_counted_by_its_innermost_loop_of_products():
    """0x4 to 0x6, 0x9 and the stray 0xb: with its stalls, without the loop of copies inside it."""
    assert schedule.main_loop(SCHEDULE) == Loop(cycles=5, around=9, matmuls=3)


def test_the_newest_schedule_of_a_kernel_is_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="no schedule of gqa_decode"):
        schedule.find(tmp_path, "gqa_decode")
    for name in ("1-gqa_decode.1-00-schedule-analysis_packed", "2-lrkv_decode.1-01-packed"):
        (tmp_path / f"{name}-bundles-post-ra.txt").write_text("")
    expected = tmp_path / "3-gqa_decode.1-01-packed-bundles-post-ra.txt"
    expected.write_text("")
    assert schedule.find(tmp_path, "gqa_decode") == expected


@pytest.mark.parametrize(
    "shape",
    [shape for shape in MAIN if shape.num_heads == 6 or shape.scaled or shape.kind == "shared"]
    + [shape for shape in MAIN if shape.kind == "gqa" and shape.num_heads == 16],
    ids=lambda shape: shape.name,
)
def test_einsums_compute_what_the_kernels_do(shape):
    """Else their estimate would be of something else."""
    shape = shape.replace(batch=2, slots=48, dtype="float32")
    rng = np.random.default_rng(0)
    arrays = {
        name: jnp.asarray(rng.standard_normal(x.shape), x.dtype)
        for name, x in shape.arguments().items()
    } | {"lengths": jnp.array([48, 17], jnp.int32)}
    expected = shape.call(arrays, backend="jnp").out
    with jax.default_matmul_precision("highest"):
        found = plain.attend(shape, arrays)
    assert jnp.abs(found - expected).max() <= 1e-5 * jnp.abs(expected).max()


# ------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chip", "v4"], "argument --chip: invalid choice: 'v4' (choose from"),
        (["--tiles"], "unrecognized arguments: --tiles"),
        (["--out", "no/such/folder/x.md"], "a folder that does not exist"),
    ],
)
def test_bad_flags_are_refused_in_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        roofline.main(arguments)
    captured = capsys.readouterr()
    assert (stopped.value.code, captured.out) == (2, "")
    assert words in captured.err
    assert captured.err.count("\n") == 1
    if "v4" in arguments:
        assert all(chip in captured.err for chip in CHIPS)


def test_a_missing_compiler_is_said_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(ahead.importlib.util, "find_spec", lambda _: None)
    assert roofline.main(["--chip", "v5e"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "pallas_kernels.roofline: Compiling for a TPU needs libtpu, which is not installed; "
        "install the extra tpu.\n"
    )


def test_a_call_that_does_not_compile_is_said_with_its_reason(monkeypatch, capsys):
    monkeypatch.setattr(ahead, "require_compiler", lambda _: None)
    monkeypatch.setattr(roofline.sys, "executable", "false")
    assert roofline.main(["--chip", "v5e", "--kernels-only"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "pallas_kernels.roofline: Compiling the kernels for v5e failed: it said nothing.\n"
    )


# ------------------------------------------------------------------ the document


def sections() -> dict[str, list[list[str]]]:
    """Rows of the table of each chip."""
    found = {}
    for part in re.split(r"^## ", DOCUMENT.read_text(), flags=re.MULTILINE):
        name, _, text = part.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("| ")]
        found[name] = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return found


def test_the_document_is_of_what_the_code_compiles():
    text, tables = DOCUMENT.read_text(), sections()
    assert "static" in text.splitlines()[0]
    assert "`python -m pallas_kernels.roofline`" in text
    for chip in CHIPS:
        header, *rows = tables[chip]
        assert header[1:] == [name for name, _ in roofline.COLUMNS]
        assert [row[0] for row in rows] == [shape.name for shape in MAIN]
    for chip in GPUS:
        header, *rows = tables[chip]
        assert header[1:] == [name for name, _ in roofline_gpu.COLUMNS]
        assert [row[0] for row in rows] == [shape.name for shape in MAIN]
        spilled = header.index("spilled, bytes")
        for shape, row in zip(MAIN, rows, strict=True):
            assert not measure_gpu.is_goal(shape) or row[spilled] == "0", shape.name
    assert re.search(r"^No spills, and .* below 1, for .*: met\.$", text, flags=re.MULTILINE)
    goals = [row for row in tables["Goals for compute / DMA"] if row[0] != "shape"]
    assert [row[0] for row in goals] == [shape.name for shape in GOALS]
    assert all(row[-1] == "yes" for row in goals)
