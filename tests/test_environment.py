"""launch/make_env.sh on machines unlike this one, and what no tracked file may say."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Brackets keep this file from matching itself.
FORBIDDEN = {
    "a package registry": r"py[p]i\.(?:org|python)|python[h]osted\.org|np[m]js\.(?:org|com)"
    r"|https?://[^\s\"'<>]+/[s]imple\b",
    "an option that names a registry": r"--(?:extra-)?index[-]url|--find[-]links",
    "a folder of one machine": r"/ho[m]e/\w|/Use[r]s/\w|(?<![\w.~])/ro[o]t/|file[:]///",
}


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
    path.chmod(0o755)
    return path


class Machine:
    """A checkout, a PATH with no Python but those a test puts there, and an empty pyenv."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout with spaces"
        (self.checkout / "launch").mkdir(parents=True)
        shutil.copy(ROOT / "launch/make_env.sh", self.checkout / "launch")
        (self.checkout / "pyproject.toml").write_text("[project]\n")
        (self.checkout / "constraints.txt").write_text("numpy==2.5.5\n")
        self.venv = self.checkout / ".venv"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in (
            "bash",
            "cat",
            "cksum",
            "cp",
            "cut",
            "dirname",
            "grep",
            "mkdir",
            "mktemp",
            "rm",
        ):
            found = shutil.which(tool)
            assert found
            (self.bin / tool).symlink_to(found)
        self.pyenv = folder / "pyenv"
        self.pyenv.mkdir()
        self.calls = folder / "calls"

    def broken_shims(self) -> None:
        for version in ("3.14", "3.13", "3.12"):
            script(
                self.bin / f"python{version}",
                f'echo "pyenv: python{version}: command not found" >&2; exit 127',
            )

    def old_python(self) -> None:
        script(
            self.bin / "python3",
            f"""\
[ "$1" = -c ] && exec "{sys.executable}" -c "import sys; sys.version_info = (3, 11, 9); $2"
echo "an old Python was used: $*" >&2""",
        )

    def python(self, path: Path, pip: str = "exit 0", venv: str = "exit 0") -> Path:
        """One that passes for Python 3.12, makes a .venv of itself, and runs `pip` for pip."""
        return script(
            path,
            f"""\
case "$1 $2" in
  "-m venv")
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    cp "$0" "$3/bin/pytest"
    {venv}
    ;;
  "-m pip")
    echo "pip $*" >>"{self.calls}"
    {pip}
    ;;
esac""",
        )

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.bin / "bash", self.checkout / "launch/make_env.sh", *arguments],
            env={
                "PATH": str(self.bin),
                "HOME": str(self.pyenv),
                "PYENV_ROOT": str(self.pyenv),
                **variables,
            },
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def assert_one_sentence(run: subprocess.CompletedProcess[str], *words: str) -> None:
    assert run.returncode != 0
    assert run.stderr.count("\n") == 1
    assert run.stderr.endswith(".\n")
    for word in words:
        assert word in run.stderr


def test_no_python_fits(machine: Machine) -> None:
    machine.broken_shims()
    machine.old_python()
    run = machine.run()
    assert_one_sentence(run, "Python 3.12", "PYTHON=")
    assert run.stdout == ""
    assert not machine.venv.exists()


def test_a_broken_shim_is_passed_over_for_a_python_that_runs(machine: Machine) -> None:
    machine.broken_shims()
    machine.old_python()
    good = script(machine.pyenv / "versions/x/bin/python", f'exec "{sys.executable}" "$@"')
    run = machine.run("--which")
    assert (run.returncode, run.stdout, run.stderr) == (0, f"{good}\n", "")
    assert not machine.venv.exists()


def test_the_python_that_is_named_comes_first(machine: Machine) -> None:
    machine.python(machine.bin / "python3.13")
    named = machine.python(machine.checkout.parent / "mine/python")
    assert machine.run("--which", PYTHON=str(named)).stdout == f"{named}\n"
    assert machine.run("--which", PYTHON="absent").stdout == f"{machine.bin / 'python3.13'}\n"


def test_a_python_whose_venv_fails_is_passed_over(machine: Machine) -> None:
    machine.python(machine.bin / "python3.13", venv="exit 1")
    good = machine.python(machine.pyenv / "versions/x/bin/python")
    run = machine.run()
    assert (run.returncode, run.stderr) == (0, "")
    assert str(good) in run.stdout
    assert (machine.venv / "stamp").exists()


@pytest.mark.parametrize(
    ("pip_says", "words"),
    [
        ("ERROR: No space left on device", "No space left"),
        ("WARNING: Retrying after connection broken by NewConnectionError", "network connection"),
    ],
)
def test_a_failed_installation_leaves_no_venv(machine: Machine, pip_says: str, words: str) -> None:
    machine.python(machine.bin / "python3.12", pip=f"echo '{pip_says}' >&2; exit 1")
    assert_one_sentence(machine.run(), "could not be installed", words)
    assert not machine.venv.exists()


def test_the_venv_is_made_once_and_again_when_an_input_changes(machine: Machine) -> None:
    machine.python(machine.bin / "python3.12")
    pins = machine.checkout / "constraints.txt"
    for expected, change in ((1, ""), (1, ""), (2, "jax==0.12.0\n"), (2, "")):
        pins.write_text(pins.read_text() + change)
        assert machine.run(VIRTUAL_ENV="/nowhere", PYTHONPATH="/nowhere").returncode == 0
        assert len(machine.calls.read_text().splitlines()) == expected

    # A failed update keeps the environment that worked, and is tried again.
    machine.python(machine.venv / "bin/python", pip="exit 1")
    pins.write_text("jax==9\n")
    assert_one_sentence(machine.run())
    assert_one_sentence(machine.run())
    assert (machine.venv / "bin/python").exists()


def test_a_venv_made_in_another_folder_is_made_anew(machine: Machine) -> None:
    machine.python(machine.bin / "python3.12")
    assert machine.run().returncode == 0
    machine.checkout = machine.checkout.rename(machine.checkout.parent / "moved")
    assert "Making .venv" in machine.run().stdout


def test_uv_installs_where_it_is_on_path_and_pip_where_it_fails(machine: Machine) -> None:
    machine.python(machine.bin / "python3.12")
    script(machine.bin / "uv", f'echo "uv $*" >>"{machine.calls}"; exit "${{UV_STATUS:-0}}"')
    assert machine.run(UV_STATUS="2").returncode == 0
    machine.calls.write_text(machine.calls.read_text() + "again\n")
    shutil.rmtree(machine.venv)
    assert machine.run().returncode == 0
    by_uv, by_pip, again, by_uv_alone = machine.calls.read_text().splitlines()
    assert by_uv.startswith("uv pip install --python .venv/bin/python -c constraints.txt")
    assert by_pip.startswith("pip -m pip install")
    assert "-c constraints.txt" in by_pip
    assert (again, by_uv_alone) == ("again", by_uv)


def test_constraints_are_exact_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9.-]+==[\w.]+", pin)] == []


def tracked_files() -> list[Path]:
    try:
        run = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if run.returncode != 0 or not run.stdout:
        pytest.skip("not a git checkout with tracked files")
    return [ROOT / name for name in run.stdout.split("\0") if (ROOT / name).is_file()]


def test_tracked_files_name_no_registry_and_no_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {what}: {match[0]}"
        for path in tracked_files()
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), start=1)
        for what, pattern in FORBIDDEN.items()
        if (match := re.search(pattern, line))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "https://" + "py" + "pi.org/project/jax",
        "https://mirror.example" + "/simple",
        "pip install --" + "extra-index-url x",
        "/" + "home/someone/vhajax",
        "cd /" + "root/work",
    ],
)
def test_what_a_tracked_file_may_not_say_is_recognised(text: str) -> None:
    assert any(re.search(pattern, text) for pattern in FORBIDDEN.values())
