"""Llama, Qwen2 and Qwen3 as transformers defines them, in float64 NumPy; nothing of vhajax.

config: a `config.json`. tensors: arrays by the names that transformers gives them; matrices are
[outputs, inputs]. A field that is missing has transformers' default.
"""

import math
from typing import Any

import numpy as np

Config = dict[str, Any]


def heads(config: Config) -> tuple[int, int, int]:
    """Query heads, KV heads, width of a head."""
    N, D = config["num_attention_heads"], config["hidden_size"]
    width = 128 if config["model_type"] == "qwen3" else D // N
    return N, config.get("num_key_value_heads") or N, config.get("head_dim") or width


def biases(config: Config) -> tuple[bool, bool]:
    """Whether queries, keys and values have biases, and whether the output has."""
    if config["model_type"] == "qwen2":
        return True, False
    both = config.get("attention_bias", False)
    return both, both


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that transformers looks for, and no other."""
    V, D, F = (config[name] for name in ("vocab_size", "hidden_size", "intermediate_size"))
    N, K, H = heads(config)
    found = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config.get("tie_word_embeddings", False):
        found["lm_head.weight"] = (V, D)
    for layer in range(config["num_hidden_layers"]):
        part: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (D,),
            "post_attention_layernorm.weight": (D,),
            "self_attn.q_proj.weight": (N * H, D),
            "self_attn.k_proj.weight": (K * H, D),
            "self_attn.v_proj.weight": (K * H, D),
            "self_attn.o_proj.weight": (D, N * H),
            "mlp.gate_proj.weight": (F, D),
            "mlp.up_proj.weight": (F, D),
            "mlp.down_proj.weight": (D, F),
        }
        inputs, output = biases(config)
        if inputs:
            part["self_attn.q_proj.bias"] = (N * H,)
            part["self_attn.k_proj.bias"] = part["self_attn.v_proj.bias"] = (K * H,)
        if output:
            part["self_attn.o_proj.bias"] = (D,)
        if config["model_type"] == "qwen3":
            part["self_attn.q_norm.weight"] = part["self_attn.k_norm.weight"] = (H,)
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in part.items()}
    return found


# ------------------------------------------------------------------ positions


def rotary(config: Config, version: int) -> tuple[np.ndarray, float]:
    """Frequencies [H / 2] and what cosine and sine are multiplied by.

    version: of transformers: 4 reads rope_theta and rope_scaling, 5 rope_parameters.
    """
    H = heads(config)[2]
    rope = dict(config["rope_parameters"] if version == 5 else config.get("rope_scaling") or {})
    base = rope.get("rope_theta") or config["rope_theta"]
    plain = np.array([1 / base ** (i / H) for i in range(0, H, 2)])
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return plain, 1.0
    factor = rope["factor"]
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    if kind == "llama3":
        return np.array([_llama3(f, rope, original) for f in plain]), 1.0
    assert kind == "yarn", kind

    def correction(turns: float) -> float:
        return H * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(correction(rope.get("beta_fast") or 32)), 0)
    high = min(math.ceil(correction(rope.get("beta_slow") or 1)), H - 1)
    ramp = np.clip((np.arange(H // 2) - low) / (high - low + 0.001 * (low == high)), 0, 1)
    told = rope.get("attention_factor")
    scale = (0.1 * math.log(factor) + 1 if factor > 1 else 1.0) if told is None else told
    return plain / factor * ramp + plain * (1 - ramp), scale


def _llama3(frequency: float, rope: Config, original: int) -> float:
    low, high, wavelength = rope["low_freq_factor"], rope["high_freq_factor"], math.tau / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / rope["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / rope["factor"] + smooth * frequency


def rotate_half(x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    return np.concatenate([-x[..., half:], x[..., :half]], axis=-1)


def visible(config: Config, layer: int, length: int) -> np.ndarray:
    """[queries, keys]: causal, and in a sliding layer the last `sliding_window` keys only."""
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if config["model_type"] == "llama" or window is None:
        return j <= i
    kinds = config.get("layer_types")
    slides = kinds[layer] == "sliding_attention" if kinds else layer >= config["max_window_layers"]
    return (j <= i) & (i - window < j) if slides else j <= i


# ------------------------------------------------------------------ model


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def logits(
    config: Config, tensors: dict[str, np.ndarray], tokens: np.ndarray, version: int = 5
) -> np.ndarray:
    """[T] → [T, V]. The tensors must be those that transformers looks for."""
    wanted = shapes(config)
    assert {name: x.shape for name, x in tensors.items()} == wanted
    weights = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    eps = config.get("rms_norm_eps", 1e-6)
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        p = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        mask = visible(config, layer, len(tokens))
        x = x + _attention(config, p, norm(x, p["input_layernorm.weight"], eps), mask, version)
        h = norm(x, p["post_attention_layernorm.weight"], eps)
        gate = h @ p["mlp.gate_proj.weight"].T
        up = h @ p["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p["mlp.down_proj.weight"].T
    tied = config.get("tie_word_embeddings", False)
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    return norm(x, weights["model.norm.weight"], eps) @ head.T


def _attention(
    config: Config, p: dict[str, np.ndarray], x: np.ndarray, mask: np.ndarray, version: int
) -> np.ndarray:
    N, K, H = heads(config)
    T = len(x)
    inputs, output = biases(config)

    def project(name: str, count: int) -> np.ndarray:
        y = x @ p[f"self_attn.{name}_proj.weight"].T
        y = y + p[f"self_attn.{name}_proj.bias"] if inputs else y
        return y.reshape(T, count, H)

    q, k, v = project("q", N), project("k", K), project("v", K)
    if config["model_type"] == "qwen3":
        eps = config.get("rms_norm_eps", 1e-6)
        q = norm(q, p["self_attn.q_norm.weight"], eps)
        k = norm(k, p["self_attn.k_norm.weight"], eps)
    frequencies, scale = rotary(config, version)
    angles = np.arange(T)[:, None] * np.concatenate([frequencies, frequencies])
    cos, sin = scale * np.cos(angles)[:, None], scale * np.sin(angles)[:, None]
    q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
    k, v = np.repeat(k, N // K, axis=1), np.repeat(v, N // K, axis=1)
    scores = np.einsum("inh,jnh->nij", q, k) * H**-0.5
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    y = np.einsum("nij,jnh->inh", weights, v).reshape(T, N * H) @ p["self_attn.o_proj.weight"].T
    return y + p["self_attn.o_proj.bias"] if output else y
