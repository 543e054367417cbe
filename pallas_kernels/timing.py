"""Time of one call of the decode kernels, by loops: what `benchmark` measures with.

JAX has no CUDA events, and the host takes 10 to 50 µs to dispatch a program, as long as a small
call lasts. So one program makes n calls in a loop, each of which waits for the one before and for a
pass over an array twice as large as the L2 cache; the loop without calls is timed next, and their
difference over n is the time of a call. Unlike a pair of events it holds all that a call launches,
with the gaps between launches that the card waits for, and the noise of both loops: of calls far
shorter than the pass (some 50 µs) see min and max.
"""

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import measure, plain
from pallas_kernels.check import ELEMENTS
from pallas_kernels.chips import GPUS, MIB
from pallas_kernels.core import Backend
from pallas_kernels.shapes import Shape

FASTEST = max(gpu.hbm for gpu in GPUS.values())
LIMIT = 1e-2  # error over the largest output

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


def prepare(call: Call, arrays: Arrays, size: int, to: Settings, clock: Clock) -> Contender:
    """size: bytes that the call moves at least."""
    guess = max(1, math.ceil(to.block * FASTEST / (size + 2 * to.flush)))
    loop = functools.partial(_loop, call, arrays, to.flush)
    n, calls = enough(loop, guess, to.block, clock)
    return Contender(n, calls, _loop(_nothing, {}, to.flush, n))


# ------------------------------------------------------------------ calls


def _nothing(_: Arrays, seed: jax.Array) -> jax.Array:
    return seed[None]


def copying(arrays: Arrays, seed: jax.Array) -> jax.Array:
    return arrays["x"] + seed.astype(arrays["x"].dtype)


def reading(arrays: Arrays, seed: jax.Array) -> jax.Array:
    return jnp.max(copying(arrays, seed))[None]


@functools.cache  # the same function again is not compiled again
def attending(shape: Shape, backend: Backend | None) -> Call:
    """By the kernel, or without a backend by einsums; queries and schedule new to each call."""

    def call(arrays: Arrays, seed: jax.Array) -> jax.Array:
        new = {name: arrays[name] + seed.astype(arrays[name].dtype) for name in ("q", "lengths")}
        arrays = arrays | new
        return shape.call(arrays, backend=backend).out if backend else plain.attend(shape, arrays)

    return call


@functools.partial(jax.jit, static_argnums=(1, 2))
def noise(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def arrays_of(shape: Shape, *, ragged: bool) -> Arrays:
    """Standard normal numbers, up-projections over √R."""
    arrays: Arrays = {"lengths": jnp.asarray(lengths_of(shape, ragged=ragged))}
    for seed, (name, x) in enumerate(shape.arguments().items()):
        if name != "lengths":
            made = noise(seed, x.shape, x.dtype)
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
