"""What the entry points refuse: a sentence with the argument, its value and the fix."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rows import padded, up

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
ELEMENTS = 2**31  # offsets are 32-bit


class UnsupportedError(ValueError):
    """What these kernels refuse, in one sentence; raised before anything compiles."""


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UnsupportedError(sentence)


def positive(**values: int) -> None:
    for name, value in values.items():
        require(
            isinstance(value, int | np.integer) and value >= 1,
            f"{name} is {value}; it must be a whole number of at least 1.",
        )


def queries(q: jax.Array) -> tuple[int, int, int]:
    require(
        q.ndim == 3 and all(q.shape),
        f"q has shape {q.shape}; it must be [B, N, H], one token a sequence.",
    )
    B, N, H = q.shape
    return B, N, H


def grouped(num_heads: int, num_kv_heads: int) -> None:
    positive(num_kv_heads=num_kv_heads)
    require(
        num_heads % num_kv_heads == 0,
        f"num_kv_heads is {num_kv_heads}, which does not divide the {num_heads} heads of q.",
    )


def rows(q: jax.Array, cache: jax.Array, lengths: jax.Array, elements: int) -> None:
    require(
        cache.ndim == 3 and cache.shape[0] == q.shape[0],
        f"cache has shape {cache.shape}; it must be [B, S, W] with B = {q.shape[0]}, as q has.",
    )
    width = padded(elements)
    require(
        cache.shape[2] == width,
        f"cache has rows of {cache.shape[2]}; these heads need {elements} elements, padded to "
        f"W = {width}.",
    )
    require(cache.shape[1] >= 1, f"cache has shape {cache.shape}; it needs at least one slot.")
    require(
        any(cache.dtype == d for d in DTYPES),
        f"cache is {cache.dtype}; it must be bfloat16, float32 or float16.",
    )
    require(
        cache.size < ELEMENTS,
        f"cache has {cache.size} elements; offsets are 32-bit, so keep it under {ELEMENTS} by "
        "calling for fewer sequences at a time.",
    )
    require(
        lengths.shape == q.shape[:1] and lengths.dtype == jnp.int32,
        f"lengths is {lengths.dtype}{list(lengths.shape)}; it must be int32[{q.shape[0]}].",
    )


def options(scale: float, window: int | None, cap: float, splits: int | None) -> None:
    require(math.isfinite(scale), f"scale is {scale}; it must be finite.")
    if window is not None:
        positive(window=window)
    require(0 <= cap < float("inf"), f"cap is {cap}; it must be finite and not negative.")
    if splits is not None:
        positive(splits=splits)


def total(first: Any, num_heads: int, total: int) -> None:
    require(
        num_heads <= total,
        f"heads says that there are {total} heads, but q has {num_heads}.",
    )
    if isinstance(first, int | np.integer):
        require(
            bool(0 <= first <= total - num_heads),
            f"heads begins at {first}; {num_heads} heads of {total} cannot begin there.",
        )


def factors(q: jax.Array, key_up: jax.Array, value_up: jax.Array) -> tuple[int, int]:
    """R and V."""
    _, N, H = q.shape
    require(
        key_up.ndim == 3 and key_up.shape[0] == N and key_up.shape[2] == H and key_up.shape[1] > 0,
        f"key_up has shape {key_up.shape}; it must be [N, R, H] = [{N}, R, {H}] with R ≥ 1 "
        "(at rank 0 the cache is that of MQA: gqa_decode).",
    )
    require(
        value_up.ndim == 3 and value_up.shape[:2] == key_up.shape[:2] and value_up.shape[2] > 0,
        f"value_up has shape {value_up.shape}; it must be [N, R, V] = [{N}, {key_up.shape[1]}, V].",
    )
    return key_up.shape[1], value_up.shape[2]


def same_shape(name: str, x: jax.Array, q: jax.Array) -> None:
    require(x.shape == q.shape, f"{name} has shape {x.shape}; it must be q's {q.shape}.")


def scales(key_scales: jax.Array | None, q: jax.Array, cache: jax.Array) -> None:
    if key_scales is None:
        return
    B, N, S = *q.shape[:2], cache.shape[1]
    require(
        key_scales.shape in ((B, N, S), (B, up(N, 8), S)) and key_scales.dtype == jnp.float32,
        f"key_scales is {key_scales.dtype}{list(key_scales.shape)}; it must be "
        f"float32{[B, N, S]}, [B, N, S], or with N padded to {up(N, 8)}.",
    )


def rotation(
    frequencies: Any, multiplier: float, q: jax.Array, q_residual: jax.Array | None
) -> None:
    if frequencies is None:
        require(
            multiplier == 1,
            f"multiplier is {multiplier}, but without frequencies nothing turns; leave it out.",
        )
        return
    H = q.shape[2]
    require(math.isfinite(multiplier), f"multiplier is {multiplier}; it must be finite.")
    require(H % 2 == 0, f"q has heads of {H}; RoPE needs an even width.")
    shape = getattr(frequencies, "shape", None)
    require(
        isinstance(frequencies, np.ndarray) and shape == (H // 2,),
        f"frequencies is a {type(frequencies).__name__} of shape {shape}; it must be a NumPy array "
        f"of H/2 = {H // 2}, known before the program runs.",
    )
    largest = np.max(np.abs(frequencies))  # nan if one is
    require(math.isfinite(largest), f"frequencies has {largest}; all must be finite.")
    require(
        q_residual is None,
        "q_residual is given with frequencies; where whole keys are rotated q meets both terms.",
    )
