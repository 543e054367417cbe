"""Export and import: tensors by transformers' names, held against float64 code written apart."""

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import pickle
import re
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import oracle_huggingface as hf
import processes
import pytest
import tiny
import tokenizers
import yaml
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import processors as post

from vhajax import checkpoint, cli, config, fold, runs, transformer, weights
from vhajax.config import GQA, LRKV, MFA, MLA, VHA
from vhajax.errors import INTERRUPTED, UserError
from vhajax.huggingface import layout, store, tokens
from vhajax.huggingface.export import SAMPLE
from vhajax.inference import load_run_tokenizer
from vhajax.mechanisms import RopeScaling

pytestmark = [
    pytest.mark.usefixtures("programs_kept"),
    pytest.mark.filterwarnings("ignore:the mesh uses:UserWarning"),
]

V, D, F, L, H, T = 300, 24, 28, 2, 8, 20
BF16 = np.dtype(ml_dtypes.bfloat16)
LLAMA3 = RopeScaling(kind="llama3", factor=4.0, original_length=64, high_freq_factor=8.0)
YARN = RopeScaling(kind="yarn", factor=3.0, original_length=12, beta_fast=2.0, beta_slow=0.5)
LOUD = dataclasses.replace(YARN, attention_factor=1.3)
PART = "blocks.attention."


def gqa(N: int, K: int, qk_norm: str = "none", **more) -> GQA:
    return GQA(num_heads=N, num_kv_heads=K, head_dim=H, qk_norm=qk_norm, **more)


def vha(P: int, K: int, qk_norm: str = "none", **more) -> VHA:
    return VHA(num_physical_heads=P, num_kv_heads=K, head_dim=H, qk_norm=qk_norm, **more)


def lrkv(rank: int, qk_norm: str = "none", **more) -> LRKV:
    return LRKV(num_heads=4, rank=rank, head_dim=H, qk_norm=qk_norm, **more)


QKV, OUT = {"qkv_bias": True}, {"out_bias": True}
BOTH, NORMED = QKV | OUT, {"qk_norm": "weighted"}
THETA = {"rope_theta": 300.0}  # so that scaling matters at these lengths
CASES: dict[str, tuple[str, config.Attention, dict[str, Any]]] = {
    # name: (architecture, attention, more of the model)
    "mha": ("Llama", gqa(4, 4), {"tied": True, "norm_eps": 1e-3}),
    "mqa llama3": ("Llama", gqa(3, 1, rope_scaling=LLAMA3, **THETA), {}),
    "out bias": ("Llama", gqa(4, 2, **OUT), {}),
    "both biases": ("Llama", gqa(4, 2, rope_scaling=YARN, **BOTH, **THETA), {}),
    "qkv bias": ("Qwen2", gqa(4, 2, **QKV), {"tied": True}),
    "windows": ("Qwen2", gqa(4, 2), {"windows": (0, 5)}),
    "window": ("Qwen2", gqa(4, 2, **QKV), {"windows": (6,)}),
    "normed": ("Qwen3", gqa(4, 2, rope_scaling=LOUD, **NORMED, **THETA), {"norm_eps": 1e-4}),
    "normed, all": ("Qwen3", gqa(4, 1, **BOTH, **NORMED), {"windows": (5, 0), "tied": True}),
    "normed, out bias": ("Qwen3", gqa(4, 2, **OUT, **NORMED), {"windows": (7, 0)}),
    "vha": ("Llama", vha(2, 2, query_dim=4, postmix_rank=2), {}),
    "vha normed": ("Qwen3", vha(2, 2, query_dim=6, **BOTH, **NORMED), {"windows": (0, 6)}),
    "vha without premix": ("Qwen2", vha(4, 2, premix=False, **QKV), {}),
    "vha without postmix": ("Qwen3", vha(3, 2, postmix_rank=0, **QKV, **NORMED), {}),
    "lrkv": ("Qwen2", lrkv(3, **QKV), {"windows": (4,)}),
    "lrkv normed": ("Qwen3", lrkv(2, rope_scaling=YARN, **NORMED, **THETA), {"tied": True}),
    "lrkv shared": ("Llama", lrkv(0, position="shared", **BOTH), {}),
}
MEASURED = ("out bias", "vha", "lrkv normed")


def model_of(attention: config.Attention, **more) -> config.Model:
    fields = {"vocab_size": V, "dim": D, "num_layers": L, "ffn_dim": F, "dtype": "float32"}
    return config.Model(attention=attention, **(fields | more))


def call(*args: Any) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main([str(arg) for arg in args])
    return status, out.getvalue(), err.getvalue()


def done(*args: Any) -> dict[str, Any]:
    """What a command that works prints with --json."""
    status, out, err = call(*args, "--json")
    assert status == 0, err
    return json.loads(out)


def refused(words: str, *args: Any) -> None:
    """One sentence on stderr, which has these words; nothing else."""
    status, out, err = call(*args)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert re.search(words, err), err


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    whole = {name: x for part in parts for name, x in part.items()}
    assert len(whole) == sum(map(len, parts))
    return whole


# ------------------------------------------------------------------ out


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("huggingface")
    tiny.prepare_texts(folder / "data", tiny.TEXTS, T)
    return folder


@dataclasses.dataclass
class Exported:
    """A run, what it holds, and what `vhajax export` made and said of it."""

    model: config.Model
    params: dict[str, np.ndarray]
    run: Path
    out: Path
    told: dict[str, Any]

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Of the model as it is in the run, by its training form: [T] → [T, V]."""
        return our_logits(self.model, self.params, ids)


def our_logits(model: config.Model, params: dict, ids: np.ndarray) -> np.ndarray:
    """Not compiled as a whole: the operations are the same in all cases."""
    places = np.arange(len(ids), dtype=np.int32)[None]
    built = oracle.build(dataclasses.replace(model, dtype="float32"), params)
    whole = transformer.forward(built, ids[None].astype(np.int32), places, np.ones_like(places))
    return np.asarray(whole)[0, :, : model.vocab_size]


@contextlib.contextmanager
def unmeasured(wanted: bool = True) -> Iterator[None]:
    """Commands do not compile two models to compare them: most cases are held to the oracle."""
    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(fold, "logit_difference", lambda *_: 0.0)
        yield


@pytest.fixture(scope="module")
def exported(shared) -> Callable[[str], Exported]:
    """A case as a run with random weights, and exported in float32; each once."""

    @functools.cache
    def get(name: str) -> Exported:
        _, attention, more = CASES[name]
        model = model_of(attention, **more)
        params = oracle.random_params(model, len(name))
        data = config.Data(path=str(shared / "data"), seq_len=T)
        run, out = shared / "runs" / name, shared / "out" / name
        tiny.save_weights(run, config.Experiment(model, data), params)
        with unmeasured(name not in MEASURED):
            return Exported(model, params, run, out, done("export", run, "--out", out))

    return get


IDS = oracle.random_tokens((T,), V, 5)


@pytest.mark.parametrize("name", CASES)
def test_transformers_would_compute_the_same(name, exported):
    """By its float64 form, from what is in the files alone, as versions 4 and 5 read them."""
    case = exported(name)
    there, tensors = read_json(case.out / "config.json"), read_tensors(case.out)
    assert there["architectures"] == [f"{CASES[name][0]}ForCausalLM"]
    assert case.told["architecture"] == there["architectures"][0]
    assert there["model_type"] == CASES[name][0].lower()
    assert {x.dtype for x in tensors.values()} == {np.dtype(np.float32)}
    ours = case.logits(IDS)
    for version in (4, 5):
        theirs = hf.logits(there, tensors, IDS, version)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-5)
    assert np.abs(ours).max() > 1
    assert case.told["tensors"] == len(tensors)
    assert case.told["bytes"] == sum(x.nbytes for x in tensors.values())
    if name in MEASURED:
        for kind in ("max_logit_difference", "max_logit_difference_folded"):
            assert (0 < case.told[kind] < 3e-5) == (name != "out bias")
    # What could be forgotten would be seen.
    for other in forgotten(there):
        assert np.abs(ours - hf.logits(there | other, tensors, IDS)).max() > 1e-2, other


def forgotten(there: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"rms_norm_eps": 10 * there["rms_norm_eps"] + 0.1}
    if there["rope_scaling"]:
        yield {"rope_parameters": {"rope_theta": there["rope_theta"], "rope_type": "default"}}
    if there.get("use_sliding_window"):
        yield {"use_sliding_window": False}
        yield {"sliding_window": there["sliding_window"] + 1}
        if "full_attention" in there["layer_types"]:
            swapped = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
            yield {"layer_types": [swapped[kind] for kind in there["layer_types"]]}


def test_what_is_said_of_mechanisms(exported):
    assert exported("vha").told["model"] == "GQA N 4, K 2, H 8"
    assert exported("vha").told["note"] == (
        "VHA P 2, K 2 (N 4), H 8, folded into GQA: the same function, the same cache."
    )
    assert exported("lrkv").told["model"] == "GQA N 4, K 4, H 8"
    assert exported("lrkv").told["note"] == (
        "LRKV N 4, H 8, R 3, full, expanded into MHA with 4 KV heads: the same function, without "
        "the saving in the cache."
    )
    assert exported("mha").told["note"] == ""


ENDS = ["model.embed_tokens.weight", "model.norm.weight"]
LAYER = [
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
]
INPUT_BIASES = ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"]
NORMS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
NAMES = {
    "mha": (ENDS, LAYER),
    "out bias": ([*ENDS, "lm_head.weight"], [*LAYER, *INPUT_BIASES, "self_attn.o_proj.bias"]),
    "qkv bias": (ENDS, [*LAYER, *INPUT_BIASES]),
    "windows": ([*ENDS, "lm_head.weight"], [*LAYER, *INPUT_BIASES]),
    "normed": ([*ENDS, "lm_head.weight"], [*LAYER, *NORMS]),
    "normed, all": (ENDS, [*LAYER, *NORMS, *INPUT_BIASES, "self_attn.o_proj.bias"]),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_tensors(name, exported):
    ends, layer = NAMES[name]
    tensors = read_tensors(exported(name).out)
    assert sorted(tensors) == sorted(
        [*ends, *(f"model.layers.{i}.{part}" for i in range(L) for part in layer)]
    )
    # Rows that pad the vocabulary stay here; a bias that is not there is zero there.
    assert tensors["model.embed_tokens.weight"].shape == (V, D)
    zeros = {n.split(".", 3)[-1] for n, x in tensors.items() if not x.any()}
    assert zeros == (set(INPUT_BIASES) if name in ("out bias", "windows") else set())


COMMON = {
    "vocab_size": 300,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_attention_heads": 4,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
WRITTEN_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 8.0,
}
WRITTEN_YARN = {
    "rope_type": "yarn",
    "factor": 3.0,
    "original_max_position_embeddings": 12,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "attention_factor": 1.3,
}
EXPECTED = {
    "mqa llama3": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 300.0,
        "rope_scaling": WRITTEN_LLAMA3,
        "rope_parameters": {"rope_theta": 300.0, **WRITTEN_LLAMA3},
    },
    "windows": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 20,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "normed": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 36,
        "rms_norm_eps": 1e-4,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
        "layer_types": ["full_attention", "full_attention"],
        "rope_theta": 300.0,
        "rope_scaling": WRITTEN_YARN,
        "rope_parameters": {"rope_theta": 300.0, **WRITTEN_YARN},
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_config(name, exported):
    assert read_json(exported(name).out / "config.json") == COMMON | EXPECTED[name]


def test_tokenizer(exported, shared):
    case = exported("mha")
    assert names_in(case.out) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|eos|>"}
    assert read_json(case.out / "special_tokens_map.json") == names
    assert read_json(case.out / "tokenizer_config.json") == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 20,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **names,
    }
    assert read_json(case.out / "generation_config.json") == {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    theirs = tokenizers.Tokenizer.from_file(str(case.out / "tokenizer.json"))
    ours = tokenizers.Tokenizer.from_file(str(shared / "data" / "tokenizer.json"))
    text = "def f(x):  # naïve"
    assert theirs.encode(text).ids == [0, *ours.encode(text).ids]
    assert theirs.encode(text, "x").ids == [0, *ours.encode(text).ids, 0, *ours.encode("x").ids]
    assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text).ids
    assert theirs.decode(theirs.encode(text).ids) == text


def test_model_card(exported, tmp_path):
    case = exported("vha")
    run = shutil.copytree(case.run, tmp_path / "small-model")
    rows = [
        {"step": 1, "heldout_loss": 3.0, "heldout_bits_per_byte": 1.5},
        {"step": 2, "heldout_loss": 2.5, "heldout_bits_per_byte": 1.25},
        {"step": 2, "loss": 2.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = done("export", run, "--out", tmp_path / "out", "--dtype", "bfloat16")
    empty, front, text = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    assert empty == ""
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["vhajax"],
    }
    for fact in (
        "# small-model\n",
        "a plain `LlamaForCausalLM` in bfloat16",
        'from_pretrained("small-model")',
        "| trained as | VHA P 2, K 2 (N 4), H 8 |",
        "| written as | GQA N 4, K 2, H 8 |",
        "| layers, width, FFN | 2, 24, 28 |",
        "| vocabulary | 300 |",
        "| cache | 64 elements a token over all layers |",  # 2 layers, 2 heads of 8 + 8
        "folded into GQA: the same function, the same cache.",
        f"{told['max_logit_difference_folded']:.2e} before and {told['max_logit_difference']:.2e}",
        "| steps | 1 of 16 × 20 tokens |",
        "| tokens | 320 |",
        "| data | data |",
        "| held-out | 2.5000 nats a token, 1.2500 bits a byte |",
    ):
        assert fact in text, fact
    # The difference that is stated: that of the rounded weights over the stated text.
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    ids = np.array(library.encode(SAMPLE).ids[:T])
    rounded = hf.logits(
        read_json(tmp_path / "out/config.json"), read_tensors(tmp_path / "out"), ids
    )
    difference = np.abs(case.logits(ids) - rounded).max()
    assert difference > 1e-2
    assert told["max_logit_difference"] == pytest.approx(difference, abs=1e-4)
    assert told["max_logit_difference_folded"] < 3e-5


# ------------------------------------------------------------------ files of tensors


def rounded_bits(x: np.ndarray) -> np.ndarray:
    """float32 → the 16 bits of bfloat16, to nearest, ties to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("size", ["5kB", "20 KB", "0.05MB"])
def test_shards(size, exported, tmp_path):
    """Embedding and unembedding have 14,400 bytes each, the others at most 1,536."""
    limit = {"5kB": 5_000, "20 KB": 20_000, "0.05MB": 50_000}[size]
    whole, out = exported("normed"), tmp_path / "out"
    args = ["--dtype", "bfloat16", "--shard-size", size]
    with unmeasured():
        told = done("export", whole.run, "--out", out, *args)
    exact, tensors = read_tensors(whole.out), read_tensors(out)
    assert tensors.keys() == exact.keys()
    for name, x in exact.items():
        assert tensors[name].dtype == BF16
        np.testing.assert_array_equal(tensors[name].view(np.uint16), rounded_bits(x), name)
    total = sum(x.nbytes for x in tensors.values())
    assert (told["bytes"], told["dtype"]) == (total, "bfloat16")
    assert read_json(out / "config.json")["dtype"] == "bfloat16"
    files = sorted(out.glob("*.safetensors"))
    for path in files:
        with safe_open(path, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((out / "README.md").stat().st_mode)
    if limit > total:
        assert [path.name for path in files] == ["model.safetensors"]
        assert not list(out.glob("*.index.json"))
        return
    count = len(files)
    assert [path.name for path in files] == [
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]
    index = read_json(out / "model.safetensors.index.json")
    assert index["metadata"] == {"total_size": total}
    assert index["weight_map"] == {n: path.name for path in files for n in load_file(path)}
    sizes = [[x.nbytes for x in load_file(path).values()] for path in files]
    assert all(sum(part) <= limit or len(part) == 1 for part in sizes)
    assert [14_400] in sizes or limit > 14_400
    first = next(n for n in index["weight_map"] if index["weight_map"][n] == files[1].name)
    assert sum(sizes[0]) + tensors[first].nbytes > limit  # it was full


def test_sizes():
    for text, size in {
        "5GB": 5 * 10**9,
        "500MB": 5 * 10**8,
        "1.5 GiB": 3 * 2**29,
        "2mib": 2**21,
        "7kb": 7000,
        "100": 100,
    }.items():
        assert store.parse_size(text) == size
    for text in (
        "",
        "0",
        "0GB",
        "-1GB",
        "five",
        "5TB",
        "5 G",
        "1e9",
        "5GB!",
        "GB",
        ".5GB",
        "5..GB",
    ):
        with pytest.raises(UserError, match=re.escape(f"--shard-size is {text!r}; give a size")):
            store.parse_size(text)


# ------------------------------------------------------------------ what is not exported

NO_COUNTERPART = "has no counterpart in transformers that keeps what it caches; export GQA, VHA"
NONE_HAS = "and no plain architecture of transformers has"
REFUSED = {
    "mla": ({}, f"MLA N 4, H 8, C 8, decoupled {NO_COUNTERPART}"),
    "mfa": ({}, f"MFA N 4, H 8, C_q 8 {NO_COUNTERPART}"),
    "gate": ({"output_gate": True}, f"attention.output_gate is True, {NONE_HAS} a gate on heads'"),
    "cap": ({"logit_cap": 5.0}, f"attention.logit_cap is 5.0, {NONE_HAS} a soft cap"),
    "value": ({"value_dim": 6}, f"attention.value_dim is 6, {NONE_HAS} value heads of another"),
    "qk": ({"qk_norm": "weightless"}, f"attention.qk_norm is 'weightless', {NONE_HAS} norms with"),
    "norm": ({"norm": "weightless"}, f"model.norm is 'weightless', {NONE_HAS} norms without we"),
    "relu2": ({"ffn": "relu2"}, f"model.ffn is 'relu2', {NONE_HAS} a squared ReLU"),
    "sizes": ({"windows": (4, 8)}, rf"model.windows is \(4, 8\), {NONE_HAS} windows of several"),
    "bias": (
        {"windows": (4, 0), "out_bias": True},
        f"attention.out_bias is True, {NONE_HAS} it together with windows and without QK-norm",
    ),
    "vha": ({"logit_cap": 5.0}, f"attention.logit_cap is 5.0, {NONE_HAS} a soft cap"),
    "lrkv none": ({}, "attention.position is 'none', and MHA rotates whole keys here"),
    "lrkv shared": ({}, "attention.position is 'shared', and MHA rotates whole keys here"),
    "lrkv value": ({"value_dim": 6}, f"attention.value_dim is 6, {NONE_HAS} value heads"),
}
BASES = {
    "mla": MLA(num_heads=4, latent_dim=8, rope_dim=4, head_dim=H),
    "mfa": MFA(num_heads=4, query_latent_dim=8, head_dim=H),
    "vha": vha(2, 2),
    "lrkv none": lrkv(2, position="none"),
    "lrkv shared": lrkv(2, position="shared"),
    "lrkv value": lrkv(2),
}


@pytest.fixture(scope="module")
def early(shared) -> dict[str, list]:
    """For each refusal: status, what is on stderr, whether JAX was imported. One process."""
    place = shared / "early"
    for name, (fields, _) in REFUSED.items():
        own = {f.name for f in dataclasses.fields(config.Model)}
        attention = BASES.get(name, gqa(4, 2))
        inner = {n: x for n, x in fields.items() if n not in own}
        outer = {n: x for n, x in fields.items() if n in own}
        model = model_of(dataclasses.replace(attention, **inner), **outer)
        (place / name).mkdir(parents=True)
        (place / name / "config.json").write_text(config.to_json(config.Experiment(model)))
    lines = {name: ["export", str(place / name), "--out", str(place / "out")] for name in REFUSED}
    good = ["export", str(place / "cap"), "--out", str(place / "out")]
    lines |= {
        "no run": ["export", str(place / "nothing"), "--out", str(place / "out")],
        "no config": ["export", str(place), "--out", str(place / "out")],
        "no out": ["export", str(place / "cap")],
        "dtype": [*good, "--dtype", "float16"],
        "size": [*good, "--shard-size", "5 parsecs"],
    }
    code = f"""
import contextlib, io, json, sys
from vhajax import cli
found = {{}}
for name, args in {lines!r}.items():
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        status = cli.main(args)
    heavy = sorted({{"jax", "flax", "orbax"}} & sys.modules.keys())
    found[name] = [status, err.getvalue(), heavy]
print(json.dumps(found))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert names_in(place) == sorted(REFUSED)
    return json.loads(ran.stdout)


OTHERS = {
    "no run": "early/nothing does not exist; name a folder that `vhajax train` made",
    "no config": "early has no config.json; name a folder",
    "no out": "required: --out",
    "dtype": "argument --dtype: invalid choice: 'float16'",
    "size": "--shard-size is '5 parsecs'; give a size such as 5GB or 500MB",
}


@pytest.mark.parametrize("name", [*REFUSED, *OTHERS])
def test_refused_before_jax(name, early):
    status, err, heavy = early[name]
    assert (status, heavy, err.count("\n")) == (2, [], 1)
    assert re.search(REFUSED[name][1] if name in REFUSED else OTHERS[name], err), err


def test_an_existing_folder_is_refused(exported):
    case = exported("mha")
    before = {path: path.read_bytes() for path in case.out.iterdir()}
    refused("out/mha exists; name a new folder", "export", case.run, "--out", case.out)
    assert {path: path.read_bytes() for path in case.out.iterdir()} == before


@contextlib.contextmanager
def file_size(limit: int) -> Iterator[None]:
    """Stands for a full disk: the small files are written, others not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [100, 20_000])
def test_a_full_disk(limit, exported, tmp_path):
    """Of config.json, and of the tensors."""
    with file_size(limit):
        refused("out cannot be written .*File too large", *export_of(exported, tmp_path))
    assert not names_in(tmp_path)


def test_a_folder_that_cannot_be_made(exported, tmp_path):
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" / "sub"
    refused(r"sub/out cannot be written \(", *export_of(exported, where))
    assert names_in(tmp_path) == ["file"]


def test_a_read_only_folder(exported, tmp_path):
    place = tmp_path / "place"
    place.mkdir(mode=0o555)
    args, words = export_of(exported, place), r"place/out cannot be written \(.*ermission denied"

    def powerless() -> None:  # root's power is a thread's own
        processes._obey_permissions()
        refused(words, *args)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(powerless).result()
    assert not names_in(place)


def export_of(exported: Callable[[str], Exported], where: Path) -> list[str]:
    return ["export", str(exported("mha").run), "--out", str(where / "out")]


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_leaves_nothing(exported, tmp_path, monkeypatch):
    case, made = exported("mha"), []

    def second(*args: Any, **kwargs: Any) -> None:
        interrupt() if made else made.append(save_file(*args, **kwargs))

    monkeypatch.setattr(store, "save_file", second)
    status, _, err = call(*export_of(exported, tmp_path), "--shard-size", "20kB")
    assert (status, err, len(made)) == (INTERRUPTED, "vhajax: interrupted.\n", 1)
    monkeypatch.setattr(checkpoint.Checkpointer, "save", interrupt)
    status, _, err = call("import", case.out, "--out", tmp_path / "run")
    assert (status, err) == (INTERRUPTED, "vhajax: interrupted.\n")
    assert not names_in(tmp_path)


# ------------------------------------------------------------------ in, of what was exported


@pytest.mark.parametrize("name", ["mha", "normed, all", "vha without premix"])
def test_there_and_back(name, exported, tmp_path):
    """Bitwise the same parameters, but for the rows that pad the vocabulary."""
    case = exported(name)
    told = done("import", case.out, "--out", tmp_path / "run")
    tensors = read_tensors(case.out)
    assert told == {
        "folder": str(case.out),
        "out": str(tmp_path / "run"),
        "architecture": f"{CASES[name][0]}ForCausalLM",
        "model": case.told["model"],
        "context": T,
        "tensors": len(tensors),
        "dtypes": ["float32"],
    }
    model = runs.read_config(tmp_path / "run").model
    attention = case.model.attention
    attention = attention.folded() if isinstance(attention, VHA) else attention
    wanted = dataclasses.replace(case.model, attention=attention, dtype="auto")
    assert dataclasses.replace(model, windows=()) == dataclasses.replace(wanted, windows=())
    assert model.layer_windows == wanted.layer_windows
    assert checkpoint.steps(tmp_path / "run") == [0]
    assert checkpoint.read_meta(tmp_path / "run", 0)["weights_only"]
    if attention is case.model.attention:
        _, params = weights.read(tmp_path / "run")
        for path in ("embedding", "unembedding") if not model.tied else ("embedding",):
            params[path] = np.array(params[path])
            assert not params[path][V:].any()
            params[path][V:] = case.params[path][V:]
        tiny.assert_bitwise(case.params, params)


def test_the_same_text(exported, tmp_path):
    """Of VHA as the run has it, and as it came back."""
    case = exported("vha normed")
    done("import", case.out, "--out", tmp_path / "run")
    args = ["--prompt", "def f", "--max-new-tokens", "12", "--temperature", "0"]
    texts = [done("generate", run, *args)["text"] for run in (case.run, tmp_path / "run")]
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("def f")


# ------------------------------------------------------------------ in, of what others made


def published(kind: str, **more: Any) -> dict[str, Any]:
    """A config.json as transformers 4 writes it, for the layers here."""
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
        "transformers_version": "4.44.0",
    } | more


def random_tensors(tree: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in hf.shapes(tree).items():
        x = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            x = 1 + 0.3 * x
        elif "embed" in name or name.endswith("bias"):
            x = 0.2 * x
        else:
            x = x / np.sqrt(shape[-1])
        made[name] = x.astype(np.float32)
    return made


@functools.cache
def library_text(bos: bool) -> str:
    library = tokenizers.Tokenizer.from_str(tiny.train_bpe(tiny.TEXTS, V).to_json())
    if bos:
        library.post_processor = post.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B:1", special_tokens=[("<|bos|>", 0)]
        )
    return library.to_str()


def write_folder(
    folder: Path,
    tree: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    shards: int = 1,
    bos: bool = True,
    **texts: str,
) -> Path:
    """What save_pretrained of a model and its tokenizer writes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tree))
    (folder / "tokenizer.json").write_text(library_text(bos))
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)  # not in the order of the layers
    where = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FOREIGN: dict[str, tuple[dict[str, Any], np.dtype, int]] = {
    # config.json, dtype, files. H is D / N for the first two, and told for the third.
    "llama": (
        published(
            "llama",
            attention_bias=True,
            tie_word_embeddings=True,
            rope_scaling={
                "type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        np.dtype(np.float16),
        1,
    ),
    "qwen2": (
        published("qwen2", num_key_value_heads=None, vocab_size=320, **WINDOWED),
        BF16,
        3,
    ),
    "qwen3": (
        published(
            "qwen3",
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=H,
            rope_theta=None,
            rope_parameters={"rope_theta": 200.0, **SCALED},
        ),
        np.dtype(np.float32),
        2,
    ),
}
COMPANIONS = {
    "tokenizer_config.json": '{"eos_token": {"content": "<|eos|>"}, "chat_template": "{{ x }}"}',
    "special_tokens_map.json": '{"eos_token": "<|eos|>"}',
    "chat_template.jinja": "{% for m in messages %}ü{{ m }}{% endfor %}\n",
    "generation_config.json": '{"eos_token_id": [1, 7], "temperature": 0.6}',
}


@dataclasses.dataclass
class Imported:
    tree: dict[str, Any]
    tensors: dict[str, np.ndarray]
    folder: Path
    run: Path
    told: dict[str, Any]


@pytest.fixture(scope="module")
def imported(shared) -> Callable[[str], Imported]:
    @functools.cache
    def get(name: str) -> Imported:
        tree, dtype, shards = FOREIGN[name]
        tensors = {n: x.astype(dtype) for n, x in random_tensors(tree).items()}
        there = dict(tensors)
        if name == "llama":
            there["lm_head.weight"] = there["model.embed_tokens.weight"].copy()
            there["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        texts = COMPANIONS if name == "qwen2" else {}
        folder, run = shared / "foreign" / name, shared / "imported" / name
        write_folder(folder, tree, there, shards=shards, bos=name == "llama", **texts)
        return Imported(tree, tensors, folder, run, done("import", folder, "--out", run))

    return get


@pytest.mark.parametrize("name", FOREIGN)
def test_an_import_computes_what_transformers_would(name, imported):
    case = imported(name)
    model, params = weights.read(case.run)
    version = 5 if "rope_parameters" in case.tree else 4
    theirs = hf.logits(case.tree, case.tensors, IDS, version)
    np.testing.assert_allclose(our_logits(model, params, IDS), theirs, rtol=0, atol=3e-5)
    assert np.abs(theirs).max() > 1
    assert case.told["dtypes"] == sorted(
        {FOREIGN[name][1].name} | ({"float32"} if name == "llama" else set())
    )
    assert case.told["context"] == runs.read_config(case.run).data.seq_len == 64
    assert case.told["tensors"] == len(case.tensors) + 2 * (name == "llama")


@pytest.mark.parametrize("name", FOREIGN)
def test_an_import_is_exported_as_it_came(name, imported, tmp_path):
    """Bit for bit where the dtype can be written; half precision as the float32 that it is."""
    case = imported(name)
    dtype = "bfloat16" if name == "qwen2" else "float32"
    with unmeasured(name != "qwen2"):
        told = done("export", case.run, "--out", tmp_path / "out", "--dtype", dtype)
    wanted = {n: x if x.dtype == BF16 else x.astype(np.float32) for n, x in case.tensors.items()}
    tiny.assert_bitwise(wanted, read_tensors(tmp_path / "out"))
    assert told["max_logit_difference"] == 0
    there = read_json(tmp_path / "out" / "config.json")
    version = 5 if "rope_parameters" in case.tree else 4
    ours, theirs = hf.logits(there, wanted, IDS), hf.logits(case.tree, wanted, IDS, version)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    assert there["max_position_embeddings"] == {"llama": 256}.get(name, 64)
    assert there["architectures"] == case.tree["architectures"]
    assert there["bos_token_id"] == (0 if name == "llama" else None)


def test_bfloat16_comes_back_rounded(exported, tmp_path):
    case = exported("mha")
    with unmeasured():
        done("export", case.run, "--out", tmp_path / "out", "--dtype", "bfloat16")
    assert done("import", tmp_path / "out", "--out", tmp_path / "run")["dtypes"] == ["bfloat16"]
    _, params = weights.read(tmp_path / "run")
    for name, x in case.params.items():
        there = np.asarray(params[name])
        rows = V if name == "embedding" else len(x)
        np.testing.assert_array_equal(there.view(np.uint32) & 0xFFFF, 0)
        there = (there.view(np.uint32) >> 16).astype(np.uint16)
        np.testing.assert_array_equal(there[:rows], rounded_bits(x)[:rows], name)


DEFAULT = {"rope_type": "default", "rope_theta": 700.0}
READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # config.json → fields of the model and of its attention
    "llama": (published("llama"), {"qkv_bias": False, "out_bias": False, "head_dim": 8}),
    "no kv heads": (published("llama", num_key_value_heads=None), {"num_kv_heads": 3}),
    "head_dim": (published("llama", head_dim=6), {"head_dim": 6, "num_kv_heads": 1}),
    "qwen3 head_dim": (published("qwen3"), {"head_dim": 128, "qk_norm": "weighted"}),
    "qwen2": (published("qwen2"), {"qkv_bias": True, "out_bias": False, "head_dim": 8}),
    "bias": (published("llama", attention_bias=True), {"qkv_bias": True, "out_bias": True}),
    "qwen3 bias": (published("qwen3", attention_bias=True), {"qkv_bias": True, "out_bias": True}),
    "qwen2 bias": (published("qwen2", attention_bias=True), {"qkv_bias": True, "out_bias": False}),
    "tied": (published("qwen3", tie_word_embeddings=True), {"tied": True, "norm_eps": 1e-5}),
    "defaults": (
        published("llama", tie_word_embeddings=None, rms_norm_eps=None, rope_theta=None),
        {"tied": False, "norm_eps": 1e-6, "rope_theta": 10_000.0},
    ),
    "whole numbers": (published("llama", rope_theta=500_000), {"rope_theta": 500_000.0}),
    "version 5": (
        published("llama", rope_theta=None, rope_parameters=DEFAULT),
        {"rope_theta": 700.0, "rope_scaling": RopeScaling()},
    ),
    "version 5 first": (published("llama", rope_parameters=DEFAULT), {"rope_theta": 700.0}),
    "old name": (
        published("llama", rope_scaling={"type": "yarn", "factor": 4}),
        {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_length=64)},
    ),
    "yarn": (
        published(
            "qwen2",
            rope_scaling={**SCALED, "beta_fast": 20, "attention_factor": 1.5, "truncate": True},
        ),
        {
            "rope_scaling": RopeScaling(
                kind="yarn", factor=4.0, original_length=16, beta_fast=20.0, attention_factor=1.5
            )
        },
    ),
    "windows off": (
        published("qwen2", use_sliding_window=False, sliding_window=5, max_window_layers=1),
        {"layer_windows": ()},
    ),
    "windows by number": (published("qwen2", **WINDOWED), {"layer_windows": (0, 5)}),
    "windows from the first": (
        published("qwen3", **{**WINDOWED, "max_window_layers": 0}),
        {"layer_windows": (5, 5)},
    ),
    "windows past the last": (
        published("qwen3", **{**WINDOWED, "max_window_layers": 28}),
        {"layer_windows": ()},
    ),
    "windows by name": (
        published("qwen3", **WINDOWED, layer_types=["sliding_attention", "full_attention"]),
        {"layer_windows": (5, 0)},
    ),
    "llama has none": (published("llama", **WINDOWED), {"layer_windows": ()}),
}


@pytest.mark.parametrize("name", READ)
def test_configs_that_are_read(name):
    tree, wanted = READ[name]
    model, context = layout.from_config(tree, "config.json")
    sizes = (model.vocab_size, model.dim, model.ffn_dim, model.num_layers, context)
    assert sizes == (V, D, F, L, 64)
    parts = vars(model) | vars(model.attention) | {"layer_windows": model.layer_windows}
    assert {field: parts[field] for field in wanted} == wanted


# ------------------------------------------------------------------ tokenizers


@pytest.mark.parametrize(
    ("settings", "tree", "eos"),
    [
        ({"eos_token": "<|bos|>"}, {"eos_token_id": 5}, "<|bos|>"),
        ({"eos_token": {"content": "<|bos|>", "special": True}}, {}, "<|bos|>"),
        (None, {"eos_token_id": 0}, "<|bos|>"),
        ({"eos_token": None}, {"eos_token_id": [0, 1]}, "<|bos|>"),
        ({}, {}, "<|eos|>"),  # a common name
        ({"eos_token": 7}, {"eos_token_id": -1}, "<|eos|>"),
        ({"eos_token": {}}, {"eos_token_id": "1"}, "<|eos|>"),
        ({}, {"eos_token_id": 99999}, "<|eos|>"),
    ],
)
def test_end_of_text(settings, tree, eos, tmp_path):
    (tmp_path / "tokenizer.json").write_text(library_text(False))
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found, texts = tokens.from_folder(tmp_path, tree)
    assert (found.eos_name, found.eos) == (eos, {"<|bos|>": 0, "<|eos|>": 1}[eos])
    assert json.loads(texts["special_tokens.json"]) == {"eos": eos, "bos": ""}


def test_begin_of_text_only_where_the_file_puts_one(imported):
    """The vocabulary has one in both."""
    for name, bos in (("llama", 0), ("qwen3", None)):
        tokenizer = load_run_tokenizer(imported(name).run)
        assert (tokenizer.bos, tokenizer.eos) == (bos, 1)
        theirs = tokenizers.Tokenizer.from_file(str(imported(name).folder / "tokenizer.json"))
        assert tokenizer.encode_document("def f")[:-1] == theirs.encode("def f").ids


def test_companions_stay(imported, tmp_path):
    """Import, convert, fold, train, export: the tokenizer's files are those that came.

    The model has 20 ids more than the tokenizer has tokens, as Qwen's have.
    """
    case = imported("qwen2")
    args = ["--to", "vha", "--kv-heads", 1, "--eval-rows", 0]
    with unmeasured():
        done("convert", case.run, "--out", tmp_path / "vha", *args)
        done("fold", tmp_path / "vha", "--out", tmp_path / "gqa")
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in tiny.TEXTS)
    )
    prepare = ["--tokenizer", case.run / "tokenizer.json", "--seq-len", 16, "--bos", ""]
    more = ["--heldout-fraction", 0.2]
    done("data", "prepare", tmp_path / "texts.jsonl", "--out", tmp_path / "data", *prepare, *more)
    fields = {"data.path": tmp_path / "data", "data.seq-len": 16, "data.batch-size": 4}
    fields |= {"train.steps": 1, "optim.name": "adamw", "train.eval-rows": 4}
    flags = [text for name, value in fields.items() for text in (f"--{name}", value)]
    told = done(
        "train", tmp_path / "gqa", "--init-from", tmp_path / "gqa", "--run-dir", tmp_path / "run",
        *flags,
    )  # fmt: skip
    assert 0 < told["heldout_loss"] < 2 * np.log(320)
    with unmeasured():
        done("export", tmp_path / "run", "--out", tmp_path / "out")
    for place in (tmp_path / "vha", tmp_path / "gqa", tmp_path / "run", tmp_path / "out"):
        for file, text in COMPANIONS.items():
            assert (place / file).read_text() == text, (place, file)
    theirs = read_json(case.folder / "tokenizer.json")
    assert read_json(tmp_path / "out" / "tokenizer.json") == theirs
    there = read_json(tmp_path / "out" / "config.json")
    assert (there["eos_token_id"], there["bos_token_id"]) == (1, None)
    assert there["vocab_size"] == 320


def test_single_companions_stay(exported, tmp_path):
    """Also where there is no tokenizer_config.json."""
    folder = shutil.copytree(exported("mha").out, tmp_path / "there")
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / file).unlink()
    (folder / "chat_template.jinja").write_text(COMPANIONS["chat_template.jinja"])
    (folder / "generation_config.json").write_text(COMPANIONS["generation_config.json"])
    done("import", folder, "--out", tmp_path / "run")
    with unmeasured():
        done("export", tmp_path / "run", "--out", tmp_path / "out")
    for file in ("chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / file).read_text() == COMPANIONS[file]
    assert read_json(tmp_path / "out" / "tokenizer_config.json")["eos_token"] == "<|eos|>"
    one, other = (read_json(place / "tokenizer.json") for place in (tmp_path / "out", folder))
    assert one == other


# ------------------------------------------------------------------ what is not imported

Change = Callable[[Path], None]


def edit(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        tree = read_json(folder / "config.json") | fields
        (folder / "config.json").write_text(json.dumps(tree))

    return change


def text(file: str, content: str | None) -> Change:
    """None: the file is removed."""

    def change(folder: Path) -> None:
        (folder / file).unlink() if content is None else (folder / file).write_text(content)

    return change


def arrays(edit_arrays: Callable[[dict[str, np.ndarray]], Any]) -> Change:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        edit_arrays(tensors)
        save_file(tensors, path)

    return change


def together(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def two_halves(folder: Path, index: dict[str, str] | None = None) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[:5]}, folder / "a.safetensors")
    save_file({n: tensors[n] for n in names[5:]}, folder / "b.safetensors")
    if index is not None:
        where = dict.fromkeys(names[:5], "a.safetensors") | dict.fromkeys(
            names[5:], "b.safetensors"
        )
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {n: f for n, f in (where | index).items() if f}})
        )


class Trap:
    """Whoever unpickles this makes a file."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self) -> tuple:
        return open, (self.marker, "w")


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(folder / "marker")))


def put(tensors: dict[str, np.ndarray], name: str, x: np.ndarray) -> None:
    tensors[name] = x


Q, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
NOT_BUILT = r"in .*config.json, which is not built here"
BAD: dict[str, tuple[Change, str]] = {
    # architecture
    "mixtral": (
        edit(architectures=["MixtralForCausalLM"]),
        "architectures is .'MixtralForCausalLM'. in .* imports one of LlamaForCausalLM, Qwen2ForC",
    ),
    "none": (edit(architectures=None), "architectures is None in"),
    "no list": (edit(architectures="LlamaForCausalLM"), "architectures is 'LlamaForCausalLM' in"),
    "two": (edit(architectures=["LlamaForCausalLM", "X"]), "architectures is .'LlamaFor.*, 'X'. "),
    "odd": (edit(architectures=[{}]), "architectures is .{}. in"),
    "mlp_bias": (edit(mlp_bias=True), f"mlp_bias is True {NOT_BUILT}; only False is"),
    "gelu": (edit(hidden_act="gelu"), f"hidden_act is 'gelu' {NOT_BUILT}; only 'silu' is"),
    "quantized": (
        edit(quantization_config={"bits": 4}),
        f"quantization_config is {{'bits': 4}} {NOT_BUILT}",
    ),
    "partial": (edit(partial_rotary_factor=0.5), f"partial_rotary_factor is 0.5 {NOT_BUILT}"),
    "partial rope": (
        edit(rope_parameters={**SCALED, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor is 0.5 in rope_parameters of .*which is not built here",
    ),
    **{
        kind: (
            edit(rope_scaling={"type": kind, "factor": 2.0}),
            f"The rope type is '{kind}' in .* vhajax knows default, llama3 and yarn",
        )
        for kind in ("linear", "dynamic", "longrope")
    },
    "odd rope type": (edit(rope_scaling={"rope_type": ["yarn"]}), r"The rope type is \['yarn'\]"),
    "mscale": (
        edit(rope_scaling={**SCALED, "mscale": 1.0}),
        "mscale is 1.0 in rope_scaling of .*config.json, which is not built here",
    ),
    "truncate": (edit(rope_scaling={**SCALED, "truncate": False}), "truncate is False in rope_sc"),
    "no factor": (edit(rope_scaling={"rope_type": "yarn"}), "rope_scaling of .* has no factor"),
    # fields
    "no config": (text("config.json", None), "folder has no config.json; name a folder that save"),
    "no JSON": (text("config.json", "{"), "config.json is not a JSON object"),
    "no object": (text("config.json", "7"), "config.json is not a JSON object"),
    "lost field": (edit(hidden_size=None), "config.json has no hidden_size; it is incomplete"),
    "word": (edit(num_hidden_layers="two"), "num_hidden_layers is 'two' in .* it must be int"),
    "yes": (edit(num_hidden_layers=True), "num_hidden_layers is True in .* it must be int"),
    "half": (edit(head_dim=7.5), "head_dim is 7.5 in .* it must be int"),
    "flag": (edit(tie_word_embeddings=1), "tie_word_embeddings is 1 in .* it must be bool"),
    "eps": (edit(rms_norm_eps="1e-6"), "rms_norm_eps is '1e-6' in .* it must be float or int"),
    "rope": (edit(rope_scaling=[8]), r"rope_scaling is \[8\] in .* it must be dict"),
    "no heads": (edit(num_attention_heads=0), "num_attention_heads is 0 in .* must be 1 or more"),
    "no width": (edit(head_dim=-8), "head_dim is -8 in .* it must be 1 or more"),
    "kv heads": (edit(num_key_value_heads=2), "num_heads is 3, not a multiple of"),
    # tensors
    "missing": (arrays(lambda x: x.pop(Q)), f"are not those of its config.json: {Q} is missing"),
    "extra": (
        arrays(lambda x: put(x, "model.extra", np.ones(3, np.float32))),
        "config.json: model.extra is not in the architecture",
    ),
    "shape": (
        arrays(lambda x: put(x, Q, x[Q][:-1].copy())),
        rf"{Q} is F32\[23, 24\], not F32\|BF16\|F16\[24, 24\]",
    ),
    "transposed": (
        arrays(lambda x: put(x, "model.layers.1.mlp.up_proj.weight", np.ones((24, 28), "f"))),
        r"up_proj.weight is F32\[24, 28\], not F32\|BF16\|F16\[28, 24\]",
    ),
    "int8": (
        arrays(lambda x: put(x, Q, x[Q].astype(np.int8))),
        rf"{Q} is I8\[24, 24\], not F32\|BF16\|F16\[24, 24\]",
    ),
    "many": (edit(num_hidden_layers=4), r"input_layernorm.weight is missing; .* and 8 more\."),
    "other head": (
        edit(tie_word_embeddings=True),
        "lm_head.weight of .* is not the embedding, but tie_word_embeddings is true",
    ),
    # files
    "cut": (cut, "model.safetensors cannot be read .*; copy it again"),
    "no tensors": (text("model.safetensors", ""), "model.safetensors cannot be read"),
    "no index": (two_halves, f"folder has neither model.safetensors nor {INDEX}; copy the one"),
    "index lies": (
        lambda folder: two_halves(folder, {EMBEDDING: "b.safetensors"}),
        rf"{INDEX} (lacks|lists) {EMBEDDING} of [ab].safetensors, and",
    ),
    "index lacks": (lambda folder: two_halves(folder, {Q: ""}), f"{INDEX} lacks {Q} of b.safet"),
    "index of more": (
        lambda folder: two_halves(folder, {"x": "a.safetensors"}),
        f"{INDEX} lists x of a.safetensors, and a.safetensors lacks it; copy the files again",
    ),
    "odd index": (
        together(two_halves, text(INDEX, '{"weight_map": 3}')),
        f"{INDEX} is not an index of tensors",
    ),
    "index of another file": (
        lambda folder: two_halves(folder, {"x": "c.safetensors"}),
        "c.safetensors cannot be read .*; copy it again",
    ),
    "index of nowhere": (
        lambda folder: two_halves(folder, {Q: "../c.safetensors"}),
        "c.safetensors cannot be read",
    ),
    "pickle": (only_a_pickle, "pytorch_model.bin is a pickle file, which can execute code"),
    "nothing": (text("model.safetensors", None), "folder has no model.safetensors; name a folder"),
    # tokenizer
    "no tokenizer": (text("tokenizer.json", None), "folder has no tokenizer.json; load its token"),
    "odd tokenizer": (text("tokenizer.json", "{}"), "tokenizer.json is not a tokenizer.json"),
    "odd settings": (text("tokenizer_config.json", "[1]"), "tokenizer_config.json is not JSON as"),
    "unknown EOS": (
        text("tokenizer_config.json", '{"eos_token": "<|nowhere|>"}'),
        "tokenizer.json has no token '<|nowhere|>'",
    ),
    "small model": (
        together(
            edit(vocab_size=299),
            arrays(lambda x: [put(x, n, x[n][:-1].copy()) for n in (EMBEDDING, "lm_head.weight")]),
        ),
        "The tokenizer of .*folder has 300 tokens, the model 299; they do not belong together",
    ),
}
WINDOWS = {
    "no size": ({"sliding_window": None}, "config.json has no sliding_window; it is incomplete"),
    "zero": ({"sliding_window": 0}, "sliding_window is 0 in .* it must be 1 or more"),
    "few kinds": ({"layer_types": ["full_attention"]}, r"layer_types is \['full_attention'\] in"),
    "other kind": ({"layer_types": ["full_attention", "chunked"]}, "layer_types is .*'chunked'"),
    "odd kind": ({"layer_types": ["full_attention", {}]}, "layer_types is .*, {}. in .* it must"),
    "no list": ({"layer_types": "full"}, "layer_types is 'full' in"),
}


@pytest.fixture(scope="module")
def good(shared) -> Path:
    tree = published("llama")
    return write_folder(shared / "good" / "folder", tree, random_tensors(tree))


@pytest.mark.parametrize("name", BAD)
def test_refused_imports(name, good, tmp_path):
    folder = shutil.copytree(good, tmp_path / "folder")
    BAD[name][0](folder)
    before = names_in(folder)
    refused(BAD[name][1], "import", folder, "--out", tmp_path / "run")
    assert names_in(tmp_path) == ["folder"]
    assert names_in(folder) == before
    assert "marker" not in before


@pytest.mark.parametrize("name", WINDOWS)
def test_refused_windows(name):
    fields, words = WINDOWS[name]
    with pytest.raises(UserError, match=words):
        layout.from_config(published("qwen3", **(WINDOWED | fields)), "config.json")


def test_other_files_are_left_alone(good, tmp_path):
    """What transformers does not read, as adapters or another layout of the same weights."""
    folder = shutil.copytree(good, tmp_path / "folder")
    save_file({"adapter": np.zeros(3, np.float32)}, folder / "adapter_model.safetensors")
    only_a_pickle(shutil.copytree(good, tmp_path / "pickle"))
    shutil.copy(tmp_path / "pickle" / "pytorch_model.bin", folder)
    assert cli.main(["import", str(folder), "--out", str(tmp_path / "run")]) == 0
    assert "marker" not in [*names_in(folder), *names_in(tmp_path / "pickle")]


def test_refused_places(good, tmp_path):
    refused("nowhere does not exist; name a folder that save_pretrained wrote", "import",
            tmp_path / "nowhere", "--out", tmp_path / "run")  # fmt: skip
    (tmp_path / "run").mkdir()
    refused("run exists; name a new folder", "import", good, "--out", tmp_path / "run")
    refused("required: --out", "import", good)
    assert names_in(tmp_path) == ["run"]


# ------------------------------------------------------------------ memory

MEASURE = """
import re, sys
from pathlib import Path
from vhajax.huggingface import load

def peak():  # getrusage would tell that of the process which started this one
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

small, big = map(Path, sys.argv[1:])
load.import_folder(small, small.with_name("small-run"))
before = peak()
load.import_folder(big, big.with_name("big-run"))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_import_needs_little_more_memory_than_the_model(tmp_path):
    """The peak, Orbax's save included, over that of the process after a first small import."""
    small = published("llama", hidden_size=128, num_attention_heads=2, head_dim=64)
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16}
    big = small | sizes | {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8000}
    rng = np.random.default_rng(0)
    for name, tree in (("small", small), ("big", big)):
        made = {
            n: np.frombuffer(rng.bytes(2 * math.prod(shape)), BF16).reshape(shape)
            for n, shape in hf.shapes(tree).items()
        }
        write_folder(tmp_path / name, tree, made, shards=4)
    parts = [path.stat().st_size for path in (tmp_path / "big").glob("*.safetensors")]
    args = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "big")]
    settings = {n: x for n, x in os.environ.items() if n != "XLA_FLAGS"}  # no simulated devices
    ran = subprocess.run(args, capture_output=True, text=True, env=settings)
    assert ran.returncode == 0, ran.stderr
    assert 100e6 < sum(parts) < 200e6
    whole = 2 * sum(parts)  # float32
    assert whole < int(ran.stdout) < 1.3 * (max(parts) + whole)
