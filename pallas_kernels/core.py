"""The one problem that all kernels solve, and who solves it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import chips
from pallas_kernels.check import require

Backend = Literal["auto", "jnp", "tpu", "tpu_interpret", "gpu", "gpu_interpret"]
BACKENDS: tuple[Backend, ...] = ("auto", "jnp", "tpu", "tpu_interpret", "gpu", "gpu_interpret")


class Attended(NamedTuple):
    """What attention found, in float32.

    out: each query's weighted mean of values. lse: log of the sum of its exponentials of logits.
    A sequence without live slots has out 0 and lse −inf.
    """

    out: jax.Array
    lse: jax.Array


class Solved(NamedTuple):
    """What a backend returns, in float32, 0 and −inf as in `Attended`.

    out: [B, N, V], for LRKV of the shared value alone. latents: [B, N, R] each head's weighted mean
    of its own, or None at rank 0. lse: [B, N].
    """

    out: jax.Array
    latents: jax.Array | None
    lse: jax.Array


@dataclass(frozen=True)
class Rotation:
    """LRKV's latent keys under RoPE: logits Σ_ρ z_ρ (t_n A)_ρ, see `decode.lrkv_decode`.

    rotor: [B, N, R, H] float32, Aᵀ of each head: its two halves.
    frequencies: [H/2] float64, radians a slot. multiplier: of cosine and sine.
    """

    rotor: jax.Array
    frequencies: np.ndarray
    multiplier: float

    def table(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine of nθ in float64: [n, H/2] each."""
        angles = slots[:, None].astype(np.float64) * self.frequencies
        return np.cos(angles), np.sin(angles)


@dataclass(frozen=True)
class Problem:
    """Attention of one token a sequence over cached rows: what every backend solves.

    name: of the kernel, in profiles and dumps.
    q: [B, N, H] float32. cache: [B, S, W]. lengths: [B] int32 live slots.
    num_kv_heads, value_dim, rank: of a row, whose total heads are `total`: K groups of [H | V], or
      [H | total·R | V | total·R] with one group.
    first: of those heads, the first that q holds. partial: whether q holds some heads only.
    absorbed: [B, N, R] float32, queries of the latents, None where there are none or they are
      rotated. scales: [B, N or more, S] float32 factors of logits, or None.
    scale: of logits. window: slots seen, the last live one included, or None. cap: soft cap of
      logits, 0 for none.
    """

    name: str
    q: jax.Array
    cache: jax.Array
    lengths: jax.Array
    num_kv_heads: int
    value_dim: int
    scale: float
    window: int | None
    cap: float
    first: jax.Array | int
    total: int
    partial: bool
    rank: int = 0
    absorbed: jax.Array | None = None
    scales: jax.Array | None = None
    rotation: Rotation | None = None

    @property
    def elements(self) -> int:
        """Of a row, without padding."""
        group = self.q.shape[2] + self.value_dim + 2 * self.total * self.rank
        return self.num_kv_heads * group

    @property
    def rotor_width(self) -> int:
        """Elements of t_n, 0 without rotation."""
        return 0 if self.rotation is None else self.q.shape[2]

    @property
    def live(self) -> tuple[jax.Array, jax.Array]:
        """First live slot and end of each sequence, [B] int32."""
        high = jnp.clip(self.lengths, 0, self.cache.shape[1])
        low = jnp.maximum(high - self.window, 0) if self.window else jnp.zeros_like(high)
        return low, high


def choose(backend: Backend) -> Backend:
    """The only place that chooses: the kernel of the device that is traced for, else jnp.

    Raises:
      UnsupportedError: an unknown name.
    """
    require(backend in BACKENDS, f"backend is {backend!r}; choose one of {', '.join(BACKENDS)}.")
    if backend != "auto":
        return backend
    platform, _ = chips.device()
    return "tpu" if platform == "tpu" else "gpu" if chips.is_hopper() else "jnp"


def solve(problem: Problem, splits: int | None, backend: Backend) -> Solved:
    """Raises UnsupportedError where the backend cannot."""
    chosen = choose(backend)
    if chosen in ("gpu", "gpu_interpret"):
        from pallas_kernels import gpu

        return gpu.solve(problem, splits, interpret=chosen == "gpu_interpret")
    from pallas_kernels import wide

    laid = wide.lay(problem)
    if chosen == "jnp":
        from pallas_kernels import reference

        found = reference.solve(laid)
    else:
        from pallas_kernels import tpu

        found = tpu.solve(laid, splits, interpret=chosen == "tpu_interpret")
    return wide.read(problem, laid, found)


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
