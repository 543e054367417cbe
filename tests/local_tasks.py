"""Tasks of lm-evaluation-harness from local files: one of each kind of request.

No vhajax here: the interpreter that has transformers reads this, too.
"""

import json
from pathlib import Path

LENGTH = 32
"""Of the model's input: some of the texts below are longer."""

LONG = " ".join(f"x{i} = f{i}(x{i - 1})" for i in range(1, 12))
PAIRS = [
    ("def f1(x):", "\n    return 7 * x"),
    ("def f1(x):  ", "return x"),
    ("def f1(x):\n", "    return"),
    ("", "def f2(x):"),
    (LONG, " f(x)"),
    (LONG, " return x"),
    ("naïve ", "日"),
    ("a", "b"),
    ("<|bos|>a <|eos|>", "b"),
    ("", "<|bos|>b"),
    ("a<|eos|> ", "<|bos|>"),
]
CHOICES = [
    {"question": f"f{i}(x) returns", "choices": [f"{i}", f"{i} * x", "naïve"], "answer": i % 3}
    for i in range(6)
]
TEXTS = ["", "x", "<|bos|>x<|eos|>", "def f3(x):\n    return 237 * x", LONG]
# None begins with BOS: where `hf` generates, the first text of a batch decides for all.
PROMPTS = ["def f1(x):\n", "x", "# naïve ", "x<|eos|>x", LONG]

SPLITS = {"pairs": PAIRS, "choice": CHOICES, "rolling": TEXTS, "generate": PROMPTS}
TASKS = {
    "pairs": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{continuation}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
    },
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "fewshot_split": "test",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n\n", "e"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}
NAMES = [f"local_{name}" for name in TASKS]


def write(folder: Path) -> Path:
    """Task files and their data in a new folder."""
    folder.mkdir()
    for name, task in TASKS.items():
        rows = folder / f"{name}.jsonl"
        rows.write_text("".join(json.dumps(_row(x)) + "\n" for x in SPLITS[name]))
        data = {"data_files": {"test": str(rows)}, "cache_dir": str(folder / "cache")}
        config = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": data,
            "test_split": "test",
            **task,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(config))  # YAML, too
    return folder


def _row(example: dict | tuple | str) -> dict:
    if isinstance(example, tuple):
        return {"context": example[0], "continuation": example[1]}
    return {"text": example} if isinstance(example, str) else example


def answers(samples: dict[str, list[dict]]) -> dict[str, list]:
    """What the model answered, by task, document and request, without the harness's nesting."""
    return {
        task: [
            [answer for request in row["resps"] for answer in request]
            for row in sorted(rows, key=lambda row: row["doc_id"])
        ]
        for task, rows in samples.items()
    }
