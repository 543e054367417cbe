"""Softmax attention over whole rows of tokens, for training and prefill.

Mechanisms give queries, keys and values; this file masks, normalises and shards.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from vhajax.sharding import axis_for, head_axes, local, platform, reshard

HIGHEST = jax.lax.Precision.HIGHEST

Window = jax.Array | int | None


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    window: Window = None,
    *,
    scale: float,
    cap: float = 0.0,
) -> jax.Array:
    """Causal attention inside documents: written out on CPU, tokamax's on TPU and GPU.

    Args:
      q: [B, T, N, H]. k: [B, T, K, H]. v: [B, T, K, H_v]; query head n reads KV head n // (N / K).
      segments: [B, T] int32; a query sees keys of its own segment, itself and earlier.
      window: tokens that a query sees, itself included; None or 0: all.
      scale: of the logits before the softmax.
      cap: soft cap of the scaled logits; 0: none.
    Returns:
      [B, T, N, H_v] in q's dtype; softmax in float32.
    """
    q_axis, kv_axis = head_axes(q.shape[2], k.shape[2])
    batch, num_heads, on_cpu = axis_for("data", q.shape[0]), q.shape[2], platform() == "cpu"
    heads, kv_heads = (batch, None, q_axis, None), (batch, None, kv_axis, None)

    def run(q, k, v, mask):
        if q_axis != kv_axis:
            k, v = (own_heads(x, 2, q.shape[2], num_heads) for x in (k, v))
        if on_cpu:
            return attend_reference(q, k, v, mask, scale=scale, cap=cap)
        return _tokamax(q, k, v, mask, scale=scale, cap=cap)

    mask = document_mask(reshard(segments, (batch, None)), window)
    places = [heads, kv_heads, kv_heads, (batch, None, None)]
    # Kernels do not say how their results vary over a mesh.
    return local(run, places, heads, differentiable=on_cpu)(q, k, v, mask)


def _tokamax(q, k, v, mask, *, scale: float, cap: float) -> jax.Array:
    """Its kernel where it has one for these arguments, else its XLA form."""
    import tokamax  # 7 s to import: only where its kernels run

    # Left alone it goes by this machine's device, not by the one that is compiled for.
    chosen: Any = ("mosaic_tpu", "xla") if platform() == "tpu" else None
    return tokamax.dot_product_attention(
        q,
        k,
        v,
        mask=mask[:, None],
        scale=scale,
        is_causal=True,
        logits_soft_cap=cap or None,
        precision=HIGHEST if q.dtype == jnp.float32 else None,  # a TPU's default is bfloat16
        implementation=chosen,
    )


def document_mask(segments: jax.Array, window: Window = None) -> jax.Array:
    """[B, T] segment ids → [B, T, T] bool: same segment, key not after query nor out of window."""
    slots = jnp.arange(segments.shape[1])
    seen = within(slots[:, None], slots, window)
    return seen & (segments[:, :, None] == segments[:, None, :])


def within(query: jax.Array, key: jax.Array, window: Window) -> jax.Array:
    """Whether a query's position sees a key's."""
    behind = query - key
    if window is None:
        return behind >= 0
    return (behind >= 0) & ((behind < window) | (jnp.asarray(window) == 0))


def attend_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    scale: float | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """Grouped attention in float32, written out.

    Args:
      q: [B, T, N, H]. k: [B, S, K, H]. v: [B, S, K, H_v].
      mask: [B, T, S] bool, True where a query sees a key; every query must see one.
      scale: 1/√H by default.
    Returns:
      [B, T, N, H_v] in q's dtype.

    Source: Attention Is All You Need (arXiv 1706.03762), eq. 1; GQA (arXiv 2305.13245), sec. 2.2.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H).astype(jnp.float32)
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k.astype(jnp.float32), precision=HIGHEST)
    logits = soft_cap(logits * (scale or 1 / math.sqrt(H)), cap)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], logits, -jnp.inf), axis=-1)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v.astype(jnp.float32), precision=HIGHEST)
    return out.reshape(B, T, N, v.shape[-1]).astype(q.dtype)


def soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    """c·tanh(logits / c) (Gemma 2, arXiv 2408.00118, sec. 2); the logits where c is 0."""
    return cap * jnp.tanh(logits / cap) if cap else logits


def own_heads(x: jax.Array, axis: int, local_heads: int, num_heads: int) -> jax.Array:
    """The heads that this device's query heads read, of an x that holds all heads."""
    group = num_heads // x.shape[axis]
    start = jax.lax.axis_index("model") * local_heads // group
    return jax.lax.dynamic_slice_in_dim(x, start, max(1, local_heads // group), axis=axis)
