"""Decode attention over cached rows: what people call.

Each function takes one query token a sequence, reads the first `lengths` slots of that sequence's
rows (the last `window` of them where one is given), and returns `Attended`. Letters: B sequences,
S slots, N query heads of this call, K KV heads, H head dim, V value dim, R rank, W row.

Common arguments:
  cache: [B, S, W] float32 or bfloat16, W the row padded to 128.
  lengths: [B] int32 live slots, the new token's among them; 0 is allowed.
  scale: factor of logits, 1/√H as a rule.
  window: slots that a query sees, its own included; None: all.
  cap: c of logits c·tanh(logits / c); 0: none.
  heads: (first, total) where these N queries are heads first … first + N − 1 of `total`, for
    instance on one shard; first may be traced. The row then holds what all heads need.
  splits: parts of a sequence that are computed apart and merged; None: one for each core.
  backend: `tpu` (the Pallas kernel), `interpret` (the same in JAX's interpreter, for tests) or
    `jnp`; `auto`: the kernel where the program is traced for a TPU, else jnp.
All of them raise UnsupportedError, a ValueError that names the argument, before anything compiles.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import check
from pallas_kernels.core import Attended, Backend, Problem, Rotation, solve
from pallas_kernels.rows import (
    LANES,
    gather,
    gqa_views,
    lrkv_views,
    padded,
    place,
    spread,
    whole_row,
)

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
    B, N, H = check.queries(q)
    first, total = heads or (0, N)
    check.total(first, N, total)
    check.grouped(total, num_kv_heads)
    check.positive(value_dim=value_dim)
    check.rows(q, cache, lengths, num_kv_heads * (H + value_dim))
    check.options(scale, window, cap, splits)
    K, group = num_kv_heads, H + value_dim
    q = q.astype(jnp.float32)
    if heads is not None:
        views = whole_row(K * group)
        wide = spread(place(q, 0, group), K, first, total // K)
        q = place(wide, 0, views.key_width)[:, None]
    else:
        views = gqa_views(K, H, value_dim)
        offsets = [k * group - view.keys for k, view in enumerate(views.views)]
        grouped = q.reshape(B, K, N // K, H)
        placed = [place(grouped[:, k], at, views.key_width) for k, at in enumerate(offsets)]
        q = jnp.stack(placed, axis=1)
    out, lse = solve(
        Problem("gqa_decode", q, cache, lengths, views, scale, window, cap), splits, backend
    )
    if heads is not None:
        mine = gather(out[:, 0, :, : K * group], K, first, total // K)
        return Attended(mine[..., H:], lse[:, 0])
    starts = [k * group + H - view.values for k, view in enumerate(views.views)]
    values = [out[:, k, :, at : at + value_dim] for k, at in enumerate(starts)]
    return Attended(jnp.stack(values, axis=1).reshape(B, N, -1), lse.reshape(B, N))


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
    views = lrkv_views(total, R, H, V, latent_keys=frequencies is None)
    shared, key_up = q.astype(jnp.float32), key_up.astype(jnp.float32)
    if frequencies is None:
        rotation = None
        residual = shared if q_residual is None else q_residual.astype(jnp.float32)
        check.same_shape("q_residual", residual, q)
        absorbed = jnp.einsum("BNH,NRH->BNR", residual, key_up, precision=HIGHEST)
        laid = jnp.concatenate([shared, spread(absorbed, total, first)], axis=-1)
    else:
        rotation = _rotation(shared, key_up, frequencies, multiplier, (first, total), cache.dtype)
        laid = shared
    laid = place(laid, 0, views.key_width)[:, None]
    name = "lrkv_decode" if rotation is None else "lrkv_rope_decode"
    problem = Problem(name, laid, cache, lengths, views, scale, window, cap, key_scales, rotation)
    out, lse = solve(problem, splits, backend)
    values = out[:, 0, :, H + total * R - views.views[0].values :]
    latents = gather(values[..., V : V + total * R], total, first)
    up = jnp.einsum("BNR,NRV->BNV", latents, value_up.astype(jnp.float32), precision=HIGHEST)
    return Attended(values[..., :V] + up, lse[:, 0])


def _rotation(q, key_up, frequencies, multiplier, heads: Heads, dtype) -> Rotation:
    """Aᵀ of every head, at the lanes of its latents."""
    (B, N, H), R, (first, total) = q.shape, key_up.shape[1], heads
    start, half, wide = H // LANES * LANES, H // 2, padded(H) // 2
    width, offset = padded(H - start + total * R), H - start
    q1, q2 = q[:, :, None, :half], q[:, :, None, half:]
    b1, b2 = key_up[None, ..., :half], key_up[None, ..., half:]
    halves = [place(x, 0, wide) for x in (q1 * b1 + q2 * b2, q2 * b1 - q1 * b2)]
    mine = jnp.concatenate(halves, axis=-1).reshape(B, N * R, 2 * wide)
    rotor = jnp.zeros((B, width, 2 * wide), jnp.float32)
    rotor = jax.lax.dynamic_update_slice_in_dim(rotor, mine, offset + first * R, axis=1)
    lanes = jnp.arange(width) - offset
    owner = jnp.where(lanes < 0, -1, lanes // R)
    own = (first + jnp.arange(N))[:, None] == owner
    return Rotation(rotor, own.astype(dtype), start, np.asarray(frequencies), multiplier)
