"""The shapes of arguments that tests, ahead-of-time compilation and the roofline share."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core import Attended
from pallas_kernels.decode import gqa_decode, lrkv_decode
from pallas_kernels.rows import padded

Kind = Literal["gqa", "lrkv", "shared", "rope"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One call: what kind of attention, over what cache.

    kind: `gqa`; LRKV `lrkv` without positions, `shared` with two queries, `rope` with rotated keys.
    num_heads N, num_kv_heads K (gqa), rank R (LRKV), head_dim H, value_dim V (0: H).
    scaled: LRKV with an inverse RMS of whole keys.
    """

    kind: Kind
    num_heads: int
    num_kv_heads: int = 0
    rank: int = 0
    head_dim: int = 128
    value_dim: int = 0
    scaled: bool = False
    batch: int = 8
    slots: int = 32_768
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        if self.kind == "gqa":
            size = f"GQA-{self.num_kv_heads} G {self.num_heads // self.num_kv_heads}"
        else:
            form = {"lrkv": "none", "shared": "shared", "rope": "full RoPE"}[self.kind]
            size = f"LRKV {form} N {self.num_heads} R {self.rank}"
        return f"{size} H {self.head_dim}" + (", QK-norm" if self.scaled else "")

    @property
    def v_dim(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def elements(self) -> int:
        """Of a row, without padding."""
        if self.kind == "gqa":
            return self.num_kv_heads * (self.head_dim + self.v_dim)
        return self.head_dim + self.v_dim + 2 * self.num_heads * self.rank

    @property
    def row(self) -> int:
        return padded(self.elements)

    @property
    def frequencies(self) -> np.ndarray:
        half = self.head_dim // 2
        return 10_000.0 ** (-np.arange(half) / half)

    def replace(self, **changes) -> "Shape":
        return dataclasses.replace(self, **changes)

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Arrays that `call` takes, by name."""
        B, N, S, H = self.batch, self.num_heads, self.slots, self.head_dim
        dtype = jnp.dtype(self.dtype)
        sizes = {
            "q": ((B, N, H), dtype),
            "cache": ((B, S, self.row), dtype),
            "lengths": ((B,), jnp.int32),
        }
        if self.kind != "gqa":
            sizes["key_up"] = ((N, self.rank, H), jnp.float32)
            sizes["value_up"] = ((N, self.rank, self.v_dim), jnp.float32)
        if self.kind == "shared":
            sizes["q_residual"] = ((B, N, H), dtype)
        if self.scaled:
            sizes["key_scales"] = ((B, N, S), jnp.float32)
        return {name: jax.ShapeDtypeStruct(*size) for name, size in sizes.items()}

    def call(self, arrays: dict[str, jax.Array], **options: Any) -> Attended:
        """The entry point on such arrays with its options, logits scaled by 1/√H."""
        options["scale"] = self.head_dim**-0.5
        if self.kind == "gqa":
            options |= {"num_kv_heads": self.num_kv_heads, "value_dim": self.v_dim}
            return gqa_decode(**arrays, **options)
        if self.kind == "rope":
            options["frequencies"] = self.frequencies
        return lrkv_decode(**arrays, **options)


GOALS = (  # the main cases, which must be bound by bytes on v5e and v6e
    Shape(kind="gqa", num_heads=16, num_kv_heads=2),
    Shape(kind="gqa", num_heads=128, num_kv_heads=2),
    Shape(kind="lrkv", num_heads=16, rank=64),
    Shape(kind="lrkv", num_heads=32, rank=64),
    Shape(kind="lrkv", num_heads=6, rank=46),
    Shape(kind="rope", num_heads=16, rank=64),
    Shape(kind="rope", num_heads=6, rank=46),
)
MORE = (
    Shape(kind="gqa", num_heads=8, num_kv_heads=2),
    Shape(kind="gqa", num_heads=32, num_kv_heads=2),
    Shape(kind="gqa", num_heads=16, num_kv_heads=2, head_dim=64),
    Shape(kind="gqa", num_heads=16, num_kv_heads=2, head_dim=256),
    Shape(kind="gqa", num_heads=32, num_kv_heads=8),
    Shape(kind="gqa", num_heads=16, num_kv_heads=1),
    Shape(kind="gqa", num_heads=16, num_kv_heads=16),
    Shape(kind="lrkv", num_heads=8, rank=64),
    Shape(kind="lrkv", num_heads=12, rank=51),
    Shape(kind="lrkv", num_heads=18, rank=55),
    Shape(kind="lrkv", num_heads=32, rank=54),
    Shape(kind="lrkv", num_heads=64, rank=64, batch=4),  # offsets are 32-bit
    Shape(kind="lrkv", num_heads=16, rank=64, scaled=True),
    Shape(kind="shared", num_heads=16, rank=64),
    Shape(kind="rope", num_heads=12, rank=51),
    Shape(kind="rope", num_heads=18, rank=55),
    Shape(kind="rope", num_heads=32, rank=54),
    Shape(kind="rope", num_heads=32, rank=64),
    Shape(kind="rope", num_heads=16, rank=64, scaled=True),
)
MAIN = GOALS + MORE
