"""launch/local.py with real processes; the clusters' scripts with stand-ins for their commands."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from vhajax import experiment

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
TIMEOUT = 20.0

# Stands in for `vhajax train`: process I runs the I-th piece of code, the last one the rest.
STAND_IN = """
import os, signal, socket, subprocess, sys, time
from pathlib import Path

codes, flags = sys.argv[1:-6], dict(zip(sys.argv[-6::2], sys.argv[-5::2]))
me = int(flags["--process-id"])
with open(f"{me}.pid", "a") as file:
    file.write(f"{os.getpid()}\\n")
attempt = Path(f"{me}.pid").read_text().count("\\n")

def wait(status=75):
    def stop(*_):
        Path(f"{me}.term").touch()
        sys.exit(status)
    signal.signal(signal.SIGTERM, stop)
    Path(f"{me}.ready").touch()
    time.sleep(60)

def ignore():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(f"{me}.ready").touch()
    time.sleep(60)

def until(name):
    while not Path(name).exists():
        time.sleep(0.01)

exec(codes[min(me, len(codes) - 1)])
"""
READY = "until('0.ready'); until('1.ready');"  # said by process 2
SUICIDE = "os.kill(os.getpid(), signal.SIGKILL)"


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended may stay listed until somebody asks for its status."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return sys.platform != "linux"


def interruptible() -> None:
    """A test run in the background passes on that Ctrl-C is to be ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Local:
    """launch/local.py in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def command(self, *codes: str, options: str = "") -> list[str]:
        launcher = [sys.executable, str(LAUNCH / "local.py"), "--log-dir", "logs"]
        return [*launcher, *options.split(), "--", sys.executable, "-c", STAND_IN, *codes]

    def start(self, *codes: str, options: str = "", **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command(*codes, options=options),
            cwd=self.folder,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=interruptible,
        )
        self.started.append(process)
        return process

    def run(self, *codes: str, options: str = "", **env: str) -> tuple[int, str, str]:
        return self.end(self.start(*codes, options=options, **env))

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Status and output of a launcher, after which nothing that it started may live."""
        out, err = process.communicate(timeout=TIMEOUT)
        assert [pid for pid in self.pids() if alive(pid)] == []
        return process.returncode, out, err

    def pids(self) -> list[int]:
        return [int(pid) for file in self.folder.glob("*.pid") for pid in file.read_text().split()]

    def attempts(self) -> int:
        return len((self.folder / "0.pid").read_text().split())

    def has(self, *names: str) -> bool:
        return all((self.folder / name).exists() for name in names)

    def log(self, index: int) -> str:
        return (self.folder / f"logs/process-{index}.log").read_text()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    launcher = Local(tmp_path)
    yield launcher
    for process in launcher.started:
        process.kill()
        process.communicate()


def test_all_processes_run_and_process_0_shows(local: Local) -> None:
    code = """\
print("out", me, flags["--num-processes"], os.getsid(0) == os.getpid())
print("err", me, file=sys.stderr)
host, port = flags["--coordinator"].split(":")
if me == 0:
    socket.create_server((host, int(port))).close()
Path(f"{me}.coordinator").write_text(f"{host} {port}")
"""
    status, out, err = local.run(code, options="--processes 3")
    assert (status, out) == (0, "out 0 3 True\n")
    assert err == "local.py: logs are in logs.\nerr 0\n"
    for index in range(3):
        assert sorted(local.log(index).splitlines()) == [f"err {index}", f"out {index} 3 True"]
    assert len({(local.folder / f"{index}.coordinator").read_text() for index in range(3)}) == 1


def test_logs_lie_under_runs_unless_said_otherwise(local: Local) -> None:
    command = local.command("print('hello', me)", options="--processes 2")
    del command[2:4]
    run = subprocess.run(command, cwd=local.folder, capture_output=True, text=True, timeout=TIMEOUT)
    (folder,) = (local.folder / "runs/logs").iterdir()
    assert run.stderr == f"local.py: logs are in {folder.relative_to(local.folder)}.\n"
    assert (folder / "process-1.log").read_text() == "hello 1\n"


@pytest.mark.parametrize(
    ("end", "status", "word"),
    [("sys.exit(3)", 3, "status 3"), (SUICIDE, 137, "SIGKILL"), ("sys.exit(75)", 75, "status 75")],
)
def test_one_dies_and_the_others_are_ended(local: Local, end: str, status: int, word: str) -> None:
    dies = f"{READY} [print('line', i) for i in range(30)]; {end}"
    result, out, err = local.run("wait()", "ignore()", dies, options="--processes 3 --grace 0.2")
    assert (result, out) == (status, "")
    first, *lines, last = err.splitlines()[1:]
    assert first.startswith(f"local.py: process 2 ended first, with {word};")
    assert first.endswith("the last lines of logs/process-2.log:")
    assert lines == [f"  line {i}" for i in range(10, 30)]
    assert local.has("0.term")  # SIGTERM was enough for process 0
    assert last == "local.py: killing process 1."


def test_who_merely_noticed_does_not_count_as_first(local: Local) -> None:
    os.mkfifo(local.folder / "line")  # ends when process 1 does, as a connection would
    noticed = "open('line').read(); sys.exit(76)"
    status, _, err = local.run(
        noticed, f"line = open('line', 'w'); {SUICIDE}", options="--processes 2 --grace 10"
    )
    assert status == 137
    assert "process 1 ended first, with SIGKILL" in err
    assert "killing" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_reaches_all_as_sigterm(local: Local, number: signal.Signals) -> None:
    process = local.start("wait()", "wait(0)", options="--processes 2 --restarts 3")
    until(lambda: local.has("0.ready", "1.ready"))
    os.killpg(process.pid, number)  # as a terminal does: the launcher's group is its own
    status, _, err = local.end(process)
    assert status == {signal.SIGINT: 130, signal.SIGTERM: 75}[number]
    assert local.has("0.term", "1.term")
    assert local.attempts() == 1
    assert err.splitlines()[1:] == ["local.py: stopping 2 processes, which have 60 s to save."]


def test_sigterm_and_a_process_that_could_not_save(local: Local) -> None:
    process = local.start("wait()", "wait(1)", options="--processes 2 --restarts 3")
    until(lambda: local.has("0.ready", "1.ready"))
    process.terminate()
    status, _, err = local.end(process)
    assert (status, local.attempts()) == (1, 1)
    assert "process 1 was to stop and ended with status 1;" in err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 137)])
def test_who_ignores_sigterm_is_killed(local: Local, number: signal.Signals, status: int) -> None:
    process = local.start("wait()", "ignore()", options="--processes 2 --grace 0.2")
    until(lambda: local.has("0.ready", "1.ready"))
    process.send_signal(number)
    result, _, err = local.end(process)
    assert result == status
    assert "local.py: killing process 1.\n" in err


def test_a_second_ctrl_c_kills_at_once(local: Local) -> None:
    process = local.start("ignore()", options="--processes 2 --grace 1000")
    until(lambda: local.has("0.ready", "1.ready"))
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert local.end(process)[0] == 130


@pytest.mark.parametrize(
    ("end", "status", "attempts"),
    [
        ("sys.exit(75)", 75, 3),
        ("sys.exit(76)", 76, 3),
        (SUICIDE, 137, 3),
        ("sys.exit(0)", 0, 1),
        ("sys.exit(2)", 2, 1),
        ("sys.exit(130)", 130, 1),
        ("sys.exit(76 if attempt == 1 else 0)", 0, 2),
    ],
)
def test_restarts(local: Local, end: str, status: int, attempts: int) -> None:
    result, _, err = local.run(
        f"print('attempt', attempt); {end}", options="--processes 1 --restarts 2"
    )
    assert (result, local.attempts()) == (status, attempts)
    assert err.count("starting all again") == attempts - 1
    # Of a log that goes on, what an earlier attempt said is not shown again.
    assert err.count("  attempt 1\n") == (end != "sys.exit(0)")
    assert local.log(0) == "".join(f"attempt {n + 1}\n" for n in range(attempts))


def test_simulated_devices(local: Local) -> None:
    show = "print(os.environ.get('XLA_FLAGS'), os.environ.get('JAX_PLATFORMS'))"
    given = {"XLA_FLAGS": "--xla_a=1", "JAX_PLATFORMS": "tpu"}
    assert local.run(show, options="--processes 1", **given)[1] == "--xla_a=1 tpu\n"
    _, out, _ = local.run(show, options="--processes 1 --devices-per-process 4", **given)
    assert out == "--xla_a=1 --xla_force_host_platform_device_count=4 cpu\n"


def test_what_a_process_leaves_behind_is_ended(local: Local) -> None:
    leave = "p = subprocess.Popen(['sleep', '60']); Path('helper.pid').write_text(str(p.pid))"
    assert local.run("print('done')", leave, options="--processes 2")[0] == 0
    assert local.has("helper.pid")


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_killing_the_launcher_ends_its_processes(local: Local) -> None:
    process = local.start("ignore()", options="--processes 2")
    until(lambda: local.has("0.ready", "1.ready"))
    assert [alive(pid) for pid in local.pids()] == [True, True]
    process.kill()
    process.wait()
    until(lambda: not any(map(alive, local.pids())))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "--processes"),
        ("--processes 2", "COMMAND"),
        ("--processes 2 --", "COMMAND"),
        ("--processes 0 -- true", "--processes is 0"),
        ("--processes two -- true", "two"),
        ("--processes 1 --devices-per-process 0 -- true", "--devices-per-process is 0"),
        ("--processes 1 --restarts -1 -- true", "--restarts is -1"),
        ("--processes 1 --grace -1 -- true", "--grace is -1"),
        ("--processes 1 --grace nan -- true", "--grace is nan"),
        ("--processes 1 -- no-such-program", "no-such-program"),
        ("--processes 1 true", "true"),
        ("--processes 1 --log-dir /dev/null/logs -- true", "/dev/null/logs"),
    ],
)
def test_bad_usage_is_one_sentence(tmp_path: Path, arguments: str, words: str) -> None:
    run = subprocess.run(
        [sys.executable, LAUNCH / "local.py", *arguments.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert_sentence(run, words)
    assert list(tmp_path.iterdir()) == []


def assert_sentence(run: subprocess.CompletedProcess[str], words: str) -> None:
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.count("\n") == 1
    assert run.stderr.endswith(".\n")
    assert words in run.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_read_the_scripts(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=beside)
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; the extra dev brings it")
    run = subprocess.run([shellcheck, "--shell=bash", script], capture_output=True, text=True)
    assert run.stdout == ""


def stand_in(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
    path.chmod(0o755)


def lines(path: Path) -> list[list[str]]:
    """What a stand-in wrote: the arguments of each call, quoted for a shell, on a line."""
    return [shlex.split(line) for line in path.read_text().splitlines()] if path.exists() else []


RECORD = """printf '%q ' "$@" >>"$RECORDS/$(basename "$0")"; echo >>"$RECORDS/$(basename "$0")" """
AWKWARD = ["--data.path", "a b", "--train.note", 'it\'s $HOME "*"']


class Slurm:
    """A job's environment, with srun and scontrol that only take notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        stand_in(folder / "bin", "srun", f'{RECORD}; env >"$RECORDS/env"; eval "$SRUN"')
        stand_in(folder / "bin", "scontrol", RECORD)
        stand_in(folder / ".venv/bin", "vhajax", "exit 99")
        self.env = {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "RECORDS": str(folder),
            "SLURM_JOB_ID": "71",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NTASKS": "16",
            "SLURM_CPUS_PER_TASK": "8",
            "SRUN": "exit 0",
        }

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", LAUNCH / "slurm.sbatch", *arguments],
            cwd=self.folder,
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def test_slurm_runs_one_step_on_the_whole_job(slurm: Slurm) -> None:
    run = slurm.run("demo_vha", "/shared/a run", *AWKWARD)
    assert (run.returncode, run.stdout) == (0, "")
    assert run.stderr == "slurm.sbatch: job 71, 16 tasks on 2 hosts.\n"
    (call,) = lines(slurm.folder / "srun")
    assert call[:3] == ["--kill-on-bad-exit=0", "--wait=300", ".venv/bin/vhajax"]
    assert call[3:] == ["train", "demo_vha", "--run-dir", "/shared/a run", *AWKWARD]
    assert "SRUN_CPUS_PER_TASK=8" in (slurm.folder / "env").read_text().splitlines()


@pytest.mark.parametrize("status", [0, 2, 130, 75, 76, 1, 137, 139])
def test_slurm_requeues_what_a_restart_helps(slurm: Slurm, status: int) -> None:
    run = slurm.run("demo_vha", "a", SRUN=f"exit {status}")
    assert run.returncode == status
    again = status not in (0, 2, 130)
    assert lines(slurm.folder / "scontrol") == ([["requeue", "71"]] if again else [])


@pytest.mark.parametrize(
    ("count", "limit", "again"), [("19", "", True), ("20", "", False), ("0", "0", False)]
)
def test_slurm_requeues_no_oftener_than_allowed(
    slurm: Slurm, count: str, limit: str, again: bool
) -> None:
    env = {"MAX_RESTARTS": limit} if limit else {}
    run = slurm.run("demo_vha", "a", SRUN="exit 75", SLURM_RESTART_COUNT=count, **env)
    assert run.returncode == 75
    assert (slurm.folder / "scontrol").exists() == again
    assert ("as many as MAX_RESTARTS allows" in run.stderr) != again


def test_slurm_preempts_the_script_too(slurm: Slurm) -> None:
    run = slurm.run("demo_vha", "a", SRUN='kill -TERM "$PPID"; sleep 0.2; exit 75')
    assert run.returncode == 75
    assert lines(slurm.folder / "scontrol") == [["requeue", "71"]]


def test_slurm_bad_usage_is_one_sentence(slurm: Slurm) -> None:
    assert_sentence(slurm.run("demo_vha"), "EXPERIMENT RUN_DIR")
    assert_sentence(slurm.run("demo_vha", "a", MAX_RESTARTS="many"), "many")
    assert_sentence(slurm.run("demo_vha", "a", VHAJAX="/no/vhajax"), "/no/vhajax")
    assert_sentence(slurm.run("demo_vha", "a", SLURM_JOB_ID=""), "sbatch")
    assert not (slurm.folder / "srun").exists()


def test_slurm_options() -> None:
    text = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    first_command = next(n for n, line in enumerate(text) if line and not line.startswith("#"))
    directives = [n for n, line in enumerate(text) if line.startswith("#SBATCH")]
    assert max(directives) < first_command  # sbatch reads none after a command
    options = dict(text[n].removeprefix("#SBATCH --").partition("=")[::2] for n in directives)
    assert options["ntasks-per-node"] == options["gpus-per-node"]  # one task a GPU
    assert "gpus-per-task" not in options
    assert options["signal"] == "TERM@120"  # to the tasks, not to the script
    assert options["open-mode"] == "append"
    assert "requeue" in options


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    run = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()


# Runs the command on two "hosts", folders that serve as HOME, and returns the first status but 0.
GCLOUD = f"""{RECORD}
case "$*" in
  *" describe "*) echo "${{STATE:-READY}}" ;;
  *" ssh "*)
    pids=()
    for host in 0 1; do
      mkdir -p "$RECORDS/$host"
      HOME=$RECORDS/$host bash -c "${{!#//--command=/}}" &
      pids+=("$!")
    done
    result=0
    for pid in "${{pids[@]}}"; do
      status=0
      wait "$pid" || status=$?
      [ "$result" -ne 0 ] || result=$status
    done
    exit "$result"
    ;;
esac"""

# The N-th run of a host ends with the N-th word of STATUSES, or is stopped, or cannot be.
REMOTE_VHAJAX = """printf '%q ' "$@" >>"$HOME/train"; echo >>"$HOME/train"
read -ra statuses <<<"$STATUSES"
status=${statuses[$(wc -l <"$HOME/train") - 1]}
case $status in
  wait) trap 'touch "$HOME/stopped"; kill "$!"; exit 75' TERM ;;
  hang) trap '' TERM ;;
  *) exit "$status" ;;
esac
sleep 60 &
touch "$HOME/ready"
wait"""


class Slice:
    """A checkout, its origin, and a gcloud that runs commands on two hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        origin = folder / "origin"
        (origin / "launch").mkdir(parents=True)
        shutil.copy(LAUNCH / "tpu_vm.sh", origin / "launch")
        install = f"mkdir -p .venv/bin; cp '{folder / 'remote_vhajax'}' .venv/bin/vhajax"
        stand_in(origin / "launch", "make_env.sh", install)
        stand_in(folder, "remote_vhajax", REMOTE_VHAJAX)
        stand_in(folder / "bin", "gcloud", GCLOUD)
        git(origin, "init", "-q")
        git(origin, "add", "-A")
        git(origin, "commit", "-q", "-m", "all")
        self.checkout = folder / "checkout with spaces"
        git(folder, "clone", "-q", str(origin), str(self.checkout))
        self.env = {
            **os.environ,
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "RECORDS": str(folder),
            "STATUSES": "0",
        }

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", self.checkout / "launch/tpu_vm.sh", *arguments],
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=interruptible,
        )

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **env)
        out, err = process.communicate(timeout=TIMEOUT)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def runs(self, host: int) -> list[list[str]]:
        return lines(self.folder / str(host) / "train")

    def has(self, name: str) -> bool:
        return all((self.folder / host / name).exists() for host in "01")


@pytest.fixture
def tpu(tmp_path: Path) -> Slice:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    return Slice(tmp_path)


WHERE = ("my-tpu", "us-west4-a")
WHAT = ("demo_vha", "/mnt/a run")


def test_tpu_vm_runs_this_commit_on_all_hosts(tpu: Slice) -> None:
    run = tpu.run(*WHERE, *WHAT, *AWKWARD)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    describe, ssh = lines(tpu.folder / "gcloud")
    assert describe[:5] == ["compute", "tpus", "tpu-vm", "describe", "my-tpu"]
    assert ssh[:5] == ["compute", "tpus", "tpu-vm", "ssh", "my-tpu"]
    assert {"--zone=us-west4-a", "--worker=all"} < set(ssh)
    for host in (0, 1):
        assert tpu.runs(host) == [["train", "demo_vha", "--run-dir", "/mnt/a run", *AWKWARD]]
        home = tpu.folder / str(host)
        assert git(home / "vhajax", "rev-parse", "HEAD") == git(tpu.checkout, "rev-parse", "HEAD")


def test_tpu_vm_takes_a_newer_commit_to_hosts_that_have_an_older_one(tpu: Slice) -> None:
    assert tpu.run(*WHERE, *WHAT).returncode == 0
    (tpu.folder / "origin/new").write_text("new")
    git(tpu.folder / "origin", "add", "new")
    git(tpu.folder / "origin", "commit", "-q", "-m", "new")
    git(tpu.checkout, "pull", "-q")
    assert tpu.run(*WHERE, *WHAT, STATUSES="0 0").returncode == 0
    assert tpu.has("vhajax/new")
    git(tpu.checkout, "commit", "-q", "--allow-empty", "-m", "not pushed")
    run = tpu.run(*WHERE, *WHAT)
    assert run.returncode == 2
    assert run.stderr.count("is not at") == 2  # once a host


@pytest.mark.parametrize(
    ("statuses", "limit", "status", "runs"),
    [
        ("2", "3", 2, 1),
        ("130", "3", 130, 1),
        ("75 76 137 0", "3", 0, 4),
        ("75 76 137 0", "1", 76, 2),
    ],
)
def test_tpu_vm_restarts(tpu: Slice, statuses: str, limit: str, status: int, runs: int) -> None:
    run = tpu.run(*WHERE, *WHAT, STATUSES=statuses, MAX_RESTARTS=limit)
    assert run.returncode == status
    assert [len(tpu.runs(host)) for host in (0, 1)] == [runs, runs]
    assert run.stderr.count("restart ") == runs - 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_tpu_vm_stop_reaches_the_hosts(tpu: Slice, number: signal.Signals, status: int) -> None:
    process = tpu.start(*WHERE, *WHAT, STATUSES="wait")
    until(lambda: tpu.has("ready"))
    os.killpg(process.pid, number)  # as a terminal does
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == status
    assert tpu.has("stopped")


def test_tpu_vm_second_ctrl_c_waits_no_longer(tpu: Slice) -> None:
    process = tpu.start(*WHERE, *WHAT, STATUSES="hang")
    until(lambda: tpu.has("ready"))
    os.killpg(process.pid, signal.SIGINT)
    until(lambda: len(lines(tpu.folder / "gcloud")) == 3)  # describe, train, stop
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert "not waiting for the hosts" in err


@pytest.mark.skipif(sys.platform != "linux", reason="the hosts are Linux's")
def test_tpu_vm_stops_what_a_lost_connection_left_behind(tpu: Slice) -> None:
    lost = tpu.start(*WHERE, *WHAT, STATUSES="wait", MAX_RESTARTS="0")
    until(lambda: tpu.has("ready"))
    assert tpu.run(*WHERE, *WHAT, STATUSES="wait 0").returncode == 0
    assert tpu.has("stopped")
    lost.communicate(timeout=TIMEOUT)
    assert lost.returncode == 75


def test_tpu_vm_names_a_slice_that_is_not_there(tpu: Slice) -> None:
    assert_sentence(tpu.run(*WHERE, *WHAT, STATE="PREEMPTED"), "PREEMPTED")
    assert tpu.runs(0) == []


def test_tpu_vm_dry_run_prints_what_would_run(tpu: Slice) -> None:
    run = tpu.run("--dry-run", *WHERE, *WHAT, *AWKWARD)
    assert (run.returncode, run.stderr) == (0, "")
    assert not (tpu.folder / "gcloud").exists()
    subprocess.run(["bash", "-c", run.stdout], env=tpu.env, check=True, timeout=TIMEOUT)
    assert tpu.runs(1) == [["train", "demo_vha", "--run-dir", "/mnt/a run", *AWKWARD]]


def test_tpu_vm_bad_usage_is_one_sentence(tpu: Slice) -> None:
    assert_sentence(tpu.run(*WHERE, "demo_vha"), "RUN_DIR")
    assert_sentence(tpu.run(*WHERE, "demo_vha", "runs/a"), "all hosts see")
    assert_sentence(tpu.run(*WHERE, *WHAT, MAX_RESTARTS="-1"), "-1")
    git(tpu.checkout, "remote", "remove", "origin")
    assert "no origin" in tpu.run(*WHERE, *WHAT).stderr


def exactly(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """An object that has these fields and no others."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def some(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXTS = {"type": "object", "additionalProperties": TEXT}

# Of the fields that the APIs define (jobset.x-k8s.io/v1alpha2, batch/v1, v1), those that are of use
# here; whoever adds another one looks it up there and adds it here.
CONTAINER = exactly(
    {
        "name": NAME,
        "image": TEXT,
        "command": some(TEXT),
        "resources": exactly({"limits": {"type": "object", "additionalProperties": COUNT}}),
        "volumeMounts": some(exactly({"name": NAME, "mountPath": TEXT})),
    },
    args=some(TEXT),
    env=some(
        exactly(
            {"name": TEXT},
            value=TEXT,
            valueFrom=exactly({"fieldRef": exactly({"fieldPath": TEXT})}),
        )
    ),
)
POD = exactly(
    {
        "restartPolicy": {"const": "Never"},  # which podFailurePolicy requires
        "terminationGracePeriodSeconds": COUNT,
        "nodeSelector": TEXTS,
        "containers": some(CONTAINER),
        "volumes": some(
            exactly({"name": NAME, "persistentVolumeClaim": exactly({"claimName": NAME})})
        ),
    }
)
POD_FAILURE_RULE = exactly(
    {
        "action": {"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
        "onExitCodes": exactly(
            {
                "containerName": NAME,
                "operator": {"enum": ["In", "NotIn"]},
                "values": {**some(COUNT), "uniqueItems": True},
            }
        ),
    }
)
JOB = exactly(
    {
        "parallelism": COUNT,
        "completions": COUNT,
        "backoffLimit": COUNT,
        "podFailurePolicy": exactly({"rules": some(POD_FAILURE_RULE)}),
        "template": exactly({"spec": POD}),
    },
    completionMode={"const": "Indexed"},  # which JobSet sets where nothing is said
)
FAILURE_RULE = exactly(
    {
        "action": {"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
        "onJobFailureReasons": some(
            {"enum": ["BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy"]}
        ),
    },
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
)
JOBSET = exactly(
    {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": exactly({"name": NAME}, annotations=TEXTS),
        "spec": exactly(
            {
                "failurePolicy": exactly({"maxRestarts": COUNT, "rules": some(FAILURE_RULE)}),
                "replicatedJobs": some(
                    exactly({"name": NAME, "replicas": COUNT, "template": exactly({"spec": JOB})})
                ),
            },
            coordinator=exactly({"replicatedJob": NAME, "jobIndex": COUNT, "podIndex": COUNT}),
        ),
    }
)
JOBSETS = ["gke_jobset.yaml", "gke_jobset_gpu.yaml"]
CHIPS_OF_A_HOST = {"tpu-v5-lite-podslice": 4}  # of a slice of several hosts
VARIABLE = r"\$\((\w+)\)"


def jobset(name: str) -> dict[str, Any]:
    (document,) = yaml.safe_load_all((LAUNCH / name).read_text())
    return document


def job(document: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = document["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


@pytest.mark.parametrize("name", JOBSETS)
def test_jobset_has_the_fields_of_the_api(name: str) -> None:
    document = jobset(name)
    jsonschema.Draft202012Validator.check_schema(JOBSET)
    jsonschema.validate(document, JOBSET)
    job(document)["template"]["spec"]["terminationGracePeriod"] = 1  # a misspelt field is found
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, JOBSET)


@pytest.mark.parametrize("name", JOBSETS)
def test_jobset_restarts_whole_and_not_on_bad_usage(name: str) -> None:
    document = jobset(name)
    (container,) = job(document)["template"]["spec"]["containers"]
    (pod_rule,) = job(document)["podFailurePolicy"]["rules"]
    assert pod_rule["action"] == "FailJob"
    assert pod_rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [2, 130],
    }
    policy = document["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert policy["maxRestarts"] > 0
    assert (
        job(document)["backoffLimit"] == 0
    )  # any other end of a pod ends its job: all start again


@pytest.mark.parametrize("name", JOBSETS)
def test_jobset_counts_agree(name: str) -> None:
    spec = job(jobset(name))
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    (chips,) = container["resources"]["limits"].values()
    hosts = spec["parallelism"]
    assert spec["completions"] == hosts
    if "google.com/tpu" in container["resources"]["limits"]:
        selector = pod["nodeSelector"]
        assert chips == CHIPS_OF_A_HOST[selector["cloud.google.com/gke-tpu-accelerator"]]
        rows, columns = map(int, selector["cloud.google.com/gke-tpu-topology"].split("x"))
        assert hosts * chips == rows * columns
    command = container["command"]
    assert int(command[command.index("--mesh.data") + 1]) == hosts * chips
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    (mount,) = container["volumeMounts"]
    assert command[command.index("--run-dir") + 1].startswith(f"{mount['mountPath']}/")


def test_jobset_of_gpus_says_who_is_who() -> None:
    document = jobset("gke_jobset_gpu.yaml")
    (replicated,) = document["spec"]["replicatedJobs"]
    (container,) = job(document)["template"]["spec"]["containers"]
    assert document["spec"]["coordinator"] == {
        "replicatedJob": replicated["name"],
        "jobIndex": 0,
        "podIndex": 0,
    }
    env = {entry["name"]: entry for entry in container["env"]}
    assert int(env["HOSTS"]["value"]) == job(document)["parallelism"]
    assert [arg.partition("=")[0] for arg in container["args"]] == [
        "--coordinator",
        "--num-processes",
        "--process-id",
    ]
    assert {name for arg in container["args"] for name in re.findall(VARIABLE, arg)} == set(env)


# ------------------------------------------------------------------ what the files show


def shown() -> list[list[str]]:
    """Arguments of `vhajax train` in every example: the experiment, then what follows it."""
    pods = [job(jobset(name))["template"]["spec"] for name in JOBSETS]
    found = [pod["containers"][0]["command"][2:] for pod in pods]
    for name in ("slurm.sbatch", "tpu_vm.sh", "local.py"):
        for line in (LAUNCH / name).read_text().splitlines():
            match = re.search(r"(lrkv_1b2_lrkv|demo_vha) (.*--mesh\.data .*)", line)
            found += [[match[1], *match[2].split()]] if match else []
    return found


def test_examples_are_experiments_that_the_configuration_accepts() -> None:
    assert len(shown()) == 5
    for name, *rest in shown():
        first = next(i for i, word in enumerate(rest) if "." in word)  # the overrides come last
        made = experiment.override(experiment.load(name), rest[first:], "train")
        assert made.mesh.data == (8 if name == "demo_vha" else 16)
