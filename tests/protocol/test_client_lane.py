"""A client's lane to a real worker: opened on the clients' socket, spoken on with the records that fronts use."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tensord.shm.channel import ChannelClosed
from tensord.shm.messages import WIRE_VERSION, AnswerRecord, PreparedRequest, WireVersion
from tests import repositories
from tests.daemon.clients.lane_client import LaneClient
from tests.daemon_process import PATIENCE, DaemonProcess
from tests.raw_lane import RawLane, tensor

Serve = Callable[..., DaemonProcess]


class Lane(RawLane):
    """A lane on which one request is asked at a time, with tensors "x" and "y" of FP32 in the records."""

    def answer(self) -> AnswerRecord:
        """Waits for an answer. Raises ChannelClosed: the lane has ended."""
        while True:
            assert self.poll(PATIENCE)
            if answers := self.receive():
                return answers[0]

    def infer(self, model: str, values: np.ndarray, version: int = 0) -> tuple[int, list[Any]]:
        """Returns the version that answered and "y". Raises RuntimeError: it failed."""
        request = self.ask(PreparedRequest(model, version, (tensor("x", values),)), values.tobytes())
        answer = self.answer()
        assert answer.request_id == request
        if answer.code:
            raise RuntimeError(f"{answer.code}: {answer.message}")
        content = self.outputs(answer)["y"]
        return self.kind(answer).version, np.frombuffer(content, np.float32).reshape(values.shape).tolist()

    def ended(self) -> bool:
        """Waits for the end of the lane."""
        with contextlib.suppress(ChannelClosed):
            self.answer()
        return True


@pytest.fixture
def serve(start_daemon: Any, tmp_path: Path) -> Serve:
    repositories.scale_model(tmp_path / "models", factor=2.0)

    def start(**options: dict[str, Any]) -> DaemonProcess:
        options.setdefault("clients", {})["socket"] = str(tmp_path / "clients.sock")
        daemon: DaemonProcess = start_daemon(tmp_path / "models", **options)
        daemon.wait_ready()
        return daemon

    return start


class Clients:
    """Connects clients, and closes what they have in the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: list[LaneClient | Lane] = []

    def connect(self) -> LaneClient:
        client = LaneClient(self._path)
        self._made.append(client)
        return client

    def lanes(self, client: LaneClient, answer: Any) -> list[Lane]:
        """Returns the new lanes of an answer; they take over the client's sockets."""
        new = [Lane(client.lanes.pop(entry["lane"])) for entry in answer["lanes"] if entry["lane"] in client.lanes]
        self._made += new
        return new

    def close(self) -> None:
        for each in self._made:
            each.close()


@pytest.fixture
def clients(serve: Serve, tmp_path: Path) -> Iterator[Clients]:
    with contextlib.closing(Clients(tmp_path / "clients.sock")) as made:
        yield made


VALUES = np.arange(8, dtype=np.float32).reshape(2, 4)
SCALED = (2 * VALUES + 1).tolist()


def test_a_small_request(serve: Serve, clients: Clients) -> None:
    """It is answered as over HTTP, by the worker itself: the front counts no connection and the model one request more."""
    daemon = serve()
    one = clients.connect()
    assert one.ask(hello={})["lanes"] is True
    answer = one.open("scale")
    assert (answer["max_batch_size"], answer["pure"], answer["streams"], answer["sequences"]) == (8, True, False, False)
    status, metadata = daemon.request("GET", "/v2/models/scale")
    assert (status, answer["metadata"]) == (200, json.loads(metadata))
    (lane,) = clients.lanes(one, answer)
    for _ in range(5):
        assert lane.infer("scale", VALUES) == (1, SCALED)
    assert lane.received[0] == WireVersion(WIRE_VERSION)
    with pytest.raises(RuntimeError, match="NOT_FOUND: Request for unknown model: 'nobody'"):
        lane.infer("nobody", VALUES)
    _, statistics = daemon.request("GET", "/v2/models/scale/stats")
    assert json.loads(statistics)["model_stats"][0]["inference_count"] == 10
    one.disconnect()
    assert lane.ended()


def test_a_worker_that_is_killed(serve: Serve, clients: Clients) -> None:
    """The lane ends, ``open`` waits for the replacement, and other clients' lanes to other workers go on."""
    daemon = serve(workers={"cpu": 2})
    one = clients.connect()
    while (answer := one.open("scale"))["coming"]:
        time.sleep(0.05)
    first, second = clients.lanes(one, answer)
    victim = daemon.workers[0]
    victim.kill()
    alive = [lane for lane in (first, second) if answers(lane)]
    assert len(alive) == 1
    (gone,) = [entry["lane"] for entry, lane in zip(answer["lanes"], (first, second), strict=True) if lane not in alive]
    while True:
        answer = one.open("scale", ended=[gone], wait=PATIENCE)
        if new := clients.lanes(one, answer):
            break
    (lane,) = new
    assert lane.infer("scale", VALUES) == (1, SCALED)
    assert alive[0].infer("scale", VALUES) == (1, SCALED)


def answers(lane: Lane) -> bool:
    try:
        return lane.infer("scale", VALUES)[0] == 1
    except (ChannelClosed, OSError):
        return False


def test_garbage_costs_its_own_lane(serve: Serve, clients: Clients) -> None:
    daemon = serve()
    bad, good = clients.connect(), clients.connect()
    answer = bad.open("scale")
    (broken,), (kept,) = clients.lanes(bad, answer), clients.lanes(good, good.open("scale"))
    broken.send_bytes(b"\x01\xff\xff")
    assert broken.ended()
    assert kept.infer("scale", VALUES)[0] == 1
    (again,) = clients.lanes(bad, bad.open("scale", ended=[answer["lanes"][0]["lane"]]))
    assert again.infer("scale", VALUES)[0] == 1
    assert len(daemon.workers) == 1
    assert psutil.Process(daemon.workers[0].pid).is_running()


def test_a_model_that_moves_and_goes(serve: Serve, clients: Clients, tmp_path: Path) -> None:
    """
    1. It gets a worker to itself: the lane says that it is not there, and ``open`` gives another one. Both stay.
    2. A version more: the lane answers with it.
    3. It is unloaded: nobody has it.
    """
    daemon = serve(repository={"control_mode": "explicit", "load": ["scale"]})
    repositories.scale_model(tmp_path / "models", "other")
    assert daemon.request("POST", "/v2/repository/models/other/load", b"{}")[0] == 200
    one = clients.connect()
    (lane,) = clients.lanes(one, one.open("scale"))
    assert lane.infer("scale", VALUES)[0] == 1
    (tmp_path / "models" / "scale" / "config.pbtxt").write_text(
        'parameters { key: "isolated" value { string_value: "true" } }'
    )
    assert daemon.request("POST", "/v2/repository/models/scale/load", b"{}")[0] == 200
    moved = one.open("scale")
    (its_own,) = clients.lanes(one, moved)
    assert len(moved["lanes"]) == 1
    assert its_own.infer("scale", VALUES)[0] == 1
    with pytest.raises(RuntimeError, match=r"NOT_FOUND|UNAVAILABLE"):
        lane.infer("scale", VALUES)
    assert lane.infer("other", VALUES)[0] == 1
    shutil.copytree(tmp_path / "models" / "scale" / "1", tmp_path / "models" / "scale" / "2")
    assert daemon.request("POST", "/v2/repository/models/scale/load", b"{}")[0] == 200
    assert its_own.infer("scale", VALUES)[0] == 2
    assert one.open("scale")["version"] == 2
    assert daemon.request("POST", "/v2/repository/models/scale/unload", b"{}")[0] == 200
    assert its_own.ended()
    assert one.open("scale")["code"] == "NOT_FOUND"
    assert [entry["new"] for entry in one.open("other")["lanes"]] == [False]
