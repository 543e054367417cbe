"""Starts a command as several processes on this machine, which make up one run.

  python launch/local.py --processes 4 --devices-per-process 2 -- \\
      vhajax train demo_vha --run-dir runs/a --mesh.data 8

Each process gets --coordinator, --num-processes and --process-id appended, and writes to
process-I.log in the folder of logs; what process 0 prints also shows here. Ctrl-C or SIGTERM
reaches all of them as SIGTERM, upon which a run saves; a second Ctrl-C kills them. When one dies,
the others get --grace seconds to notice, then SIGTERM, and after as many seconds SIGKILL.
Exit status: 0 done, 2 bad usage or input, 130 after Ctrl-C, 75 after SIGTERM where everything was
saved, else that of the process that died first (128 + n for signal n).
"""

import argparse
import contextlib
import ctypes
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn

BAD_USAGE, STOPPED, PEER_LOST, INTERRUPTED = 2, 75, 76, 130
FINAL = (0, BAD_USAGE, INTERRUPTED)  # starting again would change nothing
SHOWN_LINES = 20  # of the log of a process that died
POLL_SECONDS = 0.02
LOGS = Path("runs/logs")
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class UsageError(Exception):
    """What the person who called can mend, in one sentence."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} -h`.")


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    processes: int
    devices: int | None
    log_dir: Path
    restarts: int
    grace: float
    command: tuple[str, ...]


class Stop:
    """What signals have asked of the launcher; its handlers only take notes."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.terminated = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
        else:
            self.terminated = True

    @property
    def requested(self) -> bool:
        return self.terminated or self.interrupts > 0


class Process:
    """One process of the run, leader of a session of its own, and its log."""

    def __init__(self, index: int, command: Sequence[str], env: dict[str, str], log: Path) -> None:
        self.index = index
        self.log = log
        self._begin = log.stat().st_size if log.exists() else 0
        self._tees: list[threading.Thread] = []
        with log.open("ab") as out:
            self.popen = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if index == 0 else out,
                stderr=subprocess.PIPE if index == 0 else subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone
                preexec_fn=die_with(os.getpid()),
            )

    def tee(self) -> None:
        """Shows what the process prints, beside logging it."""
        for source, terminal in (
            (self.popen.stdout, sys.stdout.fileno()),
            (self.popen.stderr, sys.stderr.fileno()),
        ):
            if source is not None:
                thread = threading.Thread(target=copy, args=(source, terminal, self.log))
                thread.daemon = True  # a grandchild that left the session may hold the pipe open
                thread.start()
                self._tees.append(thread)

    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self.popen.poll()

    def terminate(self) -> None:
        """SIGTERM to the process alone: its own helpers are needed until it has saved."""
        self.popen.terminate()

    def kill(self) -> None:
        """SIGKILL to whatever is left of its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def finish(self) -> None:
        """Leaves nothing behind; the log is complete afterwards."""
        self.kill()
        self.popen.wait()
        for thread in self._tees:
            thread.join(timeout=5)

    def last_lines(self) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]


def die_with(parent: int) -> Callable[[], None]:
    """What a child does before it runs the command: on Linux it asks to end with the launcher."""

    def ask() -> None:
        if LIBC is not None:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # which ended before that was asked
                os._exit(128 + signal.SIGKILL)

    return ask


def copy(source: BinaryIO, terminal: int, log: Path) -> None:
    """Copies to the log, in whole lines, and to the terminal as long as somebody reads there."""
    with source, log.open("ab", buffering=0) as out:
        line, reading = b"", True
        while piece := source.read(1 << 16):
            whole, end, line = (line + piece).rpartition(b"\n")
            out.write(whole + end)  # what the other stream says comes between lines, not into them
            try:
                while reading and piece:
                    piece = piece[os.write(terminal, piece) :]
            except OSError:
                reading = False
        out.write(line)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    stop = Stop()
    try:
        options = parse(list(sys.argv[1:] if argv is None else argv))
        say(f"logs are in {options.log_dir}.")
        return run(options, stop)
    except UsageError as error:
        say(str(error))
        return BAD_USAGE


def say(sentence: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads, as after a terminal was closed
        print(f"local.py: {sentence}", file=sys.stderr, flush=True)


def parse(argv: list[str]) -> Options:
    """The options, checked, with a folder for the logs.

    Raises:
      UsageError: the command line cannot be followed.
    """
    cut = argv.index("--") if "--" in argv else len(argv)
    given, command = parser().parse_args(argv[:cut]), argv[cut + 1 :]
    for name, least in (("processes", 1), ("devices_per_process", 1), ("restarts", 0)):
        value = getattr(given, name)
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be {least} or more.")
    if not 0 <= given.grace < math.inf:
        raise UsageError(f"--grace is {given.grace}; it must be a number of seconds, 0 or more.")
    if not command:
        raise UsageError("the COMMAND to run is missing; it comes after `--`.")
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no program {command[0]!r} to run.")
    return Options(
        given.processes,
        given.devices_per_process,
        made(given.log_dir or LOGS / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"),
        given.restarts,
        given.grace,
        tuple(command),
    )


def parser() -> Parser:
    result = Parser(
        prog="local.py",
        usage="%(prog)s --processes N [option …] -- COMMAND …",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("--processes", type=int, required=True, metavar="N")
    add(
        "--devices-per-process",
        type=int,
        metavar="M",
        help="that many simulated devices each, on CPU only (sets XLA_FLAGS and JAX_PLATFORMS)",
    )
    add("--log-dir", type=Path, metavar="DIR", help=f"default: {LOGS}/DATE-TIME-PID")
    add("--restarts", type=int, default=0, metavar="R", help="how often to start all again")
    add("--grace", type=float, default=60, metavar="SECONDS", help="default: 60")
    return result


def made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} for the logs cannot be made ({error.strerror}).") from None
    return folder


def run(options: Options, stop: Stop) -> int:
    """The run, started again as often as is allowed and of use."""
    for restart in range(options.restarts + 1):
        status = attempt(options, stop)
        if status in FINAL or stop.requested or restart == options.restarts:
            return status
        say(f"status {status}; starting all again, {restart + 1} of {options.restarts} times.")
    raise AssertionError("unreachable: the last attempt returns")


def attempt(options: Options, stop: Stop) -> int:
    """Starts all processes, waits for them, and leaves none behind."""
    processes: list[Process] = []
    coordinator = f"127.0.0.1:{free_port()}"
    try:
        for index in range(options.processes):
            flags = ("--coordinator", coordinator, "--num-processes", str(options.processes))
            command = (*options.command, *flags, "--process-id", str(index))
            log = options.log_dir / f"process-{index}.log"
            try:
                processes.append(Process(index, command, environment(options.devices), log))
            except OSError as error:
                raise UsageError(f"process {index} could not be started ({error}).") from None
        processes[0].tee()  # only now: no thread may run where a process is forked
        return watch(processes, stop, options.grace)
    finally:
        for process in processes:
            process.finish()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(devices: int | None) -> dict[str, str]:
    """The launcher's own; what a process printed before it died is not to be lost in a buffer."""
    env = {"PYTHONUNBUFFERED": "1", **os.environ}
    if devices is not None:
        flag = f"--xla_force_host_platform_device_count={devices}"
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flag}".strip()
        env["JAX_PLATFORMS"] = "cpu"
    return env


def watch(processes: list[Process], stop: Stop, grace: float) -> int:
    """Waits until all have ended, ends them where they must be ended; returns the exit status."""
    first: Process | None = None
    plan: list[tuple[float, Callable[[list[Process]], None]]] = []
    stopping = False
    while True:
        running = [process for process in processes if process.status() is None]
        now = time.monotonic()
        if first is None and (first := first_dead(processes, stop)) is not None:
            report(first, len(running), stop, grace)
            if not stopping:
                plan = [(now + grace, terminate), (now + 2 * grace, kill)]
        if not running:
            return exit_status(first, stop)
        if stop.requested and not stopping:
            stopping = True
            say(f"stopping {len(running)} processes, which have {grace:g} s to save.")
            plan = [(now, terminate), (now + grace, kill)]
        if stop.interrupts > 1 and plan:
            plan = [(now, kill)]
        while plan and plan[0][0] <= now:
            plan.pop(0)[1](running)
        time.sleep(POLL_SECONDS)


def first_dead(processes: list[Process], stop: Stop) -> Process | None:
    """The process that failed; of several, one that did not merely notice another's end."""
    fine = (None, 0, STOPPED) if stop.requested else (None, 0)
    dead = [process for process in processes if process.status() not in fine]
    return min(dead, key=lambda process: process.status() == PEER_LOST, default=None)


def terminate(running: list[Process]) -> None:
    for process in running:
        process.terminate()


def kill(running: list[Process]) -> None:
    names = ", ".join(str(process.index) for process in running)
    say(f"killing {'processes' if len(running) > 1 else 'process'} {names}.")
    for process in running:
        process.kill()


def report(first: Process, running: int, stop: Stop, grace: float) -> None:
    """Which process ended first, how, and what it said last."""
    how = "was to stop and ended" if stop.requested else "ended first,"
    more = f"; {running} more may take {grace:g} s to end" if running and not stop.requested else ""
    first.finish()
    say(
        f"process {first.index} {how} with {described(first)}{more}; the last lines of {first.log}:"
    )
    for line in first.last_lines():
        with contextlib.suppress(OSError):
            print(f"  {line}", file=sys.stderr, flush=True)


def described(process: Process) -> str:
    status = process.status() or 0
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


def exit_status(first: Process | None, stop: Stop) -> int:
    if stop.interrupts:
        return INTERRUPTED
    if first is None:
        return STOPPED if stop.terminated else 0
    status = first.status() or 0
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
