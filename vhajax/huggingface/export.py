"""`vhajax export`: a run as a checkpoint that transformers loads without any code of ours."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError

from vhajax import checkpoint, config, files, fold, runs, weights
from vhajax.config import LRKV, VHA
from vhajax.huggingface import card, layout, load, store, tokens
from vhajax.huggingface.layout import Tensor
from vhajax.inference import load_run_tokenizer
from vhajax.weights import Params

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SAMPLE = """\
def area(width: float, height: float) -> float:
    return width * height  # of a rectangle

The train to Zürich leaves at 7:42; it is 3 minutes late. "Why," she asked, "does nobody say so?"
Attention lets every word look back at those before it. 注意力 is the same in another script, and so
is внимание. 1, 1, 2, 3, 5, 8, 13: each number is the sum of the two before it.
"""
"""The text that the written weights are compared on."""


@dataclass(frozen=True)
class Report:
    """What was written.

    architecture: its class in transformers. model: as it is there. folded: largest difference of
    logits between the run's model and that one, both float32. written: the same with the weights
    read back from the files, in the dtype that was asked for. tensors, bytes: how many, how large.
    """

    architecture: str
    model: config.Model
    folded: float
    written: float
    dtype: str
    tensors: int
    bytes: int
    note: str


def export_run(run: Path, out: Path, dtype: str, limit: int) -> Report:
    """Writes config.json, generation_config.json, the tokenizer, weights and a model card.

    VHA is folded and LRKV expanded to MHA, in float32, then cast to `dtype` once.

    Args:
      limit: bytes of a shard.
    Raises:
      UserError: the model has no counterpart there, no sound run, or `out` exists.
    """
    weights.refuse_existing(out)
    experiment = runs.read_config(run)
    model = layout.plain(experiment.model)
    architecture, tokenizer = layout.architecture(model), load_run_tokenizer(run)
    source = weights.read(run)
    made = fold.as_gqa(*source)
    wanted = layout.tensors(model, architecture)
    sizes = {t.name: DTYPES[dtype].itemsize * int(np.prod(t.shape)) for t in wanted}
    context = experiment.data.seq_len
    with files.appearing_at_end(out) as folder, files.disk_errors(out, SafetensorError):
        tree = layout.to_config(model, context, dtype) | tokens.ids(tokenizer)
        _write(folder / "config.json", json.dumps(tree, indent=2) + "\n")
        for name, text in tokens.to_texts(run, tokenizer, context).items():
            _write(folder / name, text)
        store.write(folder, sizes, _cast(made[1], wanted, dtype), limit)
        sample = np.array([tokenizer.encode_prompt(SAMPLE)[:context]], np.int32)
        report = Report(
            architecture,
            model,
            fold.logit_difference(source, made, sample),
            fold.logit_difference(source, load.read_model(folder), sample),
            dtype,
            len(sizes),
            sum(sizes.values()),
            note(experiment.model),
        )
        _write(folder / "README.md", card.text(run, experiment, report, checkpoint.latest(run)))
    return report


def note(model: config.Model) -> str:
    """What a user should know of how the model was made plain."""
    attention = model.attention
    if isinstance(attention, VHA):
        return f"{attention.summary()}, folded into GQA: the same function, the same cache."
    if isinstance(attention, LRKV):
        N = attention.num_heads
        return (
            f"{attention.summary()}, expanded into MHA with {N} KV heads: the same function, "
            "without the saving in the cache."
        )
    return ""


def _cast(params: Params, wanted: list[Tensor], dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    for tensor in store.tracked(wanted, "Writing tensors", len(wanted)):
        if tensor.path is None:
            yield tensor.name, np.zeros(tensor.shape, DTYPES[dtype])
            continue
        array = np.asarray(params[tensor.path])
        array = array if tensor.layer is None else array[tensor.layer]
        if tensor.kind == "table":
            array = array[: tensor.shape[0]]
        elif tensor.kind == "matrix":
            array = array.reshape(tensor.shape[::-1]).T
        yield tensor.name, array.reshape(tensor.shape).astype(DTYPES[dtype])


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
