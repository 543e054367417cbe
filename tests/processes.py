"""Real processes of `vhajax`, forked from one that has imported JAX but used no device yet."""

import ctypes
import importlib
import multiprocessing
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tiny

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["processes", "vhajax.train", "vhajax.distributed", "tensorboardX"])


def _run(args: Sequence[str], log: str, devices: int, settings: dict[str, str], main: str) -> None:
    """What a child does: a function of a list of arguments, its output into a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdin, sys.stdout, sys.stderr = open(os.devnull), open(1, "w"), open(2, "w")  # noqa: SIM115
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    )
    os.environ |= settings
    import jax

    for name, value in tiny.CACHE_SETTINGS.items():
        jax.config.update(name, settings.get("TEST_CACHE", value) if "dir" in name else value)
    if "TEST_FILE_SIZE" in settings:
        process, size = settings["TEST_FILE_SIZE"].split(":")
        if args[-2:] == ["--process-id", process] or "--process-id" not in args:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
    if "TEST_POWERLESS" in settings:
        _obey_permissions()
    module, _, function = main.partition(":")
    status = getattr(importlib.import_module(module), function)(args)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _obey_permissions() -> None:
    """Gives up every capability: then root, too, may write only where a file's mode says so."""
    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    if ctypes.CDLL(None, use_errno=True).capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "capset")


class Child:
    """One process. log: the file with all that it printed.

    main: module and function that get the arguments. settings: of the environment; TEST_FILE_SIZE
    "I:BYTES" lets process I write no file larger than that, TEST_POWERLESS takes root's power away.
    """

    def __init__(
        self,
        args: Sequence[str],
        log: Path,
        devices: int = 1,
        main: str = "vhajax.cli:main",
        **settings: str,
    ):
        self.log = log
        # The session's folder of compiled programs is the parent's, not the server's.
        settings["TEST_CACHE"] = tiny.CACHE.name
        self.process = SERVER.Process(
            target=_run, args=(list(args), str(log), devices, settings, main)
        )
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def status(self) -> int | None:
        """As a shell sees it: 128 + n after signal n; None while it runs."""
        code = self.process.exitcode
        return 128 - code if code is not None and code < 0 else code

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def signal(self, number: int) -> None:
        if self.status is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 120) -> int:
        self.process.join(seconds)
        if self.status is None:
            self.signal(signal.SIGKILL)
            raise AssertionError(f"still running after {seconds} s:\n{self.text}")
        return self.status

    def until(self, there: Callable[[], bool], seconds: float = 120) -> None:
        """Waits for something to happen while the process runs."""
        deadline = time.monotonic() + seconds
        while not there():
            assert self.status is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.01)


def several(
    args: Sequence[str], folder: Path, count: int, devices: int, **settings: Any
) -> list[Child]:
    """The processes of one run; their logs are folder/0.log and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(count)]
    return [
        Child([*args, *where, "--process-id", str(i)], folder / f"{i}.log", devices, **settings)
        for i in range(count)
    ]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
