"""Queries laid out over whole rows, as the TPU kernel and the jnp form want them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core import Attended, Problem, Solved
from pallas_kernels.rows import (
    LANES,
    Views,
    gather,
    gqa_views,
    lrkv_views,
    padded,
    place,
    spread,
    whole_row,
)


@dataclass(frozen=True)
class Turned:
    """`core.Rotation` at the lanes of a row.

    rotor: [B, Z, P] float32 Aᵀ at slot 0, its halves at lanes 0 and P/2 on; Z lanes of the row.
    heads: [M, Z] 1 where a lane belongs to a query's head, else 0.
    start: lane of the row where those Z begin, a multiple of 128.
    multiplier: of cosine and sine.
    """

    rotor: jax.Array
    heads: jax.Array
    start: int
    multiplier: float
    problem: Problem

    def table(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine of nθ in float64: [n, P/2] each, zero beyond H/2."""
        assert self.problem.rotation is not None
        cos, sin = self.problem.rotation.table(slots)
        spare = ((0, 0), (0, self.rotor.shape[2] // 2 - cos.shape[1]))
        return np.pad(cos, spare), np.pad(sin, spare)


@dataclass(frozen=True)
class Wide:
    """Every query laid out over what it reads, zero where it does not look.

    q: [B, views, M, key_width] float32. views: what each block of M queries reads.
    Everything else is the problem's.
    """

    name: str
    q: jax.Array
    cache: jax.Array
    lengths: jax.Array
    views: Views
    scale: float
    window: int | None
    cap: float
    scales: jax.Array | None
    rotation: Turned | None


def lay(problem: Problem) -> Wide:
    q, views, rotation = (_lay_lrkv if problem.rank else _lay_gqa)(problem)
    return Wide(
        problem.name,
        q,
        problem.cache,
        problem.lengths,
        views,
        problem.scale,
        problem.window,
        problem.cap,
        problem.scales,
        rotation,
    )


def read(problem: Problem, laid: Wide, found: Attended) -> Solved:
    """What heads want of out [B, views, M, value_width] and lse [B, views, M]."""
    out, lse = found
    (B, N, H), K, V, R = problem.q.shape, problem.num_kv_heads, problem.value_dim, problem.rank
    if R:
        total, first = problem.total, problem.first
        values = out[:, 0, :, H + total * R - laid.views.views[0].values :]
        return Solved(
            values[..., :V], gather(values[..., V : V + total * R], total, first), lse[:, 0]
        )
    group = H + V
    if problem.partial:
        mine = gather(out[:, 0, :, : K * group], K, problem.first, problem.total // K)
        return Solved(mine[..., H:], None, lse[:, 0])
    starts = [k * group + H - view.values for k, view in enumerate(laid.views.views)]
    values = [out[:, k, :, at : at + V] for k, at in enumerate(starts)]
    return Solved(jnp.stack(values, axis=1).reshape(B, N, V), None, lse.reshape(B, N))


def _lay_gqa(problem: Problem) -> tuple[jax.Array, Views, None]:
    q, K, V = problem.q, problem.num_kv_heads, problem.value_dim
    (B, N, H), group = q.shape, q.shape[2] + V
    if problem.partial:
        views = whole_row(K * group)
        wide = spread(place(q, 0, group), K, problem.first, problem.total // K)
        return place(wide, 0, views.key_width)[:, None], views, None
    views = gqa_views(K, H, V)
    offsets = [k * group - view.keys for k, view in enumerate(views.views)]
    grouped = q.reshape(B, K, N // K, H)
    placed = [place(grouped[:, k], at, views.key_width) for k, at in enumerate(offsets)]
    return jnp.stack(placed, axis=1), views, None


def _lay_lrkv(problem: Problem) -> tuple[jax.Array, Views, Turned | None]:
    laid, total, rotation = problem.q, problem.total, None
    H, rotated = laid.shape[2], problem.rotation is not None
    views = lrkv_views(total, problem.rank, H, problem.value_dim, latent_keys=not rotated)
    if rotated:
        rotation = _turned(problem)
    else:
        assert problem.absorbed is not None
        laid = jnp.concatenate([laid, spread(problem.absorbed, total, problem.first)], axis=-1)
    return place(laid, 0, views.key_width)[:, None], views, rotation


def _turned(problem: Problem) -> Turned:
    assert problem.rotation is not None
    rotor, first, total = problem.rotation.rotor, problem.first, problem.total
    B, N, R, H = rotor.shape
    start, half, wide = H // LANES * LANES, H // 2, padded(H) // 2
    width, offset = padded(H - start + total * R), H - start
    halves = [place(x, 0, wide) for x in (rotor[..., :half], rotor[..., half:])]
    mine = jnp.concatenate(halves, axis=-1).reshape(B, N * R, 2 * wide)
    laid = jnp.zeros((B, width, 2 * wide), jnp.float32)
    laid = jax.lax.dynamic_update_slice_in_dim(laid, mine, offset + first * R, axis=1)
    lanes = jnp.arange(width) - offset
    owner = jnp.where(lanes < 0, -1, lanes // R)
    own = (first + jnp.arange(N))[:, None] == owner
    heads = own.astype(problem.cache.dtype)
    return Turned(laid, heads, start, problem.rotation.multiplier, problem)
