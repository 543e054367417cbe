"""Softmax attention over K and V: one function for training, one for reading a cache.

Mechanisms give queries, keys and values; this file masks, normalises and shards.
"""

import math

import jax
import jax.numpy as jnp

from vhajax.sharding import axis_for, head_axes, local, model_size, platform

HIGHEST = jax.lax.Precision.HIGHEST


def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    """Causal attention inside documents, by a library: JAX's own on CPU, tokamax on TPU and GPU.

    Args:
      q: [B, T, N, H]. k, v: [B, T, K, H]; query head n reads KV head n // (N / K).
      segments: [B, T] int32; a query sees keys of its own segment, itself and earlier.
    Returns:
      [B, T, N, H] in q's dtype; softmax in float32, scale 1/√H.
    """
    q_axis, kv_axis = head_axes(q.shape[2], k.shape[2])
    batch, num_heads, on_cpu = axis_for("data", q.shape[0]), q.shape[2], platform() == "cpu"
    heads, kv_heads = (batch, None, q_axis, None), (batch, None, kv_axis, None)

    def run(q, k, v, segments):
        if q_axis != kv_axis:
            k, v = (_own_kv_heads(x, q.shape[2], num_heads) for x in (k, v))
        mask = document_mask(segments)[:, None]
        if on_cpu:
            return jax.nn.dot_product_attention(q, k, v, mask=mask)
        import tokamax  # 7 s to import: only where its kernels run

        return tokamax.dot_product_attention(q, k, v, mask=mask, is_causal=True)

    return local(run, [heads, kv_heads, kv_heads, (batch, None)], heads)(q, k, v, segments)


def document_mask(segments: jax.Array) -> jax.Array:
    """[B, T] segment ids → [B, T, T] bool: same segment, key not after query."""
    length = segments.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    return causal & (segments[:, :, None] == segments[:, None, :])


def attend_reference(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped attention in float32, written out; masked values cannot reach the result.

    Args:
      q: [B, T, N, H]. k, v: [B, S, K, H].
      mask: [B, T, S] bool, True where a query sees a key; every query must see one.
    Returns:
      [B, T, N, H] in q's dtype.

    Source: Attention Is All You Need (arXiv 1706.03762), eq. 1; GQA (arXiv 2305.13245), sec. 2.2.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H).astype(jnp.float32)
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k.astype(jnp.float32), precision=HIGHEST)
    logits = jnp.where(mask[:, None, None], logits / math.sqrt(H), -jnp.inf)
    # A NaN in a slot that nobody sees would survive 0 · NaN in the product with V.
    seen = mask.any(axis=1)[:, :, None, None]
    values = jnp.where(seen, v.astype(jnp.float32), 0)
    weights = jax.nn.softmax(logits, axis=-1)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, values, precision=HIGHEST)
    return out.reshape(B, T, N, v.shape[-1]).astype(q.dtype)


def append(
    rows: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, valid: jax.Array
) -> jax.Array:
    """A cache with new tokens written at their slots.

    Args:
      rows: [B, S, W] cache, see `KVCache`.
      k, v: [B, T, K, H], normed and roped.
      positions: [B, T] int32 slot of each token; out of range drops it.
      valid: [B, T] bool; padding is not written.
    """
    batch, kv_axis = _cache_axes(rows, k)
    cache, tokens, heads = (batch, None, kv_axis), (batch, None), (batch, None, kv_axis, None)
    write = local(_append, [cache, heads, heads, tokens, tokens], cache)
    return write(rows, k, v, positions, valid)


def read(
    q: jax.Array, rows: jax.Array, num_kv_heads: int, positions: jax.Array, live: jax.Array
) -> jax.Array:
    """Attention over a cache that already holds the new tokens.

    Args:
      q: [B, T, N, H].
      rows: [B, S, W].
      positions: [B, T] int32; a query sees slots up to its own.
      live: [B] int32 slots in use; what lies behind them cannot matter.
    Returns:
      [B, T, N, H] in q's dtype.
    """
    N, H, K = q.shape[2], q.shape[3], num_kv_heads
    q_axis, _ = head_axes(N, K) if model_size() > 1 else (None, None)
    batch, kv_axis = _cache_axes(rows, q, K)
    heads = (batch, None, q_axis, None)

    def run(q, rows, positions, live):
        keys, values = _split(rows, rows.shape[-1] // (2 * H) if kv_axis else K, H)
        if q_axis != kv_axis:
            keys, values = (_own_kv_heads(x, q.shape[2], N) for x in (keys, values))
        slots = jnp.arange(rows.shape[1])
        mask = (slots <= positions[..., None]) & (slots < live[:, None, None])
        # A row with no live slot sees slot 0 rather than nothing; its output is not used.
        return attend_reference(q, keys, values, mask | (slots == 0))

    specs = [heads, (batch, None, kv_axis), (batch, None), (batch,)]
    return local(run, specs, heads)(q, rows, positions, live)


def _cache_axes(
    rows: jax.Array, heads: jax.Array, num_kv_heads: int = 0
) -> tuple[str | None, str | None]:
    """Mesh axes of a cache's batch and of its rows: padded rows do not split into heads."""
    B, _, K, H = heads.shape
    K = num_kv_heads or K
    split = model_size() > 1 and rows.shape[-1] == 2 * K * H and K % model_size() == 0
    return axis_for("data", B), "model" if split else None


def _append(
    rows: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, valid: jax.Array
) -> jax.Array:
    B, T, K, H = k.shape
    # [K_0 | V_0 | K_1 | V_1 | … | padding]
    new = jnp.stack([k, v], axis=3).reshape(B, T, K * 2 * H).astype(rows.dtype)
    new = jnp.pad(new, ((0, 0), (0, 0), (0, rows.shape[-1] - new.shape[-1])))
    slots = jnp.where(valid, positions, rows.shape[1])
    return rows.at[jnp.arange(B)[:, None], slots].set(new, mode="drop")


def _split(rows: jax.Array, num_kv_heads: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values, each [B, S, K, H], as slices of the rows."""
    B, S, _ = rows.shape
    pairs = rows[..., : num_kv_heads * 2 * head_dim].reshape(B, S, num_kv_heads, 2, head_dim)
    return pairs[:, :, :, 0], pairs[:, :, :, 1]


def _own_kv_heads(k: jax.Array, local_heads: int, num_heads: int) -> jax.Array:
    """The KV heads that this device's query heads read, where only query heads are sharded."""
    group = num_heads // k.shape[2]
    start = jax.lax.axis_index("model") * local_heads // group
    return jax.lax.dynamic_slice_in_dim(k, start, max(1, local_heads // group), axis=2)
