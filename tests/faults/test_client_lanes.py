"""Clients that attack by their lanes, and that die: it costs them their own requests, and nobody else anything."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tensord.shm.channel import ChannelClosed
from tensord.shm.messages import (
    TIMING,
    AnswerRecord,
    PreparedRequest,
    PreparedTensor,
    RegionSlice,
    RequestedOutput,
    RequestRecord,
    SegmentOpened,
    SegmentRefused,
)
from tests import prepared, repositories
from tests.daemon.clients.lane_client import LaneClient
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess, wait_until
from tests.faults.lane_mutations import SEGMENT, life
from tests.faults.load import CheckedLoad
from tests.generated import times
from tests.open_files import no_descriptors_left
from tests.raw_lane import RawLane, memory

#: More of them run with these: lives of hostile clients, clients that are killed, lanes that come and go.
LIVES = int(os.environ.get("TENSORD_TEST_LANE_LIVES", "100"))
KILLS = int(os.environ.get("TENSORD_TEST_LANE_KILLS", "12"))
CONNECTS = int(os.environ.get("TENSORD_TEST_LANE_CONNECTS", times(1000, 250)))
SECRET = np.frombuffer(b"SeCrEt!?" * 8, np.float32)
_PUNCH_HOLE_KEEP_SIZE = 0x03

SLOW = """
    import time

    inputs = {"x": "FP32[4]"}
    outputs = {"y": "FP32[4]"}
    host = True

    def create(path, config, device):
        def apply(params, inputs):
            time.sleep(0.2)
            return {"y": inputs["x"]}
        return apply, {}
"""

#: Names its lanes' socket, then asks without end: prepared and inline, in segments and in records, and reads only some answers.
VICTIM = """
import random, sys
from pathlib import Path
from tests.daemon.clients.lane_client import LaneClient
from tests.faults.lane_mutations import conversation
from tests.raw_lane import RawLane, memory
client = LaneClient(Path(sys.argv[1]))
number = int(sys.argv[2])
print("begun", flush=True)
while True:
    number += 1
    lane = RawLane(client.lanes.pop(client.open("addsub", ended=[])["lanes"][-1]["lane"]), agree=False)
    try:
        for said in conversation(random.Random(number)):
            fds = [memory(said.memory)[0]] if said.memory > 0 else []
            lane.send_bytes(said.content, *fds)
            if number % 2:
                lane.receive()
    except OSError:
        pass
    client.disconnect()
    client = LaneClient(Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("lanes")
    repository = repositories.scale_model(folder / "models")
    repositories.write_model(repository, "slow", SLOW)
    for name in ("addsub", "identity", "repeat"):
        shutil.copytree(ROOT / "bench" / "models" / name, repository / name)
    options = {
        "supervisor": {"control_socket": str(folder / "control.sock")},
        "arenas": {"byte_size": 1 << 20, "wait": 1.0},
        "clients": {
            "max_in_flight": 32,
            "max_segments": 4,
            "segment_byte_size": 8 << 20,
            "response_byte_size": 4 << 20,
        },
    }
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository], options) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def path(daemon: DaemonProcess) -> Path:
    return Path(daemon.sections["supervisor"]["control_socket"]).with_name("clients.sock")


@pytest.fixture
def workers(daemon: DaemonProcess) -> Iterator[set[int]]:
    """Checks at its end that no worker has died and that the log has no traceback."""
    before = {worker.pid for worker in daemon.workers}
    yield before
    assert {worker.pid for worker in daemon.workers} == before
    assert "Traceback" not in daemon.log


def opened(client: LaneClient, model: str = "addsub", agree: bool = True) -> RawLane:
    """Opens a lane to the worker that has a model."""
    answer = client.open(model, wait=PATIENCE)
    number = next(entry["lane"] for entry in answer["lanes"] if entry["new"])
    return RawLane(client.lanes.pop(number), agree)


def send_when_there_is_room(lane: RawLane, content: bytes) -> None:
    """Sends a datagram, once the worker has read enough of those before it. Raises ConnectionError: it has closed the lane."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return lane.send_bytes(content)
        time.sleep(0.005)


def awaited(lane: RawLane, count: int = 1) -> list[AnswerRecord]:
    answers: list[AnswerRecord] = []
    while len(answers) < count:
        assert lane.poll(PATIENCE), f"{len(answers)} of {count} answers came"
        answers += lane.receive() or ()
    return answers


def scale() -> PreparedRequest:
    return PreparedRequest("scale", 0, (PreparedTensor("x", "FP32", (1, 4)),))


class Neighbour:
    """A good client on a lane of its own, in a thread, with data of its own in a segment and in records."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers = 0
        self.wrong: list[str] = []

    def _run(self) -> None:
        with LaneClient(self._path) as client:
            lane = opened(client)
            data = lane.open_segment(1, SEGMENT)
            data[:64], data[64:128] = SECRET.tobytes(), bytes(64)
            places = RegionSlice("@1", 0, 64), RegionSlice("@1", 64, 64)
            names = "INPUT0", "INPUT1"
            tensors = tuple(PreparedTensor(name, "FP32", (1, 16), at) for name, at in zip(names, places, strict=True))
            lane.prepare(
                0, PreparedRequest("addsub", 0, tensors, (RequestedOutput("OUTPUT0", RegionSlice("@1", 128, 64)),))
            )
            while not self._stop.wait(0.002):
                data[128:192] = bytes(64)
                lane.ask(0)
                (answer,) = awaited(lane)
                if answer.code or data[128:192] != SECRET.tobytes():
                    self.wrong.append(answer.message or "other bytes")
                self.answers += 1
            lane.close()

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def neighbours(daemon: DaemonProcess, path: Path) -> Iterator[None]:
    """Runs good clients over HTTP and on a lane within the block; each of their answers has to come and be right."""
    with CheckedLoad(daemon, 2) as load, Neighbour(path) as neighbour:
        wait_until(lambda: load.answers > 5 and neighbour.answers > 5, "answers")
        yield
        answered = load.answers, neighbour.answers
        wait_until(lambda: load.answers > answered[0] and neighbour.answers > answered[1], "more answers")
    assert (load.errors, load.wrong) == ([], 0)
    assert neighbour.wrong == []


def test_hostile_lives(daemon: DaemonProcess, path: Path, workers: set[int]) -> None:
    """
    Clients say what a good one says, with bytes, values, descriptors and datagrams that are others, missing or said twice.
    Result: their lane ends or their requests are answered; nothing that comes to them is of their neighbours.
    """
    with neighbours(daemon, path):
        for seed in range(LIVES):
            with LaneClient(path) as client:
                lane, memories, seen = opened(client, agree=False), [], b""
                for said in life(1_000_000 + seed):
                    fds = []
                    if said.memory >= 0:
                        fd, mapping = memory(max(1, said.memory))
                        fds.append(fd)
                        memories.append(mapping)
                    with contextlib.suppress(OSError):
                        lane.send_bytes(said.content, *fds)
                    for fd in fds:
                        os.close(fd)
                if seed % 3:
                    lane.poll(0.05)
                    with contextlib.suppress(OSError):
                        while content := lane.sock.recv(1 << 17):
                            seen += content
                assert SECRET.tobytes() not in seen + b"".join(mapping[:] for mapping in memories)
                lane.close()


def test_who_never_reads(daemon: DaemonProcess, path: Path, workers: set[int]) -> None:
    """
    Ten clients ask, small and streamed, until the worker takes nothing more of them, and read nothing.
    Result: the worker's memory has a bound; when they read after all, each has an answer to everything that was taken.
    """
    repeat = PreparedRequest(
        "repeat", 0, (PreparedTensor("base", "FP32", (16,)), PreparedTensor("count", "INT32", (1,)))
    )
    endless = bytes(64), np.int32(1 << 30).tobytes()
    with neighbours(daemon, path), contextlib.ExitStack() as stack:
        lanes: list[RawLane] = []
        for number in range(10):
            client = stack.enter_context(LaneClient(path))
            lane = opened(client)
            stack.callback(lane.close)
            lanes.append(lane)
            lane.prepare(0, scale())
            if number == 9:
                lane.ask(repeat, *endless)
        sizes: list[int] = []
        for _ in range(3):
            for lane in lanes[:9]:
                try:
                    for _ in range(20_000):
                        lane.ask(0, bytes(16))
                except BlockingIOError:
                    lane.last_id -= 1  # that one was not sent
            time.sleep(0.2)
            sizes.append(sum(psutil.Process(pid).memory_info().rss for pid in workers))
        assert sizes[2] - sizes[0] < 32 << 20
        for lane in lanes[:9]:
            ids = [answer.request_id for answer in _patiently(lane, lane.last_id)]
            assert sorted(ids) == list(range(1, lane.last_id + 1))


def _patiently(lane: RawLane, count: int) -> list[AnswerRecord]:
    answers = awaited(lane, count)
    assert {answer.code for answer in answers} <= {"", "UNAVAILABLE"}
    return answers


def test_who_holds_every_lease(daemon: DaemonProcess, path: Path, workers: set[int]) -> None:
    """
    A client keeps what it is lent, and asks for more.
    Result: an error with both numbers; with one of them given back it is served again; a lease of its own making ends its lane.
    """
    count = 1 << 18
    source = RegionSlice("@1", 0, 4 * count)
    wanted = PreparedRequest("identity", 0, (PreparedTensor("INPUT0", "FP32", (count,), source),))
    with neighbours(daemon, path), LaneClient(path) as client:
        lane = opened(client, "identity")
        lane.open_segment(1, 4 * count)[:] = np.ones(count, np.float32).tobytes()
        leases = []
        for _ in range(8):
            lane.ask(wanted)
            (answer,) = awaited(lane)
            if answer.code:
                break
            assert answer.lease is not None
            leases.append(answer.lease)
        assert answer.code == "UNAVAILABLE"
        assert f"no room for an answer of {4 * count} bytes in the response arena" in answer.message
        assert f"of {4 << 20} are in use" in answer.message
        lane.release(leases.pop())
        lane.ask(wanted)
        assert awaited(lane)[0].code == ""
        segment, offset, generation = leases.pop()
        lane.release((segment, offset, generation + 1))
        with pytest.raises(ChannelClosed):
            awaited(lane)
        lane.close()


def test_holes_in_a_segment(daemon: DaemonProcess, path: Path, workers: set[int]) -> None:
    """
    A client takes the pages out of its memory, again and again, while requests use it; its seals forbid truncating it.
    Result: zeros where the pages were, and nothing else.
    """
    count = 1 << 16
    source, target = RegionSlice("@1", 0, 4 * count), RegionSlice("@2", 0, 4 * count)
    wanted = PreparedRequest(
        "identity", 0, (PreparedTensor("INPUT0", "FP32", (count,), source),), (RequestedOutput("OUTPUT0", target),)
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    with neighbours(daemon, path), LaneClient(path) as client, contextlib.ExitStack() as stack:
        lane = opened(client, "identity")
        fds = []
        for number in (1, 2):
            fd, lane.segments[number] = memory(4 * count)
            stack.callback(os.close, fd)
            fds.append(fd)
            lane.send(SegmentOpened(number, 4 * count), fds=(fd,))
        with pytest.raises(PermissionError):
            os.ftruncate(fds[0], 4096)
        lane.prepare(0, wanted)
        for _ in range(200):
            lane.segments[1][:] = np.ones(count, np.float32).tobytes()
            lane.ask(0)
            for fd in fds:
                assert libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, 0, 4 * count) == 0
            (answer,) = awaited(lane)
            assert answer.code == ""
            assert set(np.frombuffer(lane.segments[2][:], np.float32)) <= {0.0, 1.0}
        lane.close()


@pytest.mark.parametrize("what", ["truncated", "replayed", "oversized", "forged", "wrong descriptor"])
def test_what_ends_a_lane_ends_nothing_else(daemon: DaemonProcess, path: Path, workers: set[int], what: str) -> None:
    """
    On one of two lanes of two clients a record comes that no client sends.
    Result: that lane is at its end, and a line in the log says why; the same client gets another lane.
    """
    record = RequestRecord(1, scale(), (bytes(16),))
    with LaneClient(path) as client, LaneClient(path) as other:
        lane, theirs = opened(client, "slow"), opened(other)
        if what == "truncated":
            lane.send_bytes(b"\x01\x91" + bytes(7))
        elif what == "replayed":
            slow = PreparedRequest("slow", 0, (PreparedTensor("x", "FP32", (4,)),))
            for _ in range(2):
                lane.send(RequestRecord(1, slow, (bytes(16),)))
        elif what == "oversized":
            with contextlib.suppress(ConnectionError):
                for _ in range(30):
                    send_when_there_is_room(lane, b"\x02" + bytes(60_000))
        elif what == "forged":
            lane.release((0, 0, 1))
        else:
            ours, far = socket.socketpair()
            lane.send(SegmentOpened(1, 4096), fds=(ours.fileno(),))
            ours.close()
            far.close()
        with pytest.raises(ChannelClosed):
            awaited(lane)
        wait_until(lambda: "closing the lane of submitter" in daemon.log, "a line in the log")
        theirs.send(record)
        assert awaited(theirs)[0].code == ""
        again = opened(client)
        again.send(record)
        assert awaited(again)[0].code == ""
        for each in (lane, theirs, again):
            each.close()


def test_worker_without_descriptors(daemon: DaemonProcess, path: Path, workers: set[int]) -> None:
    """
    1. The worker may open no file more. 2. A client asks for a lane; another one opens a segment.
    Result: both are refused; when there are descriptors again both go on.
    """
    (pid,) = workers
    with LaneClient(path) as client, LaneClient(path) as other:
        lane = opened(client)
        lane.prepare(0, scale())
        lane.ask(0, bytes(16))
        awaited(lane)
        with no_descriptors_left(pid):
            lane.open_segment(1, 4096)
            wait_until(lambda: lane.receive() is None and SegmentRefused(1) in lane.received, "refusal")
            with other.lanes.pop(other.open("addsub")["lanes"][0]["lane"]) as lost:
                lost.settimeout(PATIENCE)
                assert lost.recv(1) == b""
            lane.ask(0, bytes(16))
            assert awaited(lane)[0].code == ""
        fd, mapping = memory(4096)
        mapping[:16] = np.ones(4, np.float32).tobytes()
        lane.send(SegmentOpened(1, 4096), fds=(fd,))
        os.close(fd)
        place = RegionSlice("@1", 0, 16)
        lane.ask(PreparedRequest("scale", 0, (PreparedTensor("x", "FP32", (1, 4), place),)), trace=TIMING)
        (answer,) = awaited(lane)
        assert np.frombuffer(lane.outputs(answer)["y"], np.float32).tolist() == [4.0] * 4
        assert answer.timing is not None
        lane.close()
        opened(other).close()


def test_connects_and_ends_leave_nothing(daemon: DaemonProcess, path: Path, workers: set[int]) -> None:
    """Many clients come, ask a little or nothing, and go: descriptors and mappings are as before."""

    def open_files() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (daemon.pid, *sorted(workers))]

    def come_and_go(number: int) -> None:
        with LaneClient(path) as client:
            lane = opened(client)
            if number % 2:
                lane.open_segment(1, 4096)
            if number % 3:
                lane.ask(scale(), bytes(16))
            if number % 5 == 0:
                awaited(lane) if number % 3 else None
            lane.close()

    with neighbours(daemon, path):
        for number in range(20):
            come_and_go(number)
        wait_until(lambda: _mappings(workers) == 1, "end of the mappings")
        before = open_files()
        for number in range(CONNECTS):
            come_and_go(number)
        wait_until(lambda: _mappings(workers) == 1, "end of the mappings")
        wait_until(lambda: all(now <= then + 4 for now, then in zip(open_files(), before, strict=True)), "closed files")


def test_clients_that_are_killed(daemon: DaemonProcess, path: Path, workers: set[int]) -> None:
    """Processes are killed with everything in flight that a client can have, at any moment. Result: nothing is left of them."""
    chance = random.Random(34)
    with neighbours(daemon, path):
        for number in range(KILLS):
            said, output = os.pipe()
            victim = prepared.start(["-c", VICTIM, str(path), str(1000 * number)], output=output)
            os.close(output)
            try:
                with os.fdopen(said) as reader:
                    assert reader.readline() == "begun\n"
                    time.sleep(chance.random() * 0.2)
            finally:
                victim.kill()
                victim.wait()
        wait_until(lambda: _mappings(workers) == 1, "end of the mappings")


def test_worker_that_is_killed(daemon: DaemonProcess, path: Path) -> None:
    """
    1. Clients have requests in flight on their lanes. 2. The worker is killed.
    Result: their lanes end, and they get others to its successor; who asked over HTTP notices nothing.
    """
    slow = PreparedRequest("slow", 0, (PreparedTensor("x", "FP32", (4,)),))
    with CheckedLoad(daemon, 2) as load, LaneClient(path) as client:
        lane = opened(client, "slow")
        for _ in range(4):
            lane.ask(slow, bytes(16))
        awaited(lane)
        (worker,) = daemon.workers
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(ChannelClosed):
            awaited(lane, 4)
        lane.close()
        again = _reopened(client, "slow")
        again.ask(slow, bytes(16))
        assert awaited(again)[0].code == ""
        again.close()
        answered = load.answers
        wait_until(lambda: load.answers > answered + 5, "more answers")
    assert (load.errors, load.wrong) == ([], 0)


def _mappings(workers: set[int]) -> int:
    """Returns how many client segments the workers have mapped; the good client has one."""
    return sum(Path(f"/proc/{pid}/maps").read_text().count("memfd:client") for pid in workers)


def _reopened(client: LaneClient, model: str) -> RawLane:
    made: list[RawLane] = []

    def new() -> bool:
        answer = client.open(model, wait=5)
        made.extend(RawLane(client.lanes.pop(entry["lane"])) for entry in answer.get("lanes", ()) if entry["new"])
        return bool(made)

    wait_until(new, "a lane")
    return made[-1]
