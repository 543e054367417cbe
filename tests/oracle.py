"""A float64 NumPy transformer written apart from the library, and helpers to compare with it.

Parameters are the library's dict of arrays by path, layers stacked on axis 0. VHA is written as the
paper does it: Postmix on the head axis first, W_O afterwards.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from vhajax import config, transformer
from vhajax.mechanisms import Common, RopeScaling
from vhajax.sharding import make_mesh, named_arrays, with_arrays

Params = dict[str, np.ndarray]
UNSCALED = RopeScaling()

# ------------------------------------------------------------------ comparing


def assert_near(actual, expected, tolerance: float = 1e-5) -> None:
    """Every error is at most `tolerance` times the largest magnitude expected; infinities agree.

    The default is about 80 float32 roundings, for a chain of small sums.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    if finite.any():
        scale = np.abs(expected[finite]).max()
        error = np.abs(actual[finite] - expected[finite]).max()
        assert error <= tolerance * scale, f"error {error:.3g} at scale {scale:.3g}"


def assert_trees_near(actual: dict, expected: dict, tolerance: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        try:
            assert_near(actual[name], expected[name], tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


# ------------------------------------------------------------------ inputs


@functools.cache
def template(cfg: config.Model) -> transformer.Transformer:
    return transformer.abstract(cfg)


def random_params(cfg: config.Model, seed: int = 0) -> Params:
    """float32 weights that hide no mistake: no norm weight is 1, no bias 0, no Postmix I."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, leaf in named_arrays(template(cfg)).items():
        noise = rng.standard_normal(leaf.shape)
        kind = name.rsplit(".", 1)[-1]
        if kind == "scale":
            noise = 1 + 0.3 * noise
        elif kind in ("postmix_u", "postmix_v"):
            noise = 0.5 * noise
        elif kind == "embedding":  # small, so that a tied model does not just repeat its input
            noise = 0.1 * noise
        elif kind.endswith("_bias"):
            noise = 0.3 * noise
        else:
            noise = noise / np.sqrt(fan_in(cfg, kind, leaf.shape))
        params[name] = noise.astype(np.float32)
    return params


def fan_in(cfg: config.Model, kind: str, shape: tuple[int, ...]) -> int:
    """What a weight [layers, …] contracts: its first own axis, but for the few named here."""
    axes = {"out": (1, 2), "premix": (2,), "key_down": (2,), "value_down": (2,)}
    if isinstance(cfg.attention, config.LRKV):  # [N, R, H]; MLA's are [C, N, H]
        axes |= {"key_up": (2,), "value_up": (2,)}
    return int(np.prod([shape[axis] for axis in axes.get(kind, (1,))]))


def build(cfg: config.Model, params: dict) -> transformer.Transformer:
    """The library's model with these parameters."""
    return with_arrays(template(cfg), params)


def mesh_of(data: int, model: int) -> jax.sharding.Mesh:
    return make_mesh(config.Mesh(data=data, model=model))


def documents(lengths: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Positions and segments [B, T] int32 of rows whose documents have these lengths."""
    rows = [np.concatenate([np.arange(n) for n in row]) for row in lengths]
    ids = [np.repeat(np.arange(len(row)), row) for row in lengths]
    return np.stack(rows).astype(np.int32), np.stack(ids).astype(np.int32)


def random_tokens(shape: tuple[int, ...], vocab_size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, shape, dtype=np.int32)


def random_batch(cfg: config.Model, lengths: list[list[int]], seed: int = 0) -> dict:
    """A batch of `step` whose rows hold these documents and score unequal numbers of tokens."""
    positions, segments = documents(lengths)
    rng = np.random.default_rng(seed)
    keep = rng.random(positions.shape) < np.linspace(0.2, 1, len(positions))[:, None]
    return {
        "tokens": random_tokens(positions.shape, cfg.vocab_size, seed),
        "targets": random_tokens(positions.shape, cfg.vocab_size, seed + 1),
        "positions": positions,
        "segments": segments,
        "weights": keep.astype(np.float32),
    }


# ------------------------------------------------------------------ layers


def rms_norm(x: np.ndarray, scale: np.ndarray | None, eps: float) -> np.ndarray:
    normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return normed if scale is None else normed * np.asarray(scale, np.float64)


def frequencies(width: int, theta: float, scaling: Any) -> np.ndarray:
    """Radians a position, pair by pair, as Hugging Face's `modeling_rope_utils` has them."""
    found = []
    for i in range(width // 2):
        frequency = theta ** (-2 * i / width)
        if scaling.kind == "llama3":
            frequency = llama3(frequency, scaling)
        elif scaling.kind == "yarn":
            frequency = yarn(frequency, i, width, theta, scaling)
        found.append(frequency)
    return np.array(found)


def llama3(frequency: float, scaling: Any) -> float:
    """Long wavelengths are stretched by the factor, short ones stay, in between a mean of both."""
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_length / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_length / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = scaling.original_length / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def yarn(frequency: float, pair: int, width: int, theta: float, scaling: Any) -> float:
    """A ramp over pairs, from the one that turns beta_fast times to the one of beta_slow turns."""

    def correction(turns: float) -> float:
        long = math.log(scaling.original_length / (turns * 2 * math.pi))
        return width * long / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), width - 1)
    if low == high:
        high += 0.001
    ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
    return frequency / scaling.factor * ramp + frequency * (1 - ramp)


def magnitude(scaling: Any) -> float:
    """What YaRN multiplies cosine and sine by."""
    if scaling.kind != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1


def rotate(
    x: Float[np.ndarray, "B T N H"],
    positions: Int[np.ndarray, "B T"],
    theta: float,
    scaling: Any = UNSCALED,
) -> Float64[np.ndarray, "B T N H"]:
    """RoPE as a product of complex numbers x[i] + i·x[i + H/2]."""
    half = x.shape[-1] // 2
    phases = positions[:, :, None, None] * frequencies(2 * half, theta, scaling)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * phases) * magnitude(scaling)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def softmax(x: np.ndarray) -> np.ndarray:
    exp = np.exp(x - x.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def document_mask(segments: Int[np.ndarray, "B T"], window: int = 0) -> Bool[np.ndarray, "B T T"]:
    """Keys of a query's own document, not after it and among the last `window` tokens (0: all)."""
    B, T = segments.shape
    mask = np.zeros((B, T, T), bool)
    for b in range(B):
        for query in range(T):
            for key in range(max(0, query + 1 - window) if window else 0, query + 1):
                mask[b, query, key] = segments[b, query] == segments[b, key]
    return mask


def attention(
    q: Float[np.ndarray, "B T N H"],
    k: Float[np.ndarray, "B S K H"],
    v: Float[np.ndarray, "B S K V"],
    mask: Bool[np.ndarray, "B T S"],
    scale: float = 0.0,
    cap: float = 0.0,
) -> Float64[np.ndarray, "B T N V"]:
    """One head after another; query head n reads KV head n // (N / K). scale: 1/√H by default."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    N, K = q.shape[2], k.shape[2]
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for n in range(N):
        kv = n // (N // K)
        logits = q[:, :, n] @ k[:, :, kv].swapaxes(1, 2) * (scale or q.shape[3] ** -0.5)
        if cap:
            logits = cap * np.tanh(logits / cap)
        out[:, :, n] = softmax(np.where(mask, logits, -np.inf)) @ v[:, :, kv]
    return out


class Layer:
    """One layer's attention, as the papers write it: keys and values of all heads are formed.

    p: the layer's weights by their name in the attention module.
    """

    def __init__(self, cfg: config.Model, p: Params, positions: np.ndarray):
        self.att, self.eps, self.p, self.positions = cfg.attention, cfg.norm_eps, p, positions

    def norm(self, x: np.ndarray, name: str, kind: str) -> np.ndarray:
        return x if kind == "none" else rms_norm(x, self.p.get(f"{name}.scale"), self.eps)

    def qk_norm(self, x: np.ndarray, side: str) -> np.ndarray:
        return self.norm(x, f"{side}_norm", self.att.qk_norm)

    def turn(self, x: np.ndarray) -> np.ndarray:
        return rotate(x, self.positions, self.att.rope_theta, self.att.rope_scaling)

    def project(self, x: np.ndarray, name: str) -> np.ndarray:
        """x W + b, with or without a head axis."""
        y = np.tensordot(x, self.p[name], axes=1)
        return y + self.p[f"{name}_bias"] if self.att.qkv_bias else y

    def plain_queries(self, x: np.ndarray) -> np.ndarray:
        """[B, T, D] → [B, T, N, H], before norm and RoPE."""
        if "query_latent" in self.p:
            x = self.norm(x @ self.p["query_latent"], "query_latent_norm", self.att.latent_norm)
        physical = self.project(x, "query")
        if "premix" not in self.p:
            return physical
        heads = [physical[:, :, i] @ W for W in self.p["premix"] for i in range(physical.shape[2])]
        return np.stack(heads, axis=2)

    def parts(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, keys and values as they meet."""
        if isinstance(self.att, config.MLA):
            return self.mla(x)
        if isinstance(self.att, config.LRKV):
            return self.lrkv(x)
        q = self.turn(self.qk_norm(self.plain_queries(x), "query"))
        k = self.turn(self.qk_norm(self.project(x, "key"), "key"))
        return q, k, self.project(x, "value")

    def mla(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        att, p = self.att, self.p
        latent = self.norm(self.project(x, "latent"), "latent_norm", att.latent_norm)
        keys = [latent @ p["key_up"][:, n] for n in range(att.num_heads)]
        values = [latent @ p["value_up"][:, n] for n in range(att.num_heads)]
        if att.position == "decoupled":
            shared = self.project(x, "shared_key")
            keys = [np.concatenate([key, shared], axis=-1) for key in keys]
        q = self.qk_norm(self.plain_queries(x), "query")
        k = self.qk_norm(np.stack(keys, axis=2), "key")
        turned = {"decoupled": att.rope_dim, "full": att.head_dim, "none": 0}[att.position]
        split = q.shape[-1] - turned
        if turned:
            q, k = (
                np.concatenate([y[..., :split], self.turn(y[..., split:])], axis=-1) for y in (q, k)
            )
        return q, k, np.stack(values, axis=2)

    def lrkv(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        att = self.att
        q = self.qk_norm(self.plain_queries(x), "query")
        (shared, residual), value = self.low_rank(x, "key"), sum(self.low_rank(x, "value"))
        if att.position != "shared":
            k = self.qk_norm(shared + residual, "key")
            return (q, k, value) if att.position == "none" else (self.turn(q), self.turn(k), value)
        if att.qk_norm != "none":  # of the sum, which scales both of its terms
            total = shared + residual
            factor = 1 / np.sqrt((total * total).mean(axis=-1, keepdims=True) + self.eps)
            factor = factor * self.p.get("key_norm.scale", 1.0)
            shared, residual = shared * factor, residual * factor
        q = np.concatenate([self.turn(q), q], axis=-1)
        return q, np.concatenate([self.turn(shared), residual], axis=-1), value

    def low_rank(self, x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
        """x W_shared and x U_n B_nᵀ, [B, T, N, H] each."""
        shared = self.project(x, name)
        shared = np.stack([shared] * self.att.num_heads, axis=2)
        if not self.att.rank:
            return shared, np.zeros_like(shared)
        pairs = zip(self.p[f"{name}_down"], self.p[f"{name}_up"], strict=True)
        return shared, np.stack([x @ (down @ up) for down, up in pairs], axis=2)

    def __call__(self, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
        att, p = self.att, self.p
        width = att.head_dim + (att.shared_key_dim if isinstance(att, config.MLA) else 0)
        o = attention(*self.parts(x), mask, width**-0.5, att.logit_cap)
        if att.output_gate:
            o = o / (1 + np.exp(-np.tensordot(x, p["gate"], axes=1)))
        if "postmix_u" in p:  # on the head axis, the same for every channel
            M = np.eye(o.shape[2]) + p["postmix_v"] @ p["postmix_u"].T
            o = np.einsum("nm,btmh->btnh", M, o)
        y = np.einsum("btnh,nhd->btd", o, p["out"])
        return y + p["out_bias"] if att.out_bias else y


def feed_forward(cfg: config.Model, p: Params, x: np.ndarray) -> np.ndarray:
    up = x @ p["ffn.up"]
    if cfg.ffn == "relu2":
        return np.maximum(up, 0) ** 2 @ p["ffn.down"]
    gate = x @ p["ffn.gate"]
    return gate / (1 + np.exp(-gate)) * up @ p["ffn.down"]


# ------------------------------------------------------------------ model


def under(params: Params, prefix: str, layer: int | None = None) -> Params:
    """The weights below a prefix, of one layer where they are stacked."""
    return {
        name.removeprefix(prefix): value if layer is None else value[layer]
        for name, value in params.items()
        if name.startswith(prefix)
    }


def hidden(cfg: config.Model, params: Params, tokens, positions, segments) -> np.ndarray:
    """[B, T] → [B, T, D] after the last norm."""
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    x = params["embedding"][tokens]
    for layer in range(cfg.num_layers):
        p = under(params, "blocks.", layer)
        window = cfg.windows[layer % len(cfg.windows)] if cfg.windows else 0
        attend = Layer(cfg, under(p, "attention."), positions)
        normed = rms_norm(x, p.get("attention_norm.scale"), cfg.norm_eps)
        x = x + attend(normed, document_mask(segments, window))
        x = x + feed_forward(cfg, p, rms_norm(x, p.get("ffn_norm.scale"), cfg.norm_eps))
    return rms_norm(x, params.get("norm.scale"), cfg.norm_eps)


def forward(cfg: config.Model, params: Params, tokens, positions, segments) -> np.ndarray:
    """[B, T] → [B, T, padded V] logits, padded ids at −inf."""
    table = np.asarray(params["embedding" if cfg.tied else "unembedding"], np.float64)
    logits = hidden(cfg, params, tokens, positions, segments) @ table.T
    logits[..., cfg.vocab_size :] = -np.inf
    return logits


def cross_entropy(x, table, targets, weights, vocab_size: int, z_loss: float = 0.0):
    """Σ w·(nll + z·lse²), Σ w·nll and the gradients of the first by x and by table."""
    x, weights = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    real = np.asarray(table, np.float64)[:vocab_size]
    logits = x @ real.T
    top = logits.max(axis=-1)
    lse = np.log(np.exp(logits - top[..., None]).sum(axis=-1)) + top
    hit = np.eye(vocab_size)[targets]
    nll = lse - (hit * logits).sum(axis=-1)
    slope = softmax(logits) * (1 + 2 * z_loss * lse)[..., None] - hit
    slope = slope * weights[..., None]
    dtable = np.zeros(table.shape)
    dtable[:vocab_size] = np.einsum("btv,btd->vd", slope, x)
    return (weights * (nll + z_loss * lse**2)).sum(), (weights * nll).sum(), slope @ real, dtable


def objective(cfg: config.Model, params: Params, batch: dict, z_loss: float = 0.0) -> float:
    """The mean over scored tokens of the training objective."""
    x = hidden(cfg, params, batch["tokens"], batch["positions"], batch["segments"])
    table = params["embedding" if cfg.tied else "unembedding"]
    scored = batch["targets"], batch["weights"], cfg.vocab_size, z_loss
    return cross_entropy(x, table, *scored)[0] / batch["weights"].sum()


def fold(cfg: config.Model, params: Params) -> tuple[config.Model, Params]:
    """VHA → GQA in float64, one head at a time: the paper's two equations."""
    vha = cfg.attention
    assert isinstance(vha, config.VHA)
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    names = [f"blocks.attention.{n}" for n in ("premix", "postmix_u", "postmix_v")]
    premix, u, v = (params.pop(name, None) for name in names)
    for name in ("blocks.attention.query", "blocks.attention.query_bias"):
        if premix is not None and name in params:
            pairs = zip(params[name], premix, strict=True)
            params[name] = np.stack([_fold_query(w, W) for w, W in pairs])
    if u is not None:
        out = params["blocks.attention.out"]
        folded = np.zeros(out.shape)
        for layer in range(cfg.num_layers):
            M = np.eye(vha.num_heads) + v[layer] @ u[layer].T
            for j in range(vha.num_heads):
                folded[layer, j] = sum(M[h, j] * out[layer, h] for h in range(vha.num_heads))
        params["blocks.attention.out"] = folded
    shared = {f.name: getattr(vha, f.name) for f in dataclasses.fields(Common)}
    gqa = config.GQA(num_heads=vha.num_heads, num_kv_heads=vha.num_kv_heads, **shared)
    return dataclasses.replace(cfg, attention=gqa), params


def _fold_query(query: np.ndarray, premix: np.ndarray) -> np.ndarray:
    """[…, P, Q], [K, Q, H] → […, K·P, H]."""
    heads = [query[..., p, :] @ W for W in premix for p in range(query.shape[-2])]
    return np.stack(heads, axis=-2)


# ------------------------------------------------------------------ optimiser


def adamw(p, g, mu, nu, count, lr, b1, b2, eps, decay=0.0):
    """One AdamW step (Loshchilov & Hutter 2019, algorithm 2): new p, mu, nu. count is from 1."""
    mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g * g
    unbiased = mu / (1 - b1**count) / (np.sqrt(nu / (1 - b2**count)) + eps)
    return p - lr * (unbiased + decay * p), mu, nu


def newton_schulz(x: np.ndarray) -> np.ndarray:
    """Muon's five quintic steps on the singular values alone: U f(S) Vᵀ."""
    u, s, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    s = s / (np.sqrt((s * s).sum()) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ vt
