"""A run under lm-evaluation-harness: float64 sums of the oracle, windows written out, bad input."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import local_tasks
import numpy as np
import oracle
import pytest
import tiny
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from vhajax import cli, harness, harness_tasks, likelihood
from vhajax.errors import UserError
from vhajax.harness import RunModel
from vhajax.inference import load
from vhajax.sampling import GREEDY, Sampling
from vhajax.text import generate_text

pytestmark = pytest.mark.usefixtures("programs_kept")
LENGTH = 24
"""Of the model's input: some of the texts below are longer."""

LONG = local_tasks.LONG
PAIRS = [*local_tasks.PAIRS, ("", ""), ("x = ", ""), ("   ", "y")]


class Case:
    """A VHA run, which is folded to be evaluated, and the oracle, which does not fold."""

    def __init__(self, folder: Path) -> None:
        tiny.prepare_texts(folder / "data", tiny.TEXTS)
        self.experiment = tiny.vha_experiment(folder / "data")
        self.params = oracle.random_params(self.experiment.model, seed=3)
        self.run = folder / "run"
        tiny.save_weights(self.run, self.experiment, self.params)
        _, self.text = load(self.run)
        # Greedy text is then of tokens that stand for ASCII, which never end inside a character.
        plain = [
            i for i in range(tiny.VOCAB) if self.text.piece(i).isascii() and self.text.piece(i)
        ]
        others = np.setdiff1d(np.arange(len(self.params["unembedding"])), plain)
        self.params["unembedding"][others] = 0
        self.run = folder / "ascii"
        tiny.save_weights(self.run, self.experiment, self.params)
        self.model, _ = load(self.run)
        self.tasks = local_tasks.write(folder / "tasks")

    def lm(self, batch_size: int = 3, max_length: int = LENGTH) -> RunModel:
        return RunModel(self.model, self.text, max_length, batch_size)

    def log_probs(self, ids: list[int]) -> np.ndarray:
        """[len(ids), V] float64: of the token after each."""
        positions, segments = oracle.documents([[len(ids)]])
        tokens = np.array([ids])
        logits = oracle.forward(self.experiment.model, self.params, tokens, positions, segments)[0]
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    def nats(self, read: list[int], targets: list[int]) -> float:
        """Of the targets, the last of which follows the last id read."""
        found = self.log_probs(read)[-len(targets) :] if targets else np.zeros((0, 1))
        return float(found[np.arange(len(targets)), targets].sum())


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    return Case(tmp_path_factory.mktemp("harness"))


def ask(kind, *args: tuple) -> list[Instance]:
    return [Instance(kind, {}, arguments, i) for i, arguments in enumerate(args)]


# ------------------------------------------------------------------ log-likelihoods


def split(case: Case, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids as the harness's `hf` has them, BOS in front, but for an empty continuation."""
    bos, encode = case.text.bos, functools.partial(case.text.encode, special=True)
    if not continuation:
        return [bos], []
    moved = len(context.rstrip())
    text = context + continuation
    alone, whole = ([bos, *encode(x.removeprefix("<|bos|>"))] for x in (context[:moved], text))
    return alone, whole[len(alone) :]


def test_loglikelihoods_are_the_oracles_sums_in_every_order_and_batch_size(case):
    expected = []
    for pair in PAIRS:
        context, continuation = split(case, *pair)
        read = [*context, *continuation][-LENGTH - 1 :][:-1]
        expected.append(case.nats(read, continuation))
    assert len(split(case, LONG, "x")[0]) > 2 * LENGTH  # so some are cut
    for batch_size, order in ((1, 1), (3, 1), (3, -1)):
        requests = ask("loglikelihood", *PAIRS[::order])
        answers = case.lm(batch_size).loglikelihood(requests)[::order]
        oracle.assert_near([nats for nats, _ in answers], expected)
        assert [greedy for _, greedy in answers] == [
            continuation == "" for _, continuation in PAIRS
        ]
    empty = [pair[1] == "" for pair in PAIRS]
    assert [a for a, e in zip(answers, empty, strict=True) if e] == [(0.0, True)] * 2


@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_the_context_boundary(case, more):
    """max_length tokens are read: with the last one, which is only predicted, one more fits."""
    ids = oracle.random_tokens((LENGTH + 1 + more,), tiny.VOCAB, seed=more + 1).tolist()
    for n in (1, 5, LENGTH):
        pairs = [(ids[:-n], ids[-n:])] if n < len(ids) else []
        kept = ids[max(0, more) :]
        found = dict(likelihood.score(case.model, pairs, LENGTH, 2))
        expected = {i: case.nats(kept[:-1], ids[-n:]) for i in range(len(pairs))}
        oracle.assert_near([found[i][0] for i in found], list(expected.values()))


def test_greedy_means_that_every_token_is_the_likeliest(case):
    ids = case.text.encode_document("def f1(x):")[:-1]
    start = len(ids)
    for _ in range(4):
        ids.append(int(case.log_probs(ids)[-1].argmax()))
    other = [*ids[:-2], (ids[-2] + 1) % tiny.VOCAB, ids[-1]]
    pairs = [(row[:start], row[start:]) for row in (ids, other)]
    found = dict(likelihood.score(case.model, pairs, LENGTH, 4))
    assert [found[i][1] for i in (0, 1)] == [True, False]
    assert found[0][0] > found[1][0]


def test_logits_in_chunks(case, monkeypatch):
    """16 positions a row, 48 in all, seven at a time."""
    ids = oracle.random_tokens((16,), tiny.VOCAB).tolist()
    monkeypatch.setattr(likelihood, "CHUNK", 7)
    likelihood._look_up.clear_cache()
    found = dict(likelihood.score(case.model, [(ids[:n], ids[n:]) for n in (1, 5, 9)], LENGTH, 3))
    likelihood._look_up.clear_cache()
    expected = [case.nats(ids[:-1], ids[n:]) for n in (1, 5, 9)]
    oracle.assert_near([found[i][0] for i in range(3)], expected)


def test_a_continuation_past_the_maximum_is_refused(case):
    request = ask("loglikelihood", ("x", LONG))
    with pytest.raises(UserError, match=r"continuation to score has \d+ tokens, past .* of 24;"):
        case.lm().loglikelihood(request)


def test_rolling_is_the_sum_over_windows_written_out(case):
    """With BOS both as what is given and as the first token to be predicted, as `hf` has it."""
    texts = ["", "x", "def f3(x):\n    return 3"]
    bos = case.text.bos
    short, t = [bos, *case.text.encode("x")], [bos, *case.text.encode(texts[2])]
    assert len(t) == 10
    expected = [
        case.nats([bos], [bos]),
        case.nats([bos, *short[:-1]], short),
        case.nats([bos, *t[:3]], t[:4]) + case.nats(t[3:7], t[4:8]) + case.nats(t[5:9], t[8:10]),
    ]
    for batch_size in (1, 3):
        lm = case.lm(batch_size, max_length=4)
        answers = lm.loglikelihood_rolling(ask("loglikelihood_rolling", *((x,) for x in texts)))
        oracle.assert_near(answers, expected)


# ------------------------------------------------------------------ generation


def greedy(**more) -> dict:
    return {"until": [], "max_gen_toks": 10, "do_sample": False, **more}


def pieces(case: Case, prompt: str, count: int) -> list[str]:
    """Greedy text, one piece a token."""
    found = list(generate_text(case.run, prompt, count, GREEDY))
    assert "".join(found).isascii()
    return found[:-1]  # after the last token nothing is left


def test_generated_text_is_that_of_generate(case):
    prompts = ["def f1(x):\n", "x", "return ", ""]
    requests = ask("generate_until", *((prompt, greedy()) for prompt in prompts))
    expected = ["".join(pieces(case, prompt, 10)) for prompt in prompts]
    for batch_size in (1, 3):
        assert case.lm(batch_size).generate_until(requests) == expected
    assert case.lm(3).generate_until(requests[::-1]) == expected[::-1]


def test_stop_strings_may_straddle_tokens(case):
    made = pieces(case, "x", 10)
    at = next(i for i in range(3, 9) if made[i][-1:].strip() and made[i + 1])
    stop = made[at][-1] + made[at + 1][0]
    text = "".join(made)
    plans = [{"until": stop}, {"until": ["nowhere", stop, text[-2:]]}, {"until": [text[:2]]}]
    requests = ask("generate_until", *(("x", greedy(**plan)) for plan in plans))
    whole = text[: text.index(stop)]
    assert case.lm().generate_until(requests) == [whole, whole, ""]


def test_generation_stops_as_soon_as_every_text_has_ended(case, monkeypatch):
    steps = []

    def counted(*args, **kwargs):
        for step in generate(*args, **kwargs):
            steps.append(step)
            yield step

    generate = harness.generate
    monkeypatch.setattr(harness, "generate", counted)
    text = "".join(pieces(case, "x", 10))
    requests = ask("generate_until", ("x", greedy(until=[text[0]])))
    assert case.lm(1).generate_until(requests) == [""]
    assert len(steps) == 1


def test_eos_ends_a_text(case, monkeypatch):
    lm = case.lm()
    ids = case.text.encode_document("x")[:-1]
    for _ in range(3):
        ids.append(int(case.log_probs(ids)[-1].argmax()))
    monkeypatch.setattr(case.text, "eos", ids[-1])
    expected = case.text.decode(ids[2 : ids.index(ids[-1], 2)])
    assert lm.generate_until(ask("generate_until", ("x", greedy()))) == [expected]


def test_a_long_prompt_is_cut_on_the_left(case):
    ids = [case.text.bos, *case.text.encode(LONG)][-(LENGTH - 10) :]
    for _ in range(10):
        ids.append(int(case.log_probs(ids)[-1].argmax()))
    expected = case.text.decode(ids[-10:])
    assert case.lm().generate_until(ask("generate_until", (LONG, greedy()))) == [expected]


def test_a_sampled_text_depends_on_its_own_number_only(case):
    plan = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "max_gen_toks": 10}
    sampling = Sampling(0.7, 9, 0.9)
    expected = ["".join(generate_text(case.run, "x", 10, sampling, seed)) for seed in range(3)]
    assert len(set(expected)) == 3
    for batch_size in (1, 3):
        requests = ask("generate_until", *[("x", plan)] * 3)
        assert case.lm(batch_size).generate_until(requests) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, harness.Plan(("<|eos|>",), 256, GREEDY)),
        ({"until": "a", "max_new_tokens": 3}, harness.Plan(("a", "<|eos|>"), 3, GREEDY)),
        ({"do_sample": False, "temperature": 0.8}, harness.Plan(("<|eos|>",), 256, GREEDY)),
        ({"temperature": 0.8}, harness.Plan(("<|eos|>",), 256, Sampling(0.8))),
        ({"do_sample": True, "top_p": 0.5}, harness.Plan(("<|eos|>",), 256, Sampling(1, 0, 0.5))),
        ({"num_beams": 1, "until": []}, harness.Plan(("<|eos|>",), 256, GREEDY)),
    ],
)
def test_generation_kwargs(asked, expected):
    assert harness.plan_of(asked, "<|eos|>") == expected


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"num_beams": 4}, r"hold \{'num_beams': 4\}, which vhajax does not know"),
        ({"max_gen_toks": LENGTH}, "24 new tokens .* no room for a prompt in a length of 24"),
        ({"max_gen_toks": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0, "do_sample": True}, "temperature is -1.0"),
        ({"temperature": "warm"}, "generation_kwargs are {'temperature': 'warm'} .*; mend"),
        ({"top_k": None}, "generation_kwargs are {'top_k': None} .*; mend"),
    ],
)
def test_generation_that_is_refused(case, asked, words):
    with pytest.raises(UserError, match=words):
        case.lm().generate_until(ask("generate_until", ("x", asked)))


# ------------------------------------------------------------------ the command


def command(case: Case, tasks: str, *more: str) -> list[str]:
    return ["eval", str(case.run), "--harness", tasks, "--harness-path", str(case.tasks), *more]


def test_the_command_in_a_process_of_its_own(case):
    """One JSON object on stdout, no bars on stderr, and the accuracy counted by hand."""
    args = command(case, ",".join(local_tasks.NAMES), "--max-length", "24", "--json")
    settings = {name.upper(): str(value) for name, value in tiny.CACHE_SETTINGS.items()}
    done = subprocess.run(
        [sys.executable, "-m", "vhajax.cli", *args],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
    )
    printed = "bootstrapping for stddev: perplexity\n"  # by the harness
    assert (done.returncode, done.stderr) == (0, printed)
    found = json.loads(done.stdout)
    assert (found["run"], found["max_length"]) == (str(case.run), 24)
    assert found["results"].keys() == set(local_tasks.NAMES)
    right = 0
    for row in local_tasks.CHOICES:
        answers = []
        for choice in row["choices"]:
            context, continuation = split(case, row["question"], f" {choice}")
            answers.append(case.nats([*context, *continuation][:-1], continuation))
        right += int(np.argmax(answers) == row["answer"])
    choice = found["results"]["local_choice"]
    assert choice["acc,none"] == pytest.approx(right / len(local_tasks.CHOICES))
    assert found["n-samples"]["local_choice"] == {"original": 6, "effective": 6}


def test_the_table_and_the_options(case, capsys):
    more = ["--num-fewshot", "2", "--limit", "3", "--batch-size", "3", "--max-length", str(LENGTH)]
    assert cli.main(command(case, "local_choice", *more)) == 0
    out, _ = capsys.readouterr()
    cells = [cell.strip() for cell in out.splitlines()[2].split("|")]
    assert cells[1] == "local_choice"
    assert cells[4:6] == ["2", "acc"]
    assert out.splitlines()[0].startswith("|")


def test_the_runs_length_is_the_default(case, capsys):
    found = tiny.run_json(capsys, *command(case, "local_choice", "--limit", "1"))
    assert found["max_length"] == tiny.T
    assert found["n-samples"]["local_choice"]["effective"] == 1


def test_what_is_not_finite_is_null(capsys):
    cli._emit(True, {"a": {"b": [float("nan"), 1.5]}, "c": float("inf")}, "")
    assert json.loads(capsys.readouterr().out) == {"a": {"b": [None, 1.5]}, "c": None}


def test_a_mistake_of_the_harness_is_told_and_one_below_the_model_is_raised(
    case, capsys, monkeypatch
):
    """The first document of the task is empty, and the harness divides by its bytes."""
    words = "The harness fails on local_rolling (ZeroDivisionError: "
    assert_refused(capsys, command(case, "local_rolling", "--limit", "1"), words)
    monkeypatch.setattr(harness, "score", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(command(case, "local_rolling"))


REFUSALS = {
    "no harness": (["--limit", "3"], "--limit is 3, but there is no --harness; name its tasks."),
    "no harness, zero": (["--num-fewshot", "0"], "--num-fewshot is 0, but there is no --harness"),
    "path alone": (["--harness-path", "x"], "--harness-path is x, but there is no --harness"),
    "with data": (["--harness", "x", "--data", "y"], "--data is y, but tasks have their own data"),
    "with rows": (["--harness", "x", "--rows", "3"], "--rows is 3, but tasks have their own data"),
    "limit": (["--harness", "x", "--limit", "0"], "--limit is 0; it must be 1 or more."),
    "few-shot": (["--harness", "x", "--num-fewshot", "-1"], "--num-fewshot is -1; it must be 0"),
    "batch": (["--harness", "x", "--batch-size", "0"], "--batch-size is 0; it must be 1 or more"),
    "length": (["--harness", "x", "--max-length", "0"], "--max-length is 0; it must be 1 or more"),
    "no task": (["--harness", ","], "--harness names no task"),
    "no folder": (["--harness", "x", "--harness-path", "no/dir"], "no/dir is not a folder"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(case, name, capsys):
    args, words = REFUSALS[name]
    assert_refused(capsys, ["eval", str(case.run), *args], words)


def test_an_unknown_task_is_refused(case, capsys, monkeypatch):
    """The harness's own thousands, which take ten seconds to read, are left out."""
    few = functools.partial(TaskManager, include_path=case.tasks, include_defaults=False)
    monkeypatch.setattr(harness_tasks, "TaskManager", lambda **_: few())
    assert_refused(capsys, command(case, "local_choice,nope"), "The harness has no task 'nope' (")


def test_a_run_is_looked_for_before_its_tasks(tmp_path, capsys):
    assert_refused(capsys, ["eval", str(tmp_path), "--harness", "x"], "has no config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dataset_kwargs": {"data_files": {"test": "no/such.jsonl"}}}, "The harness fails on t ("),
        ({"doc_to_text": "{{nothing.at.all}}"}, "The harness fails on t (UndefinedError"),
        ({"unsafe_code": True}, "The task t runs code that the model writes"),
        ({"generation_kwargs": {"num_beams": 4}}, "hold {'num_beams': 4}"),
    ],
)
def test_a_bad_task_file_is_refused(case, tmp_path, capsys, change, words):
    task = json.loads((case.tasks / "generate.yaml").read_text())
    (tmp_path / "t.yaml").write_text(json.dumps({**task, "task": "t", **change}))
    args = ["eval", str(case.run), "--harness", "t", "--harness-path", str(tmp_path)]
    assert_refused(capsys, args, words)


def test_more_examples_than_there_are_is_refused(case, capsys):
    words = "The harness fails on local_choice (ValueError: Sample larger"
    assert_refused(capsys, command(case, "local_choice", "--num-fewshot", "99"), words)


def test_without_the_package_the_extra_is_named(case, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("vhajax.harness")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(name, raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert_refused(capsys, command(case, "local_choice"), "pip install 'vhajax[harness]'")


def assert_refused(capsys, args: list[str], words: str) -> None:
    capsys.readouterr()
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.splitlines()[-1].startswith("vhajax: ")
    assert err.endswith(".\n")
