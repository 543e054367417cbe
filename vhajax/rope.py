"""Rotary position embedding, half-split (as in Llama and Qwen), phases in float32."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates each pair (x[i], x[i + H/2]) by position · theta^(−2i/H).

    Args:
      x: [B, T, N, H], H even.
      positions: [B, T] int32.
      theta: base of the wavelengths.
    Returns:
      [B, T, N, H] in x's dtype.

    Source: RoFormer (arXiv 2104.09864), eq. 34, with the halves of H as pairs.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
