"""`python -m pallas_kernels.benchmark`: seconds of the decode kernels on a Hopper GPU.

JAX has no CUDA events, and the host takes 10 to 50 µs to dispatch a program, as long as a small
call lasts. So one program makes n calls in a loop, each of which waits for the one before and for a
pass over an array twice as large as the L2 cache; the loop without calls is timed next, and their
difference over n is the time of a call. Unlike a pair of events it holds all that a call launches,
with the gaps between launches that the card waits for, and the noise of both loops: of calls far
shorter than the pass (some 50 µs) see min and max.
"""

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import chips, measure, plain
from pallas_kernels.check import ELEMENTS, UnsupportedError, require
from pallas_kernels.chips import MIB
from pallas_kernels.core import Backend
from pallas_kernels.shapes import GOALS, MAIN, Shape

NAME = "pallas_kernels.benchmark"
LABEL = "interpreter: no timing means anything"
GOAL, GOAL_BATCH = 0.85, 8  # of the copy bandwidth, from this batch up
LIMIT = 1e-2  # error over the largest output
FASTEST = max(gpu.hbm for gpu in chips.GPUS.values())
THREADS = "--xla_force_host_platform_device_count"  # in the interpreter a warpgroup holds one
INTERRUPTED = 130

Arrays = dict[str, jax.Array]
Call = Callable[[Arrays, jax.Array], jax.Array]  # of arrays, and of a 0 that it must wait for
Run = Callable[[], Any]  # returns once the device is done
Clock = Callable[[], float]
Times = dict[str, list[float]]  # seconds of a call, by contender and repeat
Row = dict[str, Any]  # of the table and of JSON, see `row`


class WrongError(RuntimeError):
    """A kernel's output is not that of the jnp form, or the clock is of no use."""


@dataclass(frozen=True)
class Settings:
    """Of all rows; block: seconds that are timed at once, at least; the others but repeats: bytes.

    flush: more than the L2 cache holds. copied: for the card's own bandwidth. memory: of the
    device. published: a second. None: unknown.
    """

    backend: Backend = "gpu"
    repeats: int = 10
    ragged: bool = False
    block: float = 20e-3
    flush: int = 100 * MIB
    copied: int = 1024 * MIB
    memory: int | None = None
    published: float | None = None


# ------------------------------------------------------------------ time


@dataclass(frozen=True)
class Contender:
    """A loop of n calls, and the same without them."""

    n: int
    calls: Run
    flushes: Run


def timed(run: Run, clock: Clock) -> float:
    begin = clock()
    run()
    return clock() - begin


def interleave(contenders: dict[str, Contender], repeats: int, clock: Clock) -> Times:
    """Every repeat times each contender once in turn."""
    found: Times = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, c in contenders.items():
            found[name].append((timed(c.calls, clock) - timed(c.flushes, clock)) / c.n)
    return found


def ratio(times: Times, name: str) -> float | None:
    """The median over repeats of a contender's time over the kernel's of the same repeat."""
    pairs = zip(times.get(name, ()), times["kernel"], strict=name in times)
    return statistics.median(t / k for t, k in pairs) if name in times else None


def enough(loop: Callable[[int], Run], n: int, block: float, clock: Clock) -> tuple[int, Run]:
    """A loop that lasts so many seconds, from a first guess of n."""
    run = loop(n)
    while block and (seconds := timed(run, clock)) < block:
        n = math.ceil(1.2 * n * block / seconds)
        run = loop(n)
    return n, run


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _chain(call: Call, n: int, arrays: Arrays, state: tuple, zero: jax.Array) -> tuple:
    """zero: 0, which the compiler must not know."""

    def body(_, state):
        flushed, out = state
        flushed = flushed + 1 + zero * out.reshape(-1)[0].astype(jnp.float32)
        # Without the barrier, what XLA makes of the cache (slices, say) could leave the loop.
        held, seed = jax.lax.optimization_barrier((arrays, zero * jnp.max(flushed)))
        return flushed, call(held, seed)

    return jax.lax.fori_loop(0, n, body, state)


def _loop(call: Call, arrays: Arrays, flush: int, n: int) -> Run:
    out = jax.eval_shape(call, arrays, jax.ShapeDtypeStruct((), jnp.float32))
    state = (jnp.zeros(flush // 4, jnp.float32), jnp.zeros(out.shape, out.dtype))

    def run() -> None:
        nonlocal state
        state = jax.block_until_ready(_chain(call, n, arrays, state, np.float32(0)))

    run()  # compiles
    return run


def _contender(call: Call, arrays: Arrays, size: int, to: Settings, clock: Clock) -> Contender:
    """size: bytes that the call moves at least."""
    guess = max(1, math.ceil(to.block * FASTEST / (size + 2 * to.flush)))
    loop = functools.partial(_loop, call, arrays, to.flush)
    n, calls = enough(loop, guess, to.block, clock)
    return Contender(n, calls, _loop(_nothing, {}, to.flush, n))


# ------------------------------------------------------------------ calls


def _nothing(_: Arrays, seed: jax.Array) -> jax.Array:
    return seed[None]


def _copy(arrays: Arrays, seed: jax.Array) -> jax.Array:
    return arrays["x"] + seed.astype(arrays["x"].dtype)


def _read(arrays: Arrays, seed: jax.Array) -> jax.Array:
    return jnp.max(_copy(arrays, seed))[None]


@functools.cache  # the same function again is not compiled again
def _attention(shape: Shape, backend: Backend | None) -> Call:
    """By the kernel, or without a backend by einsums; queries and schedule new to each call."""

    def call(arrays: Arrays, seed: jax.Array) -> jax.Array:
        new = {name: arrays[name] + seed.astype(arrays[name].dtype) for name in ("q", "lengths")}
        arrays = arrays | new
        return shape.call(arrays, backend=backend).out if backend else plain.attend(shape, arrays)

    return call


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def arrays_of(shape: Shape, *, ragged: bool) -> Arrays:
    """Standard normal numbers, up-projections over √R."""
    arrays: Arrays = {"lengths": jnp.asarray(lengths_of(shape, ragged=ragged))}
    for seed, (name, x) in enumerate(shape.arguments().items()):
        if name != "lengths":
            made = _normal(seed, x.shape, x.dtype)
            arrays[name] = made / math.sqrt(shape.rank) if name.endswith("_up") else made
    return arrays


def lengths_of(shape: Shape, *, ragged: bool) -> np.ndarray:
    """Live slots, [B] int32: all, or drawn evenly from an eighth of them up."""
    S, B = shape.slots, shape.batch
    least = S // 8 if ragged else S
    return np.random.default_rng(0).integers(least, S, B, np.int32, endpoint=True)


def bytes_of(shape: Shape, live: int) -> int:
    """That a call must move: live rows and their scales, queries, outputs in float32."""
    head = shape.head_dim * jnp.dtype(shape.dtype).itemsize + shape.v_dim * 4
    return live * measure.token_bytes(shape) + shape.batch * shape.num_heads * head


def mha(shape: Shape) -> Shape:
    """As many heads as wide, each with keys and values of its own."""
    return shape.replace(kind="gqa", num_kv_heads=shape.num_heads, rank=0, scaled=False)


def tiny(shape: Shape) -> Shape:
    """For the interpreter."""
    N, K, R = (min(n, 4) for n in (shape.num_heads, shape.num_kv_heads, shape.rank))
    return shape.replace(num_heads=N, num_kv_heads=K, rank=R)


def refusal(shape: Shape, room: float) -> str | None:
    """Why a call is not made where so many bytes are left, if it is not."""
    cells = shape.batch * shape.slots * shape.row
    size = sum(x.size * x.dtype.itemsize for x in shape.arguments().values())
    if cells >= ELEMENTS:
        return f"its cache has {cells} elements, and the kernels take fewer than {ELEMENTS}"
    if size > room:
        return f"it takes {size / MIB:.1f} MiB and {max(room, 0) / MIB:.1f} are left"
    return None


@functools.cache
def check(shape: Shape, backend: Backend) -> None:
    """Raises WrongError where the kernel and the jnp form differ."""
    arrays = arrays_of(shape, ragged=True)
    call = jax.jit(shape.call, static_argnames="backend")
    found, expected = (np.asarray(call(arrays, backend=b).out) for b in (backend, "jnp"))
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not error <= LIMIT:  # NaN neither
        raise WrongError(
            f"The kernel of {shape.name} is off by {error:.2g} of its largest output, where "
            f"{LIMIT} is allowed, so it is not timed"
        )


# ------------------------------------------------------------------ rows


def bandwidth(to: Settings, clock: Clock) -> tuple[float, float]:
    """The card's own bytes/s: copying (read and written), and reading."""
    arrays = {"x": _normal(0, (to.copied // 2,), jnp.dtype(jnp.bfloat16))}
    sizes = {_copy: 2 * to.copied, _read: to.copied}
    contenders = {c.__name__: _contender(c, arrays, s, to, clock) for c, s in sizes.items()}
    times = interleave(contenders, to.repeats, clock)
    if min(map(min, times.values())) <= 0:
        raise WrongError("A copy took no longer than nothing, so the clock is of no use")
    copy, read = (s / statistics.median(times[c.__name__]) for c, s in sizes.items())
    return copy, read


def compare(shape: Shape, to: Settings, copy: float, clock: Clock) -> tuple[Row | None, list[str]]:
    """A row, None without the kernel's time, and why what is missing is. copy: bytes/s."""
    room = math.inf if to.memory is None else to.memory - 6 * to.flush
    if reason := refusal(shape, room):
        return None, [f"kernel: {reason}"]
    contenders, notes, arrays = {}, [], {}
    live = int(lengths_of(shape, ragged=to.ragged).sum(dtype=np.int64))
    few = {"batch": 2, "slots": 128 if to.backend == "gpu_interpret" else 1024}
    for name, of in {"kernel": shape, "xla": shape, "mha": mha(shape)}.items():
        try:
            reason = refusal(of, room) if name == "mha" else None
            require(reason is None, str(reason))
            if name != "xla":  # which takes the kernel's arrays
                check(of.replace(**few), to.backend)
                arrays = arrays_of(of, ragged=to.ragged)
                room -= sum(x.nbytes for x in arrays.values())
            call = _attention(of, None if name == "xla" else to.backend)
            contenders[name] = _contender(call, arrays, bytes_of(of, live), to, clock)
            continue
        except UnsupportedError as error:
            reason = str(error).rstrip(".")
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = "out of memory"
        notes.append(f"{name}: {reason}")
        if name == "kernel":
            return None, notes
    times = interleave(contenders, to.repeats, clock)
    lost = [name for name, found in times.items() if min(found) <= 0]
    notes += [f"{name}: too short to be told from the flush" for name in lost]
    kept = {name: found for name, found in times.items() if name not in lost}
    return (row(shape, live, kept, to, copy) if "kernel" in kept else None), notes


def row(shape: Shape, live: int, times: Times, to: Settings, copy: float) -> Row:
    """Of a call with so many live slots; bytes/s and seconds, the kernel's if not said otherwise.

    of_copy, of_published: speed over that of the card's copies, and over its data sheet's.
    over_xla, over_mha: their time over the kernel's. None: unknown, or no goal.
    """
    seconds, size = statistics.median(times["kernel"]), bytes_of(shape, live)
    speed, judged = size / seconds, shape.batch >= GOAL_BATCH and to.backend == "gpu"
    return {
        "shape": shape.name,
        "batch": shape.batch,
        "slots": shape.slots,
        "live": live,
        "bytes": size,
        "seconds": seconds,
        "least": min(times["kernel"]),
        "most": max(times["kernel"]),
        "speed": speed,
        "of_copy": speed / copy,
        "of_published": speed / to.published if to.published else None,
        "over_xla": ratio(times, "xla"),
        "over_mha": ratio(times, "mha"),
        "goal": speed >= GOAL * copy if judged else None,
        "times": times,
    }


@dataclass(frozen=True)
class Report:
    """copy, read: bytes/s. left_out: of which call what is missing, and why."""

    about: dict[str, Any]
    copy: float
    read: float
    rows: list[Row]
    left_out: list[str]


def report(cases: Sequence[Shape], to: Settings, command: str, clock: Clock) -> Report:
    began, rows, left_out = time.monotonic(), [], []
    copy, read = bandwidth(to, clock)
    for done, shape in enumerate(cases):
        _progress(done, len(cases), time.monotonic() - began)
        found, notes = compare(shape, to, copy, clock)
        rows += [found] if found else []
        where = f"{shape.name}, batch {shape.batch}, {shape.slots} slots"
        left_out += [f"{where}, {note}." for note in notes]
    _progress(len(cases), len(cases), 0)
    return Report(about(to, command), copy, read, rows, left_out)


def _progress(done: int, total: int, seconds: float) -> None:
    if sys.stderr.isatty():
        left = f", {seconds / done * (total - done) / 60:.0f} min left" if done else ""
        end = "\n" if done == total else "\r"
        print(f"timed {done} of {total} calls{left}\x1b[K", end=end, file=sys.stderr, flush=True)


def about(to: Settings, command: str) -> dict[str, Any]:
    """When, on what and how."""
    device = jax.devices()[0]
    found = {
        "command": command,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        "card": device.device_kind,
        "multiprocessors": getattr(device, "core_count", None),
        "compute capability": getattr(device, "compute_capability", None),
        "bytes of memory": to.memory,
        "platform": " ".join(device.client.platform_version.split()),
        "jax": jax.__version__,
        "lengths": "drawn from an eighth of the slots up" if to.ragged else "all slots live",
        "repeats": to.repeats,
    }
    return found if to.backend == "gpu" else {"label": LABEL} | found


# ------------------------------------------------------------------ what is printed

TEXT = """\
# Decode kernels, timed

{about}

The card copies {copy:.0f} GB/s (bytes read and written) and reads {read:.0f} GB/s, timed alike.

`MiB` is what a call must move: live rows with their scales, queries and outputs, not up-projections
or tables. `µs` is the median, with all that a call launches and a cold L2 cache; `min` and `max`
are of the same repeats. `of copy` and `of published` are its bandwidth over that of the copy and of
the data sheet. `× XLA` and `× MHA` are times over the kernel's: of the same attention by einsums,
which read dead slots too, and of the kernel on MHA with as many heads. The goal is {goal} of the
copy from batch {batch} up.
"""
COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("shape", "shape", str),
    ("batch", "batch", str),
    ("slots", "slots", str),
    ("MiB", "bytes", lambda x: f"{x / MIB:.1f}"),
    ("µs", "seconds", lambda x: f"{x * 1e6:.1f}"),
    ("min", "least", lambda x: f"{x * 1e6:.1f}"),
    ("max", "most", lambda x: f"{x * 1e6:.1f}"),
    ("GB/s", "speed", lambda x: f"{x / 1e9:.0f}"),
    ("of copy", "of_copy", "{:.2f}".format),
    ("of published", "of_published", "{:.2f}".format),
    ("× XLA", "over_xla", "{:.2f}".format),
    ("× MHA", "over_mha", "{:.2f}".format),
    ("goal", "goal", lambda x: "met" if x else "**missed**"),
)


def document(found: Report) -> str:
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Report) -> Iterator[str]:
    known = [f"- {name}: {value}" for name, value in found.about.items() if value is not None]
    speeds = {"copy": found.copy / 1e9, "read": found.read / 1e9}
    yield TEXT.format(about="\n".join(known), goal=GOAL, batch=GOAL_BATCH, **speeds).rstrip("\n")
    yield f"\n| {' | '.join(title for title, *_ in COLUMNS)} |"
    yield f"|---|{'--:|' * (len(COLUMNS) - 1)}"
    for line in found.rows:
        cells = ((show, line[key]) for _, key, show in COLUMNS)
        yield f"| {' | '.join('–' if x is None else show(x) for show, x in cells)} |"
    if found.left_out:
        yield "\nLeft out:\n"
        yield from (f"- {line}" for line in found.left_out)


def as_json(found: Report) -> str:
    return json.dumps(dataclasses.asdict(found)) + "\n"


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


# ------------------------------------------------------------------ command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip('.')}.\n")


def main(argv: Sequence[str] | None = None, clock: Clock = time.perf_counter) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _arguments()
    args = parser.parse_args(words)
    if args.out and (args.out.is_dir() or not os.access(args.out.parent, os.W_OK)):
        parser.error(f"--out {args.out} cannot be written")
    try:
        shapes = cases(args)
        to = interpreted(args) if args.interpret else on_gpu(args)
        found = report(shapes, to, shlex.join(["python", "-m", NAME, *words]), clock)
    except UnsupportedError as error:
        parser.error(str(error))
    except (WrongError, jax.errors.JaxRuntimeError) as error:
        print(f"{NAME}: {str(error).splitlines()[0].rstrip('.')}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted.", file=sys.stderr)
        return INTERRUPTED
    text = (as_json if args.json else document)(found)
    try:
        if args.out:
            write(args.out, text)
    except OSError as error:
        print(text, end="")  # rather than lose it
        parser.error(f"--out {args.out} cannot be written ({error.strerror}), see stdout")
    if not args.out:
        print(text, end="")
    return 0


def _arguments() -> _Parser:
    about = "Times the decode kernels on a Hopper GPU."
    parser = _Parser(prog=NAME, description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--batch", type=positive, nargs="+", help="1 8 64 if not given")
    add("--slots", type=positive, nargs="+", help="8192 32768 131072 if not given")
    add("--shapes", default="goals", help="goals (default), all, or part of a name")
    add("--ragged", action="store_true", help="lengths from an eighth of the slots up")
    add("--repeats", type=positive, help="10 if not given")
    add("--memory", type=positive, metavar="BYTES", help="of the device, if not what JAX says")
    add("--interpret", action="store_true", help="run tiny shapes on a CPU, to check this script")
    add("--json", action="store_true", help="one JSON object, times in seconds")
    add("--out", type=Path, help="write there what would be printed")
    return parser


def positive(word: str) -> int:
    if not word.isdecimal() or int(word) == 0:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1")
    return int(word)


def cases(args: argparse.Namespace) -> list[Shape]:
    """Raises UnsupportedError where the flags mean no call."""
    given = [f"--{name}" for name in ("batch", "slots", "repeats") if getattr(args, name)]
    require(
        not (args.interpret and given),
        f"{' and '.join(given)} cannot be chosen with --interpret, which is for tiny calls only.",
    )
    batches = args.batch or ([2] if args.interpret else [1, 8, 64])
    slots = args.slots or ([128] if args.interpret else [8192, 32_768, 131_072])
    named = [shape for shape in MAIN if args.shapes.lower() in shape.name.lower()]
    shapes = {"goals": GOALS, "all": MAIN}.get(args.shapes, named)
    require(bool(shapes), f"--shapes {args.shapes!r} is part of no shape's name, as 'rope' is.")
    found = itertools.product(map(tiny, shapes) if args.interpret else shapes, batches, slots)
    return list(dict.fromkeys(shape.replace(batch=B, slots=S) for shape, B, S in found))


def interpreted(args: argparse.Namespace) -> Settings:
    flags = os.environ.get("XLA_FLAGS", "")
    if THREADS not in flags:  # read when JAX meets its first device
        os.environ["XLA_FLAGS"] = f"{flags} {THREADS}=8"
    jax.config.update("jax_platforms", "cpu")
    return Settings("gpu_interpret", 1, args.ragged, 0, 4096, MIB, args.memory)


def on_gpu(args: argparse.Namespace) -> Settings:
    """Raises UnsupportedError where there is no Hopper GPU."""
    try:
        kind, hopper = jax.devices()[0].device_kind, chips.is_hopper()
    except RuntimeError:  # of the platforms that JAX is told to use
        kind, hopper = "no device", False
    require(
        hopper,
        f"no Hopper GPU here (JAX finds {kind}); --interpret runs tiny shapes in JAX's "
        "interpreter to check the script.",
    )
    card, told = chips.gpu(), jax.devices()[0].memory_stats() or {}
    return Settings(
        repeats=args.repeats or 10,
        ragged=args.ragged,
        flush=2 * card.l2,
        memory=args.memory or told.get("bytes_limit"),
        published=card.hbm if kind in card.kinds else None,
    )


if __name__ == "__main__":
    sys.exit(main())
