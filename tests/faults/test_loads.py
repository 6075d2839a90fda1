"""Tests that a model's memory is given back when it is unloaded: a worker that loads for ever keeps its size."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensord_client

from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess, wait_until
from tests.protocol.sequence_models import all_models
from tests.protocol.stepped_models import Steps, write_stepped_models
from tests.protocol.streaming_models import Stream, write_streaming_models
from tests.repositories import ensemble, of_x, scale_model, write_model

#: As large as what XLA and the allocator may keep of what has been, whatever the number of loads.
_SLACK = 12 << 20
#: Of descriptors and threads: a thread of a pool may be needed later.
_FEW = 10


def test_two_hundred_loads(tmp_path: Path) -> None:
    """In turn unloaded and replaced. 1 MiB of parameters each time: kept, they would be 100 MiB in the second hundred."""
    write_model(
        tmp_path / "models",
        "megabyte",
        of_x(
            'x + params["w"][:4]',
            more="import numpy as np\nmax_batch_size = 2",
            params='{"w": np.ones(1 << 18, np.float32)}',
        ),
    )
    options = {"repository": {"paths": [str(tmp_path / "models")], "control_mode": "explicit", "load": []}}
    with DaemonProcess(tmp_path, (tmp_path / "models",), options) as daemon:
        sizes = []
        for number in range(1, 201):
            # Else it is the one that is loaded already.
            os.utime(tmp_path / "models/megabyte/1/model.py", (number, number))
            status, answer = daemon.request("POST", "/v2/repository/models/megabyte/load", b"{}")
            assert status == 200, answer
            if number % 2:
                daemon.request("POST", "/v2/repository/models/megabyte/unload", b"{}")
            if number % 100 == 0:
                (worker,) = daemon.workers
                sizes.append((worker.memory_info().rss, worker.num_fds(), worker.num_threads()))
    (half, *before), (whole, *after) = sizes
    assert all(later - earlier < _FEW for earlier, later in zip(before, after, strict=True))
    assert whole - half < 2 * _SLACK


def test_large_parameters_are_given_back(tmp_path: Path) -> None:
    """Also those that the allocator would keep for the next blocks, as it does while models serve: 240 MiB of 40 MiB each."""
    write_model(
        tmp_path / "models",
        "large",
        of_x(
            'x + sum(array[:4] for array in params["w"])',
            more="import jax.numpy as jnp\nmax_batch_size = 2",
            params='{"w": [jnp.full(10 << 20, 1.0 + number, jnp.float32) for number in range(6)]}',
        ),
    )
    options = {"repository": {"paths": [str(tmp_path / "models")], "control_mode": "explicit", "load": []}}
    with DaemonProcess(tmp_path, (tmp_path / "models",), options) as daemon:
        (worker,) = daemon.workers
        for _ in range(2):  # the first load brings in what stays, such as compilers
            before = worker.memory_info().rss
            status, answer = daemon.request("POST", "/v2/repository/models/large/load", b"{}")
            assert status == 200, answer
            # Of the load before, up to 100 MiB may have been on their way back.
            assert worker.memory_info().rss > before + (120 << 20)
            daemon.request("POST", "/v2/repository/models/large/unload", b"{}")
            most = before + (100 << 20)
            wait_until(lambda most=most: worker.memory_info().rss < most, "memory of the unloaded model")


def test_loads_beside_requests(tmp_path: Path) -> None:
    """
    1. A model is asked again and again, over connections that stay.
    2. It is loaded anew sixty times meanwhile, each time with new files.
    Result: no request fails, and the last forty leave the worker as large as it was. A program and what it was traced from have
    half a megabyte.
    """
    repository = scale_model(tmp_path / "models")
    options = {"repository": {"paths": [str(repository)], "control_mode": "explicit", "load": ["scale"]}}
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]})
    seen: Counter[int] = Counter()
    ended = threading.Event()

    def ask() -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE)) as connection:
            while not ended.is_set():
                connection.request("POST", "/v2/models/scale/infer", body)
                answer = connection.getresponse()
                answer.read()
                seen[answer.status] += 1

    with DaemonProcess(tmp_path, (repository,), options) as daemon:
        clients = [threading.Thread(target=ask) for _ in range(2)]
        for client in clients:
            client.start()
        sizes = []
        try:
            for number in range(1, 61):
                os.utime(repository / "scale/1/model.py", (number, number))
                assert daemon.request("POST", "/v2/repository/models/scale/load", b"{}")[0] == 200
                if number in (20, 60):
                    sizes.append(daemon.workers[0].memory_info().rss)
        finally:
            ended.set()
            for client in clients:
                client.join()
    assert set(seen) == {200}
    assert seen[200] > 60
    assert sizes[1] - sizes[0] < _SLACK


#: Notes beside a model's file that nothing refers to the module any more.
_NOTED = """
import pathlib, weakref

class Held:
    pass

held = Held()
weakref.finalize(held, pathlib.Path(__file__).with_name("gone").touch).atexit = False
"""


def _ask_scale(daemon: DaemonProcess, model: str) -> None:
    """Asks over a lane and over HTTP, one by one and all at once, until the C part has learned what it can."""
    x = np.ones((1, 4), np.float32)
    with tensord_client.connect(daemon.folder / "clients.sock") as client:
        lane = client.model(model)
        for _ in range(20):
            assert (lane({"x": x})["y"] == 4).all()
        for answer in [lane.submit({"x": x}) for _ in range(32)]:
            assert (answer.result()["y"] == 4).all()
    given = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}
    for _ in range(20):
        assert daemon.infer(model, [given])[0] == 200


def _ask_sequence(daemon: DaemonProcess, model: str) -> None:
    given = {"name": "x", "shape": [1, 1], "datatype": "INT32", "data": [1]}
    for number in range(20):
        told = {"sequence_id": 7, "sequence_start": number == 0, "sequence_end": number == 19}
        assert daemon.infer(model, [given], parameters=told)[0] == 200


def _ask_stepped(daemon: DaemonProcess, model: str) -> None:
    with Steps(daemon.grpc_url) as steps:
        assert len(steps.answers([1, 2], model)) > 1


def _ask_stream(daemon: DaemonProcess, model: str) -> None:
    with Stream(daemon.grpc_url) as stream:
        assert stream.answers(model, 3)


@pytest.mark.parametrize(
    ("model", "ask"),
    [
        ("scale", _ask_scale),
        ("twice", _ask_scale),
        ("oldest", _ask_sequence),
        ("jax", _ask_sequence),
        ("counts", _ask_stepped),
        ("wide", _ask_stream),
        ("talks", _ask_stream),
    ],
)
def test_a_worker_that_rests_keeps_nothing_of_an_unloaded_model(
    resting: DaemonProcess, model: str, ask: Callable[[DaemonProcess, str], None]
) -> None:
    """On a device the next model may need the memory, and a worker that has nothing to do collects no garbage by itself."""
    named = ["twice", "scale"] if model == "twice" else [model]
    for each in named:
        assert resting.request("POST", f"/v2/repository/models/{each}/load", b"{}")[0] == 200
    ask(resting, model)
    for each in named:
        assert resting.request("POST", f"/v2/repository/models/{each}/unload", b"{}")[0] == 200
    _wait_gone(resting, named[-1])


def test_a_worker_that_rests_keeps_nothing_of_a_load_before(resting: DaemonProcess) -> None:
    source = resting.folder / "models/scale/1/model.py"
    for number in range(1, 4):
        os.utime(source, (number, number))
        assert resting.request("POST", "/v2/repository/models/scale/load", b"{}")[0] == 200
        if number > 1:
            _wait_gone(resting, "scale")
        _ask_scale(resting, "scale")
    assert resting.request("POST", "/v2/repository/models/scale/unload", b"{}")[0] == 200
    _wait_gone(resting, "scale")


def _wait_gone(daemon: DaemonProcess, model: str) -> None:
    gone = daemon.folder / "models" / model / "1" / "gone"
    wait_until(gone.exists, f"nothing of {model} is kept", daemon)
    gone.unlink()


@pytest.fixture(scope="module")
def resting(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    """A daemon whose models note when nothing refers to them any more."""
    folder = tmp_path_factory.mktemp("resting")
    models = folder / "models"
    for part in (all_models, write_streaming_models, write_stepped_models):
        part(models)
    scale_model(models)
    ensemble(models, "twice", ["x FP32 4"], ["y FP32 4"], [("scale", {"x": "x"}, {"y": "y"})], 8)
    for model in models.glob("*/1/model.py"):
        with model.open("a") as file:
            file.write(_NOTED)
    options = {
        "repository": {"paths": [str(models)], "control_mode": "explicit", "load": []},
        "clients": {"socket": str(folder / "clients.sock")},
    }
    return daemon_of(models, options, folder=folder)
