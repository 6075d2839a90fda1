"""A daemon that remembers kinds of requests gives byte for byte the answers of one that reads each as if it were the first.

1. Two daemons serve the same models; one of them has ``expert.max_prepared = 0``.
2. Requests are generated, valid ones and others, and each goes to both: over HTTP, unary gRPC and a gRPC stream, on several
   connections; many are like earlier ones but for what is their own.
3. In between models are loaded anew with other parameters, one is taken away and comes back, regions are registered anew.
Result: equal answers and equal contents of the regions, always; and one of them has remembered something.

TENSORD_REMEMBERED_REQUESTS=N asks N of them instead of 400, or a thousand before a release (20000: the promise, some minutes);
TENSORD_REMEMBERED_SEED another series. TENSORD_REMEMBERED_OTHER=DIR: the second one is served by another checkout of ours, with
its ``.venv``, and remembers as well: so it is seen what a change of ours has changed for clients. All differences are said then,
at the end.
"""

from __future__ import annotations

import json
import os
import queue
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess
from tests.fakes import Client
from tests.faults.varied import OUTPUTS_AT, Asked, Dice, write_models
from tests.generated import times
from tests.scrapes import scrape

COUNT = int(os.environ.get("TENSORD_REMEMBERED_REQUESTS", times(1000, 400)))
SEED = int(os.environ.get("TENSORD_REMEMBERED_SEED", "1"))
OTHER = os.environ.get("TENSORD_REMEMBERED_OTHER", "")
#: Of each protocol.
CONNECTIONS = 3
#: How often something changes for all.
CHANGES = 8
_REGION = 8192
_SERVICE = "/inference.GRPCInferenceService/"

pytestmark = pytest.mark.timeout(600 + COUNT // 5)


class Side:
    """One of the two daemons, its clients and its regions."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self._clients: dict[int, Client] = {}
        self._channels = [grpc.insecure_channel(daemon.grpc_url) for _ in range(CONNECTIONS)]
        self._unary = [channel.unary_unary(_SERVICE + "ModelInfer") for channel in self._channels]
        self._sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stream = self._channels[0].stream_stream(_SERVICE + "ModelStreamInfer")(iter(self._sent.get, None))
        self._regions = [self._region() for _ in range(2)]
        self._registered = 0
        self._register()

    @staticmethod
    def _region() -> tuple[str, Any]:
        key = f"/tensord-test-{uuid.uuid4().hex}"
        return key, shm.create_shared_memory_region(key[1:], key, _REGION)

    def _register(self) -> None:
        key, _ = self._regions[self._registered]
        asked = json.dumps({"key": key, "offset": 0, "byte_size": _REGION}).encode()
        assert self.daemon.request("POST", "/v2/systemsharedmemory/region/r/register", asked)[0] == 200

    def register_anew(self) -> None:
        """Registers other memory under the same name."""
        assert self.daemon.request("POST", "/v2/systemsharedmemory/region/r/unregister", b"")[0] == 200
        self._registered ^= 1
        self._register()

    def model(self, name: str, verb: str) -> None:
        assert self.daemon.request("POST", f"/v2/repository/models/{name}/{verb}", b"")[0] == 200

    def _mapped(self) -> Any:
        return self._regions[self._registered][1]

    def http(self, number: int, content: bytes) -> Any:
        """Sends an HTTP request; returns the answer, and whether the connection goes on."""
        client = self._clients.get(number)
        if client is None:
            client = self._clients[number] = Client(self.daemon.port)
        client.send(content)
        try:
            answer = client.answer()
        except EOFError as end:
            self._clients.pop(number).sock.close()
            return "ended", end.args
        if answer.headers.get("connection") == "close":
            assert client.ends()
            self._clients.pop(number).sock.close()
        return answer.status, answer.headers, answer.body

    def grpc(self, number: int, content: bytes) -> Any:
        """Makes a call; returns the message, or the error it ended with."""
        try:
            return 200, self._unary[number](content, timeout=PATIENCE)
        except grpc.RpcError as error:
            return error.code().name, error.details()

    def stream(self, content: bytes) -> Any:
        self._sent.put(content)
        return 200, next(self._stream)

    def ask(self, asked: Asked, way: str, number: int) -> Any:
        """Sends a request in a given way; returns the answer, and the region's content afterwards if it uses one."""
        if asked.source == "region":
            shm.set_shared_memory_region(self._mapped(), [np.frombuffer(asked.content, np.uint8)])
        match way:
            case "http":
                answer = self.http(number, asked.http())
            case "grpc":
                answer = self.grpc(number, asked.grpc())
            case _:
                answer = self.stream(asked.grpc())
        if asked.output == "region":
            return answer, bytes(shm.get_contents_as_numpy(self._mapped(), np.uint8, [_REGION]))[OUTPUTS_AT:]
        return answer

    def numbered(self) -> dict[str, float]:
        return scrape(self.daemon.metrics_url).of("tensord_front_prepared_requests_numbered_total", "front")

    def close(self) -> None:
        self._sent.put(None)
        for channel in self._channels:
            channel.close()
        for client in self._clients.values():
            client.sock.close()
        for _, handle in self._regions:
            shm.destroy_shared_memory_region(handle)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_models(tmp_path / "models")


@pytest.fixture
def sides(leaves_nothing: None, tmp_path: Path, repository: Path) -> Iterator[tuple[Side, Side]]:
    explicit = {"control_mode": "explicit", "load": ["*"]}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    options: dict[str, dict[str, Any]] = {"repository": explicit}
    second = DaemonProcess(
        tmp_path / "two", [repository], options if OTHER else {**options, "expert": {"max_prepared": 0}}
    )
    if OTHER:
        # Of the configuration these keys alone may have other names there.
        second.sections.pop("expert")
        second.write_config(second.sections)
        second.cwd = Path(OTHER)
        second.program = (str(second.cwd / ".venv/bin/python"), "-m", "tensord")
    with DaemonProcess(tmp_path / "one", [repository], options) as one, second as two:
        two.wait_ready()
        made: list[Side] = []
        try:
            made += [Side(one)]
            made += [Side(two)]
            yield made[0], made[1]
        finally:
            for side in made:
                side.close()


def change(sides: tuple[Side, Side], repository: Path, number: int) -> None:
    """Changes something that clients can change for each other."""
    match number % 4:
        case 0:
            repositories.scale_model(repository, factor=3 + number)
            calls = [("scale", "load")]
        case 1:
            calls = [("other", "unload")]
        case 2:
            calls = [("other", "load")]
        case _:
            calls = []
    for side in sides:
        for name, verb in calls:
            side.model(name, verb)
        if not calls:
            side.register_anew()


def test_the_same_requests_get_the_same_answers(sides: tuple[Side, Side], repository: Path) -> None:
    dice, seen = Dice(SEED, wrong=0.2, regions=True), Counter[Any]()
    earlier: list[Asked] = []
    different: list[str] = []
    for number in range(COUNT):
        if number and number % (COUNT // CHANGES) == 0:
            change(sides, repository, number // (COUNT // CHANGES))
        asked = dice.choice(*earlier[-50:]) if earlier and dice.chance(0.3) else dice.asked()
        earlier.append(asked)
        way, connection = dice.choice("http", "http", "grpc", "stream"), dice.choice(*range(CONNECTIONS))
        with_memory, without = [side.ask(asked, way, connection) for side in sides]
        if with_memory != without:
            # The beginnings: contents of regions are long.
            different.append(f"{number} {way} {asked}\n    {with_memory!s:.400}\n    {without!s:.400}")
            assert OTHER, different
        answer = with_memory[0] if asked.output == "region" else with_memory
        seen[answer[0]] += 1
    assert not different, f"{len(different)} of {COUNT}:\n" + "\n".join(different)
    # Most were answered, many refused.
    assert COUNT // 2 < seen[200] < COUNT * 9 // 10, seen
    assert seen[400] > COUNT // 50, seen
    assert seen["INVALID_ARGUMENT"] > COUNT // 100, seen
    assert min(sides[0].numbered().values()) > 20
    assert OTHER or set(sides[1].numbered().values()) == {0}
