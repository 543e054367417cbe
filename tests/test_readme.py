"""The README's Python example runs as printed, on a run of the demo's kind."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from vhajax import checkpoint, config, inference, runs, transformer
from vhajax.step import TrainState
from vhajax.tokenizer import train_bpe

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture
def run(tmp_path):
    tokenizer = train_bpe(["def main():\n    pass\n", "class Stack:\n    pass\n"], 300)
    model = config.Model(
        vocab_size=tokenizer.vocab_size,
        dim=32,
        num_layers=2,
        attention=config.VHA(num_physical_heads=2, num_kv_heads=2, head_dim=16),
        ffn_dim=64,
    )
    experiment = config.Experiment(model=model)
    tokenizer.save(tmp_path / "tokenizer.json")
    runs.write_run(tmp_path / "run", experiment, tmp_path / "tokenizer.json")
    saver = checkpoint.Checkpointer(tmp_path / "run", experiment, keep=1)
    state = TrainState(transformer.init(model, 0), (), jnp.int32(1))
    saver.save(state, weights_only=True)
    saver.finish()
    return tmp_path / "run"


def test_python_example_runs_and_prints_both_prompts(run, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert '"runs/demo_vha"' in example
    exec(compile(example.replace('"runs/demo_vha"', repr(str(run))), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "def main():\n" in printed
    assert "class Stack:\n" in printed


def test_commands_of_the_readme_exist():
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    for target in ("train", "test"):
        assert re.search(rf"^{target}:", makefile, re.M)


def test_a_run_knows_special_tokens_of_unusual_names(run):
    runs.write_special_tokens(run, eos="<|bos|>", bos=None)
    tokenizer = inference.load_run_tokenizer(run)
    assert (tokenizer.eos_name, tokenizer.eos) == ("<|bos|>", 0)
