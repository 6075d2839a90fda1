"""Hundreds of hostile clients' lives, one after the other and beside each other: the worker stays, and others notice nothing.

TENSORD_TEST_LANE_LIVES=N lives N of them instead of five hundred.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tensord.shm.control_records import LaneLimits
from tensord.shm.messages import RegionSlice, RequestedOutput
from tests.daemon_process import ROOT
from tests.faults.lane_mutations import SEGMENT, Said, life
from tests.raw_lane import RawLane, addsub, memory
from tests.workers.worker_loop import PATIENCE_SECONDS, WorkerLoop

ROUNDS = int(os.environ.get("TENSORD_TEST_LANE_LIVES", "500"))
LIMITS = LaneLimits(in_flight=16, segments=4, segment_byte_size=8 * SEGMENT, response_byte_size=1 << 20)
#: What nobody else may ever read.
SECRET = np.frombuffer(b"SeCrEt!?" * 8, np.float32)


@pytest.fixture(scope="module")
def loop(leaves_nothing: None) -> Iterator[WorkerLoop]:
    made = WorkerLoop()
    for name in ("addsub", "repeat"):
        made.load(ROOT / "bench" / "models" / name)
    yield made
    made.close()


class Neighbour:
    """A good client with data of its own, in a segment and in records."""

    def __init__(self, loop: WorkerLoop) -> None:
        self._loop = loop
        self._lane = loop.open_client(999, LIMITS)
        self._memory = self._lane.open_segment(1, SEGMENT)
        self._memory[:64] = SECRET.tobytes()
        self._memory[64:128] = bytes(64)
        places = RegionSlice("@1", 0, 64), RegionSlice("@1", 64, 64)
        self._lane.prepare(0, addsub(places=places, outputs=(RequestedOutput("OUTPUT0", RegionSlice("@1", 128, 64)),)))
        self._lane.prepare(1, addsub())

    def ask(self) -> None:
        """Checks that two requests are answered rightly."""
        self._memory[128:192] = bytes(64)
        self._lane.ask(0)
        self._lane.ask(1, SECRET.tobytes(), bytes(64))
        first, second = sorted(self._loop.client_answers(self._lane, 2), key=lambda answer: answer.request_id)
        assert self._lane.outputs(first) == {"OUTPUT0": SECRET.tobytes()}
        assert self._lane.outputs(second) == {"OUTPUT0": SECRET.tobytes(), "OUTPUT1": SECRET.tobytes()}

    def close(self) -> None:
        self._lane.close()


class Enemy:
    """A client that sends what it was told to, and looks at all memory that it can reach."""

    def __init__(self, loop: WorkerLoop, peer: int, says: list[Said]) -> None:
        self._lane: RawLane = loop.open_client(peer, LIMITS, agree=False)
        self._says = says[::-1]
        self._memories: list[object] = []
        self.seen = b""

    def speak(self) -> bool:
        """Sends the next datagram, unless the worker has hung up or takes nothing. Returns False: there is none."""
        if not self._says:
            return False
        said = self._says.pop()
        fds: list[int] = []
        if said.memory >= 0:
            fd, mapping = memory(max(1, said.memory))
            fds.append(fd)
            self._memories.append(mapping)
        with contextlib.suppress(OSError):
            self._lane.send_bytes(said.content, *fds)
        for fd in fds:
            os.close(fd)
        return True

    def look(self) -> None:
        """Reads what has come, and what it was lent."""
        with contextlib.suppress(OSError):
            while content := self._lane.sock.recv(1 << 17):
                self.seen += content
        for mapping in self._memories:
            self.seen += mapping[:]  # type: ignore[index]

    def close(self) -> None:
        self._lane.close()


def usage() -> tuple[int, int]:
    """Returns this process's number of descriptors, and its largest resident memory so far in bytes."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_hostile_lives(loop: WorkerLoop, caplog: pytest.LogCaptureFixture) -> None:
    """Some die in the middle, some with requests in flight, some read nothing; of one round several go on beside each other."""
    neighbour = Neighbour(loop)
    for _ in range(40):
        neighbour.ask()
    before: tuple[int, int] | None = None
    answered = closed = 0
    for first in range(0, ROUNDS, 5):
        enemies = [Enemy(loop, 10_000 + seed, life(seed)) for seed in range(first, first + 5)]
        speaking = True
        while speaking:
            speaking = sum(enemy.speak() for enemy in enemies) > 0
            if (first // 5) % 3:
                loop.worker.iterate()
        loop.worker.iterate()
        neighbour.ask()
        for enemy in enemies:
            enemy.look()
            assert SECRET.tobytes() not in enemy.seen, f"a client of round {first} has read what is not its own"
            answered += enemy.seen.count(b"\xa1c")
            enemy.close()
        loop.worker.iterate()
        loop.worker.iterate()
        closed += len(loop.closed())
        defects = [record for record in caplog.records if record.exc_info]
        assert not defects, f"round {first}: {defects[0].getMessage()}\n{defects[0].exc_text}"
        caplog.clear()
        if first == ROUNDS // 2 // 5 * 5:
            before = usage()
    neighbour.ask()
    deadline = time.monotonic() + PATIENCE_SECONDS
    # Requests of shapes that are still being compiled hold their clients' memory until then.
    while loop.worker._regions.leaving or any(version.compiling for version in loop.worker._models):
        assert time.monotonic() < deadline
        loop.worker.iterate()
    closed += len(loop.closed())
    assert closed == ROUNDS // 5 * 5
    # As many were understood as not: else nothing would be tried that is behind the first check.
    assert answered > ROUNDS
    assert before is not None
    after = usage()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + (64 << 20)
    assert loop.worker._regions.private_byte_size == SEGMENT
    neighbour.close()


def test_lives_are_those_of_their_seeds() -> None:
    """A failure names its seed, so it can be run again."""
    assert [life(7), life(8)] == [life(7), life(8)]
    assert life(7) != life(8)
