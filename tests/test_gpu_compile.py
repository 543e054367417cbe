"""The GPU kernel compiled for cards that nobody here owns, by XLA, Mosaic GPU and ptxas."""

import functools
import json

import jax
import pytest
from test_kernel_compile import named, pytestmark  # noqa: F401 (the compilers' wheels)

from pallas_kernels import UnsupportedError, ahead, chips, gpu, measure_gpu, parts, sass
from pallas_kernels.chips import GPUS
from pallas_kernels.measure_gpu import GPURow
from pallas_kernels.shapes import GOALS, MAIN, Shape

mesh_of = functools.cache(ahead.device_mesh)
GQA, LRKV, ROPE = (next(s for s in GOALS if s.kind == kind) for kind in ("gqa", "lrkv", "rope"))
KNOWN: measure_gpu.Assembled = {}


@functools.cache
def row_of(shape: Shape, chip: str, folder) -> GPURow:
    """Compiled once in this process."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sass.flags(folder).items():
            patch.setenv(name, value)
        return measure_gpu.row(shape, GPUS[chip], mesh_of(chip), folder, KNOWN)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    return lambda shape, chip: row_of(shape, chip, folder)


def check(row: GPURow, shape: Shape) -> None:
    cache = shape.batch * shape.slots * shape.row * 2
    assert row.made < cache, "an array as large as the cache is made"
    assert row.temporaries < allowed_temporaries(shape)
    assert not row.serialized
    assert row.shared <= GPUS[row.chip].shared
    assert row.registers * 128 * (row.consumers + 1) <= 65_536
    if row.goal:
        assert row.spilled == 0
        assert max(row.issue, row.schedule, row.tensor) < 1
    assert min(row.occupancy) > 0.9


def allowed_temporaries(shape: Shape) -> int:
    """Partial results of every block, RoPE's table and A in the making, and 4 MiB."""
    N, Z = shape.num_heads, shape.num_heads * shape.rank
    places = 132 + shape.batch
    partials = 4 * places * 2 * max(N, 8) * (2 * shape.v_dim + shape.rank)
    rope = 2 * shape.slots * 128 + 4 * 4 * shape.batch * Z * shape.head_dim
    return 2 * partials + (rope if shape.kind == "rope" else 0) + 4 * 2**20


@named((GQA, ROPE))
def test_a_call_compiles_for_the_h200_without_spills(shape, measured):
    check(measured(shape, "h200"), shape)


@pytest.mark.slow
@named(MAIN)
def test_every_call_compiles_for_the_h200(shape, measured):
    check(measured(shape, "h200"), shape)


@pytest.mark.slow
@named(GOALS)
def test_so_do_the_main_ones_for_the_h100(shape, measured):
    check(measured(shape, "h100"), shape)


def test_what_is_counted_is_what_ptxas_wrote(measured):
    row, spec = measured(GQA, "h200"), spec_of(GQA)
    assert row.products == sum(spec.products.values()) == 2 * (2 + 2) * 4
    assert row.issue == pytest.approx(
        row.instructions / (64 * 1024 / (4.8e12 / 1.83e9 / 132)), rel=1e-6
    )
    assert row.bytes >= 8 * 32_768 * 1024
    assert row.dma == row.bytes / 4.8e12
    json.dumps(vars(row))


def spec_of(shape: Shape) -> gpu.Spec:
    problem = measure_gpu.problem_of(shape)
    plan, _ = parts.divide(problem)
    return gpu.specify(problem, plan, GPUS["h200"])


# ------------------------------------------------------------------ machine code


def code(*instructions) -> list[sass.Instruction]:
    return [sass.Instruction(*i) for i in instructions]


PLAIN, PRODUCT = (0x10, 2, None), (sass.HGMMA, 5, None)


def back(target: int):
    return (sass.BRANCH, 1, target)


def test_an_inner_loop_counts_as_often_as_its_products_need():
    # 0: outer { 1: inner { product, branch }, plain, spin { plain, branch }, product, branch }
    listing = code(PLAIN, PRODUCT, back(1), PLAIN, PLAIN, back(4), PRODUCT, back(0))
    assert sass.loops(listing) == [(1, 2), (4, 5), (0, 7)]
    assert sass.main_loop(listing) == (0, 7)
    found = sass.work(listing, (0, 7), 9)
    assert found == sass.Work(6 + 8 * 2, (2 + 2 + 2 + 1 + 5 + 1) + 8 * (5 + 1), 9)


def test_a_branch_leads_where_its_words_say():
    # As nvdisasm prints it: at 0x1570, to 0x3ae0.
    forward = sass._instruction(0x157, 0x0000002400581947, 0x001FEA0003800000)
    assert (forward.operation, forward.target, forward.stall) == (sass.BRANCH, 0x3AE, 5)


def test_ptxas_words_are_read():
    words = "48 bytes stack frame, 44 bytes spill stores, 40 bytes spill loads\nUsed 168 registers"
    assert sass.resources(words) == sass.Resources(168, 44, False)
    serialized = words + "\n(C7511) … instructions are serialized due to …"
    assert sass.resources(serialized).serialized
    with pytest.raises(ValueError, match="said nothing"):
        sass.resources("")


# ------------------------------------------------------------------ who runs it


def traced(shape: Shape, chip: str, backend: str = "auto", **changes) -> str:
    arrays = shape.replace(**changes).arguments()
    with jax.set_mesh(mesh_of(chip)):
        call = functools.partial(shape.replace(**changes).call, backend=backend)
        return str(jax.jit(call).trace(arrays).jaxpr)


def test_a_hopper_card_takes_the_kernel_by_itself():
    assert "copy_gmem_to_smem" in traced(GQA, "h100")


def test_float32_is_refused_with_the_reason():
    with pytest.raises(UnsupportedError, match=r"cache is float32;.*wgmma has no float32"):
        traced(GQA, "h200", dtype="float32")


@pytest.mark.parametrize(
    ("kind", "hopper"),
    [("NVIDIA GH200 480GB", True), ("NVIDIA H20", True), ("NVIDIA A100-SXM4-80GB", False)],
)
def test_other_cards_are_known_by_their_name(kind, hopper, monkeypatch):
    monkeypatch.setattr(chips, "device", lambda: ("gpu", kind))
    assert chips.is_hopper() is hopper
    if not hopper:
        with pytest.raises(UnsupportedError, match=r"for NVIDIA A100.*needs a Hopper GPU"):
            chips.gpu()


def test_occupancy_is_mean_over_largest_stretch():
    # 8 · 512 tiles over 132 teams: 32 each at most; over 66 teams of two: 63.
    assert measure_gpu.occupancy(GQA, 1, GPUS["h200"], 8) == 8 * 512 / (132 * 32)
    assert measure_gpu.occupancy(GQA, 2, GPUS["h200"], 8) == 8 * 512 / (66 * 63)
