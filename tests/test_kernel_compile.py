"""The kernels compiled ahead of time for TPUs that nobody here owns, by the TPU's own compiler."""

import functools
import json
import platform
import subprocess
import sys

import pytest

from pallas_kernels import UnsupportedError, ahead, blocks
from pallas_kernels.chips import CHIPS, MIB
from pallas_kernels.shapes import GOALS, MAIN, MORE, Shape

# Elsewhere a missing libtpu is a failure, not a reason to skip.
pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="libtpu has wheels for Linux on x86-64 only",
)
FAST, RARE = ("v5e", "v6e"), ("v5p", "tpu7x")
mesh_of = functools.cache(ahead.device_mesh)


def named(shapes):
    return pytest.mark.parametrize("shape", shapes, ids=lambda shape: shape.name)


def check(shape: Shape, chip: str, *, in_place, made, temporaries, tile, vmem) -> None:
    """What holds of every compiled call."""
    rows = shape.batch * shape.slots * shape.row * 2
    scales = shape.batch * shape.num_heads * shape.slots * 4
    assert tuple(in_place) == ((rows, scales) if shape.scaled else (rows,))
    assert made < min(in_place), "an array as large as the cache or its scales is copied"
    assert temporaries < allowed_temporaries(shape, chip)
    # The compiler was held to the prediction, so it is enough; three tiles lie there at once.
    assert 3 * tile * shape.row * 2 < vmem < CHIPS[chip].vmem


def allowed_temporaries(shape: Shape, chip: str) -> int:
    """1 MiB; where XLA has less VMEM, also results of two cores, and RoPE's A in the making."""
    if CHIPS[chip].vmem >= 128 * MIB:
        return MIB
    N, Z, wide = shape.num_heads, shape.num_heads * shape.rank, shape.head_dim * 4
    partials = 2 * shape.batch * max(N, 16) * (max(shape.num_kv_heads, 1) * wide + 4 * Z + wide)
    making = 3 * shape.batch * Z * wide if shape.kind == "rope" else 0
    return MIB + (2 * partials if CHIPS[chip].cores > 1 else 0) + making


def compile_and_check(shape: Shape, chip: str) -> None:
    program = ahead.call(shape, mesh_of(chip))
    (kernel,) = program.kernels
    assert program.compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
    assert kernel.splits == CHIPS[chip].cores
    check(
        shape,
        chip,
        in_place=kernel.in_place,
        made=program.largest_made(),
        temporaries=program.temporaries,
        tile=kernel.tile,
        vmem=kernel.vmem,
    )


@pytest.mark.parametrize("chip", FAST)
@named(MORE)  # the others are compiled for the goals below
def test_a_call_is_one_kernel_that_reads_the_cache_where_it_lies(shape, chip):
    compile_and_check(shape, chip)


@pytest.mark.slow
@pytest.mark.parametrize("chip", RARE)
@named(MAIN)
def test_so_it_is_on_other_chips(shape, chip):
    compile_and_check(shape, chip)


# ------------------------------------------------------------------ the roofline's command


@pytest.fixture(scope="module")
def goals() -> dict:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pallas_kernels.roofline"),
            *("--json", "--goals", "--kernels-only", "--chip", "v5e", "--chip", "v6e"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (run.returncode, run.stderr) == (0, "")
    return json.loads(run.stdout)


def rows_of(goals: dict) -> dict[tuple[str, str], dict]:
    return {(row["chip"], row["shape"]): row for row in goals["rows"]}


@pytest.mark.parametrize("chip", FAST)
@named(GOALS)
def test_the_main_cases_are_bound_by_bytes(goals, shape, chip):
    row = rows_of(goals)[chip, shape.name]
    at_most = 0.8 if shape.kind == "rope" or shape.num_heads == 6 else 0.7
    assert row["tile_ratio"] <= row["goal"] == at_most
    assert row["ratio"] <= 1.1 * at_most  # what lies around the loop changes little at 32k
    names = ("in_place", "made", "temporaries", "tile", "vmem")
    check(shape, chip, **{name: row[name] for name in names})


@named(GOALS)
def test_the_loop_that_is_counted_holds_every_product_of_a_tile(goals, shape):
    """v5e multiplies 16 rows of bfloat16 by 128 × 128 at a time."""
    row = rows_of(goals)["v5e", shape.name]
    N, Z, tile = shape.num_heads, shape.num_heads * shape.rank, row["tile"]

    def passes(m: int, k: int, n: int) -> int:
        return -(-m // 16) * -(-k // 128) * -(-n // 128)

    if shape.kind == "gqa":
        K, G = shape.num_kv_heads, N // shape.num_kv_heads
        expected = K * (passes(G, 128, tile) + passes(G, tile, 128))
    else:
        value_start = (128 + Z) % 128
        expected = passes(N, tile, value_start + 128 + Z)
        if shape.kind == "lrkv":
            expected += passes(N, 128 + Z, tile)
        else:
            expected += passes(N, 128, tile) + passes(tile, 128, Z) + passes(N, Z, tile)
    assert row["matmuls"] == expected


def test_bytes_and_gains_are_those_of_the_row(goals):
    row = rows_of(goals)["v5e", "LRKV none N 16 R 64 H 128"]
    cache = 8 * 32_768 * (2 * 128 + 2 * 16 * 64) * 2
    assert cache < row["bytes"] < 1.01 * cache
    assert row["dma"] == pytest.approx(row["bytes"] / 819e9)
    assert row["over_mha"] == pytest.approx(8192 / 4608)
    assert row["padding"] == 0
    assert rows_of(goals)["v6e", "LRKV none N 6 R 46 H 128"]["padding"] == pytest.approx(88 / 808)


# ------------------------------------------------------------------ predicted VMEM


@pytest.mark.parametrize("shape", [GOALS[1], GOALS[5]], ids=lambda shape: shape.name)
def test_the_prediction_is_no_more_than_twice_the_need(shape, monkeypatch):
    predicted = blocks.vmem_bytes
    monkeypatch.setattr(blocks, "vmem_bytes", lambda *args: predicted(*args) * 0.5 // 1)
    with pytest.raises(Exception, match="vmem"):
        ahead.call(shape, mesh_of("v5e"))


def test_what_does_not_fit_is_refused_before_it_is_compiled():
    shape = Shape(kind="lrkv", num_heads=64, rank=256, batch=1)
    with pytest.raises(UnsupportedError, match=r"need \d+ MiB of VMEM .* v5p has 64"):
        ahead.call(shape, mesh_of("v5p"))
