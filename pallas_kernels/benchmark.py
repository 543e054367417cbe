"""`python -m pallas_kernels.benchmark`: the decode kernels on a Hopper GPU, in seconds.

Beside each kernel: the same attention by XLA (`plain`), the kernel on MHA with as many heads, and
the copies that the card can do at best.

JAX has no CUDA events, and dispatching a program costs 10 to 50 µs of the host, as long as a small
call takes. So one program loops over n calls, each of which waits for the one before and for a pass
over an array twice as large as the L2 cache; the loop without calls is timed next, and their
difference over n is a call's time. It holds whatever a call launches, not the kernel alone, and
gaps between launches as far as the card waits for them; it takes the noise of both loops (see min
and max) where events would have that of one call. Not in it: what depends on no argument, such as
RoPE's table, which XLA may make before the loop.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import chips, measure, plain
from pallas_kernels.check import ELEMENTS, UnsupportedError
from pallas_kernels.core import Backend
from pallas_kernels.shapes import GOALS, MAIN, Shape

NAME = "pallas_kernels.benchmark"
LABEL = "interpreter: no timing means anything"
GOAL, GOAL_BATCH = 0.85, 8  # of the copy bandwidth, from this batch up
LIMIT = 1e-2  # error over the largest output
BLOCK = 20e-3  # seconds that are timed at once, at least
GIB = 2**30
INTERRUPTED = 130
THREADS = "--xla_force_host_platform_device_count"  # a warpgroup holds one in the interpreter
FASTEST = max(gpu.hbm for gpu in chips.GPUS.values())

Arrays = dict[str, jax.Array]
Call = Callable[[Arrays, jax.Array], jax.Array]  # of arrays and a 0 that must be waited for
Clock = Callable[[], float]


class WrongKernelError(RuntimeError):
    """A kernel's output is not that of the jnp form."""


@dataclass(frozen=True)
class Settings:
    """What is alike for all rows.

    block: seconds that are timed at once, at least. flush: bytes that the L2 cache cannot hold.
    copied: bytes of the array that is copied. memory: bytes of the device, None: unknown.
    published: bytes/s, None: unknown.
    """

    backend: Backend
    repeats: int
    ragged: bool
    block: float
    flush: int
    copied: int
    memory: int | None
    published: float | None

    @property
    def interpreted(self) -> bool:
        return self.backend == "gpu_interpret"


# ------------------------------------------------------------------ time


@dataclass(frozen=True)
class Contender:
    """n calls in a loop, and the same loop without them; each run returns once it is done."""

    n: int
    calls: Callable[[], Any]
    flushes: Callable[[], Any]


def timed(run: Callable[[], Any], clock: Clock) -> float:
    begin = clock()
    run()
    return clock() - begin


def interleave(
    contenders: dict[str, Contender], repeats: int, clock: Clock
) -> dict[str, list[float]]:
    """Seconds of a call, by contender and repeat; every repeat runs each of them once in turn."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, c in contenders.items():
            found[name].append((timed(c.calls, clock) - timed(c.flushes, clock)) / c.n)
    return found


def ratio(times: dict[str, list[float]], name: str) -> float | None:
    """Median over repeats of a contender's time over the kernel's of the same repeat."""
    if name not in times:
        return None
    return statistics.median(t / k for t, k in zip(times[name], times["kernel"], strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _chain(call: Call, n: int, arrays: Arrays, state: tuple, zero: jax.Array) -> tuple:
    """zero: 0, which the compiler must not know."""

    def body(_, state):
        flushed, out = state
        flushed = flushed + 1 + zero * out.reshape(-1)[0].astype(jnp.float32)
        seed = zero * jnp.max(flushed)
        # Else what XLA makes of the cache (slices, conversions) would leave the loop.
        held, seed = jax.lax.optimization_barrier((arrays, seed))
        return flushed, call(held, seed)

    return jax.lax.fori_loop(0, n, body, state)


def _loop(call: Call, n: int, arrays: Arrays, flush: int) -> Callable[[], Any]:
    """A run of n calls, compiled."""
    out = jax.eval_shape(call, arrays, jax.ShapeDtypeStruct((), jnp.float32))
    state = (jnp.zeros(flush // 4, jnp.float32), jnp.zeros(out.shape, out.dtype))

    def run() -> None:
        nonlocal state
        state = jax.block_until_ready(_chain(call, n, arrays, state, np.float32(0)))

    run()
    return run


def _contender(
    call: Call, arrays: Arrays, size: int, settings: Settings, clock: Clock
) -> Contender:
    """size: bytes that the call moves at least, for a first guess of n."""
    n = max(1, math.ceil(settings.block * FASTEST / (size + 2 * settings.flush)))
    calls = _loop(call, n, arrays, settings.flush)
    while settings.block and (seconds := timed(calls, clock)) < settings.block:
        n = math.ceil(1.2 * n * settings.block / seconds)
        calls = _loop(call, n, arrays, settings.flush)
    return Contender(n, calls, _loop(_nothing, n, {}, settings.flush))


# ------------------------------------------------------------------ calls


def _nothing(_: Arrays, seed: jax.Array) -> jax.Array:
    return seed[None]


def _copy(arrays: Arrays, seed: jax.Array) -> jax.Array:
    return arrays["x"] + seed.astype(arrays["x"].dtype)


def _read(arrays: Arrays, seed: jax.Array) -> jax.Array:
    return jnp.max(_copy(arrays, seed))[None]


@functools.cache  # so that a call is compiled once
def _kernel(shape: Shape, backend: Backend) -> Call:
    return lambda arrays, seed: shape.call(_after(arrays, seed), backend=backend).out


@functools.cache
def _einsums(shape: Shape) -> Call:
    return lambda arrays, seed: plain.attend(shape, _after(arrays, seed))


def _after(arrays: Arrays, seed: jax.Array) -> Arrays:
    """Both the queries and the schedule are new to each call, as they are in decoding."""
    new = {name: arrays[name] + seed.astype(arrays[name].dtype) for name in ("q", "lengths")}
    return arrays | new


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def arrays_of(shape: Shape, lengths: np.ndarray) -> Arrays:
    """Standard normal numbers, up-projections over √R."""
    found: Arrays = {"lengths": jnp.asarray(lengths)}
    for seed, (name, x) in enumerate(shape.arguments().items()):
        if name != "lengths":
            found[name] = _normal(seed, x.shape, x.dtype)
    for name in {"key_up", "value_up"} & found.keys():
        found[name] = found[name] / math.sqrt(shape.rank)
    return found


def lengths_of(shape: Shape, *, ragged: bool) -> np.ndarray:
    """Live slots, [B] int32: all, or drawn evenly from an eighth of them up."""
    S, B = shape.slots, shape.batch
    if not ragged:
        return np.full(B, S, np.int32)
    return np.random.default_rng(0).integers(S // 8, S, B, np.int32, endpoint=True)


def bytes_of(shape: Shape, lengths: np.ndarray) -> int:
    """That a call must move: live rows and their scales, queries, outputs in float32."""
    item = jnp.dtype(shape.dtype).itemsize
    heads = shape.head_dim * item + shape.v_dim * 4
    live = int(lengths.sum(dtype=np.int64))
    return live * measure.token_bytes(shape) + shape.batch * shape.num_heads * heads


def mha(shape: Shape) -> Shape:
    """As many heads as wide, each with its own keys and values."""
    N = shape.num_heads
    return shape.replace(kind="gqa", num_kv_heads=N, rank=0, scaled=False)


def tiny(shape: Shape) -> Shape:
    """For the interpreter."""
    N, K, R = (min(n, 8) for n in (shape.num_heads, shape.num_kv_heads, shape.rank))
    return shape.replace(num_heads=N, num_kv_heads=K, rank=R)


def refusal(shape: Shape, room: float) -> str | None:
    """Why a call is not made with so many bytes left, if it is not."""
    cells = shape.batch * shape.slots * shape.row
    size = sum(x.size * x.dtype.itemsize for x in shape.arguments().values())
    if cells >= ELEMENTS:
        return f"its cache has {cells} elements, and kernels take fewer than {ELEMENTS}"
    if size > room:
        return f"it takes {size / GIB:.2f} GiB where {max(room, 0) / GIB:.2f} are left"
    return None


@functools.cache
def check(shape: Shape, backend: Backend) -> None:
    """Compares a few short sequences with the jnp form.

    Raises:
      WrongKernelError: they differ.
    """
    small = shape.replace(batch=2, slots=128 if backend == "gpu_interpret" else 1024)
    arrays = arrays_of(small, lengths_of(small, ragged=True))
    call = lambda backend: jax.jit(functools.partial(small.call, backend=backend))(arrays)  # noqa: E731
    found, expected = np.asarray(call(backend).out), np.asarray(call("jnp").out)
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not error <= LIMIT:  # nan too
        raise WrongKernelError(
            f"The kernel of {shape.name} is off by {error:.2g} of its largest output, where "
            f"{LIMIT} is allowed; nothing was timed after that."
        )


# ------------------------------------------------------------------ rows


@dataclass(frozen=True)
class Row:
    """One call; times in seconds, of the kernel if nothing else is said.

    live: slots of all sequences. bytes: see `bytes_of`. speed: bytes/s, and what it is of the
      card's copy bandwidth and of the published one.
    over_xla, over_mha: their time over the kernel's. times: of each contender and repeat.
    goal: whether it is met, None where there is none.
    """

    shape: str
    batch: int
    slots: int
    live: int
    bytes: int
    seconds: float
    least: float
    most: float
    speed: float
    of_copy: float
    of_published: float | None
    over_xla: float | None
    over_mha: float | None
    goal: bool | None
    times: dict[str, list[float]]


def row(
    shape: Shape, live: int, size: int, times: dict[str, list[float]], copy: float, of: Settings
) -> Row:
    """copy: bytes/s."""
    seconds = statistics.median(times["kernel"])
    speed = size / seconds
    return Row(
        shape=shape.name,
        batch=shape.batch,
        slots=shape.slots,
        live=live,
        bytes=size,
        seconds=seconds,
        least=min(times["kernel"]),
        most=max(times["kernel"]),
        speed=speed,
        of_copy=speed / copy,
        of_published=speed / of.published if of.published else None,
        over_xla=ratio(times, "xla"),
        over_mha=ratio(times, "mha"),
        goal=None if of.interpreted or shape.batch < GOAL_BATCH else speed >= GOAL * copy,
        times=times,
    )


def bandwidth(settings: Settings, clock: Clock) -> tuple[float, float]:
    """Bytes/s of the card itself: of copying, read and written, and of reading."""
    size = settings.copied
    arrays = {"x": _normal(0, (size // 2,), jnp.bfloat16)}
    sizes = {"copy": 2 * size, "read": size}
    contenders = {
        name: _contender(call, arrays, sizes[name], settings, clock)
        for name, call in (("copy", _copy), ("read", _read))
    }
    times, _ = sound(interleave(contenders, settings.repeats, clock))
    if len(times) < 2:
        raise RuntimeError("Copies took no longer than nothing; the clock cannot be trusted.")
    copy, read = (sizes[name] / statistics.median(times[name]) for name in sizes)
    return copy, read


def sound(times: dict[str, list[float]]) -> tuple[dict[str, list[float]], list[str]]:
    """Those that were longer than the loop without calls in every repeat, and the others' names."""
    kept = {name: t for name, t in times.items() if min(t) > 0}
    return kept, [name for name in times if name not in kept]


def compare(
    shape: Shape, settings: Settings, copy: float, clock: Clock
) -> tuple[Row | None, list[str]]:
    """A row, None without the kernel's time, and why what is missing is."""
    notes, contenders = [], {}
    lengths = lengths_of(shape, ragged=settings.ragged)
    room = math.inf if settings.memory is None else settings.memory - 6 * settings.flush
    arrays: Arrays = {}
    for name, of in (("kernel", shape), ("xla", shape), ("mha", mha(shape))):
        reason = refusal(of, room) if name != "xla" else None
        try:
            if reason is None:
                if name != "xla":
                    check(of.replace(batch=1, slots=1), settings.backend)
                    arrays = arrays_of(of, lengths)
                    room -= sum(x.nbytes for x in arrays.values())
                call = _einsums(of) if name == "xla" else _kernel(of, settings.backend)
                size = bytes_of(of, lengths)
                contenders[name] = _contender(call, arrays, size, settings, clock)
        except UnsupportedError as error:
            reason = str(error).rstrip(".")
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = "it ran out of memory"
        if reason:
            notes.append(f"{name}: {reason}")
        if "kernel" not in contenders:
            return None, notes
    times, lost = sound(interleave(contenders, settings.repeats, clock))
    notes += [f"{name}: it took no longer than the flush, so its time is unknown" for name in lost]
    live, size = int(lengths.sum(dtype=np.int64)), bytes_of(shape, lengths)
    found = row(shape, live, size, times, copy, settings) if "kernel" in times else None
    return found, notes
