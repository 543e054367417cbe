"""The GPU kernel in its interpreter with race detection, and broken kernels that must not pass.

Each batch of jobs runs in a process of its own, which is this file as a script, because a kernel
that waits for a copy that nobody started waits forever.

What no interpreter on a CPU shows, since its matrix products happen at once and their reads of
shared memory are not among those that it checks: a missing `wgmma_wait` or `commit_smem`, and a
slot or A (`spent`) given back before the last product has read it.
"""

import dataclasses
import faulthandler
import functools
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import kernel_oracle
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels.shapes import Shape

FOLDER = Path(pallas_kernels.__file__).parent
MODULES = ("parts", "balance", "gpu")  # in the order in which they import each other
PROCESS_LIMIT = 280
PATIENCE, MUTANT_PATIENCE = 60.0, 10.0
"""Seconds that a compiled kernel may run; it takes one or two of them."""
COMPLAINTS = {
    "RACE DETECTED": "race",
    "ut-of-bounds": "out of bounds",
    "out of range": "out of bounds",
    "observed": "barrier",  # a phase that nobody waits for, or that passed before the wait
    "observe each": "barrier",
    "is already at phase": "barrier",
    "arrivals pending": "barrier",
}
PARAMS = functools.partial(plgpu.InterpretGPUParams, detect_races=True)

# ------------------------------------------------------------------ what runs


@dataclass(frozen=True)
class Case:
    """A call: slots of a ring at most, so that they are reused, and factors of queries.

    Its lengths make two blocks take two stretches each, of several tiles for either consumer.
    """

    shape: Shape
    lengths: tuple[int, ...] = (200, 0, 304, 65)
    ring: int = 3
    window: int | None = None
    loudness: tuple[int, ...] = (1, 1, 1, 1)


def tiny(kind: str, **sizes) -> Shape:
    lrkv = {"num_heads": 9, "rank": 10, "value_dim": 32} if kind != "gqa" else {}
    gqa = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 72, "value_dim": 8}
    sizes = {"head_dim": 64} | lrkv | (gqa if kind == "gqa" else {}) | sizes
    return Shape(kind=kind, **sizes)


CASES = {
    # Keys of the last KV head end in a chunk that holds padding, too.
    "gqa": Case(tiny("gqa")),
    # Groups of 5 heads, whose latents begin within a chunk.
    "scaled": Case(tiny("lrkv", scaled=True)),
    "rope": Case(tiny("rope", num_heads=6, rank=46, head_dim=40), ring=8),
}
TINY = tuple(CASES)
CASES["window"] = Case(tiny("gqa"), window=100)
CASES["loud"] = Case(tiny("gqa"), loudness=(30, 1, 1, 30))
LARGE = {
    "GQA G 8": Case(Shape(kind="gqa", num_heads=16, num_kv_heads=2)),
    "GQA G 64": Case(Shape(kind="gqa", num_heads=128, num_kv_heads=2)),
    "LRKV N 16, QK-norm": Case(Shape(kind="lrkv", num_heads=16, rank=64, scaled=True), ring=4),
    "LRKV N 6": Case(Shape(kind="lrkv", num_heads=6, rank=46)),
    "RoPE N 6": Case(Shape(kind="rope", num_heads=6, rank=46), ring=8),
    "RoPE N 16, QK-norm": Case(Shape(kind="rope", num_heads=16, rank=64, scaled=True), ring=11),
    "GQA, splits without tiles": Case(tiny("gqa"), lengths=(0, 0, 304, 0)),
}
CASES |= LARGE


@dataclass(frozen=True)
class Mutant:
    """A fault: text of one of MODULES and what stands in its place.

    case: what shows it. quick: in `make test`.
    """

    name: str
    old: str
    new: str
    case: str = "gqa"
    quick: bool = False


FULL = "        plgpu.barrier_wait(self.r.full.at[slot])\n"
EMPTY = "            pl.when(used >= spec.ring)(lambda: plgpu.barrier_wait(r.empty.at[slot]))\n"
COMMIT = (
    "        plgpu.commit_smem()"
    "  # orders loads of latents, too, before copies: those wait for tables\n"
)
LOOP = "        s = jax.lax.fori_loop(0, run.chunks, chunk, s)\n"
TABLES = "        for table in tables:\n            self.give(table)\n"
MASK = "(rows >= first) & (rows < stop), s, LOW"
MUTANTS = (
    # Copies and rings.
    Mutant("no wait for a chunk", FULL, "", quick=True),
    Mutant("a copy lands in a slot that is read", EMPTY, "", quick=True),
    Mutant(
        "no wait for scales",
        "            plgpu.barrier_wait(r.scaled.at[self.index])\n",
        "",
        case="scaled",
        quick=True,
    ),
    Mutant("no wait for A", "            plgpu.barrier_wait(r.turned)\n", "", case="rope"),
    Mutant(
        "no wait for queries",
        "        plgpu.barrier_wait(ready)\n",
        "",
    ),
    Mutant(
        "A is copied over while the other consumer reads it",
        "                pl.when(self.index == 0)(lambda: plgpu.barrier_wait(self.r.spent))\n",
        "",
        case="rope",
    ),
    Mutant(
        "tables are given back while latents are read",
        LOOP + COMMIT + TABLES,
        TABLES + LOOP + COMMIT,
        case="rope",
        quick=True,
    ),
    Mutant("loads of latents are not committed", COMMIT, "", case="rope", quick=True),
    Mutant(
        "values are given back before dead rows are cleared",
        "        slots = [self.take(turn, stage + i) for i in range(count)]\n",
        "        slots = [self.take(turn, stage + i) for i in range(count)]\n"
        "        for slot in slots:\n            self.give(slot)\n",
    ),
    Mutant(
        "a window's first tile is that of slot 0",
        "r.live[b, 0] + low - r.line[b]",
        "low - r.line[b]",
        case="window",
    ),
    # Dead rows, and what else must not matter.
    Mutant("no mask before the first live row", MASK, "rows < stop, s, LOW", case="window"),
    Mutant("no mask behind the last live row", MASK, "rows >= first, s, LOW", quick=True),
    Mutant(
        "rows that the last tile shares with the one before count twice",
        "jnp.maximum(r.live[stretch.batch, 1], tile * TILE) - base",
        "r.live[stretch.batch, 1] - base",
        quick=True,
    ),
    Mutant(
        "live rows of the first sequence",
        "r.live[stretch.batch, 2] - base",
        "r.live[0, 2] - base",
    ),
    Mutant(
        "dead rows of values are not cleared",
        "                _clear(r.rows.at[slot], first, stop, LANES)\n",
        "                del slot\n",
        quick=True,
    ),
    Mutant(
        "padding of live rows meets queries",
        "            _clear(self.r.rows.at[slot], 0, TILE, limit)\n",
        "",
        quick=True,
    ),
    # The running softmax, and its parts.
    Mutant("the peak is not subtracted", "jnp.exp2(s - self.spread(peak, s))", "jnp.exp2(s)"),
    Mutant(
        "the sum so far does not shrink",
        "shrink * state.total + p.sum",
        "state.total + p.sum",
        quick=True,
    ),
    Mutant(
        "values so far do not shrink", "sums[i] * self.spread(less, new) + new", "sums[i] + new"
    ),
    Mutant(
        "parts weigh alike",
        "jnp.exp2(peak - highest[owner][:, None])",
        "jnp.ones_like(peak)",
        case="loud",
    ),
    Mutant("places that meet are the team's alone", "part, team + b, r.live", "part, team, r.live"),
    Mutant(
        "places are another sequence's",
        "team = jnp.arange(teams + B) - jnp.arange(B)[:, None]",
        "team = jnp.arange(teams + B) - jnp.zeros_like(jnp.arange(B)[:, None])",
    ),
    Mutant(
        "teams leave the last tiles out",
        "share = jnp.maximum(-(-line[-1] // teams), FEWEST)",
        "share = jnp.maximum(line[-1] // teams, FEWEST)",
    ),
    # Heads and their lanes.
    Mutant(
        "scales of the first group",
        "(stretch.part * plan.groups + g) * plan.heads",
        "stretch.part * plan.groups * plan.heads",
        case="scaled",
    ),
    Mutant(
        "latents of values at the head's lanes of an aligned run",
        "(i * LANES - r.offsets[stretch.part, run.index])\n            mine",
        "i * LANES\n            mine",
        case="scaled",
    ),
    Mutant(
        "queries of latents at the lanes of an aligned run",
        "offset = runs[:, :, None] + jnp.arange(plan.heads) * R",
        "offset = 0 * runs[:, :, None] + jnp.arange(plan.heads) * R",
        case="scaled",
    ),
    Mutant(
        "latents of keys at the head's lanes of an aligned run",
        "begin = i * LANES - offset ",
        "begin = i * LANES ",
        case="rope",
    ),
    Mutant(
        "angles of the next tile",
        "near, far = np.arange(TILE), np.arange(tiles) * TILE",
        "near, far = np.arange(TILE), (np.arange(tiles) + 1) * TILE",
        case="rope",
    ),
    # What may wait forever. Last, since each of these ends its process.
    Mutant("a consumer reads the next slot", FULL, "        slot = slot + 1\n" + FULL),
    Mutant(
        "both consumers take every tile",
        "jax.lax.rem(many + self.index - jax.lax.rem(done, many), many)",
        "jax.lax.rem(many - jax.lax.rem(done, many), many)",
    ),
    Mutant("copies behind the last tile", "pl.when(tile < stretch.count)", "pl.when(tile >= 0)"),
    Mutant("slots are not given back", "plgpu.barrier_arrive(self.r.empty.at[slot])", "pass"),
    Mutant(
        "a ring that the table fills before latents end",
        "least = table + parts.chunks_of(plan.latents) + 1 if table else 2",
        "least, MOST_SLOTS = table + 2, table + 2",
        case="rope",
    ),
)
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}

# ------------------------------------------------------------------ in the process


def main() -> None:
    for name in json.loads(sys.argv[1]):
        print(json.dumps([name, verdict(name)]), flush=True)
    os._exit(0)  # not by way of what failed runs have left behind


def verdict(name: str) -> str:
    """`right`, `race`, `barrier`, `out of bounds`, `wrong: …` or `error: …`."""
    mutant = BY_NAME.get(name)
    case = CASES[mutant.case if mutant else name]
    shape = case.shape.replace(batch=len(case.lengths), slots=304)
    loudness = np.reshape(case.loudness, (-1, 1, 1))
    arguments = kernel_oracle.make(shape, case.lengths, loudness=loudness)
    arrays, expected = arguments.arrays(window=case.window), arguments.attended(case.window)
    kernel = compiled(dataclasses.replace(case, shape=shape), mutant)
    faulthandler.dump_traceback_later(MUTANT_PATIENCE if mutant else PATIENCE, exit=True)
    try:
        found = jax.block_until_ready(kernel(arrays))
    except Exception as error:
        return misuse(str(error))
    finally:
        faulthandler.cancel_dump_traceback_later()
    if races_found():
        return "race"
    try:
        # Rotated latents lose 4e-3 in bfloat16 here, where few values are larger than 1.
        kernel_oracle.assert_attended(found, expected, shape.dtype, 2 * max(case.loudness))
    except AssertionError as error:
        return f"wrong: {error}"
    return "right"


def misuse(error: str) -> str:
    """What the interpreter complains of."""
    return next((v for k, v in COMPLAINTS.items() if k in error), f"error: {error}")


def compiled(case: Case, mutant: Mutant | None):
    load(mutant)
    pallas_kernels.gpu.MOST_SLOTS = case.ring
    options = {"window": case.window, "backend": "gpu_interpret"}
    call = jax.jit(functools.partial(case.shape.call, **options))
    return call.lower(case.shape.arguments()).compile()


def load(mutant: Mutant | None) -> None:
    """Puts MODULES, or a fault of one of them, in the place of those of pallas_kernels."""
    reset()
    plgpu.InterpretGPUParams = PARAMS
    for name in MODULES:
        text = (FOLDER / f"{name}.py").read_text()
        if mutant is not None:
            text = text.replace(mutant.old, mutant.new)
        spec = importlib.util.spec_from_loader(f"pallas_kernels.{name}", loader=None)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        setattr(pallas_kernels, name, module)
        exec(compile(text, str(FOLDER / f"{name}.py"), "exec"), module.__dict__)


def reset() -> None:
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    gpu_callbacks.reset_gpu_interpret_mode_state()


def races_found() -> bool:
    """Versions of JAX that do not raise only take a note."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.get_races().races_found


# ------------------------------------------------------------------ in the test


@functools.cache
def verdicts(names: tuple[str, ...]) -> dict[str, str]:
    """What became of each job; those behind one that hangs run in another process."""
    command = [sys.executable, __file__, json.dumps(names)]
    folders = [str(Path(__file__).parent), str(FOLDER.parent)]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    # Each warpgroup holds a thread of XLA's pool, which has no more than cores or devices.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}
    try:
        ran = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=PROCESS_LIMIT
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"{names} took over {PROCESS_LIMIT} s; so far: {late.stdout!r}")
    found = dict(json.loads(line) for line in ran.stdout.splitlines() if line.startswith("["))
    left = [name for name in names if name not in found]
    if not left:
        return found
    assert "Timeout (" in ran.stderr, f"{left[0]} ended the process:\n{ran.stderr}"
    found[left[0]] = "hang"
    return found | (verdicts(tuple(left[1:])) if left[1:] else {})


QUICK = (*TINY, *(m.name for m in MUTANTS if m.quick))
THOROUGH = ("window", "loud", *LARGE, *(m.name for m in MUTANTS if not m.quick))


def jobs(mutants: bool) -> list:
    return [
        pytest.param(name, batch, id=name, marks=[pytest.mark.slow] * (batch is THOROUGH))
        for batch in (QUICK, THOROUGH)
        for name in batch
        if (name in BY_NAME) == mutants
    ]


@pytest.mark.parametrize(("name", "batch"), jobs(mutants=False))
def test_the_kernel_waits_for_what_it_reads_and_overwrites_nothing_in_use(name, batch):
    assert verdicts(batch)[name] == "right"


@pytest.mark.parametrize(("name", "batch"), jobs(mutants=True))
def test_a_broken_kernel_is_caught(name, batch):
    """By what it does: one that cannot even be traced or compiled shows nothing."""
    old = BY_NAME[name].old
    text = "".join((FOLDER / f"{module}.py").read_text() for module in MODULES)
    assert text.count(old) == 1, f"the kernel has changed; find the place of {old!r}"
    found = verdicts(batch)[name]
    assert found in ("race", "barrier", "out of bounds", "hang") or found.startswith("wrong: ")


if __name__ == "__main__":
    main()
