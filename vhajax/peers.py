"""The processes of one run: who is there, what they agree on, who is lost.

JAX's runtime connects processes too, but ends all of them with a stack trace where one is missing,
dead or stuck, and not always says which. So process 0 keeps one TCP connection to every other, over
which go lines of JSON: a roll call, values that all must have before they go on, and signs of life
with what each is doing. Whoever is lost is named by all others, which then end with status 76;
whoever ends with an error says so first, and all end with its status.

No JAX here.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from vhajax.config import LONG, Hosts
from vhajax.errors import INTERRUPTED, PeerLostError, UserError

LONGEST_LINE = 1 << 20
COMPUTING = "waiting for its devices"
"""What a process does that is held up by another one: never the culprit if one does otherwise."""


@dataclass(frozen=True)
class Place:
    """One process of a run.

    address: host and port of process 0. local_devices: indices of this machine's devices that are
    this process's, None for all.
    """

    address: str
    count: int = 1
    index: int = 0
    local_devices: tuple[int, ...] | None = None


ALONE = Place("", 1, 0)
PATIENT = Hosts()


class Peers:
    """This process among those of its run; also where there is only this one.

    Args:
      end: called with a sentence and a status when another process is lost; does not return.

    Raises:
      PeerLostError: somebody did not join in `hosts.join_timeout` seconds, and is named.
      UserError: the port is taken, or the processes disagree on how many they are.
    """

    def __init__(
        self,
        place: Place = ALONE,
        hosts: Hosts = PATIENT,
        end: Callable[[str, int], NoReturn] | None = None,
    ):
        self.place, self.index, self.count, self.hosts = place, place.index, place.count, hosts
        self._end = end or _end
        self._links: dict[int, _Link] = {}  # of process 0 to all others, of others to process 0
        self._names = {self.index: _name(self.index, socket.gethostname())}
        self._changed = threading.Condition()
        self._values: dict[str, dict[int, Any]] = {}
        self._lives: dict[int, _Life] = {}
        self._mine = _Life()
        self._closing = False
        if self.count > 1:
            self._call_the_roll() if self.index == 0 else self._join()
            self._start()

    # ------------------------------------------------------------------ joining

    def _call_the_roll(self) -> None:
        deadline = time.monotonic() + self.hosts.join_timeout
        with _listen(self.place.address) as server:
            while missing := set(range(1, self.count)) - self._links.keys():
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    link = _Link(server.accept()[0])
                except TimeoutError:
                    self._refuse(
                        PeerLostError(
                            f"{_these(missing)} did not join in {self.hosts.join_timeout} s; see "
                            "their logs, then start all of them again."
                        )
                    )
                self._admit(link)
        for link in self._links.values():
            link.send(names=list(self._names.items()))

    def _admit(self, link: "_Link") -> None:
        try:
            link.socket.settimeout(5)
            hello = link.read() or {}
            index, count, host = hello["process"], hello["count"], str(hello["host"])
        except (OSError, ValueError, KeyError, TypeError):
            link.socket.close()  # not one of ours
            return
        name = _name(index, host)
        if count != self.count or index in self._links or index not in range(1, self.count):
            self._links[-1] = link  # hears why, too
            self._refuse(
                UserError(
                    f"{name} joined as one of {count}, but process 0 has --num-processes "
                    f"{self.count} and these processes are there: {sorted(self._names)}; give all "
                    "the same number, and each an index of its own."
                )
            )
        link.socket.settimeout(None)
        self._links[index], self._names[index] = link, name

    def _refuse(self, error: UserError) -> NoReturn:
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(end=str(error), status=error.status)
        raise error

    def _join(self) -> None:
        deadline = time.monotonic() + self.hosts.join_timeout
        while True:
            try:
                sock = socket.create_connection(_split(self.place.address), timeout=5)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PeerLostError(
                        f"Process 0 at {self.place.address} does not answer in "
                        f"{self.hosts.join_timeout} s ({error}); see its log, then start all of "
                        "them again."
                    ) from error
                time.sleep(0.2)
        link = _Link(sock)
        link.send(process=self.index, count=self.count, host=socket.gethostname())
        sock.settimeout(
            max(0.01, deadline - time.monotonic()) + 10
        )  # process 0 says who is missing
        try:
            told = link.read()
        except OSError:
            told = None
        if told is None or "names" not in told:
            kind = UserError if told and told.get("status") == UserError.status else PeerLostError
            raise kind((told or {}).get("end") or "Process 0 ended before all had joined.")
        sock.settimeout(None)
        self._names |= {int(i): name for i, name in told["names"]}
        self._links[0] = link

    # ------------------------------------------------------------------ what the loop calls

    def beat(self, what: str, patience: int = 1) -> None:
        """Says what this process begins to do, as in "reading the batch of step 12".

        patience: of how many `hosts.progress_timeout` it may take.
        """
        self._mine = _Life(what, self._mine.count + 1, patience)

    def gather(self, topic: str, value: Any, seconds: int = 0) -> list[Any]:
        """The values of all processes in order, once all have come here.

        Raises:
          PeerLostError: not in so many seconds (0: `hosts.join_timeout`).
        """
        if self.count == 1:
            return [value]
        seconds = seconds or self.hosts.join_timeout
        with self._changed:
            self._values.setdefault(topic, {})[self.index] = value
            if self.index:
                with contextlib.suppress(OSError):  # `_hear` finds that out, too
                    self._links[0].send(topic=topic, value=value)
            enough = lambda: len(self._values[topic]) == self.count  # noqa: E731
            if not self._changed.wait_for(enough, seconds):
                missing = set(range(self.count)) - self._values[topic].keys()
                whose = _these(missing) if self.index == 0 else "Another process"
                self.fail(
                    PeerLostError(
                        f"{whose} did not come to '{topic}' in {seconds} s; the "
                        "same command goes on from the last checkpoint."
                    )
                )
            found = self._values.pop(topic)
        for link in self._links.values() if self.index == 0 else ():
            with contextlib.suppress(OSError):  # `_hear` finds that out, too
                link.send(topic=topic, values=[found[i] for i in range(self.count)])
        return [found[i] for i in range(self.count)]

    def agree(self, values: dict[str, Any]) -> None:
        """Compares what must be the same everywhere.

        Raises:
          UserError: names the first thing that is not, and whose it is.
        """
        everyone = self.gather("what they were started with", values)
        for name, ours in everyone[0].items():
            for index, theirs in enumerate(everyone):
                if theirs.get(name) != ours:
                    raise UserError(
                        f"{self._names[index]} has another {name} than process 0 "
                        f"({theirs.get(name)}, not {ours}); start all with the same command, code "
                        "and files."
                    )

    def fail(self, error: BaseException) -> NoReturn:
        """Ends the others with the reason for which this process ends, and raises it."""
        self._closing = True
        if isinstance(error, KeyboardInterrupt):
            sentence, status = "interrupted", INTERRUPTED
        else:
            sentence, status = str(error) or type(error).__name__, getattr(error, "status", 1)
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(end=f"{self._names[self.index]} ended: {sentence}", status=status)
        if self.count > 1:  # an orderly end of JAX would wait for the others
            if status == 1:
                with contextlib.suppress(OSError):
                    traceback.print_exception(error)
            self._end(sentence, status)
        raise error

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All processes do this to the end, or all end."""
        try:
            yield
            self.close()
        except (UserError, KeyboardInterrupt) as error:
            self.fail(error)
        except Exception as error:
            if self.count > 1:  # a collective breaks where a peer is dead: `_hear` says which
                time.sleep(self.hosts.silence_timeout + 2)
            self.fail(error)

    def close(self) -> None:
        """The orderly end, which waits for all."""
        self.gather(
            "the end", None, LONG * self.hosts.progress_timeout
        )  # process 0 may have to write
        self._closing = True
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(bye=True)
                link.socket.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------ threads

    def _start(self) -> None:
        for index, link in self._links.items():
            self._lives[index] = _Life()
            _thread(lambda index=index, link=link: self._hear(index, link))
        _thread(self._watch)

    def _hear(self, index: int, link: "_Link") -> None:
        while True:
            try:
                told = link.read()
            except (OSError, ValueError):
                told = None
            if self._closing or (told and "bye" in told):
                return
            if told is None:
                self._lose(f"{self._names[index]} ended unexpectedly")
            elif "end" in told:
                self._tell_others(told["end"], told["status"], but=index)
                self._end(told["end"], told["status"])
            elif "topic" in told:
                self._take(index, told)
            else:
                before = self._lives[index]
                since = before.since if before.count == told["count"] else 0.0
                self._lives[index] = _Life(told["what"], told["count"], told["patience"], since)

    def _take(self, index: int, told: dict[str, Any]) -> None:
        with self._changed:
            values = self._values.setdefault(told["topic"], {})
            values |= dict(enumerate(told["values"])) if "values" in told else {}
            if "value" in told:
                values[index] = told["value"]
            self._changed.notify_all()

    def _watch(self) -> None:
        """Sends signs of life, and looks for those of others."""
        while not self._closing:
            time.sleep(min(1.0, self.hosts.silence_timeout / 4))
            for link in self._links.values():
                with contextlib.suppress(OSError):  # `_hear` finds that out, too
                    mine = self._mine
                    link.send(what=mine.what, count=mine.count, patience=mine.patience)
            now = time.monotonic()
            for index, life in self._lives.items():
                if now - life.heard > self.hosts.silence_timeout and not self._closing:
                    self._lose(
                        f"{self._names[index]} gave no sign of life for "
                        f"{self.hosts.silence_timeout} s (it was {life.what})"
                    )
            if self.index == 0 and not self._closing:
                self._look_for_the_stuck(now)

    def _look_for_the_stuck(self, now: float) -> None:
        lives = self._lives | {0: self._mine}
        busy = {i: x for i, x in lives.items() if not x.what.startswith(COMPUTING)}
        suspects = busy or lives  # who waits for its devices waits for whoever is busy otherwise
        limit = self.hosts.progress_timeout
        late = {i: x for i, x in suspects.items() if now - x.since > limit * x.patience}
        if not late:
            return
        culprits = late if busy else lives
        doing = " and ".join(
            f"{self._names[i]} has been {x.what} for {now - x.since:.0f} s"
            for i, x in sorted(culprits.items())
        )
        self._lose(f"the run stands still: {doing}")

    def _lose(self, how: str) -> None:
        sentence = f"{how}; the same command goes on from the last checkpoint."
        self._tell_others(sentence, PeerLostError.status)
        self._end(sentence, PeerLostError.status)

    def _tell_others(self, sentence: str, status: int, but: int = -1) -> None:
        for index, link in self._links.items():
            if self.index == 0 and index != but:
                with contextlib.suppress(OSError):
                    link.send(end=sentence, status=status)


@dataclass
class _Life:
    """What a process does, how many things it has begun, since when, and the last sign of it."""

    what: str = "starting"
    count: int = 0
    patience: int = LONG
    since: float = 0.0
    heard: float = 0.0

    def __post_init__(self) -> None:
        self.heard = time.monotonic()
        self.since = self.since or self.heard


class _Link:
    """Lines of JSON over one connection."""

    def __init__(self, sock: socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self._lock = sock, threading.Lock()
        self._file = sock.makefile("rb")

    def send(self, **message: Any) -> None:
        with self._lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> dict[str, Any] | None:
        """The next message; None where the other side is gone."""
        line = self._file.readline(LONGEST_LINE)
        return json.loads(line) if line.endswith(b"\n") else None


def _listen(address: str) -> socket.socket:
    """All of this machine's addresses at the port: the name may be another interface's."""
    port = _split(address)[1]
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=512, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(
            f"The coordinator's port {port} cannot be used ({error.strerror}); name another."
        ) from error


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _name(index: int, host: str) -> str:
    return f"process {index} ({host})"


def _these(indices: set[int]) -> str:
    many = ", ".join(map(str, sorted(indices)))
    return f"Process {many}" if len(indices) == 1 else f"Processes {many}"


def _thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, daemon=True).start()


def _end(sentence: str, status: int) -> NoReturn:
    """From a thread, whatever the main one waits for."""
    try:
        sys.stdout.flush()
        print(f"vhajax: {sentence}", file=sys.stderr, flush=True)
    finally:  # also where nobody reads that, or the log's disk is full
        os._exit(status)
