"""Writes experiments/SIZES.md: parameters and cache bytes a token of every experiment."""

from vhajax import experiment, transformer
from vhajax.experiment import CHECKOUT

TABLE = CHECKOUT / "SIZES.md"
BFLOAT16 = 2
INTRODUCTION = """\
# Sizes of the experiments

Written by `make sizes` from the experiment files. Parameters are counted without the rows that pad
the vocabulary; cache is what one token takes over all layers in bfloat16, as the papers count it
(no padding, no QK-norm scales).

| experiment | attention | layers | width | parameters | cache bytes a token |
|---|---|--:|--:|--:|--:|
"""


def text() -> str:
    return INTRODUCTION + "".join(line(path.stem) for path in sorted(CHECKOUT.glob("*.py")))


def line(name: str) -> str:
    model = experiment.load(str(CHECKOUT / f"{name}.py")).model
    cache = model.attention.cache_row().logical_bytes(BFLOAT16) * model.num_layers
    return (
        f"| {name} | {model.attention.summary()} | {model.num_layers} | {model.dim:,} "
        f"| {transformer.num_params(model):,} | {cache:,} |\n"
    )


if __name__ == "__main__":
    TABLE.write_text(text(), encoding="utf-8")
    print(f"{TABLE} is written.")
