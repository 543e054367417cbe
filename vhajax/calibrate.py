"""Fewer KV heads, GQA-K → GQA-K', from a text: least squares on keys, values and block outputs.

Layer by layer. The student (K' heads) reads its own activations, so that it makes up for what its
earlier layers lost; what it should give, the teacher gives on the teacher's activations.
"""

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from vhajax import config, transformer
from vhajax.attention import GQAttention
from vhajax.attention.core import attend
from vhajax.data import Batch
from vhajax.fit import fit_keys, fit_output, fit_values
from vhajax.fold import HEADS, Params
from vhajax.merge import merge_heads
from vhajax.sharding import with_arrays


def merge_on_text(
    model: config.Model, params: Params, num_kv_heads: int, batches: Iterable[Batch]
) -> tuple[config.Model, Params]:
    """GQA-K → GQA-K' fitted on the tokens of some batches (see `fit.py`).

    Returns:
      The configuration, and parameters of which only attention's query, key, value and out differ.
    """
    student, merged = merge_heads(model, params, num_kv_heads)
    teacher_block, student_block = _block(model), _block(student)
    table, texts = np.asarray(params["embedding"]), list(batches)
    normed = model.attention.qk_norm != "none"
    theirs = [jnp.asarray(table[text["tokens"]]) for text in texts]
    ours, fitted = theirs, []
    for layer, window in enumerate(transformer.windows(model)):
        weights = {
            n[len("blocks.") :]: x[layer] for n, x in params.items() if n.startswith("blocks.")
        }
        part = {n.removeprefix("attention."): np.asarray(x) for n, x in weights.items()}
        teacher = with_arrays(teacher_block, weights)
        places = [(text["positions"], text["segments"], window) for text in texts]

        seen = [_observe(teacher, h, *p) for h, p in zip(theirs, places, strict=True)]
        k, v, y = (_rows(texts, arrays) for arrays in zip(*seen, strict=True))
        x = _rows(texts, [_normed(teacher, h) for h in ours])
        made = fit_keys(part, x, k, num_kv_heads, normed) | fit_values(part, x, v, num_kv_heads)

        changed = weights | {f"attention.{n}": a for n, a in made.items()}
        pupil = with_arrays(student_block, changed)
        mixed = [_mixed(pupil, h, *p) for h, p in zip(ours, places, strict=True)]
        bias = part.get("out_bias", np.float32(0))
        made["out"] = fit_output(made["out"], _rows(texts, mixed), y - bias)
        out = jnp.asarray(made["out"], jnp.float32)
        ours = [
            _finish(teacher, h, _project(o, out) + bias) for h, o in zip(ours, mixed, strict=True)
        ]
        theirs = [_finish(teacher, h, y) for h, (_, _, y) in zip(theirs, seen, strict=True)]
        fitted.append(made)
    for name in fitted[0]:
        merged[f"{HEADS}{name}"] = np.stack([made[name] for made in fitted]).astype(np.float32)
    return student, merged


def _block(model: config.Model) -> transformer.Block:
    """One block with shapes instead of arrays, computing in float32."""
    model = dataclasses.replace(model, dtype="float32")
    return jax.eval_shape(lambda: transformer.Block(model, jax.random.key(0)))


def _rows(texts: list[Batch], arrays: Iterable[jax.Array]) -> np.ndarray:
    """[B, T, …] of every batch → [M, …], the tokens one after another without padding."""
    pairs = zip(texts, arrays, strict=True)
    return np.concatenate([np.asarray(a)[text["segments"] > 0] for text, a in pairs])


@jax.jit
def _normed(block: transformer.Block, h: jax.Array) -> jax.Array:
    return block.attention_norm(h)


@functools.partial(jax.jit, static_argnums=4)
def _observe(block: transformer.Block, h, positions, segments, window):
    """Keys before norm and rotation, values, attention's output."""
    att, x = block.attention, block.attention_norm(h)
    return att.heads(x, "key"), att.heads(x, "value"), att(x, positions, segments, window)


@functools.partial(jax.jit, static_argnums=4)
def _mixed(block: transformer.Block, h, positions, segments, window) -> jax.Array:
    """What W_O reads: [B, T, N, H_v]."""
    att, x = block.attention, block.attention_norm(h)
    assert isinstance(att, GQAttention)
    q, k, v = att.project(x, positions)
    o = attend(q, k, v, segments, window, scale=att.scale, cap=att.cfg.logit_cap)
    if att.cfg.output_gate:
        o = o * jax.nn.sigmoid(jnp.einsum("BTD,DNH->BTNH", x, att.gate[...]))
    return o


@jax.jit
def _project(o: jax.Array, out: jax.Array) -> jax.Array:
    return jnp.einsum("BTNH,NHD->BTD", o, out, precision="highest")


@jax.jit
def _finish(block: transformer.Block, h: jax.Array, y: jax.Array) -> jax.Array:
    """The residual stream after a block whose attention gave y."""
    return block(h, lambda *_: (y, None))[0]
