"""Requests traced by a real daemon: which are, what is written of them, and how a client steers it."""

from __future__ import annotations

import fcntl
import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.daemon_process import DaemonOf, DaemonProcess, wait_until

STAMPS = [
    "HTTP_RECV_START",
    "HTTP_RECV_END",
    "REQUEST_START",
    "QUEUE_START",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
    "REQUEST_END",
    "HTTP_SEND_START",
    "HTTP_SEND_END",
]
GRPC_STAMPS = [name.replace("HTTP_RECV", "GRPC_WAITREAD").replace("HTTP_SEND", "GRPC_SEND") for name in STAMPS]
#: Asks the ensemble as part of its request, and a model as part of none.
CALLER = repositories.answering("""
    x, trace = pb_utils.get_input_tensor_by_name(request, "x"), request.trace()
    asked = pb_utils.InferenceRequest(model_name="twice", inputs=[x], requested_output_names=["y"], trace=trace)
    apart = pb_utils.InferenceRequest(model_name="scale", inputs=[x], requested_output_names=["y"])
    apart.exec()
    return pb_utils.InferenceResponse(asked.exec().output_tensors())
""")
HOST_CALLER = """
    from tensord import models

    inputs, outputs, host = {"x": "FP32[4]"}, {"y": "FP32[4]"}, True
    max_batch_size = 8

    def create(path, config, device):
        return (lambda params, inputs: models.call("scale", inputs)), None
"""
OFF = {"trace_level": ["OFF"], "trace_rate": None, "trace_count": None, "log_frequency": None}


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("tracing")
    repositories.scale_model(folder / "models")
    once = ("scale", {"x": "x"}, {"y": "middle"})
    again = ("scale", {"x": "middle"}, {"y": "y"})
    told = ["x FP32 4"], ["y FP32 4"]
    repositories.ensemble(folder / "models", "twice", *told, [once, again], 8)
    repositories.ensemble(folder / "models", "outer", *told, [("twice", {"x": "x"}, {"y": "middle"}), again], 8)
    repositories.write_model(
        folder / "models",
        "caller",
        CALLER,
        repositories.fields("x FP32 4", "y FP32 4", "max_batch_size: 8"),
    )
    repositories.write_model(folder / "models", "host_caller", HOST_CALLER)
    return daemon_of(folder / "models", {"trace": {"file": str(folder / "trace.json")}}, folder=folder)


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(daemon.url) as client:
        yield client
        for model in ("scale", None):
            client.update_trace_settings(model, dict.fromkeys(OFF) if model else OFF)


def ask(client: triton.InferenceServerClient, model: str = "scale", name: str = "x", **options: Any) -> None:
    tensor = triton.InferInput(name, [1, 4], "FP32")
    tensor.set_data_from_numpy(np.array([[1, 2, 3, 0.5]], np.float32))
    client.infer(model, [tensor], **options)


def written(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Reads the trace file; returns the entries of each trace, in their order."""
    found: dict[int, list[dict[str, Any]]] = {}
    with path.open() as file:
        # Not in the middle of a write.
        fcntl.flock(file, fcntl.LOCK_SH)
        text = file.read()
    for entry in json.loads(text or "[]"):
        found.setdefault(entry["id"], []).append(entry)
    return found


def test_steps_of_an_ensemble_are_children_of_its_trace(
    daemon: DaemonProcess, client: triton.InferenceServerClient
) -> None:
    path = daemon.folder / "trace.json"
    before = written(path).keys()
    client.update_trace_settings(
        settings={"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1", "trace_count": "1"}
    )
    ask(client, "outer", request_id="mine")
    wait_until(lambda: len(written(path).keys() - before) == 5, "the trace and its children")
    found = {number: entries for number, entries in written(path).items() if number not in before}
    heads = {number: entries[0] for number, entries in found.items()}
    assert all(head["request_id"] == "mine" and head["model_version"] == 1 for head in heads.values())
    (outer,) = [number for number, head in heads.items() if "parent_id" not in head]
    assert heads[outer]["model_name"] == "outer"

    def children(parent: int) -> list[tuple[int, str]]:
        return [(number, head["model_name"]) for number, head in heads.items() if head.get("parent_id") == parent]

    (twice, first), (_, second) = children(outer)
    assert (first, second) == ("twice", "scale")
    steps = children(twice)
    assert [name for _, name in steps] == ["scale", "scale"]
    whole = [entry["timestamps"][0]["ns"] for entry in found[outer] if "timestamps" in entry]
    for number, _ in steps:
        stamps = [entry["timestamps"][0] for entry in found[number] if "timestamps" in entry]
        assert [stamp["name"] for stamp in stamps] == [name for name in STAMPS if not name.startswith("HTTP")]
        assert all(whole[0] <= stamp["ns"] <= whole[-1] for stamp in stamps)
        tensors = {entry["activity"]: entry["tensor"] for entry in found[number] if "activity" in entry}
        assert tensors.keys() == {"TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"}
    assert {entry["tensor"]["data"] for entry in found[steps[0][0]] if "activity" in entry} == {
        "1.0,2.0,3.0,0.5",
        "4.0,7.0,10.0,2.5",
    }


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("caller", {"caller": ["twice"], "twice": ["scale", "scale"], "scale": []}),
        ("host_caller", {"host_caller": ["scale"], "scale": []}),
    ],
)
def test_calls_of_a_model_are_children_of_its_trace(
    daemon: DaemonProcess, client: triton.InferenceServerClient, model: str, family: dict[str, list[str]]
) -> None:
    path = daemon.folder / "trace.json"
    before = written(path).keys()
    client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "1"})
    ask(client, model, request_id="mine")
    wait_until(lambda: written(path).keys() - before, "the trace")
    found = {number: entries for number, entries in written(path).items() if number not in before}
    heads = {number: entries[0] for number, entries in found.items()}
    (top,) = [number for number, head in heads.items() if "parent_id" not in head]
    assert heads[top]["model_name"] == model
    for number, head in heads.items():
        children = [one["model_name"] for one in heads.values() if one.get("parent_id") == number]
        assert children == family[head["model_name"]]
    assert all(head["request_id"] == "mine" for head in heads.values())
    whole = [entry["timestamps"][0]["ns"] for entry in found[top][1:]]
    for number in heads.keys() - {top}:
        stamps = [entry["timestamps"][0] for entry in found[number][1:]]
        assert [stamp["name"] for stamp in stamps] == [name for name in STAMPS if not name.startswith("HTTP")]
        assert all(whole[0] <= stamp["ns"] <= whole[-1] for stamp in stamps)


def test_timestamps_and_tensors_of_a_request(daemon: DaemonProcess, client: triton.InferenceServerClient) -> None:
    path = daemon.folder / "trace.json"
    before = written(path).keys()
    changed = client.update_trace_settings(
        settings={"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1", "trace_count": "1"}
    )
    assert changed == {
        "trace_level": ["TIMESTAMPS", "TENSORS"],
        "trace_rate": "1",
        "trace_count": "1",
        "log_frequency": "0",
        "trace_file": str(path),
        "trace_mode": "triton",
    }
    for number in range(3):
        ask(client, request_id=f'r"{number}')
    wait_until(lambda: len(written(path)) > len(before), "the trace", daemon)
    ((number, entries),) = ((id, entries) for id, entries in written(path).items() if id not in before)
    assert entries[0] == {"id": number, "model_name": "scale", "model_version": 1, "request_id": 'r"0'}
    stamps = [stamp for entry in entries for stamp in entry.get("timestamps", ())]
    assert [stamp["name"] for stamp in stamps] == STAMPS
    assert [stamp["ns"] for stamp in stamps] == sorted(stamp["ns"] for stamp in stamps)
    tensors = {entry["activity"]: entry["tensor"] for entry in entries if "tensor" in entry}
    assert tensors["TENSOR_QUEUE_INPUT"] == {"name": "x", "data": "1.0,2.0,3.0,0.5", "shape": "1,4", "dtype": "FP32"}
    assert tensors["TENSOR_BACKEND_OUTPUT"]["name"] == "y"
    # The other two were not traced: the count was used up.
    assert client.get_trace_settings()["trace_count"] == "0"


def test_an_error_is_traced_as_far_as_it_came(daemon: DaemonProcess, client: triton.InferenceServerClient) -> None:
    path = daemon.folder / "trace.json"
    before = written(path).keys()
    client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
    with pytest.raises(InferenceServerException):
        ask(client, name="no_such_input")
    wait_until(lambda: len(written(path)) == len(before) + 1, "the trace", daemon)
    (entries,) = (entries for number, entries in written(path).items() if number not in before)
    names = [stamp["name"] for entry in entries for stamp in entry.get("timestamps", ())]
    assert names[-3:] == ["REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END"]
    assert "COMPUTE_START" not in names


def grpc_input(name: str = "x") -> list[grpcclient.InferInput]:
    tensor = grpcclient.InferInput(name, [1, 4], "FP32")
    tensor.set_data_from_numpy(np.array([[1, 2, 3, 0.5]], np.float32))
    return [tensor]


def traces_since(daemon: DaemonProcess, before: set[int], count: int) -> list[list[dict[str, Any]]]:
    """Waits for ``count`` new traces; returns their entries in the order of their requests."""
    path = daemon.folder / "trace.json"
    wait_until(lambda: len(written(path).keys() - before) >= count, f"{count} traces", daemon)
    found = written(path)
    return [found[number] for number in sorted(found.keys() - before)]


def names(entries: list[dict[str, Any]]) -> list[str]:
    return [stamp["name"] for entry in entries for stamp in entry.get("timestamps", ())]


def test_grpc_calls(daemon: DaemonProcess, client: triton.InferenceServerClient) -> None:
    before = set(written(daemon.folder / "trace.json"))
    with grpcclient.InferenceServerClient(daemon.grpc_url) as grpc:
        grpc.infer("scale", grpc_input(), request_id="before")
        # Through the front that is to heed it: it has it before it answers.
        grpc.update_trace_settings(settings={"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "2"})
        for number in range(4):
            grpc.infer("scale", grpc_input(), request_id=f"g{number}")
    traces = traces_since(daemon, before, 2)
    assert [entries[0]["request_id"] for entries in traces] == ["g1", "g3"]
    for entries in traces:
        assert (entries[0]["model_name"], entries[0]["model_version"]) == ("scale", 1)
        assert names(entries) == GRPC_STAMPS
        tensors = {entry["activity"]: entry["tensor"]["data"] for entry in entries if "tensor" in entry}
        assert tensors["TENSOR_QUEUE_INPUT"] == "1.0,2.0,3.0,0.5"


def test_requests_of_a_stream(daemon: DaemonProcess, client: triton.InferenceServerClient) -> None:
    """Each is traced for itself; the second waited from the first one on."""
    before = set(written(daemon.folder / "trace.json"))
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(daemon.grpc_url) as grpc:
        grpc.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
        grpc.start_stream(lambda result, error: answers.put((result, error)))
        for request_id, name in (("s0", "x"), ("s1", "no_such_input"), ("s2", "x")):
            grpc.async_stream_infer("scale", grpc_input(name), request_id=request_id)
            _, error = answers.get()
            assert (error is None) == (name == "x")
        grpc.stop_stream()
    first, wrong, last = traces_since(daemon, before, 3)
    assert [entries[0]["request_id"] for entries in (first, wrong, last)] == ["s0", "s1", "s2"]
    assert names(first) == names(last) == GRPC_STAMPS
    assert names(wrong)[-3:] == ["REQUEST_END", "GRPC_SEND_START", "GRPC_SEND_END"]
    moments = [
        {stamp["name"]: stamp["ns"] for entry in entries for stamp in entry.get("timestamps", ())}
        for entries in (first, wrong)
    ]
    assert moments[1]["GRPC_WAITREAD_START"] == moments[0]["GRPC_WAITREAD_END"]


def generate(daemon: DaemonProcess, endpoint: str, body: bytes) -> bytes:
    request = urllib.request.Request(f"http://{daemon.url}/v2/models/scale/{endpoint}", body)
    with urllib.request.urlopen(request) as answer:
        content: bytes = answer.read()
        return content


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_generate(daemon: DaemonProcess, client: triton.InferenceServerClient, endpoint: str) -> None:
    before = set(written(daemon.folder / "trace.json"))
    client.update_trace_settings("scale", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
    assert b'"y":[4.0,7.0,10.0,2.5]' in generate(daemon, endpoint, b'{"id":"g","x":[1,2,3,0.5]}')
    with pytest.raises(urllib.error.HTTPError, match="400"):
        generate(daemon, endpoint, b'{"x":"no number"}')
    good, bad = traces_since(daemon, before, 2)
    assert good[0] == {"id": good[0]["id"], "model_name": "scale", "model_version": 1, "request_id": "g"}
    assert sorted(names(good)) == sorted(STAMPS)
    assert names(good)[:3] == STAMPS[:3]
    assert names(good)[-1] == "HTTP_SEND_END"
    assert names(bad) == ["HTTP_RECV_START", "HTTP_RECV_END"]
