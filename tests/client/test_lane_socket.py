"""A lane's socket: when it polls before it sleeps."""

from __future__ import annotations

import ctypes
import random
import resource
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensord_client.errors import Unavailable
from tensord_client.lane import Call, LaneConnection
from tensord_client.lane_socket import LaneSocket
from tensord_client.native import wire

from tensord.shm import spin
from tests.daemon_process import wait_until
from tests.open_files import no_descriptors_left

_PATIENCE = 120.0
_LIMIT = 300_000
_INCLUDE = Path(__file__).parents[2] / "shm/common/include"


class Waits:
    """The rule of tensord_wire.h, by which the client's part in C polls as well."""

    def __init__(self, folder: Path, limit_ns: int) -> None:
        (folder / "waits.c").write_text(
            "#include <tensord_wire.h>\n"
            "uint64_t begin(tensord__waits *waits, uint64_t now) { return tensord__begin_wait(waits, now); }\n"
            "void end(tensord__waits *waits, uint64_t now) { tensord__end_wait(waits, now); }\n"
        )
        command = ("cc", "-shared", "-fPIC", "-I", f"{_INCLUDE}", "-o", f"{folder}/waits.so", f"{folder}/waits.c")
        subprocess.run(command, check=True)
        self._rule = ctypes.CDLL(f"{folder}/waits.so")
        self._rule.begin.restype = ctypes.c_uint64
        self._state = (ctypes.c_uint64 * 8)(limit_ns)

    def begin(self, now_ns: int) -> int:
        return int(self._rule.begin(self._state, ctypes.c_uint64(now_ns)))

    def end(self, now_ns: int) -> None:
        self._rule.end(self._state, ctypes.c_uint64(now_ns))


def test_it_polls_when_the_daemon_would(tmp_path: Path) -> None:
    """One rule for both ends of a lane, in two distributions."""
    chance = random.Random(0)
    ours, theirs = Waits(tmp_path, _LIMIT), spin.Spin(_LIMIT)
    now, ended, polled = 10**12, 0, set()
    for _ in range(1000):
        begun = ours.begin(now)
        assert begun == theirs.begin(now, now - ended)
        polled.add(begun > 0)
        now += chance.choice((1, _LIMIT // 4, _LIMIT - 1, _LIMIT, 2 * _LIMIT))
        ours.end(now)
        theirs.end(now)
        ended = now
        now += chance.choice((0, _LIMIT // 2, _LIMIT // 2 + 1, _LIMIT))
    assert polled == {True, False}


def test_without_a_limit_it_never_polls(tmp_path: Path) -> None:
    never = Waits(tmp_path, 0)
    never.begin(5)
    never.end(5)
    assert never.begin(5) == 0


def test_a_lock_lets_one_thread_in_at_a_time_and_wakes_each_that_waits() -> None:
    lock, count = wire.Lock(), 0

    def add() -> None:
        nonlocal count
        for _ in range(300):
            with lock:
                assert lock.held
                assert not lock.acquire(False)
                seen = count
                time.sleep(0)
                count = seen + 1

    threads = [threading.Thread(target=add, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
    assert (count, lock.held) == (2400, 0)


def test_who_waits_for_a_lock_is_interrupted() -> None:
    lock = wire.Lock()
    assert lock.acquire()

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError

    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(InterruptedError):
            lock.acquire()
    finally:
        signal.signal(signal.SIGALRM, former)
    lock.release()
    assert lock.acquire(False)


def test_a_full_socket_without_a_descriptor_to_keep() -> None:
    """The segment is not shared, which the caller is told, and what was queued before it still goes out."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lane = LaneSocket(ours, 0)
    with lane.lock:
        while not lane.backlog:
            lane.send(bytes(1000))
        with no_descriptors_left(), pytest.raises(Unavailable, match="no descriptor is left in this process: Too many"):
            lane.send(b"S+", theirs.fileno())
        assert [datagram for datagram, _, _ in lane.backlog] == [bytes(1000)]
    with theirs:
        lane.close()
        wait_until(lambda: ours.fileno() < 0, "the thread that sends what is queued to leave the socket")


def answers_quickly(limit_ns: int) -> Any:
    """Returns a lock whose holder has just had a short wait."""
    made = wire.Lock(limit_ns)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(b"an answer")
        assert made.receive(ours.fileno(), bytearray(16), 0, 0) == (9, [], 0)
    return made


def test_the_daemon_says_for_how_long(connection: LaneConnection) -> None:
    connection.open("slow")
    for lane in connection.models["slow", 0].lanes:
        assert lane.socket.reading.limit_ns == _LIMIT


@pytest.mark.parametrize("way", ["prepared", "asked"])
def test_who_waits_polls(connection: LaneConnection, way: str) -> None:
    """A wait of 0.3 s that may poll for a minute takes processor time, or leaves the processor to others again and again.

    One that sleeps does neither: it leaves the processor a few times.
    """
    given, place = connection.empty(1, np.float32), connection.empty(1, np.float32)
    call = Call("slow", {"x": given}, places={"y": place})
    lanes = connection.model_of(call).lanes
    for lane in lanes:
        lane.reading = lane.socket.reading = answers_quickly(60 * 10**9)
    prepared = connection.prepare(call)

    def ask() -> None:
        if way == "prepared":
            prepared(_PATIENCE)
        else:
            connection.ask(call).result(_PATIENCE)

    for _ in range(4):
        given[0] = 0
        ask()
    given[0] = 0.3

    def polls() -> bool:
        began = resource.getrusage(resource.RUSAGE_THREAD)
        ask()
        ended = resource.getrusage(resource.RUSAGE_THREAD)
        assert place[0] == np.float32(1.3)
        used = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
        return used > 0.005 or ended.ru_nivcsw + ended.ru_nvcsw - began.ru_nivcsw - began.ru_nvcsw > 20

    # A wait that others leave no processor for looks like sleep; sleep never looks like a wait that polls.
    assert any(polls() for _ in range(10))
