"""Requests that differ only in what is their own are prepared once, on both protocols; metrics count prepared requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.daemon_process import ROOT, DaemonProcess
from tests.repositories import write_model
from tests.scrapes import scrape

COUNT = 60


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("daemon")
    write_model(
        folder / "models",
        "told",
        """
        import json
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                answers = []
                for request in requests:
                    told = [request.correlation_id(), request.flags(), request.timeout()]
                    text = np.array([json.dumps(told).encode()], np.object_)
                    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", text)]))
                return answers
        """,
        """
        name: "told"
        backend: "python"
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
        output [ { name: "TOLD" data_type: TYPE_STRING dims: [ 1 ] } ]
        """,
    )
    models = {"control_mode": "explicit", "load": ["addsub", "told"]}
    with DaemonProcess(folder, [ROOT / "bench" / "models", folder / "models"], {"repository": models}) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, daemon: DaemonProcess) -> Iterator[tuple[str, ModuleType, Any]]:
    """Yields the protocol, its library and a client."""
    library = httpclient if request.param == "http" else grpcclient
    with library.InferenceServerClient(daemon.url if request.param == "http" else daemon.grpc_url) as made:
        yield request.param, library, made


def counts(daemon: DaemonProcess, protocol: str) -> tuple[float, float, float]:
    """Counts prepared requests of its only front: numbered now, numbered ever, evicted ever."""
    samples = scrape(daemon.metrics_url)
    names = (
        "tensord_front_prepared_requests",
        "tensord_front_prepared_requests_numbered_total",
        "tensord_front_prepared_requests_evicted_total",
    )
    known, numbered, evicted = [samples.value(name, front=f"{protocol}-0", protocol=protocol) for name in names]
    return known, numbered, evicted


def scheduling(number: int) -> dict[str, Any]:
    """Returns scheduling parameters of all kinds, others for each number."""
    sequence: int | str = 10_000 + number if number % 2 else f"sequence {number}"
    flags = {"sequence_start": number % 3 == 0, "sequence_end": number % 5 == 0}
    return {"sequence_id": sequence, **flags, "priority": number % 7, "timeout": 1_000_000 + number}


def tensors(library: ModuleType, **values: float) -> list[Any]:
    found = []
    for name, value in values.items():
        array = np.full((1, 16), value, np.float32) if name != "x" else np.full(1, value, np.float32)
        found.append(library.InferInput(name, array.shape, "FP32"))
        found[-1].set_data_from_numpy(array)
    return found


def test_ids_sequences_priorities_and_timeouts_take_no_number(daemon: DaemonProcess, client: Any) -> None:
    protocol, library, made = client
    known, numbered, evicted = counts(daemon, protocol)
    for number in range(COUNT):
        inputs = tensors(library, INPUT0=number, INPUT1=2)
        answer = made.infer("addsub", inputs, request_id=f"id {number}", **scheduling(number))
        assert answer.as_numpy("OUTPUT0").tolist() == [[number + 2] * 16]
        assert answer.as_numpy("OUTPUT1").tolist() == [[number - 2] * 16]
        response = answer.get_response()
        assert (response["id"] if protocol == "http" else response.id) == f"id {number}"
    assert counts(daemon, protocol) == (known + 1, numbered + 1, evicted)


def test_a_model_is_told_what_each_of_them_says_of_itself(daemon: DaemonProcess, client: Any) -> None:
    protocol, library, made = client
    numbered = counts(daemon, protocol)[1]
    for number in range(COUNT):
        own = scheduling(number)
        answer = made.infer("told", tensors(library, x=1), request_id=f"id {number}", **own)
        flags = own["sequence_start"] | own["sequence_end"] << 1
        assert json.loads(answer.as_numpy("TOLD")[0]) == [own["sequence_id"], flags, own["timeout"]]
    assert counts(daemon, protocol)[1] == numbered + 1


def test_what_never_comes_again_mints_nothing_and_what_comes_again_does(daemon: DaemonProcess, client: Any) -> None:
    protocol, library, made = client

    def ask(number: int) -> None:
        inputs = tensors(library, INPUT0=number, INPUT1=2)
        answer = made.infer("addsub", inputs, parameters={"request": number})
        assert answer.as_numpy("OUTPUT0").tolist() == [[number + 2] * 16]

    known, numbered, evicted = counts(daemon, protocol)
    for number in range(COUNT):
        ask(number)
    assert counts(daemon, protocol) == (known, numbered, evicted)
    for number in range(COUNT):
        ask(number)
    assert counts(daemon, protocol) == (known + COUNT, numbered + COUNT, evicted)
