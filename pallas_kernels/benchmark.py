"""`python -m pallas_kernels.benchmark`: seconds of decode kernels on a Hopper GPU (`timing`)."""

import argparse
import dataclasses
import datetime
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

from pallas_kernels import chips
from pallas_kernels.check import UnsupportedError, require
from pallas_kernels.chips import MIB
from pallas_kernels.shapes import GOALS, MAIN, Shape
from pallas_kernels.timing import (
    Clock,
    Row,
    Settings,
    Times,
    WrongError,
    arrays_of,
    attending,
    bytes_of,
    check,
    copying,
    interleave,
    lengths_of,
    mha,
    noise,
    prepare,
    ratio,
    reading,
    refusal,
    tiny,
)

NAME = "pallas_kernels.benchmark"
LABEL = "interpreter: no timing means anything"
GOAL, GOAL_BATCH = 0.85, 8  # of the copy bandwidth, from this batch up
THREADS = "--xla_force_host_platform_device_count"  # in the interpreter a warpgroup holds one
INTERRUPTED = 130


# ------------------------------------------------------------------ rows


def bandwidth(to: Settings, clock: Clock) -> tuple[float, float]:
    """The card's own bytes/s: copying (read and written), and reading."""
    arrays = {"x": noise(0, (to.copied // 2,), jnp.dtype(jnp.bfloat16))}
    sizes = {copying: 2 * to.copied, reading: to.copied}
    contenders = {c.__name__: prepare(c, arrays, s, to, clock) for c, s in sizes.items()}
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
            call = attending(of, None if name == "xla" else to.backend)
            contenders[name] = prepare(call, arrays, bytes_of(of, live), to, clock)
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
