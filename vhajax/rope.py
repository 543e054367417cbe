"""Rotary position embedding, half-split (as in Llama and Qwen), right at long contexts.

A phase is position × frequency, which float32 cannot hold past some ten thousand positions (an
error of 0.01 rad at position 131,071). Turns are kept as 32-bit fractions instead: whole turns
overflow away, and what is left is exact to 3e-6 rad below two million positions.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from vhajax.mechanisms import RopeScaling

UNSCALED = RopeScaling()
SPLIT = 1024  # positions are split into hi·1024 + lo, so that fractions are multiplied by little


def frequencies(width: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Radians a position of each pair: theta^(−2i/width), stretched as `scaling` says.

    Args:
      width: even width of the heads that are rotated.
    Returns:
      [width / 2] float64.

    Source: RoFormer (arXiv 2104.09864), eq. 34; YaRN (arXiv 2309.00071), sec. 3.2, with whole
    pairs as bounds of the ramp, as published checkpoints have it; Llama 3.1's `apply_scaling`.
    """
    half = width // 2
    base = theta ** (-np.arange(half) / half)
    if scaling.kind == "none":
        return base
    turns = scaling.original_length * base / (2 * np.pi)  # within the original context
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
    else:

        def pair_with(turns: float) -> float:
            return half * math.log(scaling.original_length / (turns * 2 * np.pi)) / math.log(theta)

        first = max(math.floor(pair_with(scaling.beta_fast)), 0)
        last = min(math.ceil(pair_with(scaling.beta_slow)), width - 1)
        kept = 1 - np.clip((np.arange(half) - first) / max(last - first, 0.001), 0, 1)
    return base * kept + base / scaling.factor * (1 - kept)


def phases(
    positions: jax.Array, width: int, theta: float, scaling: RopeScaling
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every pair, times the scaling's multiplier: [...] → [..., width / 2]."""
    turns = frequencies(width, theta, scaling) / (2 * np.pi)
    fraction = lambda x: np.round(x % 1 * 2**32).astype(np.uint64).astype(np.uint32)  # noqa: E731
    high, low = jnp.divmod(positions.astype(jnp.uint32)[..., None], jnp.uint32(SPLIT))
    turned = low * fraction(turns) + high * fraction(SPLIT * turns)  # modulo one turn
    signed = jax.lax.bitcast_convert_type(turned, jnp.int32).astype(jnp.float32)
    angles = signed * np.float32(2 * np.pi / 2**32)
    return scaling.multiplier * jnp.cos(angles), scaling.multiplier * jnp.sin(angles)


def rotate(
    x: jax.Array, positions: jax.Array, theta: float, scaling: RopeScaling = UNSCALED
) -> jax.Array:
    """Rotates each pair (x[i], x[i + H/2]) by its phase.

    Args:
      x: [B, T, N, H], H even.
      positions: [B, T] int32, not negative.
      theta: base of the wavelengths.
    Returns:
      [B, T, N, H] in x's dtype; computed in float32.

    Source: RoFormer (arXiv 2104.09864), eq. 34, with the halves of H as pairs.
    """
    half = x.shape[-1] // 2
    cos, sin = (p[:, :, None] for p in phases(positions, x.shape[-1], theta, scaling))
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
