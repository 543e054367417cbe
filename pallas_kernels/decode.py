"""Decode attention over cached rows: what people call.

Each function takes one query token a sequence, reads the first `lengths` slots of that sequence's
rows (the last `window` of them where one is given), and returns `Attended`. Letters: B sequences,
S slots, N query heads of this call, K KV heads, H head dim, V value dim, R rank, W row.

Common arguments:
  cache: [B, S, W] bfloat16, float32 (not on GPU) or float16 (not on TPU), W the row padded to 128.
  lengths: [B] int32 live slots, the new token's among them; 0 is allowed.
  scale: factor of logits, 1/√H as a rule.
  window: slots that a query sees, its own included; None: all.
  cap: c of logits c·tanh(logits / c); 0: none.
  heads: (first, total) where these N queries are heads first … first + N − 1 of `total`, for
    instance on one shard; first may be traced. The row then holds what all heads need.
  splits: parts of a sequence that are computed apart and merged; None: one for each core of a
    TPU; on a GPU an equal share of all sequences for each multiprocessor.
  backend: `tpu` or `gpu` (Pallas kernels), `tpu_interpret` or `gpu_interpret` (the same in JAX's
    interpreters, for tests), or `jnp`; `auto`: the kernel of the device that the program is traced
    for (a TPU, a Hopper GPU), else jnp.
All of them raise UnsupportedError, a ValueError that names the argument, before anything compiles.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import check
from pallas_kernels.core import Attended, Backend, Problem, Rotation, solve

Heads = tuple[jax.Array | int, int]
HIGHEST = jax.lax.Precision.HIGHEST


def gqa_decode(
    q: jax.Array,
    cache: jax.Array,
    lengths: jax.Array,
    *,
    num_kv_heads: int,
    value_dim: int,
    scale: float,
    window: int | None = None,
    cap: float = 0.0,
    heads: Heads | None = None,
    splits: int | None = None,
    backend: Backend = "auto",
) -> Attended:
    """Grouped-query attention (arXiv 2305.13245); MHA, MQA and folded VHA are cases of it.

    Args:
      q: [B, N, H], rotated if keys are. Head n reads KV head n // (N / K).
      cache: rows [K_0 | V_0 | K_1 | V_1 | …].
    Returns:
      out [B, N, V], lse [B, N].
    """
    _, N, H = check.queries(q)
    first, total = heads or (0, N)
    check.total(first, N, total)
    check.grouped(total, num_kv_heads)
    check.positive(value_dim=value_dim)
    check.rows(q, cache, lengths, num_kv_heads * (H + value_dim))
    check.options(scale, window, cap, splits)
    problem = Problem(
        "gqa_decode",
        q.astype(jnp.float32),
        cache,
        lengths,
        num_kv_heads,
        value_dim,
        scale,
        window,
        cap,
        first,
        total,
        partial=heads is not None,
    )
    out, _, lse = solve(problem, splits, backend)
    return Attended(out, lse)


def lrkv_decode(
    q: jax.Array,
    cache: jax.Array,
    lengths: jax.Array,
    key_up: jax.Array,
    value_up: jax.Array,
    *,
    scale: float,
    q_residual: jax.Array | None = None,
    frequencies: np.ndarray | None = None,
    multiplier: float = 1.0,
    key_scales: jax.Array | None = None,
    window: int | None = None,
    cap: float = 0.0,
    heads: Heads | None = None,
    splits: int | None = None,
    backend: Backend = "auto",
) -> Attended:
    """LRKV (arXiv 2601.11471): one shared key and value, and a residual of rank R for each head.

    Associative: logits q·k_s + (q B^K)·z^K and output a v_s + (a z^V) B^V (section 3 there).
    With `frequencies`, whole keys k_s + B z are rotated by RoPE, which does not commute with B;
    then, for the rotated query q' = [q₁ | q₂], B = [B₁ | B₂] and P_n the rotation at slot n,
      q'·P_n B z = Σ_ρ z_ρ (t_n A)_ρ, t_n = [cos nθ | sin nθ], A = [q₁B₁ + q₂B₂ ; q₂B₁ − q₁B₂],
    exactly, and no key is formed; values stay associative.

    Args:
      q: [B, N, H], rotated at its own slot where keys are (halves of H are pairs).
      cache: rows [k_shared, rotated at its slot if keys are | Z^K | v_shared | Z^V]; Z by head,
        never rotated.
      key_up, value_up: [N, R, H], [N, R, V] B^K (with QK-norm's weight, if any) and B^V.
      q_residual: [B, N, H], the query of the latents where only the shared key is rotated; None: q.
      frequencies: [H/2] NumPy, radians a slot, where whole keys are rotated.
      multiplier: of cosine and sine in that rotation (YaRN).
      key_scales: [B, N, S] float32 inverse RMS of whole keys, where QK-norm acts on their sum. Pad
        N to a multiple of 8: other shapes XLA lays out in its own way, and copies at every call.
    Returns:
      out [B, N, V], lse [B, N].
    """
    _, N, H = check.queries(q)
    R, V = check.factors(q, key_up, value_up)
    first, total = heads or (0, N)
    check.total(first, N, total)
    check.rows(q, cache, lengths, H + V + 2 * total * R)
    check.options(scale, window, cap, splits)
    check.scales(key_scales, q, cache)
    check.rotation(frequencies, multiplier, q, q_residual)
    shared, key_up = q.astype(jnp.float32), key_up.astype(jnp.float32)
    absorbed = rotation = None
    if frequencies is None:
        residual = shared if q_residual is None else q_residual.astype(jnp.float32)
        check.same_shape("q_residual", residual, q)
        absorbed = jnp.einsum("BNH,NRH->BNR", residual, key_up, precision=HIGHEST)
    else:
        rotor = _rotor(shared, key_up)
        rotation = Rotation(rotor, np.asarray(frequencies), multiplier)
    problem = Problem(
        "lrkv_decode" if rotation is None else "lrkv_rope_decode",
        shared,
        cache,
        lengths,
        1,
        V,
        scale,
        window,
        cap,
        first,
        total,
        partial=heads is not None,
        rank=R,
        absorbed=absorbed,
        scales=key_scales,
        rotation=rotation,
    )
    out, latents, lse = solve(problem, splits, backend)
    up = jnp.einsum("BNR,NRV->BNV", latents, value_up.astype(jnp.float32), precision=HIGHEST)
    return Attended(out + up, lse)


def _rotor(q: jax.Array, key_up: jax.Array) -> jax.Array:
    """Aᵀ of every head: [B, N, R, H], its halves side by side."""
    q1, q2 = jnp.split(q[:, :, None], 2, axis=-1)
    b1, b2 = jnp.split(key_up[None], 2, axis=-1)
    return jnp.concatenate([q1 * b1 + q2 * b2, q2 * b1 - q1 * b2], axis=-1)
