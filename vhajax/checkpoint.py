"""Sharded checkpoints through Orbax: complete or not there, restored strictly.

A checkpoint holds the parameters, the optimizer's state (unless it is weights only) and `meta`:
format version, step, position of the data iterator, configuration, tokenizer digest, code version.
Everything is arrays and JSON; loading executes nothing. Last of all, still under its temporary
name, it gets `files.json`, the size of every file: what lacks one, or has another size, is torn.
Torn ones are skipped, named, and never deleted.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from vhajax import config, runs
from vhajax.errors import UserError
from vhajax.step import TrainState

FORMAT_VERSION = 2
SEAL = "files.json"
LATER = "_CHECKPOINT_METADATA"
"""Orbax writes it once more when it renames the folder."""
TEMPORARY = ".orbax-checkpoint-tmp"
OLD = ".old"
"""Of complete ones, about to be removed."""


def _is_main() -> bool:
    return jax.process_index() == 0


def steps(run: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    return sorted(int(path.name) for path in _numbered(run) if _flaw(path) is None)


def torn(run: Path) -> dict[Path, str]:
    """Folders of checkpoints that are not complete, each with what it lacks, oldest first."""
    flaws = {path: _flaw(path) for path in sorted(_numbered(run), key=lambda p: int(p.name))}
    unfinished = sorted((run / runs.CHECKPOINTS).glob(f"*{TEMPORARY}*"))
    found = {path: flaw for path, flaw in flaws.items() if flaw is not None}
    return found | dict.fromkeys(unfinished, "its writing was cut short")


def _numbered(run: Path) -> list[Path]:
    folder = run / runs.CHECKPOINTS
    return [path for path in (folder.iterdir() if folder.is_dir() else ()) if path.name.isdigit()]


def _flaw(path: Path) -> str | None:
    """What a checkpoint lacks."""
    try:
        sizes = json.loads((path / SEAL).read_text(encoding="utf-8"))["files"]
        for name in (*sizes, LATER):
            size = (path / name).stat().st_size if (path / name).exists() else None
            if size is None:
                return f"{name} is missing"
            if name != LATER and size != sizes[name]:
                return f"{name} has {size} bytes, not {sizes[name]}"
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        return f"{SEAL} is not there or not whole ({type(error).__name__})"
    except OSError as error:  # of the disk or network, not of the checkpoint
        raise UserError(f"{path} cannot be read ({error}); mend that, then try again.") from error
    return None


def _seal(path: Path) -> None:
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != LATER)
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in files}
    runs.write_whole(path / SEAL, json.dumps({"files": sizes}, indent=0))


def set_torn_aside(run: Path) -> list[str]:
    """Renames what is no checkpoint to N.torn, and says so in a sentence each.

    Orbax would refuse to save a step whose folder is there, and deletes temporary folders of the
    step that it saves.
    """
    told = []
    for path, flaw in torn(run).items():
        name, number = f"{path.name.split('.')[0]}.torn", 1
        while (aside := path.with_name(name)).exists():
            number += 1
            name = f"{path.name.split('.')[0]}.torn{number}"
        try:
            path.rename(aside)
        except OSError as error:
            raise UserError(
                f"{path} is torn and cannot be renamed ({error}); mend that."
            ) from error
        told.append(f"the checkpoint {path} is torn ({flaw}), kept as {aside.name} and skipped")
    return told


class Checkpointer:
    """Writes a run's checkpoints in the background.

    The last `keep` stay, and those at multiples of `every` (0: no others). Torn ones must have been
    set aside. Orbax's CheckpointManager is not used: it counts what is no checkpoint, and where a
    write fails on one host it waits for the others before it says so.
    """

    def __init__(self, run: Path, experiment: config.Experiment, keep: int, every: int = 0):
        self.run, self.experiment, self._keep, self._every = run, experiment, keep, every
        self.folder = (run / runs.CHECKPOINTS).resolve()
        self._there = steps(run)
        self._started: int | None = None  # may not be on disk yet
        try:
            if _is_main():
                self.folder.mkdir(parents=True, exist_ok=True)
                for path in self.folder.glob(f"*{OLD}"):
                    shutil.rmtree(path)
        except OSError as error:
            raise UserError(f"{run} cannot be written ({error}); choose another folder.") from error
        self._writer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(),
            async_options=ocp.AsyncOptions(
                timeout_secs=config.LONG * experiment.hosts.progress_timeout,
                post_finalization_callback=self._complete,
            ),
        )
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(_closed_loops_are_no_news())

    def save(self, state: TrainState, *, weights_only: bool = False) -> None:
        """Starts a save of the state; one of the same step that is already there stays.

        Raises:
          UserError: this or an earlier save failed.
        """
        step = int(state.step)
        if step == self._started or step in self._there:
            return
        self.wait()
        self._started = step
        items: dict[str, Any] = {
            "params": _arrays(state.params),
            "meta": ocp.args.JsonSave(self._meta(step, weights_only)),
        }
        if not weights_only:
            items["opt_state"] = _arrays(named_leaves(state.opt_state))
        args = ocp.args.Composite(**items)
        self._do(lambda: self._writer.save(self.folder / str(step), args=args))

    def _complete(self) -> None:
        """Called when all hosts have written, before the temporary folder gets its name."""
        if _is_main():
            (path,) = self.folder.glob(f"{self._started}{TEMPORARY}*")
            _seal(path)

    def check(self) -> None:
        """Waits for nothing.

        Raises:
          UserError: a save has failed.
        """
        self._do(self._writer.check_for_errors)

    def wait(self) -> None:
        """Waits for a save under way, then removes what need not stay.

        Raises:
          UserError: it failed.
        """
        self._do(self._writer.wait_until_finished)
        if self._started is not None:
            self._there.append(self._started)
            self._started = None
            self._do(self._prune)

    def _prune(self) -> None:
        last = self._there[-self._keep :]
        stay = [n for n in self._there if n in last or (self._every and n % self._every == 0)]
        for step in set(self._there) - set(stay) if _is_main() else ():
            old = self.folder / f"{step}{OLD}"
            (self.folder / str(step)).rename(old)  # at once, so that it is never half there
            shutil.rmtree(old)
        self._there = stay

    def _do(self, what: Callable[[], None]) -> None:
        try:
            what()
        except (OSError, ValueError, RuntimeError, UserError) as error:
            self._started = None  # Orbax tells of it once: no later wait may take it as written
            self._quiet.pop_all()  # what it still writes will fail, too
            if _by_a_peer(error):
                raise
            raise _failed(self.run, error) from error

    def finish(self) -> None:
        """Waits, and takes no more.

        Raises:
          UserError: a save failed.
        """
        with self._quiet:
            try:
                self.wait()
            finally:
                self._writer.close()

    def _meta(self, step: int, weights_only: bool) -> dict[str, Any]:
        tokenizer = (self.run / runs.TOKENIZER).read_bytes()
        return {
            "format_version": FORMAT_VERSION,
            "step": step,
            "data_iterator": {"next_index": step},
            "weights_only": weights_only,
            "config": config.to_json(self.experiment),
            "tokenizer_sha256": hashlib.sha256(tokenizer).hexdigest(),
            "vhajax_version": importlib.metadata.version("vhajax"),
        }


def _arrays(tree: dict[str, Any]) -> ocp.args.PyTreeSave:
    """As StandardSave, in smaller files: Orbax keeps what it has compressed in memory until a file
    is full, at 2 GB by default."""
    size = sum(x.nbytes for x in tree.values())
    return ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=max(2**23, size // 256))


def read_meta(run: Path, step: int) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
      UserError: it cannot be read, or has another format.
    """
    meta = _restore(run, step, "meta", ocp.args.JsonRestore())
    version = meta.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"The checkpoint {step} of {run} has format version {version}, this vhajax reads "
            f"{FORMAT_VERSION}; read it with the vhajax that wrote it."
        )
    return meta


def latest(run: Path) -> int:
    """The newest complete step; warns of torn ones that are newer.

    Raises:
      UserError: there is none.
    """
    found, flaws = steps(run), torn(run)
    if not found:
        why = "".join(f"; {path.name} is torn ({flaw})" for path, flaw in flaws.items())
        raise UserError(f"The run {run} has no complete checkpoint{why}; train it first.")
    for path, flaw in flaws.items():
        if path.name.isdigit() and int(path.name) > found[-1]:
            warnings.warn(f"the checkpoint {path} is torn ({flaw}) and skipped", stacklevel=2)
    return found[-1]


def restore_params(
    run: Path, step: int, shapes: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Parameters by path, laid out as `shapes` say.

    Raises:
      UserError: a corrupt checkpoint, or other keys, shapes or dtypes, which are listed.
    """
    return _restore_named(run, step, "params", shapes)


def restore_state(run: Path, step: int, target: TrainState) -> TrainState:
    """The whole state; `target` holds ShapeDtypeStructs with the shardings that are wanted."""
    if read_meta(run, step)["weights_only"]:
        raise UserError(
            f"The run {run} holds weights only and cannot be resumed; "
            f"start another with --init-from {run}."
        )
    params = restore_params(run, step, target.params)
    wanted = named_leaves(target.opt_state)
    leaves = _restore_named(run, step, "opt_state", wanted)
    structure = jax.tree.structure(target.opt_state)
    opt_state = structure.unflatten([leaves[name] for name in wanted])
    where = target.step.sharding
    count = jax.device_put(jnp.asarray(step, jnp.int32), where) if where else jnp.int32(step)
    return TrainState(params, opt_state, count)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves of any pytree by path."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def _restore_named(run: Path, step: int, item: str, wanted: dict[str, Any]) -> dict[str, Any]:
    stored = _metadata(run, step, item)
    _check_same(run, step, stored, wanted)
    return _restore(run, step, item, ocp.args.StandardRestore(wanted))


def _check_same(run: Path, step: int, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Orbax fills, drops and casts in silence; here every difference is an error."""
    differences = [f"{name} is missing" for name in wanted if name not in stored]
    differences += [f"{name} is not in the model" for name in stored if name not in wanted]
    for name in wanted.keys() & stored.keys():
        have, want = stored[name], wanted[name]
        if tuple(have.shape) != tuple(want.shape) or jnp.dtype(have.dtype) != want.dtype:
            differences.append(
                f"{name} is {have.dtype}{list(have.shape)}, not {want.dtype}{list(want.shape)}"
            )
    if differences:
        raise UserError(
            f"The checkpoint {step} of {run} does not fit its configuration: "
            f"{'; '.join(sorted(differences))}."
        )


def _metadata(run: Path, step: int, item: str) -> dict[str, Any]:
    with _reading(run, step), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        tree = reader.metadata(_item(run, step, item)).item_metadata
        if tree is None:
            raise FileNotFoundError(f"{item} cannot be read")
        return dict(tree)


def _restore(run: Path, step: int, item: str, args: Any) -> Any:
    handlers = {"meta": ocp.JsonCheckpointHandler}
    handler = handlers.get(item, ocp.StandardCheckpointHandler)()
    with _reading(run, step), ocp.Checkpointer(handler) as reader:
        return reader.restore(_item(run, step, item), args=args)


@contextlib.contextmanager
def _reading(run: Path, step: int) -> Iterator[None]:
    """Turns whatever Orbax and TensorStore raise for a broken file into one sentence."""
    with _closed_loops_are_no_news():
        try:
            yield
        except Exception as error:
            if _by_a_peer(error):
                raise
            raise _corrupt(run, step, error) from error


@contextlib.contextmanager
def _closed_loops_are_no_news() -> Iterator[None]:
    """After a failure, what is still being read or written finds Orbax's event loop closed, and
    says so at length, at any time: so the filter stays, then."""
    before = sys.unraisablehook

    def hook(what: Any) -> None:
        if str(what.exc_value) != "Event loop is closed":
            before(what)

    sys.unraisablehook = hook
    yield
    sys.unraisablehook = before


def _by_a_peer(error: BaseException | None) -> bool:
    """Whether a collective broke inside Orbax: another process is lost, no file is to blame."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None and jax.process_count() > 1


def _item(run: Path, step: int, item: str) -> Path:
    return (run / runs.CHECKPOINTS / str(step) / item).resolve()


def _corrupt(run: Path, step: int, error: Exception) -> UserError:
    cause = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return UserError(
        f"The checkpoint {step} of {run} is corrupt ({cause}); remove the folder "
        f"{run / runs.CHECKPOINTS / str(step)} to use an earlier one."
    )


def _failed(run: Path, error: Exception) -> UserError:
    cause = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return UserError(
        f"A checkpoint of {run} could not be written ({cause}); free the disk or mend the folder."
    )
