"""Requests without an id get one, where the operator wants that: each its own, also where a connection repeats itself."""

from __future__ import annotations

import http.client
import json
import uuid
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests import repositories
from tests.daemon_process import DaemonOf, DaemonProcess, wait_until
from tests.protocol.test_tracing import written

TIMES = 6


@pytest.fixture(scope="module")
def naming(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository, folder = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("daemon")
    repositories.echo_models(repository, ["FP32"])
    repositories.scale_model(repository)
    repositories.faulty_models(repository)
    options: dict[str, dict[str, Any]] = {
        "requests": {"make_ids": True},
        "repository": {"strict_readiness": False},
        "trace": {"file": str(folder / "trace.json")},
    }
    return daemon_of(repository, options, folder=folder)


def all_different(ids: list[str]) -> bool:
    """Returns whether the ids are UUIDs and no two are the same."""
    return len({uuid.UUID(each) for each in ids}) == len(ids)


@pytest.mark.parametrize("count", [4, 1 << 16], ids=["small", "large"])
@pytest.mark.parametrize("way", ["json", "binary", "raw"])
def test_http(naming: DaemonProcess, way: str, count: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", naming.port)
    given: dict[str, Any] = {"name": "x", "shape": [count], "datatype": "FP32"}
    ids = []
    for number in range(TIMES):
        values = np.full(count, number, np.float32)
        tail = b"" if way == "json" else values.tobytes()
        source = {"data": values.tolist()} if way == "json" else {"parameters": {"binary_data_size": values.nbytes}}
        text = b"" if way == "raw" else json.dumps({"inputs": [{**given, **source}]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        connection.request("POST", "/v2/models/echo_fp32/infer", text + tail, headers)
        answer = connection.getresponse()
        body = answer.read()
        answered = json.loads(body[: int(answer.headers.get("Inference-Header-Content-Length", len(body)))])
        ids.append(answered["id"])
        if way != "raw":
            assert answered["outputs"][0]["data"][0] == number
    assert all_different(ids)
    connection.close()


def test_an_id_that_is_given_is_kept(naming: DaemonProcess) -> None:
    tensor = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}
    for _ in range(TIMES):
        assert naming.infer("echo_fp32", [tensor], id="mine")[1]["id"] == "mine"
    status, answer = naming.infer("echo_fp32", [{**tensor, "name": "z"}])
    assert status == 400
    assert "[request id: <id_unknown>]" not in answer["error"]


def test_generate(naming: DaemonProcess) -> None:
    ids = []
    for path in ("generate", "generate_stream"):
        for _ in range(TIMES):
            status, body = naming.request("POST", f"/v2/models/echo_fp32/{path}", b'{"x": [1.5]}')
            assert status == 200
            ids.append(json.loads(body.removeprefix(b"data: "))["id"])
    assert all_different(ids)
    assert json.loads(naming.request("POST", "/v2/models/echo_fp32/generate", b'{"x":1,"id":"a"}')[1])["id"] == "a"


@pytest.mark.parametrize("count", [4, 1 << 16], ids=["small", "large"])
@pytest.mark.parametrize("streamed", [False, True])
def test_grpc(naming: DaemonProcess, streamed: bool, count: int) -> None:
    ids = []
    with grpcclient.InferenceServerClient(naming.grpc_url) as client:
        answers: list[tuple[Any, Any]] = []
        if streamed:
            client.start_stream(lambda result, error: answers.append((result, error)))
        for number in range(TIMES):
            given = grpcclient.InferInput("x", [count], "FP32")
            given.set_data_from_numpy(np.full(count, number, np.float32))
            if streamed:
                client.async_stream_infer("echo_fp32", [given])
                wait_until(lambda expected=number + 1: len(answers) == expected, "the answer", naming)  # type: ignore[misc]
                result, error = answers[-1]
                assert error is None
            else:
                result = client.infer("echo_fp32", [given])
            assert result.as_numpy("y")[-1] == number
            ids.append(result.get_response().id)
        if streamed:
            client.stop_stream()
        given = grpcclient.InferInput("x", [count], "FP32")
        given.set_data_from_numpy(np.zeros(count, np.float32))
        assert client.infer("echo_fp32", [given], request_id="mine").get_response().id == "mine"
    assert all_different(ids)


def test_traces_and_the_log_have_it(naming: DaemonProcess) -> None:
    wanted = json.dumps({"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}).encode()
    assert naming.request("POST", "/v2/trace/setting", wanted)[0] == 200
    given = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}
    ids = [naming.infer("echo_fp32", [given])[1]["id"] for _ in range(TIMES)]
    tensor = grpcclient.InferInput("x", [2], "FP32")
    tensor.set_data_from_numpy(np.zeros(2, np.float32))
    with grpcclient.InferenceServerClient(naming.grpc_url) as client:
        ids += [client.infer("echo_fp32", [tensor]).get_response().id for _ in range(TIMES)]
    path = naming.folder / "trace.json"
    wait_until(lambda: len(written(path)) == 2 * TIMES, "the traces", naming)
    assert sorted(entries[0]["request_id"] for entries in written(path).values()) == sorted(ids)
    assert naming.request("POST", "/v2/trace/setting", b'{"trace_level":["OFF"]}')[0] == 200
    assert naming.infer("raises", [given])[0] == 500
    naming.wait_log(r"\[request id: [0-9a-f-]{36}\] .*raises")


def test_by_default_there_is_none(daemon: DaemonProcess) -> None:
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    assert "id" not in daemon.infer("scale", [tensor])[1]
