"""Workers and fronts that are killed while sequences live: a wrong sum is a step computed from fresh or foreign state."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import PATIENCE, ROOT, DaemonOf, DaemonProcess, wait_until
from tests.faults import sequence_clients
from tests.protocol import sequence_models
from tests.scrapes import scrape

NO_START = "must specify the START flag on the first request of the sequence"


def lost(who: int | str, model: str = "many") -> str:
    return f"sequence {who} of model '{model}' was lost when its worker died; start it again with the START flag"


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    """Runs a daemon with an HTTP front, a gRPC front and two workers."""
    repository = tmp_path_factory.mktemp("repository")
    sequence_models.python_model(repository, "many", "oldest { max_candidate_sequences: 64 }", rows=4)
    sequence_models.python_model(repository, "single", "")
    shutil.copytree(ROOT / "tests" / "faults" / "models" / sequence_clients.MODEL, repository / sequence_clients.MODEL)
    options = {
        "requests": {"max_sequences": 200, "worker_wait": PATIENCE},
        "repository": {"control_mode": "explicit", "load": ["*"]},
        "workers": {"device": "cpu", "cpu": 2, "pin": False},
    }
    return daemon_of(repository, options)


class Steps:
    """Sends steps of sequences over one protocol."""

    def __init__(self, client: Any, module: Any, model: str = "many") -> None:
        self._client = client
        self._module = module
        self.model = model

    def __call__(self, who: int | str, x: int, flags: str = "", **more: Any) -> int:
        """Sends a step; returns the sum in the answer. ``flags``: S for START, E for END."""
        shape = [1, 1] if self.model == "many" else [1]
        given = self._module.InferInput("x", shape, "INT32")
        given.set_data_from_numpy(np.full(shape, x, np.int32))
        controls = {"sequence_id": who, "sequence_start": "S" in flags, "sequence_end": "E" in flags}
        answer = self._client.infer(self.model, [given], **controls, **more)
        return int(answer.as_numpy("y").reshape(-1)[0])

    def refused(self, who: int | str, x: int, flags: str = "") -> str:
        with pytest.raises(InferenceServerException) as caught:
            self(who, x, flags)
        return str(caught.value.message())

    def of(self, model: str) -> Steps:
        """Returns the same client for another model."""
        return Steps(self._client, self._module, model)


@pytest.fixture
def http(daemon: DaemonProcess) -> Iterator[Steps]:
    timeouts = {"network_timeout": PATIENCE, "connection_timeout": PATIENCE}
    with contextlib.closing(httpclient.InferenceServerClient(daemon.url, concurrency=32, **timeouts)) as client:
        yield Steps(client, httpclient)


@pytest.fixture
def grpc(daemon: DaemonProcess) -> Iterator[Steps]:
    with contextlib.closing(grpcclient.InferenceServerClient(daemon.grpc_url)) as client:
        yield Steps(client, grpcclient)


@pytest.fixture(autouse=True)
def whole(daemon: DaemonProcess, http: Steps, grpc: Steps) -> None:
    """Waits until both fronts know that both workers have the models: two sequences have a slot at a time."""
    daemon.wait_ready()

    def both_take(send: Steps) -> bool:
        send(1, 1, "S")
        try:
            send(2, 1, "SE", timeout=1)
        except InferenceServerException:
            return False
        finally:
            send(1, 1, "E")
        return True

    for send in (http.of("single"), grpc.of("single")):
        wait_until(lambda send=send: both_take(send), "both workers", daemon)


def kill(daemon: DaemonProcess, victim: psutil.Process) -> None:
    """Kills a worker once the fronts know it, and waits until they know that it is dead."""
    wait_until(lambda: re.search(rf" {victim.pid} worker-\d\] model .* is ready", daemon.log), "its models", daemon)
    deaths = daemon.log.count("is gone with")
    victim.kill()
    psutil.wait_procs([victim], timeout=PATIENCE)
    wait_until(lambda: daemon.log.count("is gone with") >= deaths + 2, "both fronts to know", daemon)


def test_fronts_share_sequences_and_workers_share_them_out(http: Steps, grpc: Steps) -> None:
    for who in (*range(1, 30), "text"):
        assert [http(who, 1, "S"), grpc(who, 10), http(who, 100), grpc(who, 1000, "E")] == [1, 11, 111, 1111]
        assert NO_START in http.refused(who, 1)
        assert NO_START in grpc.refused(who, 1)


def test_a_sequence_goes_where_a_slot_is_free(http: Steps, grpc: Steps) -> None:
    """Each worker has one slot: two sequences run beside each other, whatever their ids are, and none waits for the other."""
    for first, second in [(1, 2), (3, 4), (5, 6), ("a", "b")]:
        one, other = http.of("single"), grpc.of("single")
        assert [one(first, 1, "S"), other(second, 2, "S")] == [1, 2]
        assert [one(first, 1, "E"), other(second, 2, "E")] == [2, 4]


def test_a_killed_worker_takes_its_sequences_along(daemon: DaemonProcess, http: Steps, grpc: Steps) -> None:
    """
    1. Sequences live on both workers; one worker is killed.
    Result: those of the other one go on with their sums. Every request of the lost ones is told so, through whichever front,
      until a START begins them anew.
    """
    living = range(100, 140)
    before = losses(daemon)
    for who in living:
        assert http(who, 1, "S") == 1
    assert scrape(daemon.metrics_url).model("tensord_model_sequences", "many", state="slot") == len(living)
    kill(daemon, daemon.workers[0])
    gone, left = [], []
    for who in living:
        try:
            assert grpc(who, 10) == 11
            left.append(who)
        except InferenceServerException as error:
            assert error.message() == lost(who)
            assert error.status() == "StatusCode.UNAVAILABLE"
            gone.append(who)
    assert gone
    assert left
    assert losses(daemon) - before == len(gone)
    for who in gone:
        assert [http.refused(who, 10), grpc.refused(who, 10), http.refused(who, 10, "E")] == [lost(who)] * 3
    for who in gone:
        assert [grpc(who, 5, "S"), http(who, 5), grpc(who, 5, "E")] == [5, 10, 15]
    for who in left:
        assert [http(who, 100), grpc(who, 1000, "E")] == [111, 1111]


def losses(daemon: DaemonProcess) -> float:
    """Returns how many sequences had begun on workers that died."""
    return sum(scrape(daemon.metrics_url).of("tensord_worker_sequences_lost_total", "worker").values())


def test_a_front_that_is_killed_takes_no_sequence_along(daemon: DaemonProcess, http: Steps, grpc: Steps) -> None:
    """Requests that it had sent are lost, and are a gap in their sequence; all others go on, also through its replacement."""
    for who in range(500, 510):
        assert [http(who, 1, "S"), grpc(who, 10)] == [1, 11]
    (front,) = daemon.fronts
    front.kill()
    psutil.wait_procs([front], timeout=PATIENCE)
    for who in range(500, 510):
        assert grpc(who, 100) == 111
    wait_until(lambda: len(daemon.fronts) == 1, "a new front", daemon)
    daemon.wait_ready()
    timeouts = {"network_timeout": PATIENCE, "connection_timeout": PATIENCE}
    with contextlib.closing(httpclient.InferenceServerClient(daemon.url, **timeouts)) as client:
        again = Steps(client, httpclient)
        for who in range(500, 510):
            assert [again(who, 1000), grpc(who, 10_000, "E")] == [1111, 11111]


def test_ids_that_come_and_go(daemon: DaemonProcess, http: Steps, grpc: Steps) -> None:
    """More of them than the pages have room for: what has ended makes room."""
    for who in range(10_000, 10_400):
        send, other = (http, grpc) if who % 2 else (grpc, http)
        assert [send(who, 1, "S"), other(who, 2, "E")] == [1, 3]


def test_many_sequences_while_workers_are_killed(daemon: DaemonProcess) -> None:
    """Each sum is right, or the sequence says that it was lost until a START."""
    with sequence_clients.Clients(daemon.url, daemon.grpc_url, 60, 6) as clients:
        for number in range(3):
            wait_until(lambda: len(daemon.workers) == 2, "both workers", daemon)
            right = clients.seen["right"]
            wait_until(lambda right=right: clients.seen["right"] > right + 100, "right answers", daemon)
            kill(daemon, daemon.workers[number % 2])
        wait_until(lambda: clients.seen["lost"] > 20, "lost sequences to say so", daemon)
    assert clients.failures == {}
