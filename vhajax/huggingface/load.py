"""`vhajax import`: a published checkpoint of transformers as a run, weights only."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vhajax import config, transformer, weights
from vhajax.errors import UserError
from vhajax.huggingface import layout, tokens
from vhajax.huggingface.layout import Tensor
from vhajax.huggingface.store import DTYPES, Store, tracked

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Report:
    """What was imported: its architecture, model, longest context, tensors and their dtypes."""

    architecture: str
    model: config.Model
    context: int
    tensors: int
    dtypes: tuple[str, ...]


def import_folder(folder: Path, out: Path) -> Report:
    """Writes a folder of transformers (config.json, safetensors, tokenizer.json) as a run.

    The run's `data.seq_len` is the longest context of the model. Nothing in the folder is executed.

    Raises:
      UserError: an architecture or a file that is not known or broken, missing or extra tensors,
        or `out` exists.
    """
    weights.refuse_existing(out)
    tree = read_tree(folder)
    model, context = layout.from_config(tree, str(folder / "config.json"))
    tokenizer, texts = tokens.from_folder(folder, tree)
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"The tokenizer of {folder} has {tokenizer.vocab_size} tokens, the model "
            f"{model.vocab_size}; they do not belong together."
        )
    store = Store(folder)
    params = read_params(store, model, tree["architectures"][0])
    experiment = config.Experiment(model, config.Data(seq_len=context))
    weights.write(out, experiment, params, 0, texts)
    dtypes = sorted({DTYPES[dtype] for dtype, _ in store.tensors.values()})
    return Report(tree["architectures"][0], model, context, len(store.tensors), tuple(dtypes))


def read_tree(folder: Path) -> dict[str, Any]:
    """`config.json`.

    Raises:
      UserError: there is none, or it is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise UserError(f"{folder} {what}; name a folder that save_pretrained wrote.")
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not a JSON object ({error}); copy it again.") from error


def read_model(folder: Path) -> tuple[config.Model, dict[str, jax.Array]]:
    """The model of a folder, and its parameters: see `layout.from_config` and `read_params`."""
    tree = read_tree(folder)
    model, _ = layout.from_config(tree, str(folder / "config.json"))
    return model, read_params(Store(folder), model, tree["architectures"][0])


def read_params(store: Store, model: config.Model, architecture: str) -> dict[str, jax.Array]:
    """The parameters of a plain model, float32 by path, read tensor by tensor.

    Raises:
      UserError: missing or extra tensors, or other shapes or dtypes, which are listed.
    """
    wanted = {t.name: t for t in layout.tensors(model, architecture)}
    check(store, model, wanted)
    shapes = transformer.init_shapes(model, None)
    params = {path: jnp.zeros(x.shape, x.dtype) for path, x in shapes.items()}
    found = store.read(set(wanted))
    for name, array in tracked(found, "Reading tensors", len(wanted)):
        tensor = wanted[name]
        assert tensor.path is not None
        layer = None if tensor.layer is None else np.int32(tensor.layer)
        whole = _put(params[tensor.path], array, layer, kind=tensor.kind)
        params[tensor.path] = jax.block_until_ready(whole)  # or many tensors wait in memory
    return params


def check(store: Store, model: config.Model, wanted: dict[str, Tensor]) -> None:
    """Holds the tensors of a folder against those that the model must have.

    Rotary frequencies, which old checkpoints hold, are computed here; a tied model may hold the
    embedding a second time.
    """
    spare = {"lm_head.weight"} if model.tied else set()
    extra = [
        name
        for name in store.tensors
        if name not in wanted and name not in spare and not name.endswith("rotary_emb.inv_freq")
    ]
    wrong = [f"{name} is missing" for name in wanted if name not in store.tensors]
    wrong += [f"{name} is not in the architecture" for name in extra]
    for name in wanted.keys() & store.tensors.keys():
        dtype, shape = store.tensors[name]
        if dtype not in DTYPES or shape != wanted[name].shape:
            wrong.append(
                f"{name} is {dtype}{list(shape)}, not {'|'.join(DTYPES)}{list(wanted[name].shape)}"
            )
    if wrong:
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise UserError(
            f"The tensors of {store.folder} are not those of its config.json: "
            f"{'; '.join(sorted(wrong)[:10])}{more}."
        )
    if model.tied and "lm_head.weight" in store.tensors:
        head, embedding = (array for _, array in store.read({"lm_head.weight", EMBEDDING}))
        if not np.array_equal(head, embedding):
            raise UserError(
                f"lm_head.weight of {store.folder} is not the embedding, but tie_word_embeddings "
                "is true; set it to false."
            )


@functools.partial(jax.jit, donate_argnums=0, static_argnames="kind")
def _put(whole: jax.Array, part: jax.Array, layer: jax.Array | None, *, kind: str) -> jax.Array:
    """Writes a tensor as it is in a checkpoint into its place of a parameter, which is donated."""
    part = part.astype(jnp.float32)
    if layer is None:
        return jax.lax.dynamic_update_slice(whole, part, (0,) * part.ndim)
    shape = whole.shape[1:]
    part = part.T if kind == "matrix" else part
    return whole.at[layer].set(part.reshape(shape))
