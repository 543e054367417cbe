"""Configurations of the attention mechanisms, and the row that each caches.

No JAX here: `vhajax -h`, refusals and the arithmetic of cache sizes answer at once.
Dimension letters: B batch, T query positions, S cached positions, D width, N query heads,
P physical query heads, K KV heads, G = N/K group, H head dim, Q physical query head dim, R rank,
C latent width, F FFN width, L layers, V vocabulary.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from vhajax.errors import UserError

Norm = Literal["none", "weightless", "weighted"]
NORMS = ("none", "weightless", "weighted")
LANES = 128  # an accelerator's row is padded to this many elements
SUBLANES = 8  # and its scales to this many heads


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UserError(sentence)


def require_positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        require(value > 0, f"{owner}.{name} is {value}; it must be greater than 0.")


def require_not_negative(owner: str, **values: float) -> None:
    for name, value in values.items():
        require(value >= 0, f"{owner}.{name} is {value}; it must not be negative.")


def require_choice(owner: str, **choices: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, allowed) in choices.items():
        require(
            value in allowed, f"{owner}.{name} is {value!r}; choose one of {', '.join(allowed)}."
        )


@dataclass(frozen=True)
class CacheRow:
    """What one layer keeps of one token.

    An accelerator stores one row: `groups` times the parts side by side, padded to 128 elements.
    A CPU stores every part by itself (see `cache.py`).
    """

    parts: tuple[tuple[int, int], ...]
    """(heads, width) of each part in a group."""
    groups: int = 1
    scales: int = 0
    """float32 inverse RMS values beside the row, one a head, where QK-norm acts on a sum."""

    @property
    def group_elements(self) -> int:
        return sum(heads * width for heads, width in self.parts)

    @property
    def elements(self) -> int:
        """Elements a token and layer, as papers count: neither padding nor scales."""
        return self.groups * self.group_elements

    @property
    def padded(self) -> int:
        """Elements of an accelerator's row."""
        return -(-self.elements // LANES) * LANES

    def logical_bytes(self, itemsize: int) -> int:
        """Bytes a token and layer, as papers count."""
        return self.elements * itemsize

    def stored_bytes(self, itemsize: int, packed: bool = True) -> int:
        """Bytes a token and layer in memory, scales included; packed: as an accelerator's row."""
        if packed:
            return self.padded * itemsize + 4 * (-(-self.scales // SUBLANES) * SUBLANES)
        return self.elements * itemsize + 4 * self.scales


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies for longer contexts than those trained on, as Hugging Face names them."""

    kind: Literal["none", "llama3", "yarn"] = "none"
    factor: float = 1.0
    """How many times longer."""
    original_length: int = 8192
    """Context before the stretching."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths over original_length / this are stretched whole."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths under original_length / this stay."""
    beta_fast: float = 32.0
    """yarn: pairs that turn more often than this within original_length stay."""
    beta_slow: float = 1.0
    """yarn: pairs that turn less often than this are stretched whole."""
    attention_factor: float = 0.0
    """yarn: multiplies cosine and sine (0: 0.1·ln(factor) + 1)."""

    def __post_init__(self) -> None:
        owner = "attention.rope_scaling"
        require_choice(owner, kind=(self.kind, ("none", "llama3", "yarn")))
        require(self.factor >= 1, f"{owner}.factor is {self.factor}; it must be at least 1.")
        require(
            self.kind != "none" or self.factor == 1,
            f"{owner}.factor is {self.factor}, but {owner}.kind is 'none'; choose llama3 or yarn.",
        )
        require(
            self.kind == "yarn" or not self.attention_factor,
            f"{owner}.attention_factor is {self.attention_factor}, which only yarn uses; "
            "leave it at 0.",
        )
        require_positive(
            owner,
            original_length=self.original_length,
            low_freq_factor=self.low_freq_factor,
            beta_slow=self.beta_slow,
        )
        require_not_negative(owner, attention_factor=self.attention_factor)
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            require(
                getattr(self, low) < getattr(self, high),
                f"{owner}.{low} is {getattr(self, low)}; it must be smaller than {high} = "
                f"{getattr(self, high)}.",
            )

    @property
    def multiplier(self) -> float:
        """What cosine and sine are multiplied by: YaRN's √(1/t)."""
        if self.kind != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(self.factor) + 1


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every mechanism can have."""

    head_dim: int = 64
    """H."""
    value_dim: int = 0
    """Width of a value head (0: the same as head_dim)."""
    qk_norm: Norm = "weighted"
    """RMSNorm over H of queries and of keys as they meet, before RoPE."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    qkv_bias: bool = False
    """Biases of queries, and of keys and values or of the latent they come from."""
    out_bias: bool = False
    logit_cap: float = 0.0
    """c of logits c·tanh(logits / c), as in Gemma 2 (0: none)."""
    output_gate: bool = False
    """Sigmoid gate on every head's output, from the layer's input."""

    def __post_init__(self) -> None:
        require_positive("attention", head_dim=self.head_dim)
        require_not_negative("attention", value_dim=self.value_dim, logit_cap=self.logit_cap)
        require(
            1 < self.rope_theta < math.inf,
            f"attention.rope_theta is {self.rope_theta}; it must be greater than 1 and finite.",
        )
        require(
            self.logit_cap < math.inf,
            f"attention.logit_cap is {self.logit_cap}; it must be finite (0 means none).",
        )
        require_choice("attention", qk_norm=(self.qk_norm, NORMS))

    @property
    def v_dim(self) -> int:
        """Width of a value head with its default resolved."""
        return self.value_dim or self.head_dim

    @property
    def key_dim(self) -> int:
        """Width of a head's whole query and key, which QK-norm acts on."""
        return self.head_dim

    def common(self) -> dict[str, Any]:
        """The fields that every mechanism has, by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(Common)}

    def check_rope(self, name: str, width: int) -> None:
        require(width % 2 == 0, f"attention.{name} is {width}; RoPE needs an even width.")

    def check_unrotated(self) -> None:
        require(
            self.rope_scaling.kind == "none",
            f"attention.rope_scaling.kind is {self.rope_scaling.kind!r}, but without positions "
            "nothing is rotated; use none.",
        )


@dataclass(frozen=True, kw_only=True)
class GQA(Common):
    """Grouped-query attention; MHA at num_kv_heads = num_heads, MQA at num_kv_heads = 1."""

    num_heads: int = 8
    """N, query heads."""
    num_kv_heads: int = 2
    """K, KV heads; query head n reads KV head n // (N / K)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("attention", num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"attention.num_heads is {self.num_heads}, not a multiple of "
            f"attention.num_kv_heads = {self.num_kv_heads}; change one of them.",
        )
        self.check_rope("head_dim", self.head_dim)

    def summary(self) -> str:
        return f"GQA N {self.num_heads}, K {self.num_kv_heads}, H {self.head_dim}"

    def cache_row(self) -> CacheRow:
        """[K_0 | V_0 | K_1 | V_1 | …]: K·(H + H_v) elements."""
        return CacheRow(((1, self.head_dim), (1, self.v_dim)), groups=self.num_kv_heads)


@dataclass(frozen=True, kw_only=True)
class MLA(Common):
    """Multi-head latent attention: one joint latent of width C for all keys and values.

    `decoupled` is DeepSeek's form, with a rotated key of its own that all heads share. `full` and
    `none` are the simplified form without it: keys rotated after the up-projection, or not at all.
    """

    num_heads: int = 8
    """N."""
    latent_dim: int = 128
    """C."""
    query_latent_dim: int = 0
    """Width of the queries' own latent (0: queries straight from the input)."""
    position: Literal["decoupled", "full", "none"] = "decoupled"
    rope_dim: int = 32
    """Width of the decoupled rotated key (position decoupled only)."""
    latent_norm: Norm = "weighted"
    """RMSNorm on the latents, before the up-projections."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(
            "attention",
            num_heads=self.num_heads,
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
        )
        require_not_negative("attention", query_latent_dim=self.query_latent_dim)
        require_choice(
            "attention",
            position=(self.position, ("decoupled", "full", "none")),
            latent_norm=(self.latent_norm, NORMS),
        )
        if self.position == "decoupled":
            self.check_rope("rope_dim", self.rope_dim)
        elif self.position == "full":
            self.check_rope("head_dim", self.head_dim)
        else:
            self.check_unrotated()

    @property
    def shared_key_dim(self) -> int:
        """Width of the decoupled key; 0 in the simplified form."""
        return self.rope_dim if self.position == "decoupled" else 0

    @property
    def key_dim(self) -> int:
        return self.head_dim + self.shared_key_dim

    def summary(self) -> str:
        return f"MLA N {self.num_heads}, H {self.head_dim}, C {self.latent_dim}, {self.position}"

    def cache_row(self) -> CacheRow:
        """[latent | rotated key]: C + H_rope elements."""
        shared = ((1, self.shared_key_dim),) if self.shared_key_dim else ()
        scales = 0 if self.qk_norm == "none" else self.num_heads
        return CacheRow(((1, self.latent_dim), *shared), scales=scales)


@dataclass(frozen=True, kw_only=True)
class MFA(Common):
    """Multi-matrix factorization attention: low-rank queries, many heads, one wide KV head."""

    head_dim: int = 256
    """H, wider than usual."""
    num_heads: int = 8
    """N."""
    query_latent_dim: int = 128
    """C_q, the queries' shared latent."""
    latent_norm: Norm = "weighted"
    """RMSNorm on the queries' latent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(
            "attention", num_heads=self.num_heads, query_latent_dim=self.query_latent_dim
        )
        require_choice("attention", latent_norm=(self.latent_norm, NORMS))
        self.check_rope("head_dim", self.head_dim)

    @property
    def num_kv_heads(self) -> int:
        return 1

    def summary(self) -> str:
        return f"MFA N {self.num_heads}, H {self.head_dim}, C_q {self.query_latent_dim}"

    def cache_row(self) -> CacheRow:
        """[K | V]: H + H_v elements."""
        return CacheRow(((1, self.head_dim), (1, self.v_dim)))


@dataclass(frozen=True, kw_only=True)
class VHA(Common):
    """Virtual Head Attention: N = K·P virtual heads from P physical ones; folds to GQA with K."""

    num_physical_heads: int = 4
    """P, physical query heads; N of them where premix is off."""
    num_kv_heads: int = 2
    """K, KV heads; virtual head n = k·P + p reads KV head k."""
    query_dim: int = 0
    """Q, width of a physical query head (0: the same as head_dim); at most head_dim."""
    premix: bool = True
    """Off: physical heads are the query heads."""
    postmix_rank: int = -1
    """Rank of the head-axis Postmix I + V Uᵀ; -1: N/4 (at least 1), 0: no Postmix."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(
            "attention",
            num_physical_heads=self.num_physical_heads,
            num_kv_heads=self.num_kv_heads,
        )
        require(
            0 <= self.query_dim <= self.head_dim,
            f"attention.query_dim is {self.query_dim}; it must lie between 1 and "
            f"attention.head_dim = {self.head_dim} (0 means the same).",
        )
        if not self.premix:
            require(
                self.q_dim == self.head_dim,
                f"attention.query_dim is {self.query_dim}; without Premix it must equal "
                f"attention.head_dim = {self.head_dim} (0 means the same).",
            )
            require(
                self.num_physical_heads % self.num_kv_heads == 0,
                f"attention.num_physical_heads is {self.num_physical_heads}; without Premix it "
                f"must be a multiple of attention.num_kv_heads = {self.num_kv_heads}.",
            )
        require(
            -1 <= self.postmix_rank <= self.num_heads,
            f"attention.postmix_rank is {self.postmix_rank}; it must lie between 0 and "
            f"N = {self.num_heads} (-1 means N/4).",
        )
        self.check_rope("head_dim", self.head_dim)

    @property
    def num_heads(self) -> int:
        """N, virtual query heads."""
        return self.num_physical_heads * (self.num_kv_heads if self.premix else 1)

    @property
    def q_dim(self) -> int:
        """Q with its default resolved."""
        return self.query_dim or self.head_dim

    @property
    def rank(self) -> int:
        """Postmix rank with its default resolved."""
        return max(1, self.num_heads // 4) if self.postmix_rank == -1 else self.postmix_rank

    def folded(self) -> GQA:
        """The GQA that it equals."""
        return GQA(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, **self.common())

    def summary(self) -> str:
        return (
            f"VHA P {self.num_physical_heads}, K {self.num_kv_heads} "
            f"(N {self.num_heads}), H {self.head_dim}"
        )

    def cache_row(self) -> CacheRow:
        """[K_0 | V_0 | K_1 | V_1 | …], as GQA with the same KV heads."""
        return CacheRow(((1, self.head_dim), (1, self.v_dim)), groups=self.num_kv_heads)


@dataclass(frozen=True, kw_only=True)
class LRKV(Common):
    """Low-Rank Key-Value attention: one shared key and value, and a rank-R residual a head.

    position: where RoPE acts. `full` rotates the whole key k_s + B z (the paper's training form),
    `shared` rotates the shared part only, `none` nothing.
    """

    num_heads: int = 8
    """N."""
    rank: int = 32
    """R of the residuals of keys and of values; 0 is MQA."""
    position: Literal["full", "none", "shared"] = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("attention", num_heads=self.num_heads)
        require_not_negative("attention", rank=self.rank)
        require_choice("attention", position=(self.position, ("full", "none", "shared")))
        if self.position == "none":
            self.check_unrotated()
        else:
            self.check_rope("head_dim", self.head_dim)

    def expanded(self) -> GQA:
        """The MHA that it equals with position `full`."""
        N = self.num_heads
        return GQA(num_heads=N, num_kv_heads=N, **self.common())

    def summary(self) -> str:
        return f"LRKV N {self.num_heads}, H {self.head_dim}, R {self.rank}, {self.position}"

    def cache_row(self) -> CacheRow:
        """[k_s | Z^K | v_s | Z^V]: H + H_v + 2·N·R elements."""
        residual = ((self.num_heads, self.rank),) if self.rank else ()
        # Without a residual the norm acts on the shared key before it is stored, as in MQA.
        scales = self.num_heads if self.rank and self.qk_norm != "none" else 0
        parts = ((1, self.head_dim), *residual, (1, self.v_dim), *residual)
        return CacheRow(parts, scales=scales)


Attention = GQA | MLA | MFA | VHA | LRKV
MECHANISMS: dict[str, type] = {"gqa": GQA, "mla": MLA, "mfa": MFA, "vha": VHA, "lrkv": LRKV}
