"""Decode attention in float64 NumPy, for the kernels: keys and values of every head are formed.

Nothing here shares code with pallas_kernels: rows are packed by what the README says of them, whole
keys are normalised and rotated as such, and logits are sums over one head at a time. Letters: B
sequences, S slots, N query heads, K KV heads, H head dim, V value dim, R rank, L slots seen.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

LANES = 128
EPS = 1e-6
TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-3, "float16": 1e-3}
"""Of outputs, relative to the largest of the call; 3 times that for each sequence by itself."""
LSE_TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Absolute, for logits of about 1 to 5: queries that met B are rounded, to bfloat16 by 2⁻⁹."""

Numbers = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """Random arguments of one call and what they stand for.

    numbers: float64, exactly what the arrays hold. `keys`, `values` [B, S, K, ·] of GQA, or
      `shared_keys`, `shared_values` [B, S, ·] and `key_latents`, `value_latents` [B, S, N, R].
    weight: [H] QK-norm's γ, folded into key_up and the stored shared key.
    multiplier: of cosine and sine.
    """

    shape: Any
    lengths: np.ndarray
    numbers: Numbers
    weight: np.ndarray
    multiplier: float

    def arrays(self, poison: float = np.nan, window: int | None = None) -> Numbers:
        """What the call takes; dead slots and the padding of live ones hold poison."""
        shape, numbers, dtype = self.shape, self.numbers, jnp.dtype(self.shape.dtype)
        rows = pack(numbers)
        elements, dead = rows.shape[2], ~self.live(window)
        rows = np.pad(rows, ((0, 0), (0, 0), (0, -elements % LANES)), constant_values=poison)
        rows[dead] = poison
        arrays = {"q": numbers["q"].astype(dtype), "cache": rows.astype(dtype)}
        arrays["lengths"] = self.lengths.astype(np.int32)
        if shape.kind != "gqa":
            arrays |= {name: numbers[name].astype(np.float32) for name in ("key_up", "value_up")}
        if shape.kind == "shared":
            arrays["q_residual"] = numbers["q_residual"].astype(dtype)
        if shape.scaled:
            scales = np.where(dead[:, None], poison, self.key_scales())
            arrays["key_scales"] = scales.astype(np.float32)
        return arrays

    def live(self, window: int | None = None) -> np.ndarray:
        """[B, S] bool: the slots that queries see."""
        slots, end = np.arange(self.shape.slots), self.lengths[:, None]
        return (slots < end) & (slots >= (end - window if window else 0))

    def key_scales(self) -> np.ndarray:
        """[B, N, S] inverse RMS of whole keys, before weight and rotation."""
        shape = self.shape
        scales = np.zeros((shape.batch, shape.num_heads, shape.slots))
        slots = np.arange(shape.slots)
        for b, n in np.ndindex(scales.shape[:2]):
            scales[b, n] = inverse_rms(sum(self.plain_keys(b, n, slots)))[:, 0]
        return scales

    def plain_keys(self, b: int, n: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A head's k_s and B z [L, H], neither rotated nor weighted."""
        x = self.numbers
        shared = x["shared_keys"][b, slots]
        if self.shape.kind != "lrkv":  # stored rotated
            shared = rotate(shared, -slots) / self.multiplier
        residual = x["key_latents"][b, slots, n] @ x["key_up"][n]
        return shared / self.weight, residual / self.weight

    def lrkv_keys(self, b: int, n: int, slots: np.ndarray) -> np.ndarray:
        """What a head's query meets: [L, H], or [L, 2H] for `shared`'s two queries."""
        shared, residual = self.plain_keys(b, n, slots)
        factor = self.weight
        if self.shape.scaled:
            factor = factor * inverse_rms(shared + residual)
        if self.shape.kind == "shared":
            turned = self.multiplier * rotate(shared * factor, slots)
            return np.concatenate([turned, residual * factor], axis=1)
        whole = (shared + residual) * factor
        return whole if self.shape.kind == "lrkv" else self.multiplier * rotate(whole, slots)

    def head(self, b: int, n: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Query, keys [L, ·] and values [L, V] of one head."""
        x, shape = self.numbers, self.shape
        if shape.kind == "gqa":
            k = n // (shape.num_heads // shape.num_kv_heads)
            return x["q"][b, n], x["keys"][b, slots, k], x["values"][b, slots, k]
        query = x["q"][b, n]
        if shape.kind == "shared":
            query = np.concatenate([query, x["q_residual"][b, n]])
        values = x["shared_values"][b, slots] + x["value_latents"][b, slots, n] @ x["value_up"][n]
        return query, self.lrkv_keys(b, n, slots), values

    def attended(self, window: int | None = None, cap: float = 0.0):
        """out [B, N, V] and lse [B, N], logits scaled by 1/√H."""
        shape, live = self.shape, self.live(window)
        out = np.zeros((shape.batch, shape.num_heads, shape.value_dim or shape.head_dim))
        lse = np.full(out.shape[:2], -np.inf)
        for b, n in np.ndindex(lse.shape):
            slots = np.flatnonzero(live[b])
            if slots.size:
                query, keys, values = self.head(b, n, slots)
                logits = keys @ query / np.sqrt(shape.head_dim)
                if cap:
                    logits = cap * np.tanh(logits / cap)
                weights = np.exp(logits - logits.max())
                lse[b, n] = logits.max() + np.log(weights.sum())
                out[b, n] = weights @ values / weights.sum()
        return out, lse


def make(
    shape: Any,
    lengths: Any,
    *,
    seed: int = 0,
    weighted: bool = False,
    multiplier: float = 1.0,
    loudness: Any = 1.0,
) -> Case:
    """Standard normal numbers; queries times loudness, up-projections over √R."""
    rng, lengths = np.random.default_rng(seed), np.broadcast_to(lengths, shape.batch)
    B, S, N, H = shape.batch, shape.slots, shape.num_heads, shape.head_dim
    V, K, R = shape.value_dim or H, shape.num_kv_heads, shape.rank

    def noise(*size: int, dtype: str = shape.dtype, factor: Any = 1.0) -> np.ndarray:
        return rounded(factor * rng.standard_normal(size), dtype)

    q = loudness * rng.standard_normal((B, N, H))
    if shape.kind in ("rope", "shared"):
        turned = multiplier * rotate(q, np.maximum(lengths - 1, 0)[:, None])
    else:
        turned = q
    numbers = {"q": rounded(turned, shape.dtype)}
    weight = 1 + 0.3 * rng.standard_normal(H) if weighted else np.ones(H)
    if shape.kind == "gqa":
        numbers |= {"keys": noise(B, S, K, H), "values": noise(B, S, K, V)}
        return Case(shape, lengths, numbers, weight, multiplier)
    numbers |= {
        "shared_keys": noise(B, S, H, factor=weight),
        "shared_values": noise(B, S, V),
        "key_latents": noise(B, S, N, R),
        "value_latents": noise(B, S, N, R),
        "key_up": noise(N, R, H, dtype="float32", factor=weight / np.sqrt(R)),
        "value_up": noise(N, R, V, dtype="float32", factor=1 / np.sqrt(R)),
    }
    if shape.kind == "shared":
        numbers["q_residual"] = rounded(q, shape.dtype)
    return Case(shape, lengths, numbers, weight, multiplier)


def pack(x: Numbers) -> np.ndarray:
    """Rows without padding: [K_0 | V_0 | K_1 | …] or [k_shared | Z^K | v_shared | Z^V]."""
    if "keys" in x:
        parts = [
            side[:, :, k] for k in range(x["keys"].shape[2]) for side in (x["keys"], x["values"])
        ]
        return np.concatenate(parts, axis=2)
    B, S = x["shared_keys"].shape[:2]
    latents = [x[f"{side}_latents"].reshape(B, S, -1) for side in ("key", "value")]
    return np.concatenate([x["shared_keys"], latents[0], x["shared_values"], latents[1]], axis=2)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(jnp.dtype(dtype)).astype(np.float64)


def inverse_rms(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS)


def rotate(x: np.ndarray, slots: np.ndarray, theta: float = 1e4) -> np.ndarray:
    """RoPE of [..., H] at slots [...]: the complex numbers x[i] + i·x[i + H/2], turned."""
    half = x.shape[-1] // 2
    phases = slots[..., None] * theta ** (-2 * np.arange(half) / x.shape[-1])
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * phases)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def assert_attended(found: Any, expected: Any, dtype: str, factor: float = 1.0) -> None:
    """out and lse agree within the tolerances of dtype, times factor."""
    assert all(x.dtype == np.float32 for x in found)
    (out, lse), (true_out, true_lse) = [
        [np.asarray(x, np.float64) for x in y] for y in (found, expected)
    ]
    assert out.shape == true_out.shape
    live = np.isfinite(true_lse)
    np.testing.assert_array_equal(lse[~live], true_lse[~live])
    error = np.abs(lse[live] - true_lse[live]).max(initial=0)
    assert error <= factor * LSE_TOLERANCES[dtype], f"lse is off by {error:.3g}"
    errors, scales = (np.abs(x).max(axis=(1, 2)) for x in (out - true_out, true_out))
    allowed = factor * TOLERANCES[dtype] * np.minimum(3 * scales, scales.max())
    assert (errors <= allowed).all(), f"out is off by {errors} at scales {scales}"
