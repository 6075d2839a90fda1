"""``kill -9`` of either end of clients' lanes, at any point, beside a client that notices when something is wrong.

TENSORD_LANE_KILLS=N kills N clients instead of 300, or a thousand before a release, and workers until N times a client has
met that, 64 clients each time; TENSORD_LANE_KILLS_SEED another series of moments.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tensord_client.lane import Call, LaneConnection

import tests.client  # noqa: F401  (finds tensord_client)
from tensord.shm.messages import PreparedRequest, RegionSlice, RequestedOutput
from tests.client.conftest import clients_socket
from tests.daemon.clients.lane_client import LaneClient
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess, wait_until
from tests.generated import times
from tests.raw_lane import RawLane, tensor
from tests.repositories import of_x, write_model

KILLS = int(os.environ.get("TENSORD_LANE_KILLS", times(1000, 300)))
SEED = int(os.environ.get("TENSORD_LANE_KILLS_SEED", "1"))
#: Clients that meet each death of a worker, and how many of them are in one process.
_CLIENTS, _IN_A_PROCESS = 64, 16
#: Workers that are killed, and those of them until whose deaths allocators have what they need.
WORKER_KILLS, _WARM = max(4, -(-KILLS // _CLIENTS)), 3
#: Clients that are killed between two looks at the neighbour.
_SERIES = 50
#: What allocators may keep, whatever the number of rounds.
_KEPT = 8 << 20
_ENDS = 1000
_LAST_RUNS = 3

pytestmark = pytest.mark.timeout(900 + KILLS)


@pytest.fixture
def start(tmp_path: Path, leaves_nothing: None) -> Iterator[Callable[..., DaemonProcess]]:
    started: list[DaemonProcess] = []
    models = tmp_path / "models"
    models.mkdir()
    for name in ("addsub", "identity"):
        (models / name).symlink_to(ROOT / "bench/models" / name)
    write_model(
        models,
        "rows",
        of_x("x * 1.0", "FP32[16]", more="max_batch_size = 8"),
    )

    def begin(workers: int = 1) -> DaemonProcess:
        options = {"clients": {"socket": clients_socket(tmp_path)}, "workers": {"cpu": workers}}
        started.append(DaemonProcess(tmp_path, [models], options))
        started[-1].start()
        started[-1].wait_ready()
        return started[-1]

    yield begin
    for daemon in started:
        daemon.stop()
        assert "Traceback" not in daemon.log


class Neighbour:
    """A client on lanes of its own that asks all the time, small and large, and checks each answer."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self._connection = LaneConnection(clients_socket(daemon.folder), patience=PATIENCE)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers = 0
        self.wrong: list[str] = []

    def __enter__(self) -> Neighbour:
        self._thread.start()
        self.goes_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._connection.close()
        assert self.wrong == []

    def _run(self) -> None:
        given = self._connection.empty((1, 16), np.float32)
        ones = np.ones((1, 16), np.float32)
        call = self._connection.prepare(Call("addsub", {"INPUT0": given, "INPUT1": ones}))
        large = np.arange(20_000, dtype=np.float32)
        while not self._stop.wait(0.002) and not self.wrong:
            try:
                given[:] = self.answers
                small = bool((call(PATIENCE)["OUTPUT0"] == self.answers + 1).all())
                large[0] = self.answers
                answer = self._connection.ask(Call("identity", {"INPUT0": large})).result(PATIENCE)
                if not (small and np.array_equal(answer["OUTPUT0"], large)):
                    self.wrong.append(f"another answer than number {self.answers}")
            except Exception as error:
                self.wrong.append(repr(error))
            self.answers += 1

    def goes_on(self, count: int = 3) -> None:
        """Returns when it was answered so often again, rightly."""
        before = self.answers
        wait_until(lambda: self.answers >= before + count or self.wrong, "the neighbour to be answered", self._daemon)
        assert self.wrong == []


@contextlib.contextmanager
def caller(daemon: DaemonProcess) -> Iterator[Callable[[int, int], str]]:
    """Runs clients that are killed (``lane_caller``): so many, in a series of moments."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.lane_caller", clients_socket(daemon.folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told, said = process.stdin, process.stdout

        def kill(count: int, seed: int) -> str:
            print(count, seed, file=told, flush=True)
            return said.readline().strip()

        yield kill
        told.close()
        assert process.wait(PATIENCE) == 0


def held(pid: int) -> tuple[int, int]:
    """Returns a process's number of descriptors, and of mapped pieces of anonymous files."""
    return psutil.Process(pid).num_fds(), Path(f"/proc/{pid}/maps").read_text().count("/memfd:")


def allocated(pid: int) -> int:
    """Returns the bytes of a process's memory that are no file's and nobody else's: what its allocators and its stacks have.

    Memory that clients and workers share is not in it. How much of that a process has to itself depends on which others map it.
    """
    pieces = psutil.Process(pid).memory_maps(grouped=False)
    return sum(each.private_clean + each.private_dirty for each in pieces if each.path in ("[heap]", "[anon]"))


def is_back(daemon: DaemonProcess, before: dict[int, tuple[int, int]]) -> None:
    """Returns when each process holds what it held before; tensors of the last run may live until the next one."""
    for pid, (descriptors, mapped) in before.items():
        most = descriptors + _LAST_RUNS, mapped + _LAST_RUNS

        def holds(pid: int = pid, most: tuple[int, int] = most) -> bool:
            return all(now <= allowed for now, allowed in zip(held(pid), most, strict=True))

        wait_until(holds, f"process {pid} to hold no more than {most}", daemon)


def test_clients_are_killed(start: Callable[..., DaemonProcess]) -> None:
    """
    1. A client asks all the time. 2. Others come, ask for everything at once, and are killed while they connect or call.
    Result: every answer of the first is right; worker and supervisor hold what they held, and the worker is the same one.
    """
    daemon, chance = start(), random.Random(SEED)
    (worker,) = daemon.workers

    with Neighbour(daemon) as neighbour, caller(daemon) as kill:
        assert kill(5, chance.randrange(1 << 30)) == "killed"
        # The last one of these may still be leaving.
        limit, before = time.monotonic() + 2, {}
        while time.monotonic() < limit:
            now = {pid: held(pid) for pid in (daemon.pid, worker.pid)}
            before = {pid: min(then, before.get(pid, then)) for pid, then in now.items()}
            time.sleep(0.05)
        private = {pid: allocated(pid) for pid in before}
        for begun in range(0, KILLS, _SERIES):
            assert kill(min(_SERIES, KILLS - begun), chance.randrange(1 << 30)) == "killed"
            neighbour.goes_on()
        is_back(daemon, before)
    assert [each.pid for each in daemon.workers] == [worker.pid]
    for pid, then in private.items():
        assert allocated(pid) < then + _KEPT


class Survivors:
    """A process with clients whose worker is killed (``lane_survivors``). Use as a context manager."""

    def __init__(self, daemon: DaemonProcess, first: int, seed: int) -> None:
        words = [clients_socket(daemon.folder), str(_IN_A_PROCESS), str(first), str(seed)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.lane_survivors", *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Survivors:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, rest: bool) -> None:
        """Asks whether each of them was answered anew, and reads nobody else's bytes; ``right`` has the answer.

        ``rest``: True: they then hold no answers and ask nothing until they are asked again.
        """
        assert self._process.stdin is not None
        print("rest" if rest else "", file=self._process.stdin, flush=True)

    def right(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "right\n"


def are_right(processes: Sequence[Survivors], rest: bool = False) -> None:
    for process in processes:
        process.ask(rest)
    for process in processes:
        process.right()


def test_workers_are_killed_while_clients_call(start: Callable[..., DaemonProcess]) -> None:
    """
    1. Clients, 64 in four processes, ask all the time in every way. 2. One of two workers is killed, again and again, at any
    moment once there are two: each client is on a lane to it, or waits for it, or has just come from it.
    Result: no request fails, no answer is wrong, no client can read a byte of another; supervisor and clients hold what they
    held.
    """
    daemon, chance = start(2), random.Random(SEED)
    before: dict[int, tuple[int, int]] = {}
    private: dict[int, int] = {}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(Survivors(daemon, number, chance.randrange(1 << 30)))
            for number in range(0, _CLIENTS, _IN_A_PROCESS)
        ]
        neighbour = stack.enter_context(Neighbour(daemon))
        for number in range(WORKER_KILLS + 1):
            are_right(processes)
            neighbour.goes_on()
            wait_until(lambda: len(daemon.workers) == 2, "both workers", daemon)
            daemon.wait_ready()
            if number == _WARM:
                are_right(processes, rest=True)
                before = {pid: held(pid) for pid in (daemon.pid, *[process.pid for process in processes])}
                private = {pid: allocated(pid) for pid in before}
                are_right(processes)
            if number == WORKER_KILLS:
                break
            time.sleep(chance.random() * 0.05)
            victim = chance.choice(daemon.workers)
            victim.kill()
            psutil.wait_procs([victim], timeout=PATIENCE)
        are_right(processes, rest=True)
        for pid, then in private.items():
            assert allocated(pid) < then + _KEPT
        descriptors = {process.pid: held(process.pid)[0] for process in processes}
        assert all(now <= before[pid][0] + _CLIENTS for pid, now in descriptors.items()), (before, descriptors)
    is_back(daemon, {daemon.pid: before[daemon.pid]})


def test_a_thousand_connects_and_ends(start: Callable[..., DaemonProcess]) -> None:
    """Clients that come, ask once and go: worker, supervisor and this process hold what they held."""
    daemon = start()
    (worker,) = daemon.workers
    ones = np.ones((1, 16), np.float32)
    before: dict[int, tuple[int, int]] = {}
    for number in range(_ENDS + 20):
        connection = LaneConnection(clients_socket(daemon.folder))
        given = connection.empty((1, 16), np.float32)
        given[:] = number
        answer = connection.ask(Call("addsub", {"INPUT0": given, "INPUT1": ones})).result(PATIENCE)
        assert (answer["OUTPUT0"] == number + 1).all()
        answer = connection.ask(Call("identity", {"INPUT0": np.full(5000, number, np.float32)})).result(PATIENCE)
        assert (answer["OUTPUT0"] == number).all()
        del answer, given
        connection.close()
        if number == 19:
            time.sleep(1)
            gc.collect()
            before = {pid: held(pid) for pid in (daemon.pid, worker.pid, os.getpid())}
    # Connections, their lanes and arrays refer to each other.
    del connection
    gc.collect()
    is_back(daemon, before)


#: Bytes that two clients fill everything with: those of a finite float each.
PATTERNS = (0x3A, 0x45)


def patterned(byte: int, count: int) -> Any:
    return np.full(count, byte * 0x01010101, np.uint32).view(np.float32)


def strange_bytes(mapping: Any, byte: int) -> set[int]:
    """Returns which bytes there are in it besides this one and 0."""
    found = np.frombuffer(mapping, np.uint8)
    return set(found[(found != byte) & (found != 0)].tolist())


def requests(byte: int, chance: random.Random) -> Iterator[tuple[PreparedRequest, tuple[bytes, ...]]]:
    """Yields requests to ``rows`` and ``identity`` of all sizes, with tensors in records and in segments, answers too."""
    while True:
        if chance.random() < 0.5:
            rows = patterned(byte, 16 * chance.randrange(1, 5)).reshape(-1, 16)
            yield PreparedRequest("rows", 0, (tensor("x", rows),)), (rows.tobytes(),)
            continue
        values = patterned(byte, chance.choice([1, 15, 16, 17, 500, 5000, 70_000]))
        place = RegionSlice("@2", 0, values.nbytes) if values.nbytes > 1 << 16 or chance.random() < 0.3 else None
        wanted: tuple[RequestedOutput, ...] = ()
        if values.nbytes < 1 << 16 and chance.random() < 0.3:
            wanted = (RequestedOutput("OUTPUT0", RegionSlice("@1", 1 << 16, values.nbytes)),)
        prepared = PreparedRequest("identity", 0, (tensor("INPUT0", values, place=place),), wanted)
        yield prepared, () if place else (values.tobytes(),)


def test_no_client_reads_what_is_anothers(start: Callable[..., DaemonProcess]) -> None:
    """
    1. Two clients fill everything that they send with a byte of their own, in batches that they share and side by side, hold some
    answers and give others back. 2. They leave, and two others do the same.
    Result: in everything that a client can read, all of its response segments and all of its own, there is its own byte or none.
    """
    daemon, chance = start(), random.Random(SEED)
    for patterns in (PATTERNS, PATTERNS[::-1]):
        with contextlib.ExitStack() as stack:
            lanes = []
            for _ in patterns:
                client = stack.enter_context(LaneClient(Path(clients_socket(daemon.folder))))
                client.open("identity")
                (sock,) = client.lanes.values()
                lanes.append(stack.enter_context(contextlib.closing(RawLane(sock))))
            asked = [requests(byte, chance) for byte in patterns]
            for lane, byte in zip(lanes, patterns, strict=True):
                for number in (1, 2):
                    segment = lane.open_segment(number, 1 << 19)
                    segment[:] = bytes([byte]) * len(segment) if number == 2 else bytes(len(segment))
            leases: list[list[tuple[int, int, int]]] = [[], []]
            for _ in range(min(3 * KILLS, 150)):
                each = chance.randrange(1, 6)
                for lane, requests_of in zip(lanes, asked, strict=True):
                    for _ in range(each):
                        prepared, contents = next(requests_of)
                        lane.ask(prepared, *contents)
                for lane, held_leases, byte in zip(lanes, leases, patterns, strict=True):
                    left = each
                    while left:
                        assert lane.poll(PATIENCE)
                        for answer in lane.receive() or ():
                            left -= 1
                            for output in lane.outputs(answer).values():
                                assert output == bytes([byte]) * len(output) != b""
                            if answer.lease is not None:
                                held_leases.append(answer.lease)
                    while len(held_leases) > 8:
                        lane.release(held_leases.pop(chance.randrange(len(held_leases))))
                    for mapping in (*[segment.view for segment in lane.responses.values()], *lane.segments.values()):
                        assert strange_bytes(mapping, byte) == set()
            assert all(lane.responses for lane in lanes)
