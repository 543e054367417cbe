"""A float64 NumPy transformer written apart from the library, and helpers to compare with it.

Parameters are the library's dict of arrays by path, layers stacked on axis 0. VHA is written as the
paper does it: Postmix on the head axis first, W_O afterwards.
"""

import dataclasses
import functools

import jax
import numpy as np
from jaxtyping import Bool, Float, Float64, Int

from vhajax import config, transformer
from vhajax.sharding import make_mesh, named_arrays, with_arrays

Params = dict[str, np.ndarray]

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
    """float32 weights that hide no mistake: no norm weight is 1, no Postmix the identity."""
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
        else:  # 1/√fan-in: [N, H, D] contracts two axes, [K, Q, H] its second
            axes = {"out": (1, 2), "premix": (2,)}.get(kind, (1,))
            noise = noise / np.sqrt(np.prod([leaf.shape[axis] for axis in axes]))
        params[name] = noise.astype(np.float32)
    return params


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


def rotate(
    x: Float[np.ndarray, "B T N H"], positions: Int[np.ndarray, "B T"], theta: float
) -> Float64[np.ndarray, "B T N H"]:
    """RoPE as a product of complex numbers x[i] + i·x[i + H/2]."""
    half = x.shape[-1] // 2
    phases = positions[:, :, None, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * phases)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def softmax(x: np.ndarray) -> np.ndarray:
    exp = np.exp(x - x.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def document_mask(segments: Int[np.ndarray, "B T"]) -> Bool[np.ndarray, "B T T"]:
    B, T = segments.shape
    mask = np.zeros((B, T, T), bool)
    for b in range(B):
        for query in range(T):
            for key in range(query + 1):
                mask[b, query, key] = segments[b, query] == segments[b, key]
    return mask


def attention(
    q: Float[np.ndarray, "B T N H"],
    k: Float[np.ndarray, "B S K H"],
    v: Float[np.ndarray, "B S K H"],
    mask: Bool[np.ndarray, "B T S"],
) -> Float64[np.ndarray, "B T N H"]:
    """One head after another; query head n reads KV head n // (N / K)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    N, K, H = q.shape[2], k.shape[2], q.shape[3]
    out = np.zeros(q.shape)
    for n in range(N):
        kv = n // (N // K)
        logits = q[:, :, n] @ k[:, :, kv].swapaxes(1, 2) / np.sqrt(H)
        out[:, :, n] = softmax(np.where(mask, logits, -np.inf)) @ v[:, :, kv]
    return out


def queries(cfg: config.Attention, p: Params, x: np.ndarray) -> np.ndarray:
    """[B, T, D] → [B, T, N, H], before norm and RoPE."""
    if isinstance(cfg, config.GQA):
        return np.einsum("btd,dnh->btnh", x, p["attention.query"])
    physical = [x @ p["attention.query"][:, i] for i in range(cfg.num_physical_heads)]
    virtual = [q @ W for W in p["attention.premix"] for q in physical]
    return np.stack(virtual, axis=2)


def attention_block(cfg: config.Model, p: Params, x: np.ndarray, positions, mask) -> np.ndarray:
    att = cfg.attention

    def qk_norm(heads: np.ndarray, side: str) -> np.ndarray:
        if att.qk_norm == "none":
            return heads
        return rms_norm(heads, p.get(f"attention.{side}_norm.scale"), cfg.norm_eps)

    q = rotate(qk_norm(queries(att, p, x), "query"), positions, att.rope_theta)
    k = np.einsum("btd,dkh->btkh", x, p["attention.key"])
    k = rotate(qk_norm(k, "key"), positions, att.rope_theta)
    v = np.einsum("btd,dkh->btkh", x, p["attention.value"])
    o = attention(q, k, v, mask)
    if isinstance(att, config.VHA):
        low = np.einsum("jr,btjh->btrh", p["attention.postmix_u"], o)
        o = o + np.einsum("nr,btrh->btnh", p["attention.postmix_v"], low)
    return np.einsum("btnh,nhd->btd", o, p["attention.out"])


def feed_forward(cfg: config.Model, p: Params, x: np.ndarray) -> np.ndarray:
    up = x @ p["ffn.up"]
    if cfg.ffn == "relu2":
        return np.maximum(up, 0) ** 2 @ p["ffn.down"]
    gate = x @ p["ffn.gate"]
    return gate / (1 + np.exp(-gate)) * up @ p["ffn.down"]


# ------------------------------------------------------------------ model


def hidden(cfg: config.Model, params: Params, tokens, positions, segments) -> np.ndarray:
    """[B, T] → [B, T, D] after the last norm."""
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    mask = document_mask(segments)
    x = params["embedding"][tokens]
    for layer in range(cfg.num_layers):
        p = {n[len("blocks.") :]: v[layer] for n, v in params.items() if n.startswith("blocks.")}
        normed = rms_norm(x, p.get("attention_norm.scale"), cfg.norm_eps)
        x = x + attention_block(cfg, p, normed, positions, mask)
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
    N, K, P = vha.num_heads, vha.num_kv_heads, vha.num_physical_heads
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    part = {n: params.pop(f"blocks.attention.{n}") for n in ("premix", "postmix_u", "postmix_v")}
    query, out = params["blocks.attention.query"], params["blocks.attention.out"]
    folded_query = np.zeros((cfg.num_layers, cfg.dim, N, vha.head_dim))
    folded_out = np.zeros(out.shape)
    for layer in range(cfg.num_layers):
        for k in range(K):
            for p in range(P):
                W = part["premix"][layer, k]
                folded_query[layer, :, k * P + p] = query[layer, :, p] @ W
        M = np.eye(N) + part["postmix_v"][layer] @ part["postmix_u"][layer].T
        for j in range(N):
            folded_out[layer, j] = sum(M[h, j] * out[layer, h] for h in range(N))
    params |= {"blocks.attention.query": folded_query, "blocks.attention.out": folded_out}
    shared = {n: getattr(vha, n) for n in ("num_kv_heads", "head_dim", "qk_norm", "rope_theta")}
    return dataclasses.replace(cfg, attention=config.GQA(num_heads=N, **shared)), params


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
