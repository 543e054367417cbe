"""Finding an experiment file and applying overrides from the command line."""

import contextlib
import importlib.util
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from vhajax import runs
from vhajax.config import Experiment
from vhajax.errors import UserError

CHECKOUT = Path(__file__).resolve().parent.parent / "experiments"


def find(name: str) -> Path:
    """The file of an experiment: a path, or a bare name in ./experiments or the checkout's.

    Raises:
      UserError: no such file; the known names are listed.
    """
    if name.endswith(".py") or "/" in name:
        path = Path(name)
        if path.is_file():
            return path
        raise UserError(f"There is no experiment file {name}; check the path.")
    folders = [Path("experiments"), CHECKOUT]
    for folder in folders:
        if (folder / f"{name}.py").is_file():
            return folder / f"{name}.py"
    known = sorted({path.stem for folder in folders for path in folder.glob("*.py")})
    raise UserError(f"There is no experiment {name!r}; the known ones are {', '.join(known)}.")


def load(name: str) -> Experiment:
    """The EXPERIMENT that a file exports, or the configuration of a run directory.

    Raises:
      UserError: no file, it fails to run, or it exports no Experiment.
    """
    if (Path(name) / runs.CONFIG).is_file():
        return runs.read_config(Path(name))
    path = find(name).resolve()
    spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file; name one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    with _importable(path.parent.parent):  # so that `from experiments.x import …` works
        try:
            spec.loader.exec_module(module)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            cause = f"{type(error).__name__}: {error}"
            raise UserError(f"The experiment {path} does not run ({cause}); mend it.") from error
    experiment = getattr(module, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment):
        raise UserError(f"{path} exports no EXPERIMENT of type vhajax.config.Experiment; add one.")
    return experiment


def override(default: Experiment, args: Sequence[str], program: str) -> Experiment:
    """The experiment with fields replaced, as in `--model.attention.num-kv-heads 2`.

    Raises:
      UserError: an unknown field or a value that does not fit; SystemExit(0) after --help.
    """
    if not args:
        return default
    import tyro

    plain = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                Experiment, prog=program, default=default, args=list(args), config=plain
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_sentence(errors.getvalue(), program)) from None


def _sentence(box: str, program: str) -> str:
    """The first paragraph of tyro's framed message, as one line."""
    words = []
    for line in box.splitlines()[1:]:
        text = line.strip("│╭╮╰╯|+ ")
        if set(text) <= {"─", "-"}:  # a rule; tyro draws in ASCII where the terminal has no more
            if words:
                break
        else:
            words.append(text)
    message = " ".join(words).rstrip(".")
    return f"{message}; see `{program} -h` for every field."


@contextlib.contextmanager
def _importable(folder: Path):
    """Without bytecode: a full disk leaves half a file of it, which Python then trips over."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.dont_write_bytecode = before
