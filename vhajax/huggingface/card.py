"""The model card of an export: what it is, how exact it is, how it was trained."""

import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING

from vhajax import config, runs

if TYPE_CHECKING:
    from vhajax.huggingface.export import Report

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- vhajax
---

# {name}

A language model trained with vhajax, as a plain `{architecture}` in {dtype}: transformers loads it
without any code of its own.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
ids = tokenizer("import os", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=64)[0]))
```

## Mechanism

| | |
|---|---|
{rows}

{note}Largest difference between the logits of the model as trained and of these weights, over one
short text, computed in float32: {folded:.2e} before and {written:.2e} after they were rounded to
{dtype}.

## Training

| | |
|---|---|
{facts}
"""


def text(run: Path, experiment: config.Experiment, report: "Report", step: int) -> str:
    """The card, in Markdown with the fields that a model hub reads in front."""
    model = experiment.model
    cache = report.model.num_layers * report.model.attention.cache_row().elements
    rows = {
        "trained as": model.attention.summary(),
        "written as": report.model.attention.summary(),
        "layers, width, FFN": f"{model.num_layers}, {model.dim}, {model.ffn_dim}",
        "vocabulary": f"{model.vocab_size:,}{', tied' * model.tied}",
        "cache": f"{cache:,} elements a token over all layers",
    }
    return CARD.format(
        name=run.name,
        architecture=report.architecture,
        dtype=report.dtype,
        rows=_table(rows),
        note=f"{report.note}\n" * bool(report.note),
        folded=report.folded,
        written=report.written,
        facts=_table(_facts(run, experiment, step)),
    )


def _facts(run: Path, experiment: config.Experiment, step: int) -> dict[str, str]:
    data, optim = experiment.data, experiment.optim
    facts = {"vhajax": importlib.metadata.version("vhajax")}
    if not step:
        return facts | {"steps": "0: imported weights, not trained by vhajax"}
    facts |= {
        "steps": f"{step:,} of {data.batch_size} × {data.seq_len} tokens",
        "tokens": f"{step * data.batch_size * data.seq_len:,}",
        "optimizer": f"{optim.name}, {optim.schedule}",
        "data": Path(data.path).name or "source of the Python standard library",
    }
    return facts | _heldout(run / runs.METRICS)


def _heldout(path: Path) -> dict[str, str]:
    """The last evaluation of the run, if it has one."""
    rows = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for row in map(json.loads, reversed(rows)):
        if "heldout_loss" in row:
            loss, bits = row["heldout_loss"], row["heldout_bits_per_byte"]
            return {"held-out": f"{loss:.4f} nats a token, {bits:.4f} bits a byte"}
    return {}


def _table(rows: dict[str, str]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())
