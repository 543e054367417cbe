"""Maps from a model to a model with the same function. Done in float32, tested by logits."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from vhajax import config, targets, transformer, weights
from vhajax.attention.vha import fold_postmix, fold_premix
from vhajax.errors import UserError
from vhajax.sharding import with_arrays
from vhajax.weights import Params

HEADS = "blocks.attention."


def to_gqa(model: config.Model, params: Params) -> tuple[config.Model, Params]:
    """VHA → GQA with the same KV heads: Premix goes into W_Q, Postmix into W_O.

    Returns:
      The GQA configuration (N = K·P heads) and its parameters; same logits up to rounding.
    Raises:
      UserError: the model is not VHA.

    Source: Virtual Head Attention, abstract; W_Q'[k, p] = W_Q[p] W[k] and
    W_O'[j] = Σ_h (I + V Uᵀ)[h, j] W_O[h] as in the authors' folding script.
    """
    vha = model.attention
    if not isinstance(vha, config.VHA):
        raise UserError(
            f"Only VHA folds to GQA and this model is {vha.summary()}; leave it as it is."
        )
    folded = dict(params)
    part = lambda name: folded.pop(f"{HEADS}{name}")  # noqa: E731
    if vha.premix:
        premix, bias = part("premix"), f"{HEADS}query_bias"
        folded[f"{HEADS}query"] = jax.jit(jax.vmap(fold_premix))(part("query"), premix)
        if bias in folded:  # one more row of the projection
            whole = jax.jit(jax.vmap(fold_premix))(folded[bias][:, None], premix)
            folded[bias] = whole[:, 0]
    if vha.rank:
        u, v = part("postmix_u"), part("postmix_v")
        folded[f"{HEADS}out"] = jax.jit(jax.vmap(fold_postmix))(u, v, part("out"))
    return dataclasses.replace(model, attention=vha.folded()), folded


def lrkv_to_mha(model: config.Model, params: Params) -> tuple[config.Model, Params]:
    """LRKV → MHA: W_n = W_shared + U_n B_nᵀ for keys and for values, every head the shared bias.

    Raises:
      UserError: its positions are not those that MHA has.

    Source: LRKV (arXiv 2601.11471), the training form.
    """
    lrkv = model.attention
    assert isinstance(lrkv, config.LRKV)
    targets.check_expands(lrkv)
    N = lrkv.num_heads
    expanded = dict(params)
    for name in ("key", "value"):
        shared = np.asarray(params[f"{HEADS}{name}"], np.float64)
        heads = np.repeat(shared[:, :, None], N, axis=2)
        if lrkv.rank:
            down, up = (
                np.asarray(expanded.pop(f"{HEADS}{name}_{side}"), np.float64)
                for side in ("down", "up")
            )
            heads += np.moveaxis(down @ up, 1, 2)  # [L, N, D, R] [L, N, R, H] → [L, D, N, H]
        expanded[f"{HEADS}{name}"] = heads.astype(np.float32)
        bias = f"{HEADS}{name}_bias"
        if bias in expanded:
            expanded[bias] = np.repeat(np.asarray(expanded[bias])[:, None], N, axis=1)
    return dataclasses.replace(model, attention=lrkv.expanded()), expanded


def as_gqa(model: config.Model, params: Params) -> tuple[config.Model, Params]:
    """GQA, VHA folded or LRKV expanded: what has its own keys and values, as GQA."""
    if isinstance(model.attention, config.VHA):
        return to_gqa(model, params)
    if isinstance(model.attention, config.LRKV):
        return lrkv_to_mha(model, params)
    return model, params


def repeat_heads(
    model: config.Model, params: Params, num_kv_heads: int
) -> tuple[config.Model, Params]:
    """GQA → GQA with a multiple of its KV heads (all of them is MHA): every head several times."""
    gqa = model.attention
    assert isinstance(gqa, config.GQA)
    assert num_kv_heads % gqa.num_kv_heads == 0
    repeated, times = dict(params), num_kv_heads // gqa.num_kv_heads
    for name in ("key", "value", "key_bias", "value_bias"):
        if (path := f"{HEADS}{name}") in params:
            repeated[path] = np.repeat(np.asarray(params[path]), times, axis=-2)
    wider = dataclasses.replace(gqa, num_kv_heads=num_kv_heads)
    return dataclasses.replace(model, attention=wider), repeated


def premix_drift(premix: jax.Array) -> tuple[float, float]:
    """How far Premix went: mean ‖W_k − I‖ (Frobenius), and how differently the KV groups went.

    The second is the mean pairwise ‖W_k − W_k'‖² over the mean ‖W_k − I‖²: 0 where groups learn one
    transform, 2 where independent ones (the authors' measure). premix: [L, K, H, H].
    """
    W = np.asarray(premix, np.float64)
    moved = W - np.eye(W.shape[-1])
    size = (moved**2).sum(axis=(-2, -1))
    K = W.shape[1]
    pairs = [((W[:, i] - W[:, j]) ** 2).sum(axis=(-2, -1)) for i in range(K) for j in range(i)]
    spread = float(np.mean(pairs) / np.mean(size)) if pairs else 0.0
    return float(np.sqrt(size).mean()), spread


def fold_run(run: Path, out: Path) -> float:
    """Writes the folded model of a VHA run as a run of its own, weights only.

    Returns:
      The largest difference of the two models' logits, in float32, on random tokens.
    Raises:
      UserError: the run is not VHA or has no sound checkpoint, or `out` exists.
    """
    weights.refuse_existing(out)
    model, params = weights.read(run)
    folded = to_gqa(model, params)
    weights.write_derived(run, out, *folded)
    return logit_difference((model, params), folded)


Weighted = tuple[config.Model, Params]


def logit_difference(one: Weighted, other: Weighted, tokens: np.ndarray | None = None) -> float:
    """max |logits − logits'| of two models of one vocabulary, both computed in float32.

    Args:
      tokens: [B, T] int32 (default: 4 × 64 at random).
    """
    vocab = one[0].vocab_size
    ids = _random(vocab) if tokens is None else tokens
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    segments, logits = np.ones(ids.shape, np.int32), []
    for cfg, params in (one, other):
        model = with_arrays(transformer.abstract(dataclasses.replace(cfg, dtype="float32")), params)
        logits.append(np.asarray(jax.jit(transformer.forward)(model, ids, positions, segments)))
    return float(np.abs(logits[0][..., :vocab] - logits[1][..., :vocab]).max())


def _random(vocab: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab, (4, 64)).astype(np.int32)
