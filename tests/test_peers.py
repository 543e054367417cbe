"""The processes of a run as threads of this one: joining, agreeing, and losing one."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from processes import free_port

from vhajax.config import Hosts
from vhajax.errors import PeerLostError, UserError
from vhajax.peers import COMPUTING, Peers, Place

FAST = Hosts(join_timeout=5, silence_timeout=2, progress_timeout=1)
HOST = socket.gethostname()


class Ended(Exception):  # noqa: N818
    """Instead of the end of a process."""


class Group:
    """Peers in threads. ends: sentence and status with which each would have ended."""

    def __init__(self, count: int, hosts: Hosts = FAST):
        self.ends: dict[int, tuple[str, int]] = {}
        self._changed = threading.Condition()
        address = f"127.0.0.1:{free_port()}"
        make = lambda i: Peers(Place(address, count, i), hosts, self._ender(i))  # noqa: E731
        with ThreadPoolExecutor(count) as pool:
            self.peers = list(pool.map(make, range(count)))

    def _ender(self, index: int) -> Callable:
        def end(sentence: str, status: int) -> None:
            with self._changed:
                self.ends.setdefault(index, (sentence, status))
                self._changed.notify_all()
            self.peers[index]._closing = True
            raise Ended

        return end

    def all(self, act: Callable[[Peers], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.peers)) as pool:
            return list(pool.map(act, self.peers))

    def wait_for_ends(self, *indices: int, seconds: float = 10) -> dict[int, tuple[str, int]]:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ends.keys() >= set(indices), seconds)
        return self.ends

    def drop(self, index: int) -> None:
        """As if the process were killed: its connections end without a word."""
        peers = self.peers[index]
        peers._closing = True
        for link in peers._links.values():
            with contextlib.suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)

    def freeze(self, index: int) -> None:
        """As if it were stopped: connected, and silent."""
        self.peers[index]._closing = True


@pytest.fixture(autouse=True)
def quiet_threads(monkeypatch):
    """A thread that ended its process has nothing to report."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)


@pytest.fixture
def three():
    group = Group(3)
    yield group
    for index in range(3):
        group.drop(index)


def test_values_of_all_come_to_all_in_order(three):
    for round_ in range(20):
        assert (
            three.all(lambda p, r=round_: p.gather("x", [r, p.index]))
            == [[[round_, 0], [round_, 1], [round_, 2]]] * 3
        )
    three.all(Peers.close)
    time.sleep(0.5)
    assert three.ends == {}


def test_one_process_is_alone():
    peers = Peers()
    with peers.together():
        assert peers.gather("x", 5) == [5]
        peers.agree({"seed": 1})
    with pytest.raises(UserError, match="mine"), peers.together():
        raise UserError("mine")


def test_what_differs_is_named_with_its_process(three):
    def act(peers: Peers) -> str:
        with pytest.raises(UserError) as caught:
            peers.agree({"steps": 5, "data.seed": 7 if peers.index == 2 else 3})
        return str(caught.value)

    sentence = (
        f"process 2 ({HOST}) has another data.seed than process 0 (7, not 3); start all with the "
        "same command, code and files."
    )
    assert three.all(act) == [sentence] * 3


def test_a_dead_process_is_named_at_once(three):
    before = time.monotonic()
    three.drop(2)
    ends = three.wait_for_ends(0, 1)
    assert time.monotonic() - before < 1.5
    sentence = (
        f"process 2 ({HOST}) ended unexpectedly; the same command goes on from the last checkpoint."
    )
    assert ends == {0: (sentence, 76), 1: (sentence, 76)}


def test_the_death_of_process_0_is_seen_by_the_others(three):
    three.drop(0)
    ends = three.wait_for_ends(1, 2)
    assert {x[0].partition(";")[0] for x in ends.values()} == {
        f"process 0 ({HOST}) ended unexpectedly"
    }


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_silent_process_is_named_in_time(frozen):
    three = Group(3, Hosts(join_timeout=5, silence_timeout=2, progress_timeout=60))
    three.peers[frozen].beat("reading the batch of step 9")
    time.sleep(1)
    three.freeze(frozen)
    before = time.monotonic()
    ends = three.wait_for_ends(*{0, 1, 2} - {frozen})
    assert 0.5 < time.monotonic() - before < 5
    for sentence, status in ends.values():
        assert status == 76
        assert sentence.startswith(f"process {frozen} ({HOST}) gave no sign of life for 2 s (it ")
        assert "reading the batch of step 9" in sentence


def test_a_stuck_process_is_named_and_not_the_ones_that_wait_for_it(three):
    for i in (0, 2):
        three.peers[i].beat(f"{COMPUTING} in step 12")
    three.peers[1].beat("reading the batch of step 12")
    ends = three.wait_for_ends(0, 1, 2)
    assert {status for _, status in ends.values()} == {76}
    (sentence,) = {sentence for sentence, _ in ends.values()}
    assert sentence.startswith(f"the run stands still: process 1 ({HOST}) has been reading the ")
    assert "process 0" not in sentence
    assert "process 2" not in sentence


def test_where_all_wait_for_their_devices_all_are_named(three):
    for peers in three.peers:
        peers.beat(f"{COMPUTING} in step 3")
    sentence = three.wait_for_ends(0, 1, 2)[0][0]
    assert sentence.count(f"has been {COMPUTING} in step 3 for") == 3


def test_patience(three):
    three.peers[1].beat("compiling", patience=6)
    for i in (0, 2):
        three.peers[i].beat(f"{COMPUTING} in step 1")
    time.sleep(2.5)
    assert three.ends == {}  # they wait for one that has time until second 6


def test_who_is_late_is_named_while_others_still_have_time(three):
    three.peers[0].beat("compiling step 1", patience=6)
    three.peers[1].beat("reading the batch of step 1")
    three.peers[2].beat("compiling step 1", patience=6)
    sentence, status = three.wait_for_ends(0, 1, 2, seconds=4)[0]
    assert status == 76
    assert sentence.startswith(f"the run stands still: process 1 ({HOST}) has been reading the ")
    assert "compiling" not in sentence


def test_progress_keeps_a_run_alive(three):
    for step in range(10):
        for peers in three.peers:
            peers.beat(f"{COMPUTING} in step {step}")
        time.sleep(0.3)
    assert three.ends == {}


def test_the_error_of_one_ends_all_with_its_reason(three):
    with pytest.raises(Ended), three.peers[1].together():
        raise UserError("The disk is full; free it.")
    ends = three.wait_for_ends(0, 1, 2)
    assert ends[1] == ("The disk is full; free it.", 2)
    told = (f"process 1 ({HOST}) ended: The disk is full; free it.", 2)
    assert (ends[0], ends[2]) == (told, told)


def test_who_does_not_come_to_a_meeting_is_named():
    hosts = Hosts(join_timeout=2, silence_timeout=60, progress_timeout=60)
    group = Group(3, hosts)
    with ThreadPoolExecutor(2) as pool:
        for peers in group.peers[:2]:
            pool.submit(lambda p=peers: p.gather("the run directory", 0))
        sentence, status = group.wait_for_ends(0)[0]
    assert status == 76
    assert sentence.startswith("Process 2 did not come to 'the run directory' in 2 s")


# ------------------------------------------------------------------ joining


def refusal(place: Place, hosts: Hosts) -> UserError:
    with pytest.raises(UserError) as caught:
        Peers(place, hosts)
    return caught.value


def test_who_is_missing_is_named_to_all():
    address, hosts = f"127.0.0.1:{free_port()}", Hosts(join_timeout=2)
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(lambda i: refusal(Place(address, 4, i), hosts), (0, 2)))
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert str(error) == (
            "Processes 1, 3 did not join in 2 s; see their logs, then start all of them again."
        )


def test_a_missing_process_0_is_named():
    address = f"127.0.0.1:{free_port()}"
    error = refusal(Place(address, 2, 1), Hosts(join_timeout=1))
    assert isinstance(error, PeerLostError)
    assert str(error).startswith(f"Process 0 at {address} does not answer in 1 s (")


@pytest.mark.parametrize(("count", "index"), [(3, 1), (2, 5)])
def test_processes_that_disagree_on_their_number_are_refused(count, index):
    address, hosts = f"127.0.0.1:{free_port()}", Hosts(join_timeout=5)
    places = [Place(address, 2, 0), Place(address, count, index)]
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(lambda place: refusal(place, hosts), places))
    for error in errors:
        assert error.status == 2
        assert str(error).startswith(f"process {index} ({HOST}) joined as one of {count}, but ")


def test_a_taken_port_is_refused():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        error = refusal(Place(f"127.0.0.1:{port}", 2, 0), FAST)
    assert str(error).startswith(f"The coordinator's port {port} cannot be used (")


def test_strangers_are_not_admitted():
    address, hosts = f"127.0.0.1:{free_port()}", Hosts(join_timeout=5)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: Peers(Place(address, 2, 0), hosts, lambda *_: None))
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", json.dumps({"process": "x"}).encode()):
            for _ in range(50):
                with contextlib.suppress(OSError):
                    with socket.create_connection(("127.0.0.1", int(address[10:]))) as stranger:
                        stranger.sendall(words)
                    break
                time.sleep(0.02)
        second = pool.submit(lambda: Peers(Place(address, 2, 1), hosts, lambda *_: None))
        pair = first.result(), second.result()
        closed = [pool.submit(peers.close) for peers in pair]
        assert [future.result() for future in closed] == [None, None]
