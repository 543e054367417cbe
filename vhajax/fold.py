"""Maps from a model to a model with the same function. Done in float32, tested by logits."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from vhajax import checkpoint, config, runs, transformer
from vhajax.attention.vha import fold_postmix, fold_premix
from vhajax.errors import UserError
from vhajax.mechanisms import Common
from vhajax.sharding import with_arrays
from vhajax.step import TrainState


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
            f"Only VHA folds to GQA and this model is {vha.summary()}; leave it as it is."
        )
    common = {f.name: getattr(vha, f.name) for f in dataclasses.fields(Common)}
    gqa = config.GQA(num_heads=vha.num_heads, num_kv_heads=vha.num_kv_heads, **common)
    folded = dict(params)
    part = lambda name: folded.pop(f"blocks.attention.{name}")  # noqa: E731
    if vha.premix:
        premix, bias = part("premix"), "blocks.attention.query_bias"
        folded["blocks.attention.query"] = jax.jit(jax.vmap(fold_premix))(part("query"), premix)
        if bias in folded:  # one more row of the projection
            whole = jax.jit(jax.vmap(fold_premix))(folded[bias][:, None], premix)
            folded[bias] = whole[:, 0]
    if vha.rank:
        u, v = part("postmix_u"), part("postmix_v")
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


def fold_run(run: Path, out: Path) -> float:
    """Writes the folded model of a VHA run as a run of its own, weights only.

    Returns:
      The largest difference of the two models' logits, in float32, on random tokens.
    Raises:
      UserError: the run is not VHA or has no sound checkpoint, or `out` exists.
    """
    if out.exists():
        raise UserError(f"{out} exists; name a new folder for the folded model.")
    experiment, newest = runs.read_config(run), checkpoint.latest(run)
    shapes = transformer.init_shapes(experiment.model, None)
    params = checkpoint.restore_params(run, newest, shapes)
    model, folded = to_gqa(experiment.model, params)
    runs.write_whole(out / runs.TOKENIZER, (run / runs.TOKENIZER).read_text(encoding="utf-8"))
    special = run / runs.SPECIAL_TOKENS
    if special.exists():
        runs.write_whole(out / runs.SPECIAL_TOKENS, special.read_text(encoding="utf-8"))
    target = dataclasses.replace(experiment, model=model)
    saver = checkpoint.Checkpointer(out, target, keep=1)
    saver.save(TrainState(folded, (), jnp.int32(newest)), weights_only=True)
    saver.finish()
    runs.write_whole(out / runs.CONFIG, config.to_json(target))  # last: now it is a run
    return logit_difference((experiment.model, params), (model, folded))


def logit_difference(
    one: tuple[config.Model, dict[str, jax.Array]], other: tuple[config.Model, dict[str, jax.Array]]
) -> float:
    """max |logits − logits'| of two models over 4 × 64 random tokens, both computed in float32."""
    shape, vocab = (4, 64), one[0].vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab, shape).astype(np.int32)
    positions, segments = np.tile(np.arange(64, dtype=np.int32), (4, 1)), np.ones(shape, np.int32)
    logits = []
    for cfg, params in (one, other):
        model = with_arrays(transformer.abstract(dataclasses.replace(cfg, dtype="float32")), params)
        logits.append(np.asarray(jax.jit(transformer.forward)(model, tokens, positions, segments)))
    return float(np.abs(logits[0][..., :vocab] - logits[1][..., :vocab]).max())
