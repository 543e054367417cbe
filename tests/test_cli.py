"""What a user types: help, refusals in one sentence, JSON on stdout."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
from tiny import run_json

from vhajax import cli
from vhajax.config import VHA
from vhajax.manifest import load_manifest

pytestmark = [
    pytest.mark.usefixtures("programs_kept"),
    pytest.mark.filterwarnings("ignore:the mesh uses:UserWarning"),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder with texts, prepared `data`, an experiment `tiny.py` and its finished `run`."""
    folder = tmp_path_factory.mktemp("cli")
    tiny.prepare_texts(folder / "data", tiny.TEXTS)
    tiny.write_experiment(folder / "tiny.py", tiny.gqa_experiment(folder / "data"))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in tiny.TEXTS)
    (folder / "texts.jsonl").write_text(lines)
    status = cli.main(["train", str(folder / "tiny.py"), "--run-dir", str(folder / "run")])
    assert status == 0
    return folder


# Help.


def in_a_process(code: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **more)


def test_help_and_early_refusals_import_no_jax(tmp_path):
    """Help, and every mistake that shows before the work, are answered at once."""
    lines = [
        [],
        ["-h"],
        ["--help"],
        *(
            [name, "-h"]
            for name in ("train", "eval", "generate", "fold", "convert", "cost", "bench", "data")
        ),
        ["data", "prepare", "-h"],
        ["train", "demo_vha", "-h"],
        ["nonsense"],
        ["train", "nonsense"],
        ["train", "demo_vha", "--model.dim", "wide"],
        ["eval", str(tmp_path)],
        ["eval", str(tmp_path), "--harness", "arc_easy"],
        ["eval", str(tmp_path), "--limit", "3"],
        ["generate", str(tmp_path), "--prompt", "x"],
        ["fold", str(tmp_path), "--out", str(tmp_path / "out")],
        ["convert", str(tmp_path), "--to", "mha", "--out", str(tmp_path / "out")],
        ["cost", "demo_vha", "--context", "0"],
        ["bench", "train", "--rounds", "0"],
    ]
    done = in_a_process(f"""
import sys
from vhajax import cli
for args in {lines!r}:
    try:
        status = cli.main(args)
    except SystemExit as stop:
        status = stop.code
    heavy = sorted({{"jax", "flax", "orbax", "grain", "numpy"}} & sys.modules.keys())
    print("STATUS", status, heavy, args)
""")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("STATUS")]
    wanted = [0 if not args or args[-1] in ("-h", "--help") else 2 for args in lines]
    assert told == [f"STATUS {s} [] {args}" for s, args in zip(wanted, lines, strict=True)]
    for words in ("vhajax train EXPERIMENT", "--model.attention.num-kv-heads", "--max-new-tokens"):
        assert words in done.stdout


@pytest.mark.parametrize("args", [[], ["-h"], ["--help"], ["help"]])
def test_help(args, capsys):
    assert cli.main(args) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for command in (
        "train",
        "eval",
        "generate",
        "fold",
        "convert",
        "cost",
        "data prepare",
        "bench",
    ):
        assert f"vhajax {command} " in out


# Refusals.


@dataclass
class Place:
    """Where a bad command runs: a folder of its own, and what is shared."""

    tmp: Path
    shared: Path

    @property
    def file(self) -> str:
        return str(self.shared / "tiny.py")

    @property
    def run(self) -> Path:
        return self.shared / "run"

    def copy(self, name: str) -> Path:
        return shutil.copytree(self.shared / name, self.tmp / name)

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def under_a_file(self) -> str:
        """A folder that nobody can make, not even root."""
        return str(self.write("file", "") / "sub")

    def edited(self, copy: str, file: str, change: Callable[[str], str | bytes]) -> Path:
        folder = self.copy(copy)
        self.write(f"{copy}/{file}", change((folder / file).read_text()))
        return folder

    def train(self, *more: str) -> list[str]:
        return ["train", self.file, "--run-dir", str(self.tmp / "new"), *more]

    def prepare(self, *more: str) -> list[str]:
        source, out = str(self.shared / "texts.jsonl"), str(self.tmp / "out")
        return ["data", "prepare", source, "--out", out, "--vocab-size", "300", *more]

    def generate(self, *more: str) -> list[str]:
        return ["generate", str(self.run), "--prompt", "def", *more]


def edit_json(**fields) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **fields})


def without_checkpoints(place: Place) -> Path:
    run = place.copy("run")
    shutil.rmtree(run / "checkpoints")
    return run


def with_a_broken_checkpoint(place: Place) -> Path:
    run = place.copy("run")
    for path in (run / "checkpoints/6/params").rglob("d/*"):
        path.write_bytes(bytes(path.stat().st_size))
    return run


def experiment_file(place: Place, text: str) -> list[str]:
    return ["train", str(place.write("bad.py", text)), "--run-dir", str(place.tmp / "new")]


def with_data(place: Place, folder: Path) -> list[str]:
    return place.train("--data.path", str(folder))


def cut_shard(place: Place) -> Path:
    shard = place.copy("data") / "train-00000.arrayrecord"
    shard.write_bytes(shard.read_bytes()[:-1])
    return shard.parent


def lost(place: Place, name: str) -> Path:
    (place.copy("data") / name).unlink()
    return place.tmp / "data"


IMPORT = "from vhajax.config import *\n"
REFUSALS: dict[str, tuple[list[str] | Callable[[Place], list[str]], str]] = {
    # usage
    "unknown command": (["trian", "x"], "There is no command 'trian'; the commands are"),
    "unknown data command": (["data", "prep"], "There is no command 'data prep'"),
    "unknown option": (lambda p: ["eval", str(p.run), "--nope"], "unrecognized arguments: --nope"),
    "no run": (["eval"], "required: RUN"),
    "not a number": (lambda p: p.generate("--seed", "x"), "--seed: invalid int value: 'x'"),
    "bench of nothing": (["bench", "nothing"], "invalid choice: 'nothing'"),
    "no rounds": (["bench", "train", "--rounds", "0"], "--rounds is 0"),
    # experiments
    "no experiment": (["train"], "train needs an EXPERIMENT"),
    "unknown experiment": (
        ["train", "nope"],
        "no experiment 'nope'; the known ones are demo_gqa, demo_vha",
    ),
    "no such file": (["train", "no/such.py"], "no experiment file no/such.py"),
    "experiment raises": (lambda p: experiment_file(p, "1 / 0"), "does not run (ZeroDivisionError"),
    "experiment raises lines": (
        lambda p: experiment_file(p, "raise ValueError('one\\ntwo')"),
        "does not run (ValueError: one two)",
    ),
    "experiment exits": (lambda p: experiment_file(p, "raise SystemExit(3)"), "does not run"),
    "experiment is not Python": (lambda p: experiment_file(p, "def ("), "(SyntaxError"),
    "experiment exports nothing": (lambda p: experiment_file(p, "x = 1"), "exports no EXPERIMENT"),
    "experiment exports something else": (
        lambda p: experiment_file(p, "EXPERIMENT = {}"),
        "exports no EXPERIMENT of type",
    ),
    "experiment is inconsistent": (
        lambda p: experiment_file(p, f"{IMPORT}EXPERIMENT = Experiment(model=Model(dim=-1))"),
        "model.dim is -1; it must be greater than 0",
    ),
    # overrides
    "unknown field": (
        lambda p: p.train("--model.dimm", "3"),
        "vhajax: Unrecognized options: --model.dimm, 3; see `vhajax train ",
    ),
    "bad type": (
        lambda p: p.train("--model.dim", "wide"),
        "vhajax: Error parsing --model.dim: invalid literal for int() with base 10: 'wide'; see",
    ),
    "no value": (
        lambda p: p.train("--model.dim"),
        "vhajax: Missing value for argument '--model.dim'. Expected 1 values; see",
    ),
    "field of another mechanism": (
        lambda p: p.train("--model.attention.postmix-rank", "1"),
        "vhajax: Unrecognized options: --model.attention.postmix-rank, 1; see",
    ),
    "heads": (
        lambda p: p.train("--model.attention.num-kv-heads", "3"),
        "attention.num_heads is 4, not a multiple of attention.num_kv_heads = 3",
    ),
    "negative": (lambda p: p.train("--model.num-layers", "-2"), "model.num_layers is -2"),
    "no steps": (lambda p: p.train("--steps", "0"), "train.steps is 0"),
    "steps are no number": (
        lambda p: p.train("--steps", "many"),
        "vhajax: Error parsing --train.steps: invalid literal for int() with base 10: 'many'; see",
    ),
    "evaluations": (lambda p: p.train("--eval-every", "-1"), "train.eval_every is -1"),
    "rate": (lambda p: p.train("--optim.matrix-lr", "nan"), "optim.matrix_lr is nan"),
    "batch": (lambda p: p.train("--mesh.data", "3"), "data.batch_size is 4, not a multiple of"),
    "warm-up": (lambda p: p.train("--optim.warmup-steps", "7"), "more than train.steps = 6"),
    "mesh too large": (
        lambda p: p.train("--mesh.model", "16"),
        "needs 16 devices, this machine has 8",
    ),
    "context": (lambda p: p.train("--mesh.context", "2"), "mesh.context is 2"),
    # prepared data
    "no data": (lambda p: p.train("--data.path", "no/data"), "no/data is not a folder; prepare"),
    "no manifest": (lambda p: with_data(p, p.tmp), "has no manifest.json"),
    "corrupt manifest": (
        lambda p: with_data(p, p.edited("data", "manifest.json", lambda t: t[:100])),
        "is not a manifest of prepared data",
    ),
    "manifest of another format": (
        lambda p: with_data(p, p.edited("data", "manifest.json", edit_json(format_version=2))),
        "has format version 2, this vhajax reads 1",
    ),
    "another length": (
        lambda p: p.train("--data.seq-len", "32"),
        "data.seq_len is 32, but the rows of",
    ),
    "another vocabulary": (
        lambda p: p.train("--model.vocab-size", "299"),
        "set --model.vocab-size 300",
    ),
    "shard cut short": (lambda p: with_data(p, cut_shard(p)), "as its manifest says; copy it"),
    "shard lost": (
        lambda p: with_data(p, lost(p, "heldout-00000.arrayrecord")),
        "heldout-00000.arrayrecord is missing",
    ),
    "tokenizer lost": (
        lambda p: with_data(p, lost(p, "tokenizer.json")),
        "has lost its tokenizer.json; prepare it again",
    ),
    "tokenizer is not JSON": (
        lambda p: with_data(p, p.edited("data", "tokenizer.json", lambda _: "{")),
        "is not a tokenizer.json",
    ),
    # run directories
    "unwritable run": (
        lambda p: ["train", p.file, "--run-dir", p.under_a_file()],
        "cannot be written",
    ),
    "not a run": (
        lambda p: ["train", p.file, "--run-dir", str(p.write("mine/x", "").parent)],
        "exists and is not a run; name another --run-dir",
    ),
    "a file": (lambda p: ["train", p.file, "--run-dir", str(p.write("x", ""))], "is not a run"),
    "another rate": (
        lambda p: ["train", p.file, "--run-dir", str(p.run), "--optim.matrix-lr", "0.5"],
        "optim.matrix_lr is 0.5, but the run",
    ),
    "init from nothing": (lambda p: p.train("--init-from", "no/run"), "The run no/run does not"),
    "init from another model": (
        lambda p: p.train("--init-from", str(p.run), "--model.ffn-dim", "64"),
        "model.ffn_dim is 64",
    ),
    # runs, as `eval` sees them; `generate` and `fold` below
    "no such run": (["eval", "no/run"], "The run no/run does not exist; name a folder"),
    "no config": (lambda p: ["eval", str(p.tmp)], "has no config.json; name a folder that"),
    "corrupt config": (
        lambda p: ["eval", str(p.edited("run", "config.json", lambda t: t[:-9]))],
        "config.json is not a configuration of vhajax (JSONDecodeError",
    ),
    "config is no object": (
        lambda p: ["eval", str(p.edited("run", "config.json", lambda _: "[1]"))],
        "config.json is not a configuration of vhajax",
    ),
    "config is no text": (
        lambda p: ["eval", str(p.edited("run", "config.json", lambda _: b"\xff\xfe"))],
        "config.json cannot be read",
    ),
    "config lacks a part": (
        lambda p: ["eval", str(p.edited("run", "config.json", edit_json(data={})))],
        "Data has no batch_size, path, seed, seq_len",
    ),
    "config of another format": (
        lambda p: ["eval", str(p.edited("run", "config.json", edit_json(format_version=7)))],
        "has format version 7, this vhajax reads 3",
    ),
    "no checkpoint": (
        lambda p: ["eval", str(without_checkpoints(p))],
        "has no complete checkpoint; train it first",
    ),
    "broken checkpoint": (
        lambda p: ["eval", str(with_a_broken_checkpoint(p))],
        "The checkpoint 6 of",
    ),
    "negative rows": (lambda p: ["eval", str(p.run), "--rows", "-1"], "--rows is -1"),
    "eval on no data": (lambda p: ["eval", str(p.run), "--data", "no"], "no is not a folder"),
    # generate
    "generate from no run": (["generate", "no", "--prompt", "x"], "The run no does not"),
    "generate without weights": (
        lambda p: ["generate", str(without_checkpoints(p)), "--prompt", "x"],
        "has no complete checkpoint",
    ),
    "generate from a broken checkpoint": (
        lambda p: ["generate", str(with_a_broken_checkpoint(p)), "--prompt", "x"],
        "The checkpoint 6 of",
    ),
    "prompt too long": (
        lambda p: p.generate("--max-length", "8", "--max-new-tokens", "8"),
        "past the maximum of 8; shorten the prompt",
    ),
    "prompt is not Unicode": (
        lambda p: ["generate", str(p.run), "--prompt", "\udcff"],
        "not valid Unicode",
    ),
    "no new tokens": (lambda p: p.generate("--max-new-tokens", "0"), "max_new_tokens is 0"),
    "temperature": (lambda p: p.generate("--temperature", "-1"), "temperature is -1.0"),
    "temperature is nan": (lambda p: p.generate("--temperature", "nan"), "temperature is nan"),
    "top-p": (lambda p: p.generate("--top-p", "0"), "top_p is 0.0; it must lie in (0, 1]"),
    "top-k": (lambda p: p.generate("--top-k", "-1"), "top_k is -1"),
    "negative seed": (lambda p: p.generate("--seed", "-1"), "--seed is -1; it must lie between"),
    "large seed": (lambda p: p.generate("--seed", str(2**32)), "--seed is 4294967296"),
    "run without tokenizer": (
        lambda p: [
            "generate",
            str(p.edited("run", "tokenizer.json", lambda _: "nope")),
            "--prompt",
            "x",
        ],
        "tokenizer.json is not a tokenizer.json",
    ),
    # fold
    "fold GQA": (
        lambda p: ["fold", str(p.run), "--out", str(p.tmp / "out")],
        "Only VHA folds to GQA and this model is GQA N 4, K 2, H 8",
    ),
    "fold onto something": (
        lambda p: ["fold", str(p.run), "--out", str(p.write("out/x", "").parent)],
        "exists; name a new folder",
    ),
    "fold without out": (lambda p: ["fold", str(p.run)], "required: --out"),
    "fold no run": (lambda p: ["fold", "no/run", "--out", str(p.tmp / "o")], "does not exist"),
    # data prepare
    "prepare nothing there": (
        lambda p: ["data", "prepare", "no/text", "--out", str(p.tmp / "out")],
        "no/text does not exist; name a file or a folder",
    ),
    "prepare without out": (lambda p: ["data", "prepare", p.file], "required: --out"),
    "prepare an empty folder": (
        lambda p: [
            "data",
            "prepare",
            str(p.write("texts/.hidden", "x").parent),
            "--out",
            str(p.tmp / "out"),
        ],
        "holds no documents",
    ),
    "prepare nothing but bytes": (
        lambda p: ["data", "prepare", str(p.write("x.txt", b"\xff")), "--out", str(p.tmp / "out")],
        "x.txt: it is not UTF-8",
    ),
    "prepare nothing but empty text": (
        lambda p: ["data", "prepare", str(p.write("x.txt", "")), "--out", str(p.tmp / "out")],
        "it is empty",
    ),
    "prepare onto something": (
        lambda p: [*p.prepare(), "--out", str(p.write("other/x", "").parent)],
        "exists and is not an empty folder",
    ),
    "prepare where nobody can": (
        lambda p: [*p.prepare(), "--out", p.under_a_file()],
        "cannot be written",
    ),
    "prepare too few tokens": (
        lambda p: p.prepare("--vocab-size", "257"),
        "vocabulary size is 257; byte-level BPE needs 258",
    ),
    "prepare rows of nothing": (lambda p: p.prepare("--seq-len", "0"), "sequence length is 0"),
    "prepare all held out": (lambda p: p.prepare("--heldout-fraction", "1.5"), "fraction is 1.5"),
    "prepare without a tokenizer": (
        lambda p: p.prepare("--tokenizer", "no.json"),
        "Cannot read the tokenizer no.json",
    ),
    "prepare with a broken tokenizer": (
        lambda p: p.prepare("--tokenizer", str(p.write("t.json", "{}"))),
        "is not a tokenizer.json",
    ),
    "prepare with an unknown EOS": (
        lambda p: p.prepare(
            "--tokenizer", str(p.shared / "data/tokenizer.json"), "--eos", "<nope>"
        ),
        "has no token '<nope>'",
    ),
}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"folder"
        for path in folder.rglob("*")
    }


def assert_refused(capsys, args: list[str]) -> str:
    capsys.readouterr()
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("vhajax: ")
    assert err.endswith(".\n")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name, shared, tmp_path, capsys):
    """One sentence, status 2, and nothing on disk but what was there."""
    make, words = REFUSALS[name]
    place = Place(tmp_path, shared)
    args = make(place) if callable(make) else make
    before = snapshot(tmp_path), snapshot(shared)
    assert words in assert_refused(capsys, args)
    after = snapshot(tmp_path), snapshot(shared)
    assert [path.keys() for path in after] == [path.keys() for path in before]
    assert after == before


def test_a_corrupt_row_is_refused_when_it_is_read(shared, tmp_path, capsys):
    shard = shutil.copytree(shared / "data", tmp_path / "data") / "train-00000.arrayrecord"
    shard.write_bytes(bytes(byte ^ 0xFF for byte in shard.read_bytes()))
    args = ["train", str(shared / "tiny.py"), "--run-dir", str(tmp_path / "run")]
    err = assert_refused(capsys, [*args, "--data.path", str(tmp_path / "data")])
    assert "train-00000.arrayrecord is corrupt at row" in err
    assert cli.main(args) == 0  # with sound data the run goes on from where it stopped: the start


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [
        (None, None, "cpu"),
        (None, "cuda", "cuda"),
        ("nvidia0", None, None),
        ("vfio/3", None, None),
        ("nvidiactl", None, "cpu"),
    ],
)
def test_jax_looks_for_an_accelerator_only_where_one_may_be(
    device, before, after, tmp_path, monkeypatch
):
    monkeypatch.setattr(cli.sys, "platform", "linux")
    monkeypatch.setenv("JAX_PLATFORMS", before or "")
    if before is None:
        monkeypatch.delenv("JAX_PLATFORMS")
    if device:
        (tmp_path / device).parent.mkdir(exist_ok=True)
        (tmp_path / device).touch()
    cli.spare_the_search(tmp_path)
    assert os.environ.get("JAX_PLATFORMS") == after


def test_refusals_of_a_real_process(shared):
    args = ["train", str(shared / "tiny.py"), "--run-dir", str(shared / "run"), "--data.seed", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "vhajax.cli", *args],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("vhajax: data.seed is 4, but the run ")
    assert done.stderr.count("\n") == 1


# What works.


def test_data_prepare(shared, tmp_path, capsys):
    out = tmp_path / "out"
    args = ["data", "prepare", str(shared / "texts.jsonl"), "--out", str(out)]
    args += ["--seq-len", "16", "--vocab-size", "300", "--heldout-fraction", "0.2"]
    told = run_json(capsys, *args)
    manifest = load_manifest(out, verify=True)
    assert told == {
        "out": str(out),
        "vocab_size": 300,
        "train_rows": manifest.train.rows,
        "heldout_rows": manifest.heldout.rows,
        "train_bytes": manifest.train.utf8_bytes,
        "heldout_bytes": manifest.heldout.utf8_bytes,
        "bad_rows": 0,
    }
    assert told["train_bytes"] + told["heldout_bytes"] == sum(len(t.encode()) for t in tiny.TEXTS)


def test_data_prepare_names_the_rows_it_skips(shared, tmp_path, capsys):
    source = tmp_path / "texts.jsonl"
    source.write_text((shared / "texts.jsonl").read_text() + '{"tex": "x"}\n')
    args = ["data", "prepare", str(source), "--out", str(tmp_path / "out"), "--vocab-size", "300"]
    assert cli.main([*args, "--heldout-fraction", "0.2"]) == 0
    out, err = capsys.readouterr()
    assert err == f"skipped {source}:101: it has no field `text`\n"
    assert "1 bad rows skipped" in out


def test_train(shared, tmp_path, capsys):
    run = tmp_path / "run"
    told = run_json(capsys, "train", str(shared / "tiny.py"), "--run-dir", str(run))
    assert set(told) == {
        "run",
        "step",
        "finished",
        "loss",
        "heldout_loss",
        "bits_per_byte",
        "tokens_per_second",
    }
    assert (told["run"], told["step"], told["finished"]) == (str(run), 6, True)
    rows = tiny.rows(run)
    assert told["loss"] == rows[-2]["loss"]
    assert told["bits_per_byte"] == rows[-1]["heldout_bits_per_byte"]
    assert told["tokens_per_second"] > 0
    again = run_json(capsys, "train", str(shared / "tiny.py"), "--run-dir", str(run))
    assert (again["loss"], again["tokens_per_second"]) == (None, None)  # no step was made
    assert again["heldout_loss"] == told["heldout_loss"]


def test_a_run_of_its_own_name(shared, tmp_path, monkeypatch, capsys):
    (tmp_path / "experiments").mkdir()
    shutil.copy(shared / "tiny.py", tmp_path / "experiments/mine.py")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "mine"]) == 0
    assert (tmp_path / "runs/mine/config.json").is_file()
    out = capsys.readouterr().out
    assert out.startswith("runs/mine: step 6, held-out ")
    assert out.count("\n") == 1


def test_eval(shared, capsys):
    run = str(shared / "run")
    told = run_json(capsys, "eval", run)
    heldout = load_manifest(shared / "data").heldout
    assert (told["run"], told["bytes"]) == (run, heldout.utf8_bytes)
    assert told["tokens"] == heldout.tokens - heldout.documents
    assert cli.main(["eval", run]) == 0
    assert f"{told['bits_per_byte']:.4f} bits per byte (" in capsys.readouterr().out


GENERATE = ("--max-new-tokens", "12", "--temperature", "1", "--top-p", "1")


def give(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_generate(shared, monkeypatch, capsys):
    args = ("generate", str(shared / "run"), *GENERATE)
    told = run_json(capsys, *args, "--prompt", "def f1 日")
    assert set(told) == {"run", "text"}
    assert told["text"].startswith("def f1 日")
    assert len(told["text"]) > len("def f1 日")
    assert run_json(capsys, *args, "--prompt", "def f1 日") == told
    assert run_json(capsys, *args, "--prompt", "def f1 日", "--seed", "1") != told

    give(monkeypatch, "def f1 日".encode())
    assert run_json(capsys, *args) == told
    give(monkeypatch, "def f1 日".encode())
    assert cli.main([*args]) == 0
    assert capsys.readouterr().out == told["text"] + "\n"


def test_an_empty_prompt_begins_with_bos(shared, capsys):
    told = run_json(capsys, "generate", str(shared / "run"), "--prompt", "", *GENERATE)
    assert len(told["text"]) > 0


def test_the_longest_prompt_that_fits(shared, capsys):
    args = ("generate", str(shared / "run"), "--prompt", "x", "--max-new-tokens", "6")
    run_json(capsys, *args, "--max-length", "8")  # BOS, x and six new ones
    assert "The prompt and the new tokens are 8 tokens, past the maximum of 7" in assert_refused(
        capsys, [*args, "--max-length", "7"]
    )


def test_standard_input_that_is_not_utf8(shared, monkeypatch, capsys):
    give(monkeypatch, b"def \xff")
    err = assert_refused(capsys, ["generate", str(shared / "run"), *GENERATE])
    assert "Standard input is not UTF-8" in err


def test_fold(shared, tmp_path, capsys):
    from vhajax import runs, transformer

    what = tiny.changed(
        tiny.vha_experiment(shared / "data"),
        {"model.attention": VHA(num_physical_heads=2, num_kv_heads=2, head_dim=8)},
    )
    run = tiny.save_weights(tmp_path / "run", what, transformer.init(what.model, 0))
    out = tmp_path / "folded"
    told = run_json(capsys, "fold", str(run), "--out", str(out))
    assert (told["run"], told["out"]) == (str(run), str(out))
    assert 0 <= told["max_logit_difference"] < 1e-5
    assert runs.read_config(out).model.attention.summary() == "GQA N 4, K 2, H 8"
    err = assert_refused(capsys, ["fold", str(run), "--out", str(tmp_path / "run/config.json/x")])
    assert "cannot be written" in err
