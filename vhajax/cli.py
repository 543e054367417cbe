"""The command line. JAX is imported by the command that needs it, not to print help."""

import argparse
import contextlib
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vhajax.errors import INTERRUPTED, UserError

if TYPE_CHECKING:
    from vhajax import loop

HELP = """\
vhajax: train, fold and decode language models whose attention keeps the KV cache small.

  vhajax train EXPERIMENT      train, or go on with, a run (an experiment is a file that
                               exports EXPERIMENT, its bare name in experiments/, or a run)
  vhajax eval RUN              held-out cross-entropy and bits per byte; --harness TASKS: tasks
  vhajax generate RUN          continue a prompt (--prompt TEXT, or standard input)
  vhajax fold RUN --out RUN2   Virtual Head Attention → the GQA model that it equals
  vhajax convert RUN --to …    as GQA, MHA, LRKV or VHA: equal, or a start for training
  vhajax export RUN --out DIR  as a checkpoint that Hugging Face transformers loads
  vhajax import DIR --out RUN  a published Llama, Qwen2 or Qwen3 checkpoint as a run
  vhajax cost EXPERIMENT       parameters, FLOPs and cache bytes, without running anything
  vhajax plan EXPERIMENT       memory, collectives and time on a TPU or GPU that is not here
  vhajax data prepare PATH …   text, .gz, .jsonl or .parquet → rows for training
  vhajax bench train|decode …  measure this machine

Begin with:
  vhajax train demo_vha --run-dir runs/vha
  vhajax generate runs/vha --prompt "def main():"

`vhajax COMMAND -h` explains a command; `vhajax train EXPERIMENT -h` lists every field that
can be overridden, as in --model.attention.num-kv-heads 2. Each command takes --json: one JSON
object on stdout, everything else on stderr.
Exit status: 0 done, 2 bad usage or input, 130 interrupted. Of train, too: 75 stopped by SIGTERM and
76 another process lost; after both the same command goes on.
"""
DEVICES = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd", "dxg")  # of accelerators, in /dev


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} -h`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    return guarded(lambda: _dispatch(args[0], args[1:]))


def guarded(run: Callable[[], int]) -> int:
    """Runs something and turns what a person can fix into one sentence and an exit status."""
    # Orbax and Grain warn of nothing that a person could act on; errors reach us as exceptions.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    warnings.formatwarning = lambda message, *_, **__: f"vhajax: warning: {message}\n"
    spare_the_search()
    try:
        return run()
    except UserError as error:
        sentence = " ".join(str(error).split())  # a library's words may come in lines
        print(f"vhajax: {sentence}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("vhajax: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `| head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 141  # as a shell sees SIGPIPE


def spare_the_search(devices: Path = Path("/dev")) -> None:
    """Tells JAX of no accelerator where there is none: its plugins would look, and aloud."""
    if sys.platform == "linux" and not any(any(devices.glob(name)) for name in DEVICES):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _dispatch(command: str, args: list[str]) -> int:
    commands = {
        "train": _train,
        "eval": _eval,
        "generate": _generate,
        "fold": _fold,
        "convert": _convert,
        "export": _export,
        "import": _import,
        "cost": _cost,
        "plan": _plan,
        "data": _data,
        "bench": _bench,
    }
    if command not in commands:
        raise UserError(f"There is no command {command!r}; the commands are {', '.join(commands)}.")
    return commands[command](args)


def _parser(command: str, description: str, **kwargs: Any) -> _Parser:
    parser = _Parser(
        prog=f"vhajax {command}", description=description, allow_abbrev=False, **kwargs
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _emit(as_json: bool, values: dict[str, Any], text: str) -> None:
    """One object or some lines on stdout; a number that is not finite is null in JSON."""
    print(json.dumps(_finite(values)) if as_json else text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _train(args: list[str]) -> int:
    from vhajax import experiment as experiments

    parser = _train_parser()
    overrides, plain = _split_overrides(args)
    options, unknown = parser.parse_known_args(plain)
    rest = overrides + unknown
    if options.help and not options.experiment:
        parser.print_help()
        return 0
    if not options.experiment:
        raise UserError("train needs an EXPERIMENT; see `vhajax train -h`.")
    for short in ("steps", "eval_every", "skip_bad_steps"):
        if getattr(options, short) is not None:
            rest += [f"--train.{short.replace('_', '-')}", getattr(options, short)]
    if options.help:
        parser.print_help()
        print()
        rest = ["--help"]
    program = f"vhajax train {options.experiment}"
    experiment = experiments.override(experiments.load(options.experiment), rest, program)
    run = options.run_dir or Path("runs") / Path(options.experiment).stem

    profile = _steps_of(options.profile, experiment.train.steps) if options.profile else None

    from vhajax import distributed, train  # JAX from here on

    flags = distributed.Flags(options.coordinator, options.num_processes, options.process_id)
    place = distributed.find_place(flags, experiment.hosts.join_timeout)
    with _clear_stdout(place.count > 1):
        peers = distributed.join(place, experiment.hosts)
        result = train.train(
            experiment, run, init_from=options.init_from, peers=peers, profile=profile
        )
        distributed.leave()
    if peers.index == 0:
        _tell(options.json, run, result)
    return result.status


def _train_parser() -> _Parser:
    parser = _parser("train", "Train, or go on with, a run.", add_help=False)
    parser.add_argument("experiment", nargs="?", help="a path, or a bare name in experiments/")
    parser.add_argument("--run-dir", type=Path, help="default: runs/EXPERIMENT")
    parser.add_argument("--init-from", type=Path, metavar="RUN", help="start with its weights only")
    parser.add_argument("--steps", help="short for --train.steps")
    parser.add_argument("--eval-every", help="short for --train.eval-every")
    parser.add_argument("--skip-bad-steps", help="short for --train.skip-bad-steps")
    parser.add_argument("--profile", metavar="A:B", help="trace steps A to B with JAX's profiler")
    several = parser.add_argument_group(
        "several processes", "Found by themselves under SLURM, on GKE's TPUs and on TPU VMs."
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0")
    several.add_argument("--num-processes", type=int, metavar="N")
    several.add_argument("--process-id", type=int, metavar="I", help="from 0")
    parser.add_argument("-h", "--help", action="store_true", help="EXPERIMENT -h: every field")
    return parser


def _steps_of(text: str, last: int) -> tuple[int, int]:
    first, _, end = text.partition(":")
    if not (first.isdigit() and end.isdigit() and 1 <= int(first) <= int(end) <= last):
        raise UserError(
            f"--profile is {text!r}; give the first and last step, as in 10:12, from 1 to {last}."
        )
    return int(first), int(end)


@contextlib.contextmanager
def _clear_stdout(wanted: bool) -> Iterator[None]:
    """Sends what libraries print to stderr: gloo tells its connections on stdout."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _tell(as_json: bool, run: Path, result: "loop.Result") -> None:
    values = {
        "run": str(run),
        "step": result.step,
        "finished": result.finished,
        "loss": result.loss,
        "heldout_loss": result.heldout.loss if result.finished else math.nan,
        "bits_per_byte": result.heldout.bits_per_byte if result.finished else math.nan,
        "tokens_per_second": result.tokens_per_second,
    }
    if not result.finished:
        _emit(as_json, values, f"Stopped at step {result.step}; the same command goes on.")
        return
    _emit(
        as_json,
        values,
        f"{run}: step {result.step}, held-out {result.heldout.loss:.4f} nats per token, "
        f"{result.heldout.bits_per_byte:.4f} bits per byte",
    )


def _split_overrides(args: list[str]) -> tuple[list[str], list[str]]:
    """Separates `--part.field value`, wherever it stands, from the command's own arguments."""
    overrides, plain, left = [], [], iter(args)
    for arg in left:
        if arg.startswith("--") and "." in arg.split("=")[0]:
            overrides += (
                [arg] if "=" in arg else [arg, *([value] if (value := next(left, "")) else [])]
            )
        else:
            plain.append(arg)
    return overrides, plain


def _eval(args: list[str]) -> int:
    options = _eval_parser().parse_args(args)
    _check_eval(options)
    from vhajax import runs

    experiment = runs.read_config(options.run)
    if options.harness is not None:
        return _eval_harness(options, experiment.data.seq_len)
    from vhajax import evaluate

    result = evaluate.evaluate_run(options.run, experiment, options.data, options.rows or 0)
    values = {
        "run": str(options.run),
        "loss": result.loss,
        "bits_per_byte": result.bits_per_byte,
        "tokens": result.tokens,
        "bytes": result.bytes,
    }
    _emit(
        options.json,
        values,
        f"{options.run}: {result.loss:.4f} nats per token, {result.bits_per_byte:.4f} bits per "
        f"byte ({result.tokens:,} tokens, {result.bytes:,} bytes)",
    )
    return 0


def _eval_parser() -> _Parser:
    parser = _parser(
        "eval",
        "Held-out cross-entropy (nats per token) and bits per byte of a run, or its results on "
        "tasks of EleutherAI's lm-evaluation-harness.",
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--data", help="another prepared folder with the same tokenizer")
    parser.add_argument("--rows", type=int, help="how many held-out rows (default, or 0: all)")
    harness = parser.add_argument_group(
        "the harness", "Needs the extra `harness`. A task's file can name Python code, which runs."
    )
    harness.add_argument("--harness", metavar="TASKS", help="names or patterns: task1,task2")
    harness.add_argument("--harness-path", type=Path, metavar="DIR", help="with more task files")
    harness.add_argument("--num-fewshot", type=int, metavar="N", help="default: as a task says")
    harness.add_argument(
        "--limit", type=int, metavar="N", help="documents of a task (default: all)"
    )
    harness.add_argument(
        "--batch-size", type=int, metavar="B", help="requests at once (default: 8)"
    )
    harness.add_argument("--max-length", type=int, metavar="L", help="default: the run's seq_len")
    return parser


def _check_eval(options: argparse.Namespace) -> None:
    if (options.rows or 0) < 0:
        raise UserError(f"--rows is {options.rows}; it must be 0 (all) or more.")
    harness = {"harness-path": None, "num-fewshot": 0, "limit": 1, "batch-size": 1, "max-length": 1}
    for name, least in harness.items():
        value = getattr(options, name.replace("-", "_"))
        if value is not None and options.harness is None:
            raise UserError(f"--{name} is {value}, but there is no --harness; name its tasks.")
        if value is not None and least is not None and value < least:
            raise UserError(f"--{name} is {value}; it must be {least} or more.")
    for name in ("data", "rows"):
        value = getattr(options, name)
        if value is not None and options.harness is not None:
            raise UserError(f"--{name} is {value}, but tasks have their own data; leave it out.")


def _eval_harness(options: argparse.Namespace, seq_len: int) -> int:
    names = [name for name in options.harness.split(",") if name]
    if not names:
        raise UserError("--harness names no task; give some, as in --harness arc_easy,piqa.")
    max_length = options.max_length or seq_len
    with contextlib.redirect_stdout(sys.stderr):  # the harness and its tasks print
        harness_tasks = _import_harness()
        tasks = harness_tasks.load_tasks(names, options.harness_path, options.num_fewshot)
        results = harness_tasks.evaluate_run(
            options.run,
            tasks,
            max_length=max_length,
            batch_size=options.batch_size or 8,
            limit=options.limit,
        )
    values = {"run": str(options.run), "max_length": max_length, **results}
    _emit(options.json, values, harness_tasks.table(results))
    return 0


def _import_harness() -> Any:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when its bars are imported
    try:
        from vhajax import harness_tasks
    except ImportError as error:
        raise UserError(
            f"--harness needs the package lm-eval, which cannot be imported ({error}); install "
            "vhajax with its extra, as in pip install 'vhajax[harness]'."
        ) from error
    return harness_tasks


def _generate(args: list[str]) -> int:
    parser = _parser("generate", "Continue a prompt with a run's newest weights.")
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--prompt", help="text to continue (default: standard input)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0 keeps all")
    parser.add_argument("--top-p", type=float, default=0.95, help="1 keeps all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-length", type=int, help="refuse prompt + new tokens past this")
    parser.add_argument(
        "--special", action="store_true", help="the prompt spells special tokens, as a chat does"
    )
    options = parser.parse_args(args)
    if not 0 <= options.seed < 2**32:
        raise UserError(f"--seed is {options.seed}; it must lie between 0 and 2³² − 1.")
    from vhajax import runs

    runs.read_config(options.run)
    prompt = options.prompt if options.prompt is not None else _read_stdin()
    from vhajax.sampling import Sampling
    from vhajax.text import generate_text

    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    pieces = generate_text(
        options.run,
        prompt,
        options.max_new_tokens,
        sampling,
        options.seed,
        options.max_length,
        options.special,
    )
    out = [prompt]
    if not options.json:
        print(prompt, end="", flush=True)
    for piece in pieces:
        out.append(piece)
        if not options.json:
            print(piece, end="", flush=True)
    _emit(options.json, {"run": str(options.run), "text": "".join(out)}, "")
    return 0


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"Standard input is not UTF-8 ({error}); convert it.") from error


def _fold(args: list[str]) -> int:
    parser = _parser("fold", "Write the GQA model that a VHA run equals, as a run (weights only).")
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN2")
    options = parser.parse_args(args)
    from vhajax import runs

    runs.read_config(options.run)
    from vhajax.fold import fold_run

    error = fold_run(options.run, options.out)
    values = {"run": str(options.run), "out": str(options.out), "max_logit_difference": error}
    _emit(options.json, values, f"{options.out}: GQA, max logit difference {error:.2e}")
    return 0


def _cost(args: list[str]) -> int:
    parser = _parser(
        "cost",
        "Parameters, FLOPs and cache bytes from a configuration alone.",
        epilog="Fields are overridden as in `vhajax train EXPERIMENT -h`.",
    )
    parser.add_argument("experiment", nargs="?", help="a path, or a bare name in experiments/")
    parser.add_argument("--compare", nargs="+", metavar="EXPERIMENT", help="several side by side")
    parser.add_argument(
        "--budget",
        type=int,
        metavar="BYTES",
        help="with --compare: choose the largest R, C or K whose logical cache fits into so many "
        "bytes a token over all layers",
    )
    parser.add_argument("--context", type=int, metavar="L", help="tokens (default: a row's)")
    parser.add_argument("--batch", type=int, default=1, metavar="B")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    overrides, plain = _split_overrides(args)
    options = parser.parse_args(plain)
    if bool(options.experiment) == bool(options.compare):
        raise UserError(
            "cost needs one EXPERIMENT, or --compare with several; see `vhajax cost -h`."
        )
    if options.budget is not None and not options.compare:
        raise UserError(f"--budget is {options.budget}, but there is no --compare; add it.")
    from vhajax import cost, cost_report
    from vhajax import experiment as experiments

    reports = []
    for name in options.compare or [options.experiment]:
        found = experiments.override(experiments.load(name), overrides, f"vhajax train {name}")
        model = found.model
        if options.budget is not None:
            model = cost.fit(model, options.budget, cost.ITEMSIZE[options.dtype])
        context = found.data.seq_len if options.context is None else options.context
        values = cost_report.report(model, context, options.batch, options.dtype)
        reports.append({"experiment": name, **values})
    if options.compare:
        whole = {"budget": options.budget, "models": reports}
        _emit(options.json, whole, cost_report.compare(reports))
    else:
        _emit(options.json, reports[0], cost_report.describe(reports[0]))
    return 0


def _plan(args: list[str]) -> int:
    parser = _parser(
        "plan",
        "Compile a step for a topology: memory, collectives, estimated seconds.",
        epilog="Fields are overridden as in `vhajax train EXPERIMENT -h`; "
        "the experiment's own mesh is ignored.",
    )
    parser.add_argument("experiment", help="a path, or a bare name in experiments/")
    parser.add_argument("--topology", required=True, metavar="CHIP:SIZE", help="v5e:4x4, h100:8 …")
    parser.add_argument("--mesh", metavar="data=D,model=M", help="default: data over all devices")
    parser.add_argument("--decode", action="store_true", help="the decode step instead")
    parser.add_argument("--context", type=int, metavar="L", help="cache slots (default: a row's)")
    parser.add_argument("--batch", type=int, default=8, metavar="B", help="sequences decoded")
    overrides, plain = _split_overrides(args)
    options = parser.parse_args(plain)
    from vhajax import experiment as experiments
    from vhajax import plan, plan_report, topology

    found = topology.elsewhere(experiments.load(options.experiment))
    found = experiments.override(found, overrides, f"vhajax train {options.experiment}")
    where = topology.target(options.topology, options.mesh)
    with plan_report.progress(options.topology) as tell:
        if options.decode:
            context = found.data.seq_len if options.context is None else options.context
            made = plan.decode(found, where, context, options.batch, tell)
        else:
            made = plan.train(topology.placed(found, where), where, tell)
    values = {"experiment": options.experiment, **plan_report.report(made)}
    _emit(options.json, values, plan_report.describe(values))
    return 0


def _convert(args: list[str]) -> int:
    parser = _parser(
        "convert", "Write a run's model as another mechanism, as a run (weights only)."
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN2")
    parser.add_argument("--to", required=True, choices=("gqa", "mha", "lrkv", "vha"))
    parser.add_argument("--kv-heads", type=int, metavar="K", help="of gqa and vha")
    parser.add_argument(
        "--rank", type=int, metavar="R", help="of lrkv; of vha's Postmix (default: N/4)"
    )
    parser.add_argument(
        "--premix", action="store_true", help="vha with N/K physical heads (default: all N)"
    )
    parser.add_argument(
        "--calibrate", action="store_true", help="fit merged KV heads on training rows"
    )
    parser.add_argument("--rows", type=int, default=64, help="how many (default: 64)")
    parser.add_argument(
        "--eval-rows", type=int, default=32, help="held-out rows before and after (0: none)"
    )
    parser.add_argument("--data", help="another prepared folder with the same tokenizer")
    options = parser.parse_args(args)
    if options.rows < 1 or options.eval_rows < 0:
        raise UserError(
            f"--rows is {options.rows} and --eval-rows {options.eval_rows}; "
            "the first must be at least 1 and the second at least 0."
        )
    from vhajax import runs, targets

    request = targets.Request(
        options.to,
        options.kv_heads,
        options.rank,
        options.rows if options.calibrate else 0,
        options.eval_rows,
        options.data,
        options.premix,
    )
    targets.check(runs.read_config(options.run).model.attention, request)
    from vhajax import convert

    report = convert.convert_run(options.run, options.out, request)
    values = {"run": str(options.run), "out": str(options.out), **convert.values(report)}
    _emit(options.json, values, f"{options.out}: {convert.text(report)}")
    return 0


def _export(args: list[str]) -> int:
    parser = _parser("export", "Write a run as a checkpoint that Hugging Face transformers loads.")
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="default: 5GB")
    options = parser.parse_args(args)
    from vhajax import runs
    from vhajax.huggingface import layout, store

    limit = store.parse_size(options.shard_size)
    layout.plain(runs.read_config(options.run).model)  # refuses before JAX is there
    from vhajax.huggingface import export

    made = export.export_run(options.run, options.out, options.dtype, limit)
    values = {
        "run": str(options.run),
        "out": str(options.out),
        "architecture": made.architecture,
        "model": made.model.attention.summary(),
        "dtype": made.dtype,
        "tensors": made.tensors,
        "bytes": made.bytes,
        "max_logit_difference_folded": made.folded,
        "max_logit_difference": made.written,
        "note": made.note,
    }
    _emit(
        options.json,
        values,
        f"{options.out}: {made.architecture}, {made.model.attention.summary()}, {made.tensors} "
        f"tensors of {made.dtype} in {made.bytes / 1e6:,.1f} MB, max logit difference "
        f"{made.written:.2e}" + f"\n{made.note}" * bool(made.note),
    )
    return 0


def _import(args: list[str]) -> int:
    parser = _parser("import", "Make a run of a Llama, Qwen2 or Qwen3 checkpoint (weights only).")
    parser.add_argument("folder", type=Path, metavar="DIR", help="what save_pretrained wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN")
    options = parser.parse_args(args)
    from vhajax.huggingface import load

    made = load.import_folder(options.folder, options.out)
    values = {
        "folder": str(options.folder),
        "out": str(options.out),
        "architecture": made.architecture,
        "model": made.model.attention.summary(),
        "context": made.context,
        "tensors": made.tensors,
        "dtypes": list(made.dtypes),
    }
    _emit(
        options.json,
        values,
        f"{options.out}: {made.architecture}, {made.model.attention.summary()}, "
        f"{made.model.num_layers} layers, context {made.context:,}, {made.tensors} tensors of "
        f"{' and '.join(made.dtypes)}",
    )
    return 0


def _data(args: list[str]) -> int:
    if not args or args[0] != "prepare":
        if not args or args[0] in ("-h", "--help"):
            print("vhajax data prepare PATH … --out DIR: see `vhajax data prepare -h`.")
            return 0
        raise UserError(f"There is no command 'data {args[0]}'; use `vhajax data prepare`.")
    parser = _parser("data prepare", "Text → rows of T + 1 tokens, split by document.")
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="none: the stdlib")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seq-len", type=int, default=256, help="T")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json (default: train one)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="of a tokenizer trained here")
    parser.add_argument("--eos", help="end-of-text token of --tokenizer")
    parser.add_argument("--bos", help="begin-of-text token of --tokenizer")
    parser.add_argument("--heldout-fraction", type=float, default=0.05)
    options = parser.parse_args(args[1:])
    from vhajax import prepare

    manifest = prepare.prepare_paths(
        options.paths,
        options.out,
        seq_len=options.seq_len,
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
        eos=options.eos,
        bos=options.bos,
        heldout_fraction=options.heldout_fraction,
    )
    for name, reason in manifest.first_bad_rows:
        print(f"skipped {name}: {reason}", file=sys.stderr)
    values = {
        "out": str(options.out),
        "vocab_size": manifest.vocab_size,
        "train_rows": manifest.train.rows,
        "heldout_rows": manifest.heldout.rows,
        "train_bytes": manifest.train.utf8_bytes,
        "heldout_bytes": manifest.heldout.utf8_bytes,
        "bad_rows": manifest.bad_rows,
    }
    _emit(
        options.json,
        values,
        f"{options.out}: {manifest.train.rows:,} training and {manifest.heldout.rows:,} held-out "
        f"rows of {manifest.seq_len} + 1 tokens, vocabulary {manifest.vocab_size}, "
        f"{manifest.bad_rows} bad rows skipped",
    )
    return 0


def _bench(args: list[str]) -> int:
    parser = _parser("bench", "Measure this machine; medians, interleaved.")
    kinds = ("train", "decode", "generate", "compile", "transformers")
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--rounds", type=int, default=5)
    beside = parser.add_argument_group("transformers", "vhajax and transformers on one checkpoint.")
    beside.add_argument("--folder", type=Path, metavar="DIR", help="what `vhajax export` wrote")
    beside.add_argument("--python", metavar="PYTHON", help="with torch and transformers")
    options = parser.parse_args(args)
    if options.rounds < 1:
        raise UserError(f"--rounds is {options.rounds}; it must be at least 1.")
    given = [name for name in ("folder", "python") if getattr(options, name) is not None]
    if len(given) != (2 if options.what == "transformers" else 0):
        raise UserError("--folder DIR and --python PYTHON belong to `bench transformers`.")
    from vhajax import bench

    if options.what == "transformers":
        from vhajax.huggingface import bench as beside_transformers

        rows = beside_transformers.bench(options.folder, options.python, options.rounds)
    else:
        rows = getattr(bench, f"bench_{options.what}")(options.rounds)
    _emit(options.json, {"bench": options.what, "rows": rows}, bench.table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
