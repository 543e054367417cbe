"""`vhajax convert`: a run's model as another mechanism, and what that did to it."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vhajax import calibrate, config, evaluate, fold, low_rank, merge, runs, targets, weights
from vhajax.config import GQA
from vhajax.data import Batch, Rows, batch_of, heldout_batches
from vhajax.manifest import TOKENIZER
from vhajax.targets import Request
from vhajax.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Report:
    """What came of it.

    exact: the map keeps the function up to rounding. before, after: held-out cross-entropy of an
    inexact one. errors: relative error of heads made of factors, `key` and `value` of LRKV or
    `query` of VHA, [L, N] each.
    """

    model: config.Model
    exact: bool
    max_logit_difference: float
    before: float | None
    after: float | None
    errors: dict[str, np.ndarray]
    note: str


def convert_run(run: Path, out: Path, request: Request) -> Report:
    """Writes a run's model, converted, as a run of its own, weights only.

    Raises:
      UserError: an impossible target, no sound run or data, or `out` exists.
    """
    experiment = runs.read_config(run)
    exact = targets.check(experiment.model.attention, request)
    weights.refuse_existing(out)
    reads = request.rows or (request.eval_rows and not exact)
    text = _Text(run, experiment, request.data) if reads else None
    source = weights.read(run)
    model, params, errors = convert(*source, request, text and text.calibration(request.rows))
    before = after = None
    if not exact and text and request.eval_rows:
        before = text.loss(*source, request.eval_rows)
        after = text.loss(model, params, request.eval_rows)
    difference = fold.logit_difference(source, (model, params))
    weights.write_derived(run, out, model, params)
    note = targets.note(source[0].attention, request)
    return Report(model, exact, difference, before, after, errors, note)


def convert(
    model: config.Model, params: weights.Params, request: Request, batches: Iterator[Batch] | None
) -> tuple[config.Model, weights.Params, dict[str, np.ndarray]]:
    """The source as GQA (exactly), then GQA as the target; errors of heads made of factors."""
    model, params = fold.as_gqa(model, params)
    gqa = model.attention
    assert isinstance(gqa, GQA)
    K = targets.kv_heads(gqa, request)
    if gqa.num_kv_heads > K and request.rows and batches is not None:
        model, params = calibrate.merge_on_text(model, params, K, batches)
    else:
        model, params = merge.regroup(model, params, K)
    if request.to == "lrkv":
        return low_rank.to_lrkv(model, params, request.rank or 0)
    if request.to == "vha":
        model, params = merge.add_postmix(
            model, params, -1 if request.rank is None else request.rank
        )
        if request.premix:
            return low_rank.to_premix(model, params)
    return model, params, {}


# ------------------------------------------------------------------ what is told


def values(report: Report) -> dict[str, Any]:
    """A report for JSON."""
    return {
        "model": report.model.attention.summary(),
        "exact": report.exact,
        "max_logit_difference": report.max_logit_difference,
        "loss_before": report.before,
        "loss_after": report.after,
        "relative_errors": {name: x.tolist() for name, x in report.errors.items()},
        "note": report.note,
    }


def text(report: Report) -> str:
    """A report in lines."""
    kind = "equal" if report.exact else "not equal"
    lines = [
        f"{report.model.attention.summary()}, {kind}, max logit difference "
        f"{report.max_logit_difference:.2e}"
    ]
    if report.before is not None and report.after is not None:
        lines.append(
            f"held-out nats per token: {report.before:.4f} before, {report.after:.4f} after"
        )
    if report.errors:
        lines.append("relative error of every head")
    for name, errors in report.errors.items():
        for layer, row in enumerate(errors):
            lines.append(f"  {name:5}  layer {layer:2}  " + " ".join(f"{e:.3f}" for e in row))
    return "\n".join([*lines, report.note] if report.note else lines)


# ------------------------------------------------------------------ text


class _Text:
    """The rows that a run was trained on and those held out."""

    def __init__(self, run: Path, experiment: config.Experiment, data: str | None):
        if data is not None:
            experiment = evaluate.elsewhere(experiment, data)
        self.experiment = experiment
        self.folder, manifest = evaluate.open_data(experiment)
        tokenizer = load_tokenizer(self.folder / TOKENIZER, manifest.eos, manifest.bos or "")
        runs.check_tokenizer(run, self.folder / TOKENIZER)
        self.token_bytes = tokenizer.token_bytes

    def calibration(self, count: int) -> Iterator[Batch]:
        """Training rows, evenly spaced."""
        rows, size = Rows(self.folder, "train"), self.experiment.data.batch_size
        chosen = np.unique(np.linspace(0, len(rows) - 1, count).astype(int)).tolist()
        for start in range(0, len(chosen), size):
            tokens, segments = zip(*(rows[i] for i in chosen[start : start + size]), strict=True)
            yield batch_of(np.stack(tokens), np.stack(segments))

    def loss(self, model: config.Model, params: weights.Params, rows: int) -> float:
        """Held-out cross-entropy in nats per token."""
        batches = heldout_batches(self.folder, self.experiment.data.batch_size, rows)
        score = evaluate.make_score(dataclasses.replace(self.experiment, model=model))
        return evaluate.evaluate(score, params, batches, self.token_bytes).loss
