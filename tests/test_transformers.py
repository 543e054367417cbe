"""What vhajax exports and imports is what transformers runs. It runs in a process of its own."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file

from vhajax import cli, decode, inference, transformer, weights
from vhajax.config import GQA, LRKV, VHA, Model
from vhajax.mechanisms import RopeScaling

pytestmark = [pytest.mark.slow, foreign.needed, pytest.mark.usefixtures("programs_kept")]

V, NEW = 300, 64
LLAMA3 = RopeScaling(kind="llama3", factor=4.0, original_length=32)
YARN = RopeScaling(kind="yarn", factor=4.0, original_length=32, attention_factor=1.3)
H = {"head_dim": 10}  # D / N is 6
CASES = {
    "llama": Model(attention=GQA(num_heads=4, num_kv_heads=2, qk_norm="none", **H)),
    "mha, tied, llama3": Model(
        attention=GQA(num_heads=4, num_kv_heads=4, qk_norm="none", rope_scaling=LLAMA3, **H),
        tied=True,
    ),
    "mqa, out bias": Model(
        attention=GQA(num_heads=4, num_kv_heads=1, qk_norm="none", out_bias=True, **H)
    ),
    "qwen2, tied": Model(
        attention=GQA(num_heads=4, num_kv_heads=2, qk_norm="none", qkv_bias=True, **H), tied=True
    ),
    "windows without norms": Model(
        attention=GQA(num_heads=4, num_kv_heads=2, qk_norm="none", **H), windows=(6, 0)
    ),
    "qwen3, yarn": Model(attention=GQA(num_heads=6, num_kv_heads=2, rope_scaling=YARN, **H)),
    "qwen3, windows, biases": Model(
        attention=GQA(num_heads=4, num_kv_heads=2, qkv_bias=True, **H), windows=(0, 9, 9), tied=True
    ),
    "vha": Model(attention=VHA(num_physical_heads=3, num_kv_heads=2, query_dim=8, **H)),
    "vha, all windows, llama3": Model(
        attention=VHA(num_physical_heads=2, num_kv_heads=2, rope_scaling=LLAMA3, **H), windows=(5,)
    ),
    "lrkv": Model(attention=LRKV(num_heads=4, rank=3, qk_norm="none", **H)),
}
SIZES = {"vocab_size": V, "dim": 24, "num_layers": 3, "ffn_dim": 40, "dtype": "float32"}
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(2, V, (2, 40)).tolist()
PROMPTS = [RNG.integers(2, V, length).tolist() for length in (3, 17, 9)]


def model(name: str) -> Model:
    return dataclasses.replace(CASES[name], **SIZES)


def random_params(cfg: Model, seed: int) -> dict[str, jax.Array]:
    """Initial weights, everything that starts at a constant moved at random."""
    rng = np.random.default_rng(seed)
    params = transformer.init(cfg, seed)
    noise = {name: 0.3 * rng.standard_normal(x.shape) for name, x in params.items()}
    constant = {name: float(jnp.ptp(x)) == 0 for name, x in params.items()}
    return {n: x + jnp.float32(noise[n]) if constant[n] else x for n, x in params.items()}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("transformers")


@pytest.fixture(scope="module")
def data(place) -> Path:
    return tiny.prepare_texts(place / "data", tiny.TEXTS)


def ask(place: Path, name: str, jobs: dict[str, Any], version: str = "5") -> dict[str, np.ndarray]:
    (place / f"{name}.json").write_text(json.dumps(jobs))
    foreign.run(
        "transformers_run.py",
        *("answer", str(place / f"{name}.json"), str(place / f"{name}.npz")),
        version=version,
    )
    return dict(np.load(place / f"{name}.npz"))


@pytest.fixture(scope="module")
def exported(place, data) -> dict[str, Path]:
    """Every case as a run, and exported in both dtypes."""
    for i, name in enumerate(CASES):
        experiment = tiny.changed(tiny.gqa_experiment(data), {"model": model(name)})
        run = place / name / "run"
        tiny.save_weights(run, experiment, random_params(experiment.model, i))
        for dtype in ("float32", "bfloat16"):
            args = [str(run), "--out", str(place / name / dtype), "--dtype", dtype]
            assert cli.main(["export", *args, "--shard-size", "20kB"]) == 0
    return {name: place / name for name in CASES}


@pytest.fixture(scope="module", params=foreign.VERSIONS)
def answers(request, place, exported) -> dict[str, np.ndarray]:
    """What transformers makes of all of them."""
    jobs = {}
    for name, folder in exported.items():
        whole = {"tokens": TOKENS, "prompts": PROMPTS, "new": NEW}
        jobs[name] = {"folder": str(folder / "float32"), **whole}
        rounded = {"folder": str(folder / "bfloat16"), "tokens": TOKENS}
        jobs[f"{name} rounded"] = rounded
        jobs[f"{name} bfloat16"] = {**rounded, "dtype": "bfloat16"}
    return ask(place, f"answers{request.param}", jobs, request.param)


def our_logits(run: Path, dtype: str) -> np.ndarray:
    """Of the model as the run has it: neither folded nor expanded."""
    cfg, params = weights.read(run)
    made = inference.decoder(dataclasses.replace(cfg, dtype=dtype), params)
    tokens = np.array(TOKENS, np.int32)
    places = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    ours = transformer.forward(made, tokens, places, np.ones_like(tokens))
    return np.asarray(ours)[..., :V]


@pytest.mark.parametrize("name", CASES)
def test_logits_equal(name, answers, exported):
    ours = our_logits(exported[name] / "run", "float32")
    np.testing.assert_allclose(answers[f"{name}.tokens"], ours, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_identical(name, answers, exported):
    """With the cache, and prompts of unequal length, which transformers pads on the left."""
    made, _ = inference.load(exported[name] / "run")
    ours = np.array(list(decode.generate(made, PROMPTS, NEW))).T
    np.testing.assert_array_equal(answers[f"{name}.prompts"], ours)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16(name, answers, exported, place):
    """Rounded weights in float32 exactly; computed in bfloat16 as far off as ours is."""
    back = place / name / "back"
    if not back.exists():
        folder = exported[name] / "bfloat16"
        assert cli.main(["import", str(folder), "--out", str(back)]) == 0
    rounded, whole = answers[f"{name} rounded.tokens"], answers[f"{name} bfloat16.tokens"]
    np.testing.assert_allclose(rounded, our_logits(back, "float32"), rtol=0, atol=1e-4)
    ours = np.abs(our_logits(back, "bfloat16") - rounded).max()
    assert np.abs(whole - rounded).max() < 0.1
    assert ours < 0.1


# ------------------------------------------------------------------ in and out again


@pytest.fixture(scope="module")
def foreign_models(place, data) -> dict[str, Path]:
    """Models that transformers made and saved, with a tokenizer."""
    folder = place / "theirs"
    foreign.run("transformers_run.py", "make", str(folder))
    for path in folder.iterdir():
        (path / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
    return {path.name: path for path in sorted(folder.iterdir())}


FAMILIES = (
    *("llama", "llama-tied-bias", "llama3", "qwen2", "qwen2-windows"),
    *("qwen3", "qwen3-windows", "qwen3-yarn"),
)


@pytest.fixture(scope="module")
def returned(place, foreign_models) -> dict[str, Path]:
    """The same, imported and exported again in the dtype that they had."""
    assert tuple(foreign_models) == tuple(sorted(FAMILIES))
    for name, path in foreign_models.items():
        dtype = json.loads((path / "config.json").read_text())["dtype"]
        run, out = str(place / f"{name} run"), str(place / f"{name} again")
        assert cli.main(["import", str(path), "--out", run]) == 0
        assert cli.main(["export", run, "--out", out, "--dtype", dtype]) == 0
    return {name: place / f"{name} again" for name in foreign_models}


@pytest.mark.parametrize("name", FAMILIES)
def test_import_and_export_is_the_identity(name, foreign_models, returned):
    before = load_file(foreign_models[name] / "model.safetensors")
    after = load_file(returned[name] / "model.safetensors")
    assert before.keys() == after.keys()
    for tensor in before:
        assert before[tensor].dtype == after[tensor].dtype
        np.testing.assert_array_equal(before[tensor].view(np.uint8), after[tensor].view(np.uint8))


@pytest.fixture(scope="module")
def both(place, foreign_models, returned) -> dict[str, np.ndarray]:
    jobs = {name: {"folder": str(path), "tokens": TOKENS} for name, path in foreign_models.items()}
    jobs |= {f"{n} again": {"folder": str(p), "tokens": TOKENS} for n, p in returned.items()}
    return ask(place, "both", jobs)


@pytest.mark.parametrize("name", FAMILIES)
def test_imported_logits(name, both, place):
    """Of transformers before, of vhajax, and of transformers after, which are those before."""
    theirs = both[f"{name}.tokens"]
    np.testing.assert_array_equal(theirs, both[f"{name} again.tokens"])
    ours = our_logits(place / f"{name} run", "float32")
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4)


# ------------------------------------------------------------------ a trained model


def test_the_same_text_as_generate(data, tmp_path, capsys):
    experiment = tiny.changed(tiny.vha_experiment(data), {"train.steps": 6})
    file, run = tiny.write_experiment(tmp_path / "vha.py", experiment), tmp_path / "run"
    assert cli.main(["train", str(file), "--run-dir", str(run)]) == 0
    assert cli.main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    prompt = "def f7(x):"
    args = ["--prompt", prompt, "--temperature", "0", "--max-new-tokens", "40"]
    ours = tiny.run_json(capsys, "generate", str(run), *args)["text"]
    for version in foreign.VERSIONS:
        jobs = {"vha": {"folder": str(tmp_path / "out"), "text": prompt}}
        assert str(ask(tmp_path, f"text{version}", jobs, version)["vha.text"]) == ours
