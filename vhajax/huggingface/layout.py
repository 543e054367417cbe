"""Which transformers architecture a model is, its `config.json`, and the names of its tensors.

No JAX here: what has no counterpart is refused at once. Three dense architectures are known, alike
but for what they can have: Llama (no QK-norm, no windows; biases on all four projections of
attention or on none), Qwen2 (biases on queries, keys and values; windows) and Qwen3 (QK-norm;
biases as Llama; windows). Their rotary embedding pairs the halves of a head, as ours does.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from vhajax import config, targets
from vhajax.config import GQA, LRKV, VHA
from vhajax.mechanisms import RopeScaling, require

LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
MODEL_TYPES = {LLAMA: "llama", QWEN2: "qwen2", QWEN3: "qwen3"}
HEADS = "blocks.attention."


def plain(model: config.Model) -> config.Model:
    """The model as an architecture of transformers has it: VHA folded, LRKV expanded to MHA.

    Raises:
      UserError: it has something that none of them has, which is named.
    """
    attention = model.attention
    require(
        isinstance(attention, GQA | VHA | LRKV),
        f"{attention.summary()} has no counterpart in transformers that keeps what it caches; "
        "export GQA, VHA or LRKV.",
    )
    if isinstance(attention, VHA):
        attention = attention.folded()
    elif isinstance(attention, LRKV):
        targets.check_expands(attention)
        attention = attention.expanded()
    made = dataclasses.replace(model, attention=attention)
    for present, field, value, thing in _foreign(made):
        require(
            not present,
            f"{field} is {value!r}, and no plain architecture of transformers has {thing}; "
            "such a model cannot be exported.",
        )
    return made


def _foreign(model: config.Model) -> Iterator[tuple[bool, str, Any, str]]:
    """What no architecture has: whether it is there, its field and value, what it is."""
    attention, kind, sizes = model.attention, model.attention.qk_norm, set(model.layer_windows)
    gate, cap, width = attention.output_gate, attention.logit_cap, attention.value_dim
    yield gate, "attention.output_gate", gate, "a gate on heads' outputs, which does not fold"
    yield cap > 0, "attention.logit_cap", cap, "a soft cap on attention's logits"
    other = attention.v_dim != attention.head_dim
    yield other, "attention.value_dim", width, "value heads of another width than keys"
    yield kind == "weightless", "attention.qk_norm", kind, "norms without weights"
    yield model.norm == "weightless", "model.norm", model.norm, "norms without weights"
    yield model.ffn != "swiglu", "model.ffn", model.ffn, "a squared ReLU"
    yield len(sizes - {0}) > 1, "model.windows", model.windows, "windows of several sizes"
    bias = bool(sizes - {0}) and attention.out_bias and kind == "none"
    yield bias, "attention.out_bias", True, "it together with windows and without QK-norm"


def architecture(model: config.Model) -> str:
    """The one that has what this plain model has."""
    attention = model.attention
    if attention.qk_norm == "weighted":
        return QWEN3
    if model.layer_windows or (attention.qkv_bias and not attention.out_bias):
        return QWEN2
    return LLAMA


# ------------------------------------------------------------------ tensors


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint.

    name, shape: in the checkpoint. path: our parameter; None for zeros that the architecture must
    have. layer: which of the stacked layers; None for what is not in a block. A matrix is
    [outputs, inputs] there and [inputs, outputs] here, with heads of their own axis; a table may
    have more rows here.
    """

    name: str
    path: str | None
    layer: int | None
    shape: tuple[int, ...]
    kind: Literal["table", "matrix", "vector"]


def tensors(model: config.Model, name: str) -> list[Tensor]:
    """Every tensor of a plain model as architecture `name`, in the order of the layers."""
    V, D = model.vocab_size, model.dim
    found = [Tensor("model.embed_tokens.weight", "embedding", None, (V, D), "table")]
    for layer in range(model.num_layers):
        found += _block(model, name, layer)
    found.append(Tensor("model.norm.weight", "norm.scale", None, (D,), "vector"))
    if not model.tied:
        found.append(Tensor("lm_head.weight", "unembedding", None, (V, D), "table"))
    return found


def _block(model: config.Model, name: str, layer: int) -> Iterator[Tensor]:
    D, F, attention = model.dim, model.ffn_dim, model.attention
    assert isinstance(attention, GQA)
    H, N, K = attention.head_dim, attention.num_heads, attention.num_kv_heads

    def tensor(there: str, path: str | None, *shape: int) -> Tensor:
        kind = "matrix" if len(shape) == 2 else "vector"
        return Tensor(f"model.layers.{layer}.{there}", path, layer, shape, kind)

    yield tensor("input_layernorm.weight", "blocks.attention_norm.scale", D)
    here = {"q": "query", "k": "key", "v": "value"}
    for short, size in (("q", N * H), ("k", K * H), ("v", K * H)):
        path = f"{HEADS}{here[short]}"
        yield tensor(f"self_attn.{short}_proj.weight", path, size, D)
        if _has_bias(attention, name):
            bias = f"{path}_bias" if attention.qkv_bias else None
            yield tensor(f"self_attn.{short}_proj.bias", bias, size)
    yield tensor("self_attn.o_proj.weight", f"{HEADS}out", D, N * H)
    if _has_bias(attention, name) and name != QWEN2:
        bias = f"{HEADS}out_bias" if attention.out_bias else None
        yield tensor("self_attn.o_proj.bias", bias, D)
    if name == QWEN3:
        yield tensor("self_attn.q_norm.weight", f"{HEADS}query_norm.scale", H)
        yield tensor("self_attn.k_norm.weight", f"{HEADS}key_norm.scale", H)
    yield tensor("post_attention_layernorm.weight", "blocks.ffn_norm.scale", D)
    for side in ("gate", "up"):
        yield tensor(f"mlp.{side}_proj.weight", f"blocks.ffn.{side}", F, D)
    yield tensor("mlp.down_proj.weight", "blocks.ffn.down", D, F)


def _has_bias(attention: GQA, name: str) -> bool:
    return name == QWEN2 or attention.qkv_bias or attention.out_bias


# ------------------------------------------------------------------ config.json


def to_config(model: config.Model, context: int, dtype: str) -> dict[str, Any]:
    """`config.json` of a plain model, for transformers 4 and 5.

    Args:
      context: longest context that it was made for, tokens.
      dtype: of the tensors.
    """
    attention, name = model.attention, architecture(model)
    assert isinstance(attention, GQA)
    scaling = attention.rope_scaling
    if scaling.kind != "none":
        context = max(context, int(scaling.factor * scaling.original_length))
    rope = _rope(scaling)
    tree = {
        "architectures": [name],
        "model_type": MODEL_TYPES[name],
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": dtype,
        # transformers 4 reads the first two, transformers 5 the third.
        "rope_theta": attention.rope_theta,
        "rope_scaling": None if scaling.kind == "none" else rope,
        "rope_parameters": {"rope_theta": attention.rope_theta, **rope},
    }
    if name != QWEN2:
        tree["attention_bias"] = attention.qkv_bias or attention.out_bias
    if name == LLAMA:
        return tree | {"mlp_bias": False}
    return tree | _windows(model)


def _rope(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.kind == "none":
        return {"rope_type": "default"}
    rope = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_length,
    }
    if scaling.kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor")
    else:
        names = ("beta_fast", "beta_slow", *(["attention_factor"] * bool(scaling.attention_factor)))
    return rope | {name: getattr(scaling, name) for name in names}


def _windows(model: config.Model) -> dict[str, Any]:
    sizes = model.layer_windows or (0,) * model.num_layers
    first = next((i for i, size in enumerate(sizes) if size), model.num_layers)
    return {
        "use_sliding_window": any(sizes),
        "sliding_window": max(sizes) or None,
        "max_window_layers": first,
        "layer_types": ["sliding_attention" if size else "full_attention" for size in sizes],
    }


def from_config(tree: dict[str, Any], source: str) -> tuple[config.Model, int]:
    """The plain model that a `config.json` describes, and its longest context.

    Args:
      source: what to call it.
    Raises:
      UserError: an unknown architecture, something that is not built here, or a field that is
        missing or of the wrong type.
    """
    name = _name(tree, source)
    _refuse_foreign(tree, source)
    get = _Reader(tree, source)
    N, D = get.whole("num_attention_heads"), get.whole("hidden_size")
    bias = name == QWEN2 or get.flag("attention_bias", False)
    context = get.whole("max_position_embeddings")
    theta, scaling = _read_rope(get, context)
    attention = GQA(
        num_heads=N,
        num_kv_heads=get.whole("num_key_value_heads", N),
        head_dim=get.whole("head_dim", 128 if name == QWEN3 else D // N),
        qk_norm="weighted" if name == QWEN3 else "none",
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=bias,
        out_bias=bias and name != QWEN2,
    )
    layers = get.whole("num_hidden_layers")
    model = config.Model(
        vocab_size=get.whole("vocab_size"),
        dim=D,
        num_layers=layers,
        attention=attention,
        windows=() if name == LLAMA else _read_windows(get, layers),
        ffn_dim=get.whole("intermediate_size"),
        norm_eps=get.number("rms_norm_eps", 1e-6),
        tied=get.flag("tie_word_embeddings", False),
    )
    return model, context


def _name(tree: dict[str, Any], source: str) -> str:
    names = tree.get("architectures")
    require(
        isinstance(names, list) and len(names) == 1 and names[0] in [*MODEL_TYPES],
        f"architectures is {names!r} in {source}; vhajax imports one of {', '.join(MODEL_TYPES)}.",
    )
    return tree["architectures"][0]


def _refuse_foreign(tree: dict[str, Any], source: str) -> None:
    """What these three can have in transformers and not here."""
    for key, plain_values in {
        "hidden_act": ("silu", None),
        "mlp_bias": (False, None),
        "partial_rotary_factor": (1, None),
        "quantization_config": (None,),
    }.items():
        require(
            tree.get(key) in plain_values,
            f"{key} is {tree.get(key)!r} in {source}, which is not built here; "
            f"only {plain_values[0]!r} is.",
        )


class _Reader:
    """Fields of a `config.json`, checked for their type; None counts as missing."""

    def __init__(self, tree: dict[str, Any], source: str):
        self.tree, self.source = tree, source

    def _get(self, name: str, kinds: tuple[type, ...], default: Any) -> Any:
        value = self.tree.get(name)
        value = default if value is None else value
        require(value is not None, f"{self.source} has no {name}; it is incomplete.")
        wanted = " or ".join(kind.__name__ for kind in kinds)
        require(type(value) in kinds, f"{name} is {value!r} in {self.source}; it must be {wanted}.")
        return value

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._get(name, (int,), default)
        require(value >= least, f"{name} is {value} in {self.source}; it must be {least} or more.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._get(name, (float, int), default))

    def flag(self, name: str, default: bool) -> bool:
        return self._get(name, (bool,), default)

    def part(self, name: str) -> "_Reader":
        return _Reader(self._get(name, (dict,), {}), f"{name} of {self.source}")


def _read_rope(get: _Reader, context: int) -> tuple[float, RopeScaling]:
    """Base and scaling, from where transformers 5 has them or from where 4 has."""
    rope = get.part("rope_parameters" if get.tree.get("rope_parameters") else "rope_scaling")
    theta = rope.number("rope_theta", get.number("rope_theta", 10_000.0))
    kind = rope.tree.get("rope_type") or rope.tree.get("type") or "default"
    if kind == "default":
        return theta, RopeScaling()
    names = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow")}
    require(
        kind in [*names],
        f"The rope type is {kind!r} in {get.source}; vhajax knows default, llama3 and yarn.",
    )
    for name in ("mscale", "mscale_all_dim", "truncate", "partial_rotary_factor"):
        require(
            rope.tree.get(name) in (None, *((True,) if name == "truncate" else ())),
            f"{name} is {rope.tree.get(name)!r} in {rope.source}, which is not built here.",
        )
    more = {name: rope.number(name) for name in names[kind] if rope.tree.get(name) is not None}
    if kind == "yarn":
        more["attention_factor"] = rope.number("attention_factor", 0.0)
    length = rope.whole("original_max_position_embeddings", context)
    factor = rope.number("factor")
    return theta, RopeScaling(kind=kind, factor=factor, original_length=length, **more)


def _read_windows(get: _Reader, layers: int) -> tuple[int, ...]:
    if not get.flag("use_sliding_window", False):
        return ()
    size = get.whole("sliding_window")
    first = get.whole("max_window_layers", 28, least=0)
    by_number = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    kinds = get.tree.get("layer_types") or by_number
    known = {"full_attention": 0, "sliding_attention": size}
    require(
        isinstance(kinds, list) and len(kinds) == layers and all(k in [*known] for k in kinds),
        f"layer_types is {kinds!r} in {get.source}; it must name full_attention or "
        f"sliding_attention for each of {layers} layers.",
    )
    return tuple(known[kind] for kind in kinds)
