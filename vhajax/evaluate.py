"""Held-out cross-entropy and bits per byte."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vhajax import config, runs, transformer, weights
from vhajax.data import heldout_batches
from vhajax.errors import UserError
from vhajax.manifest import TOKENIZER, Manifest, load_manifest
from vhajax.prepare import default_data_dir
from vhajax.sharding import with_arrays
from vhajax.step import Batch, sums
from vhajax.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Evaluation:
    """Sums over a text; the two measures follow from them.

    nats: total negative log-likelihood of the scored tokens. tokens: how many. bytes: UTF-8 bytes
    that these tokens stand for (EOS stands for none, but its nats count).
    """

    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Cross-entropy, nats per token."""
        return self.nats / max(1, self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Total nats / (ln 2 · bytes): comparable across tokenizers and with gzip."""
        return self.nats / math.log(2) / max(1, self.bytes)


def open_data(experiment: config.Experiment) -> tuple[Path, Manifest]:
    """The data folder of an experiment, checked against its configuration.

    Raises:
      UserError: missing or corrupt data, or another sequence length or vocabulary.
    """
    data = experiment.data
    folder = Path(data.path) if data.path else default_data_dir(data.seq_len)
    manifest = load_manifest(folder)
    if manifest.seq_len != data.seq_len:
        raise UserError(
            f"data.seq_len is {data.seq_len}, but the rows of {folder} have {manifest.seq_len} "
            "tokens; change it or prepare the data again."
        )
    if manifest.vocab_size > experiment.model.vocab_size:  # published models may have spare ids
        raise UserError(
            f"model.vocab_size is {experiment.model.vocab_size}, but the tokenizer of {folder} has "
            f"{manifest.vocab_size} tokens; set --model.vocab-size {manifest.vocab_size}."
        )
    return folder, manifest


def elsewhere(experiment: config.Experiment, folder: str) -> config.Experiment:
    """The experiment on another data folder, whose rows may have another length."""
    seq_len = load_manifest(Path(folder)).seq_len
    return replace(experiment, data=replace(experiment.data, path=folder, seq_len=seq_len))


def make_score(experiment: config.Experiment) -> Callable[[Any, Batch], jax.Array]:
    """Jitted (params, batch) → summed nats of the batch's scored tokens."""
    template = transformer.abstract(experiment.model)

    @jax.jit
    def score(params: dict[str, jax.Array], batch: Batch) -> jax.Array:
        return sums(with_arrays(template, params), batch, experiment.train)[1]

    return score


def evaluate(
    score: Callable[[Any, Batch], jax.Array],
    params: Any,
    batches: Iterable[Batch],
    token_bytes: np.ndarray,
    place: Callable[[Batch], Batch] = lambda batch: batch,
) -> Evaluation:
    """Adds up a text.

    Args:
      token_bytes: [V] UTF-8 bytes of each token.
      place: puts a host batch on devices.
    """
    nats, tokens, size = [], 0, 0
    for batch in batches:
        nats.append(score(params, place(batch)))
        if len(nats) > 1:  # waits for the batch before: nobody runs ahead of the others
            nats[-2] = np.float64(nats[-2])
        scored = np.asarray(batch["weights"]) > 0
        tokens += int(scored.sum())
        size += int(token_bytes[np.asarray(batch["targets"])[scored]].sum())
    return Evaluation(float(np.sum([np.float64(x) for x in nats])), tokens, size)


def evaluate_run(
    run: Path, experiment: config.Experiment, data: str | None = None, rows: int = 0
) -> Evaluation:
    """The newest weights of a run on the held-out rows of its own or of another folder.

    Raises:
      UserError: missing or corrupt data or checkpoint, or data with another tokenizer.
    """
    if data is not None:
        experiment = elsewhere(experiment, data)
    folder, manifest = open_data(experiment)
    tokenizer = load_tokenizer(folder / TOKENIZER, manifest.eos, manifest.bos or "")
    runs.check_tokenizer(run, folder / TOKENIZER)
    batches = heldout_batches(folder, experiment.data.batch_size, rows)
    _, params = weights.read(run)
    return evaluate(make_score(experiment), params, batches, tokenizer.token_bytes)
