"""Maps from a model to a model with the same function. Done in float32, tested by logits."""

import dataclasses

import jax
import numpy as np

from vhajax import config
from vhajax.attention.vha import fold_postmix, fold_premix
from vhajax.errors import UserError


def to_gqa(
    model: config.Model, params: dict[str, jax.Array]
) -> tuple[config.Model, dict[str, jax.Array]]:
    """VHA → GQA with the same KV heads: Premix goes into W_Q, Postmix into W_O.

    Args:
      model: a VHA configuration.
      params: float32 arrays by path, layers stacked: `blocks.attention.*` [L, …].
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
            f"only VHA folds to GQA and this model is {vha.summary()}; leave it as it is."
        )
    gqa = config.GQA(
        num_heads=vha.num_heads,
        num_kv_heads=vha.num_kv_heads,
        head_dim=vha.head_dim,
        qk_norm=vha.qk_norm,
        rope_theta=vha.rope_theta,
    )
    folded = dict(params)
    part = lambda name: folded.pop(f"blocks.attention.{name}")  # noqa: E731
    premix, u, v = part("premix"), part("postmix_u"), part("postmix_v")
    folded["blocks.attention.query"] = jax.jit(jax.vmap(fold_premix))(part("query"), premix)
    folded["blocks.attention.out"] = jax.jit(jax.vmap(fold_postmix))(u, v, part("out"))
    return dataclasses.replace(model, attention=gqa), folded


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
