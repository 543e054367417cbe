"""Parameters, FLOPs and bytes of a model, from its configuration alone; no JAX.

FLOPs are those of matrix products, 2 a multiply-add. Left out: norms, RoPE, softmax, gates and
other elementwise work (together under 5 % at D ≥ 512, H 128), recomputation and the optimizer.
Logits are counted over the padded vocabulary, as they are computed.

Causal attention is counted at half the square (S/2 keys a query, w − w²/2S in a window of w), what
a kernel that skips masked tiles does; `full_square` is what the written-out form computes.

VHA's FLOPs against GQA-8 at S 4096, 1.7B: −8.45 % (half, no logits), −7.11 % (half, logits),
−7.40 % (full square, no logits). The abstract's −7.9 % at 1.7B is none of them; the 0.6B shape with
logits gives −7.90 %.
"""

import dataclasses
from dataclasses import dataclass

from vhajax.config import GQA, LRKV, MFA, MLA, VHA, Attention, Model
from vhajax.mechanisms import require

ITEMSIZE = {"float32": 4, "bfloat16": 2}


# ------------------------------------------------------------------ parameters


@dataclass(frozen=True)
class Parameters:
    """Parameters by part, without the rows that pad the vocabulary.

    attention: matrices and biases. norms: all RMSNorm weights, those inside attention included.
    """

    embedding: int
    unembedding: int
    attention: int
    ffn: int
    norms: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def parameters(model: Model) -> Parameters:
    """What `transformer.num_params` counts, by part."""
    cfg, D, L = model.attention, model.dim, model.num_layers
    table = model.vocab_size * D
    attention = sum(projections(cfg, D).values()) + _mixers(cfg) + _biases(cfg, D)
    norms = (2 * L + 1) * D if model.norm == "weighted" else 0
    return Parameters(
        embedding=table,
        unembedding=0 if model.tied else table,
        attention=L * attention,
        ffn=L * _ffn(model),
        norms=norms + L * _attention_norms(cfg),
    )


def projections(cfg: Attention, D: int) -> dict[str, int]:
    """Elements of the matrices of one layer by name, VHA's mixers apart.

    In training a token passes each of them once, so these are also its multiply-adds.
    """
    out = cfg.num_heads * cfg.v_dim * D
    gate = {"gate": out} if cfg.output_gate else {}
    return {**_query(cfg, D), **_keys(cfg, D), **gate, "out": out}


def _query(cfg: Attention, D: int) -> dict[str, int]:
    if isinstance(cfg, VHA):
        return {"query": D * cfg.num_physical_heads * cfg.q_dim}
    heads = cfg.num_heads * cfg.key_dim
    if isinstance(cfg, MLA | MFA) and cfg.query_latent_dim:
        return {"query_latent": D * cfg.query_latent_dim, "query": cfg.query_latent_dim * heads}
    return {"query": D * heads}


def _keys(cfg: Attention, D: int) -> dict[str, int]:
    H, V, N = cfg.head_dim, cfg.v_dim, cfg.num_heads
    if isinstance(cfg, MLA):
        C = cfg.latent_dim
        down = {"latent": D * C, "shared_key": D * cfg.shared_key_dim}
        return {**down, "key_up": C * N * H, "value_up": C * N * V}
    if isinstance(cfg, LRKV):
        R = cfg.rank
        down = {"key_down": N * D * R, "value_down": N * D * R}
        return {"key": D * H, "value": D * V, **down, "key_up": N * R * H, "value_up": N * R * V}
    return {"key": D * cfg.num_kv_heads * H, "value": D * cfg.num_kv_heads * V}


def _mixers(cfg: Attention) -> int:
    """Premix [K, Q, H], Postmix U and V [N, r]."""
    if not isinstance(cfg, VHA):
        return 0
    premix = cfg.num_kv_heads * cfg.q_dim * cfg.head_dim if cfg.premix else 0
    return premix + 2 * cfg.num_heads * cfg.rank


def _biases(cfg: Attention, D: int) -> int:
    out = D if cfg.out_bias else 0
    if not cfg.qkv_bias:
        return out
    H, V = cfg.head_dim, cfg.v_dim
    if isinstance(cfg, VHA):
        query = cfg.num_physical_heads * cfg.q_dim
    else:
        query = cfg.num_heads * cfg.key_dim
    if isinstance(cfg, MLA):
        return out + query + cfg.latent_dim + cfg.shared_key_dim
    return out + query + (1 if isinstance(cfg, LRKV) else cfg.num_kv_heads) * (H + V)


def _attention_norms(cfg: Attention) -> int:
    """Weights of QK-norm and of the norms on latents, one layer's."""
    weights = 2 * cfg.key_dim if cfg.qk_norm == "weighted" else 0
    if isinstance(cfg, MLA | MFA) and cfg.latent_norm == "weighted":
        weights += cfg.query_latent_dim + (cfg.latent_dim if isinstance(cfg, MLA) else 0)
    return weights


def _ffn(model: Model) -> int:
    return (3 if model.ffn == "swiglu" else 2) * model.dim * model.ffn_dim


# ------------------------------------------------------------------ FLOPs


@dataclass(frozen=True)
class Flops:
    """FLOPs by part.

    scores: query · key and weights · value. mixing: Premix and Postmix of VHA.
    """

    projections: float
    scores: float
    mixing: float
    ffn: float
    logits: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    def times(self, factor: int) -> "Flops":
        return Flops(*(factor * part for part in dataclasses.astuple(self)))

    def over(self, count: int) -> "Flops":
        """A share, as in FLOPs a token of those of all tokens."""
        return Flops(*(part / count for part in dataclasses.astuple(self)))


def forward(
    model: Model,
    length: int,
    batch: int = 1,
    *,
    full_square: bool = False,
    postmix_per_step: bool = False,
) -> Flops:
    """The training forward of `batch` sequences of `length` tokens; training takes 3 times as much.

    Args:
      full_square: every query meets all S keys, windows or not, as in `attend_reference`.
      postmix_per_step: VHA's Postmix goes into W_O once a step, as this code does, at 2·N·r·H·D
        multiply-adds; False: 2·N·r·H a token, as papers count. Equal at D tokens a step.
    """
    cfg, D, L, tokens = model.attention, model.dim, model.num_layers, batch * length
    pairs = _twice_pairs(model, length, full_square)
    return Flops(
        projections=2 * tokens * L * sum(projections(cfg, D).values()),
        scores=batch * pairs * _pair(cfg),
        mixing=2 * L * _mixing(cfg, D, tokens, postmix_per_step),
        ffn=2 * tokens * L * _ffn(model),
        logits=2 * tokens * model.padded_vocab * D,
    )


def prefill(model: Model, length: int) -> Flops:
    """One prompt of `length` tokens in the training form; logits of its last token only."""
    whole = forward(model, length)
    return dataclasses.replace(whole, logits=2 * model.padded_vocab * model.dim)


def _twice_pairs(model: Model, S: int, full_square: bool) -> int:
    """Twice the (query, key) pairs that meet, over all layers: S² where a layer sees all."""
    if full_square:
        return 2 * S * S * model.num_layers
    return sum((2 * S - seen) * seen for seen in _seen(model, S))


def _seen(model: Model, S: int) -> list[int]:
    """Tokens that the last of S sees in each layer."""
    windows = model.layer_windows or (0,) * model.num_layers
    return [min(window or S, S) for window in windows]


def _pair(cfg: Attention) -> int:
    """Multiply-adds of one query position and one key, all heads, in training.

    LRKV in position `shared` runs attention over [P q | q] and [P k_s | B z]: scores twice as wide.
    """
    width = cfg.key_dim
    if isinstance(cfg, LRKV) and cfg.position == "shared" and cfg.rank:
        width *= 2
    return cfg.num_heads * (width + cfg.v_dim)


def _mixing(cfg: Attention, D: int, tokens: int, postmix_per_step: bool) -> int:
    """Multiply-adds of Premix and Postmix, one layer's."""
    if not isinstance(cfg, VHA):
        return 0
    premix = tokens * cfg.num_heads * cfg.q_dim * cfg.head_dim if cfg.premix else 0
    postmix = 2 * cfg.num_heads * cfg.rank * cfg.v_dim * (D if postmix_per_step else tokens)
    return premix + postmix


# ------------------------------------------------------------------ decoding


def decode(model: Model, context: int, batch: int = 1) -> Flops:
    """One step of `batch` sequences that see `context` tokens each, the new one included.

    A windowed layer is charged for its window, though the written-out form reads all slots and
    masks. VHA that is not folded (`folded`) folds its Postmix at every step.
    """
    cfg, D, L = model.attention, model.dim, model.num_layers
    return Flops(
        projections=2 * batch * L * _decode_projections(cfg, D),
        scores=2 * batch * sum(_seen(model, context)) * _slot(cfg),
        mixing=2 * L * _mixing(cfg, D, batch, postmix_per_step=True),
        ffn=2 * batch * L * _ffn(model),
        logits=2 * batch * model.padded_vocab * D,
    )


def _decode_projections(cfg: Attention, D: int) -> int:
    """Multiply-adds of one new token outside the scores, one layer's.

    The keys' up-projection meets the query (not in position `full`, where it is part of the
    scores), and the new token once more for the inverse RMS that QK-norm stores.
    """
    sizes = projections(cfg, D)
    total = sum(sizes.values())
    if not isinstance(cfg, MLA | LRKV):
        return total
    times = (cfg.position != "full") + (cfg.qk_norm != "none")
    return total + (times - 1) * sizes["key_up"]


def _slot(cfg: Attention) -> int:
    """Multiply-adds of one new token and one cached token, all heads.

    Where RoPE acts on a key that is a sum or an up-projection (LRKV and MLA in position `full`) an
    exact score costs H·R (H·C) a head, as much as forming the key; without it R (C).
    """
    N, H, V = cfg.num_heads, cfg.head_dim, cfg.v_dim
    if isinstance(cfg, MLA):
        C = cfg.latent_dim
        return N * ((H if cfg.position == "full" else 1) * C + cfg.shared_key_dim + C)
    if isinstance(cfg, LRKV):
        R = cfg.rank
        return N * (H + (H if cfg.position == "full" else 1) * R + V + R)
    return N * (H + V)


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes that one decode step reads."""

    weights: float
    cache: float

    @property
    def total(self) -> float:
        return self.weights + self.cache


def decode_bytes(model: Model, context: int, batch: int, itemsize: int) -> DecodeBytes:
    """One step: every weight once, and the cache rows (padded, scales included) that are seen.

    All weights at `itemsize`, though norms and biases are float32; of an untied embedding one row a
    sequence. A windowed layer stores the full length and reads its window.
    """
    count, D = parameters(model), model.dim
    tables = model.padded_vocab * D + (0 if model.tied else batch * D)
    weights = count.attention + count.ffn + count.norms + tables
    row = model.attention.cache_row().stored_bytes(itemsize)
    return DecodeBytes(weights * itemsize, batch * sum(_seen(model, context)) * row)


def folded(model: Model) -> Model:
    """The GQA model that a VHA model equals (`vhajax fold`), which is what serves."""
    cfg = model.attention
    if not isinstance(cfg, VHA):
        return model
    return dataclasses.replace(model, attention=cfg.folded())


# ------------------------------------------------------------------ cache


@dataclass(frozen=True)
class CacheBytes:
    """Bytes a token and layer.

    logical: as papers count. stored: an accelerator's padded row, and float32 scales. unpadded: the
    same on CPU. mha: logical, of MHA with the same heads.
    """

    logical: int
    stored: int
    unpadded: int
    mha: int

    @property
    def fraction(self) -> float:
        """Of MHA's cache, by logical bytes."""
        return self.logical / self.mha


def cache(cfg: Attention, itemsize: int) -> CacheBytes:
    row = cfg.cache_row()
    return CacheBytes(
        logical=row.logical_bytes(itemsize),
        stored=row.stored_bytes(itemsize),
        unpadded=row.stored_bytes(itemsize, packed=False),
        mha=cfg.num_heads * (cfg.head_dim + cfg.v_dim) * itemsize,
    )


def fit(model: Model, budget: int, itemsize: int) -> Model:
    """The model with the largest R (LRKV), C (MLA) or K (GQA, VHA; a divisor of N) that fits.

    MFA has nothing to choose and stays. VHA keeps N: with Premix P = N/K.

    Args:
      budget: logical cache bytes a token over all layers.
    Raises:
      UserError: nothing fits.
    """
    cfg = model.attention
    elements = budget // (model.num_layers * itemsize)  # a token and layer
    smallest, chosen = _largest(cfg, elements)
    require(
        smallest.cache_row().elements <= elements,
        f"--budget is {budget}, but the smallest cache of {cfg.summary()} over "
        f"{model.num_layers} layers is "
        f"{smallest.cache_row().logical_bytes(itemsize) * model.num_layers} bytes a token "
        f"({smallest.summary()}); raise the budget to that.",
    )
    return dataclasses.replace(model, attention=chosen)


def _largest(cfg: Attention, elements: int) -> tuple[Attention, Attention]:
    """The smallest cache of a mechanism, and its largest of at most `elements` if one fits."""
    if isinstance(cfg, MFA):
        return cfg, cfg
    if isinstance(cfg, LRKV):
        rank = (elements - cfg.head_dim - cfg.v_dim) // (2 * cfg.num_heads)
        made = [dataclasses.replace(cfg, rank=r) for r in (0, max(0, rank))]
    elif isinstance(cfg, MLA):
        widths = (1, max(1, elements - cfg.shared_key_dim))
        made = [dataclasses.replace(cfg, latent_dim=width) for width in widths]
    else:
        most = elements // (cfg.head_dim + cfg.v_dim)
        fitting = [K for K in range(1, min(most, cfg.num_heads) + 1) if cfg.num_heads % K == 0]
        made = [_with_kv_heads(cfg, K) for K in (1, max(fitting, default=1))]
    return made[0], made[1]


def _with_kv_heads(cfg: GQA | VHA, K: int) -> GQA | VHA:
    if isinstance(cfg, VHA) and cfg.premix:
        physical = cfg.num_heads // K
        return dataclasses.replace(cfg, num_kv_heads=K, num_physical_heads=physical)
    return dataclasses.replace(cfg, num_kv_heads=K)
