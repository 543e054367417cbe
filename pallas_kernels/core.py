"""The one problem that all kernels solve, and who solves it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import chips
from pallas_kernels.check import require
from pallas_kernels.rows import Views

Backend = Literal["auto", "jnp", "tpu", "interpret"]
BACKENDS = ("auto", "jnp", "tpu", "interpret")


class Attended(NamedTuple):
    """What attention found, in float32.

    out: each query's weighted mean of values. lse: log of the sum of its exponentials of logits.
    A sequence without live slots has out 0 and lse −inf.
    """

    out: jax.Array
    lse: jax.Array


@dataclass(frozen=True)
class Rotation:
    """LRKV's latent keys under RoPE: logits Σ_ρ z_ρ (t_n A)_ρ, see `decode.lrkv_rope_decode`.

    rotor: [B, Z, P] float32 Aᵀ at slot 0, its halves at lanes 0 and P/2 on; Z lanes of the row.
    heads: [M, Z] 1 where a lane belongs to a query's head, else 0.
    start: lane of the row where those Z begin, a multiple of 128.
    frequencies: [H/2] float64, radians a slot. multiplier: of cosine and sine.
    """

    rotor: jax.Array
    heads: jax.Array
    start: int
    frequencies: np.ndarray
    multiplier: float

    def table(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine of nθ in float64: [n, P/2] each, zero beyond H/2."""
        angles = slots[:, None].astype(np.float64) * self.frequencies
        spare = self.rotor.shape[2] // 2 - len(self.frequencies)
        cos, sin = (np.pad(f(angles), ((0, 0), (0, spare))) for f in (np.cos, np.sin))
        return cos, sin


@dataclass(frozen=True)
class Problem:
    """Attention of one token a sequence over rows, every query laid out over what it reads.

    name: of the kernel, in profiles and dumps.
    q: [B, views, M, key_width] float32. scale: factor of its logits.
    cache: [B, S, W]. lengths: [B] int32 live slots.
    views: what each block of M queries reads.
    window: slots seen, the last live one included, or None. cap: soft cap of logits, 0 for none.
    scales: [B, M or more, S] float32 factors of logits, or None (one view only).
    """

    name: str
    q: jax.Array
    cache: jax.Array
    lengths: jax.Array
    views: Views
    scale: float
    window: int | None
    cap: float
    scales: jax.Array | None = None
    rotation: Rotation | None = None


def choose(backend: Backend) -> Backend:
    """The only place that chooses: the kernel where the program is traced for a TPU, else jnp.

    Raises:
      UnsupportedError: an unknown name.
    """
    require(backend in BACKENDS, f"backend is {backend!r}; choose one of {', '.join(BACKENDS)}.")
    if backend != "auto":
        return backend
    platform, _ = chips.device()
    return "tpu" if platform == "tpu" else "jnp"


def solve(problem: Problem, splits: int | None, backend: Backend) -> Attended:
    """out [B, views, M, value_width] float32 and lse [B, views, M]."""
    chosen = choose(backend)
    if chosen == "jnp":
        from pallas_kernels import reference

        return reference.solve(problem)
    from pallas_kernels import tpu

    return tpu.solve(problem, splits, interpret=chosen == "interpret")


def merge(parts: Attended, axis: int = 0) -> Attended:
    """Attention over the union of disjoint sets of slots, from attention over each.

    Args:
      parts: out [..., V] and lse [...] with the parts along `axis`, for instance of splits of a
        sequence, of a shared prefix and the rest, or of shards.
    """
    out, lse = parts
    require(
        -lse.ndim <= axis < lse.ndim,
        f"axis is {axis}, but lse has {lse.ndim} dimensions; choose one of them.",
    )
    axis = axis % lse.ndim
    peak = jnp.max(lse, axis=axis, keepdims=True)
    weights = jnp.exp(lse - jnp.where(peak == -jnp.inf, 0, peak))
    total = jnp.sum(weights, axis=axis)
    mixed = jnp.sum(weights[..., None] * out, axis=axis)
    merged = mixed / jnp.where(total == 0, 1, total)[..., None]
    return Attended(merged, jnp.squeeze(peak, axis) + jnp.log(total))
