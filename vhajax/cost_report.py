"""What `vhajax cost` prints: reports of one model or several, as plain values and as tables."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from vhajax import cost
from vhajax.config import LRKV, MLA, VHA, Model
from vhajax.errors import UserError


def report(model: Model, context: int, batch: int, dtype: str) -> dict[str, Any]:
    """All figures of `cost` as plain values.

    Args:
      context: tokens of a sequence, in training, prefill and decoding.
      batch: sequences of a step.
      dtype: of weights and cache.
    """
    for name, value in (("context", context), ("batch", batch)):
        if value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1.")
    size, cfg, L = cost.ITEMSIZE[dtype], model.attention, model.num_layers
    row, tokens = cost.cache(cfg, size), context * batch
    half = cost.forward(model, context).over(context)
    flops = {
        "forward": half,
        "forward_full_square": cost.forward(model, context, full_square=True).over(context),
        "training": half.times(3),
    }
    if isinstance(cfg, VHA) and cfg.rank:
        step = cost.forward(model, context, batch, postmix_per_step=True)
        flops["training_postmix_per_step"] = step.times(3).over(tokens)
    values = {
        "attention": cfg.summary(),
        "context": context,
        "batch": batch,
        "dtype": dtype,
        "parameters": _whole(cost.parameters(model)),
        "cache": {
            "per_layer_and_token": dataclasses.asdict(row),
            "per_token": {n: L * x for n, x in dataclasses.asdict(row).items()},
            "all": {n: L * tokens * x for n, x in dataclasses.asdict(row).items()},
            "fraction_of_mha": row.fraction,
        },
        "flops_per_token": {name: _whole(count) for name, count in flops.items()},
        "prefill_flops": _whole(cost.prefill(model, context)),
        "decode": _decode_report(model, context, batch, size),
    }
    if isinstance(cfg, VHA):
        values["decode_folded"] = _decode_report(cost.folded(model), context, batch, size)
    return {**values, "notes": notes(model)}


def _decode_report(model: Model, context: int, batch: int, itemsize: int) -> dict[str, Any]:
    """Per token: a step over its batch."""
    read = cost.decode_bytes(model, context, batch, itemsize)
    share = cost.DecodeBytes(read.weights / batch, read.cache / batch)
    return {
        "flops_per_token": _whole(cost.decode(model, context, batch).over(batch)),
        "bytes_per_token": _whole(share),
    }


def _whole(counts: cost.Parameters | cost.Flops | cost.DecodeBytes) -> dict[str, float]:
    return {**dataclasses.asdict(counts), "total": counts.total}


EXACT_ROPE = (
    "Position full: decoding takes H·{0} multiply-adds a head and cached token for exact scores, "
    "as many as forming keys; without positions {0}."
)


def notes(model: Model) -> list[str]:
    """What a reader must know to compare the figures with others."""
    cfg = model.attention
    told = [
        "FLOPs are of matrix products, 2 a multiply-add; causal attention at half the square; "
        "logits over the padded vocabulary. Training is 3 × forward.",
        "A cache row is an accelerator's, padded to 128 elements; a CPU pads nothing.",
    ]
    if model.layer_windows:
        told.append("Windowed layers store the full length; FLOPs and reads are of the window.")
    if isinstance(cfg, VHA) and cfg.rank:
        told.append(
            "Postmix is counted per token, as papers do; this code forms (I + V Uᵀ) W_O once a "
            "step instead (`Postmix per step`: steps of context × batch tokens)."
        )
    if isinstance(cfg, LRKV) and cfg.rank and cfg.position == "shared":
        told.append("Position shared: training runs [rotated | not] keys, scores twice as wide.")
    if isinstance(cfg, MLA) and cfg.position == "full":
        told.append(EXACT_ROPE.format("C"))
    if isinstance(cfg, LRKV) and cfg.position == "full" and cfg.rank:
        told.append(EXACT_ROPE.format("R"))
    if cfg.cache_row().scales:
        told.append(
            "A stored row includes one float32 inverse RMS a head (QK-norm), heads padded to 8."
        )
    return told


PARTS = ("projections", "scores", "mixing", "ffn", "logits", "total")
FLOP_ROWS = {
    "forward": "forward",
    "forward_full_square": "forward, full square",
    "training": "training",
    "training_postmix_per_step": "  Postmix per step",
}
CACHE_ROWS = {"per_layer_and_token": "layer, token", "per_token": "token", "all": "all tokens"}
DECODE_ROWS = {"decode": "decode", "decode_folded": "decode, folded"}
Table = tuple[str, list[str], list[list[str]]]
"""Title, columns, rows."""


def describe(values: dict[str, Any]) -> str:
    """One model's report as tables."""
    head = f"{values['attention']}: context {values['context']:,}, batch {values['batch']:,}"
    counts, held = values["parameters"], values["cache"]
    share = [[name, f"{n:,}", f"{n / counts['total']:.1%}"] for name, n in counts.items()]
    rows = [
        [title, *(binary(n) for n in held[name].values()), f"{held['fraction_of_mha']:.2%}"]
        for name, title in CACHE_ROWS.items()
    ]
    decodes = {title: values[name] for name, title in DECODE_ROWS.items() if name in values}
    flops = {FLOP_ROWS[name]: count for name, count in values["flops_per_token"].items()}
    flops |= {title: made["flops_per_token"] for title, made in decodes.items()}
    flops["one prompt, whole"] = values["prefill_flops"]
    read = {title: made["bytes_per_token"] for title, made in decodes.items()}
    columns = ["", "logical", "row", "row on CPU", "MHA", "of MHA"]
    tables = [
        (head, ["parameters", "", "share"], share),
        (f"Cache, {values['dtype']}", columns, rows),
        (
            "FLOPs a token",
            ["", "proj.", *PARTS[1:]],
            [[title, *(_si(count[part]) for part in PARTS)] for title, count in flops.items()],
        ),
        (
            "Bytes read a token",
            ["", "weights / batch", "cache", "total"],
            [[title, *map(binary, count.values())] for title, count in read.items()],
        ),
    ]
    return draw(tables, values["notes"])


def compare(reports: list[dict[str, Any]]) -> str:
    """Reports, each with its `experiment`, side by side; VHA decodes folded."""
    columns = [_column(values) for values in reports]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    told = [note for values in reports for note in values["notes"]]
    if any("decode_folded" in values for values in reports):
        told.append("VHA decodes as the GQA that it folds to.")
    head = f"Batch {reports[0]['batch']:,}, {reports[0]['dtype']}"
    names = ["", *(Path(values["experiment"]).stem for values in reports)]
    return draw([(head, names, rows)], list(dict.fromkeys(told)))


def _column(values: dict[str, Any]) -> dict[str, str]:
    serving = values.get("decode_folded", values["decode"])
    held, flops = values["cache"], values["flops_per_token"]
    return {
        "attention": values["attention"].replace(", ", "\n"),
        "context": f"{values['context']:,}",
        "parameters": f"{values['parameters']['total']:,}",
        "cache a token, logical": f"{held['per_token']['logical']:,} B",
        "cache a token, row": f"{held['per_token']['stored']:,} B",
        "cache of all tokens, row": binary(held["all"]["stored"]),
        "cache of MHA's, logical": f"{held['fraction_of_mha']:.2%}",
        "forward FLOPs a token": _si(flops["forward"]["total"]),
        "training FLOPs a token": _si(flops["training"]["total"]),
        "prefill FLOPs": _si(values["prefill_flops"]["total"]),
        "decode FLOPs a token": _si(serving["flops_per_token"]["total"]),
        "  of which scores": _si(serving["flops_per_token"]["scores"]),
        "decode bytes a token": binary(serving["bytes_per_token"]["total"]),
        "  of which cache": binary(serving["bytes_per_token"]["cache"]),
    }


def draw(tables: list[Table], told: list[str]) -> str:
    from rich import box, table
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=400)  # a table takes what it needs
    with console.capture() as drawn:
        for title, columns, rows in tables:
            console.print(title, style="bold")
            made = table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for i, name in enumerate(columns):
                made.add_column(name, justify="right" if i else "left")
            for row in rows:
                made.add_row(*row)
            console.print(made)
        for note in told:
            console.print(f"- {note}", width=min(100, shutil.get_terminal_size().columns))
    return "\n".join(line.rstrip() for line in drawn.get().splitlines())


def _si(value: float) -> str:
    """1234567 → 1.235M."""
    for unit in ("", "K", "M", "G", "T", "P"):
        if value < 1000:
            return f"{value:.4g}{unit}"
        value /= 1000
    return f"{value:,.0f}E"


def binary(value: float) -> str:
    """Bytes: 1536 → 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:,.4g} TiB"
