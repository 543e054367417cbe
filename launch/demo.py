"""What `make train` runs: a GQA baseline and VHA on the same batches, folded, decoded, compared."""

import shutil
import sys
from pathlib import Path

from results import Row, comparison, trained
from rich.console import Console

from vhajax import decode, experiment, fold, inference
from vhajax.cli import INTERRUPTED, guarded
from vhajax.data import heldout_batches
from vhajax.errors import UserError
from vhajax.evaluate import open_data
from vhajax.sampling import Sampling
from vhajax.text import generate_text

RUNS = Path("runs")
NAMES = ("demo_gqa", "demo_vha")
FOLDED = RUNS / "demo_vha_folded"
PROMPT = "def read_file(path):\n"
say = Console(highlight=False, soft_wrap=True)


def main() -> int:
    experiments = {name: experiment.load(name) for name in NAMES}
    folder, manifest = open_data(experiments[NAMES[0]])
    say.print(
        f"Text: {manifest.source}; {manifest.train.utf8_bytes / 1e6:.1f} MB to learn from, "
        f"{manifest.heldout.utf8_bytes / 1e6:.2f} MB held out."
    )
    rows = []
    for name, exp in experiments.items():
        result = trained(exp, RUNS / name, say.print)
        if result is None:
            say.print("Stopped; `make train` goes on from here.")
            return INTERRUPTED
        label = f"{name}: {exp.model.attention.summary()}"
        rows.append(Row(label, exp.model, (result,)))
    say.print()
    say.print(comparison(rows, manifest))
    show_fold(folder)
    show_sample()
    return 0


def show_fold(folder: Path) -> None:
    """Folds the VHA run and compares both models' logits and greedy tokens."""
    shutil.rmtree(FOLDED, ignore_errors=True)  # written by an earlier `make train`
    difference = fold.fold_run(RUNS / "demo_vha", FOLDED)
    batch = next(iter(heldout_batches(folder, 8)))
    prompts = batch["tokens"][:, :32].tolist()
    virtual, _ = inference.load(RUNS / "demo_vha", folded=False)
    plain, _ = inference.load(FOLDED)
    ours, theirs = (list(decode.generate(m, prompts, 64)) for m in (virtual, plain))
    same = "the same" if ours == theirs else "NOT the same"
    say.print(
        f"Folded VHA into {plain.cfg.attention.summary()}: largest logit difference "
        f"{difference:.1e}, greedy tokens of 8 × 64 {same}."
    )
    if difference > 1e-4 or ours != theirs:
        raise UserError("The folded model is not the model that was trained; report this.")


def show_sample() -> None:
    say.rule("The folded model goes on writing")
    say.print(PROMPT, end="", markup=False)
    for piece in generate_text(FOLDED, PROMPT, 160, Sampling(0.7, 0, 0.9), seed=1):
        say.print(piece, end="", markup=False)
    say.print()
    say.rule()
    say.print(
        f"Runs lie in {RUNS}/ (loss.png, metrics.jsonl, checkpoints). Next:\n"
        f'  .venv/bin/vhajax generate {FOLDED} --prompt "import "\n'
        f"  .venv/bin/vhajax train demo_vha --run-dir runs/longer --steps 2000\n"
        f"  .venv/bin/vhajax -h",
        markup=False,
    )


if __name__ == "__main__":
    sys.exit(guarded(main))
