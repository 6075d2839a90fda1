"""Clients that attack by their lanes: it costs them their own requests, and nobody else anything."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tensord.shm.messages import (
    TIMING,
    AnswerRecord,
    PreparedRequest,
    PreparedTensor,
    RegionSlice,
    RequestedOutput,
    SegmentOpened,
    SegmentRefused,
)
from tests import repositories
from tests.daemon.clients.lane_client import LaneClient
from tests.daemon_process import PATIENCE, ROOT, DaemonOf, DaemonProcess, wait_until
from tests.faults.lane_mutations import SEGMENT, life
from tests.faults.load import CheckedLoad
from tests.open_files import no_descriptors_left
from tests.raw_lane import RawLane, memory

LIVES = int(os.environ.get("TENSORD_TEST_LANE_LIVES", "100"))

SECRET = np.frombuffer(b"SeCrEt!?" * 8, np.float32)
_PUNCH_HOLE_KEEP_SIZE = 0x03

SLOW = repositories.of_x("(time.sleep(0.2), x)[1]", more="import time\nhost = True")


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
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
    return daemon_of(repository, options)


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
