"""Tests what the published specifications say where a real Triton says nothing: model ready, STRING, dimensions of -1."""

from __future__ import annotations

import http.client
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.daemon_process import DaemonProcess

TIMES = 4


class Kept:
    """One connection on which requests are repeated."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", daemon.port)

    def ask(self, model: str, tensor: dict[str, Any], tail: bytes = b"") -> dict[str, Any]:
        text = json.dumps({"inputs": [{"name": "x", **tensor}]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        self._connection.request("POST", f"/v2/models/{model}/infer", text + tail, headers)
        answer = self._connection.getresponse()
        found: dict[str, Any] = json.loads(answer.read())
        return found["outputs"][0] if answer.status == 200 else found

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def kept(daemon: DaemonProcess) -> Iterator[Kept]:
    kept = Kept(daemon)
    yield kept
    kept.close()


def test_a_model_says_its_name_when_it_is_ready(daemon: DaemonProcess) -> None:
    for path in ("/v2/models/scale/ready", "/v2/models/scale/versions/1/ready"):
        status, body = daemon.get(path)
        assert (status, json.loads(body)) == (200, {"name": "scale", "ready": True})
    assert daemon.get("/v2/models/nope/ready") == (400, b'{"error":"Model version not ready"}')


def test_string_is_bytes(daemon: DaemonProcess, kept: Kept) -> None:
    for _ in range(TIMES):
        answer = kept.ask("echo_bytes", {"shape": [2], "datatype": "STRING", "data": ["a", "é"]})
        assert (answer["datatype"], answer["data"]) == ("BYTES", ["a", "é"])
        tensor = {"shape": [1], "datatype": "STRING", "parameters": {"binary_data_size": 5}}
        assert kept.ask("echo_bytes", tensor, b"\1\0\0\0z")["data"] == ["z"]
    request = service_pb2.ModelInferRequest(model_name="echo_bytes", raw_input_contents=[b"\1\0\0\0z"])
    request.inputs.add(name="x", datatype="STRING", shape=[1])
    with grpcclient.grpc.insecure_channel(daemon.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(TIMES):
            answer = stub.ModelInfer(request)
            assert (answer.outputs[0].datatype, answer.raw_output_contents[0]) == ("BYTES", b"\1\0\0\0z")


@pytest.mark.parametrize(("shape", "found"), [([-1, 4], [2, 4]), ([2, -1], [2, 4]), ([-1, -1], None), ([-1, 3], None)])
def test_one_dimension_is_found_from_the_data(kept: Kept, shape: list[int], found: list[int] | None) -> None:
    values = np.arange(8, dtype=np.float32)
    for number in range(TIMES):
        given = values + number
        for tensor, tail in (
            ({"data": given.tolist()}, b""),
            ({"data": given.reshape(2, 4).tolist()}, b""),
            ({"parameters": {"binary_data_size": 32}}, given.tobytes()),
        ):
            answer = kept.ask("scale", {"shape": shape, "datatype": "FP32", **tensor}, tail)
            if found is None:
                assert "input 'x' shape" in answer["error"]
            else:
                assert (answer["shape"], answer["data"]) == (found, (3 * given + 1).tolist())


def test_a_connection_that_repeats_itself_with_another_number_of_elements(kept: Kept) -> None:
    """The head is the same, byte for byte, and so is the size: only the strings say how many they are."""
    texts = [["ab", "cd"], ["12345678"], ["", "", ""], ["ab", "cd"], ["xy", "zw"]]
    for strings in texts * 2:
        tail = b"".join(struct.pack("<I", len(each)) + each.encode() for each in strings)
        assert len(tail) == 12
        tensor = {"shape": [-1], "datatype": "BYTES", "parameters": {"binary_data_size": 12}}
        answer = kept.ask("echo_bytes", tensor, tail)
        assert (answer["shape"], answer["data"]) == ([len(strings)], strings)


def test_large_tensors(kept: Kept) -> None:
    values = np.arange(1 << 18, dtype=np.float32)
    for number in range(TIMES):
        given = values + number
        tensor = {"shape": [-1], "datatype": "FP32", "parameters": {"binary_data_size": given.nbytes}}
        answer = kept.ask("echo_fp32", tensor, given.tobytes())
        assert (answer["shape"], answer["data"][-1]) == ([1 << 18], given[-1])
    some = values[: 1 << 15]
    answer = kept.ask("echo_fp32", {"shape": [-1], "datatype": "FP32", "data": some.tolist()})
    assert (answer["shape"], answer["data"]) == ([1 << 15], some.tolist())
    answer = kept.ask("echo_fp32", {"shape": [-1, 1 << 10], "datatype": "FP32", "data": some.tolist()})
    assert "unexpected shape for input 'x'" in answer["error"]
    answer = kept.ask("echo_fp32", {"shape": [-1], "datatype": "FP32", "data": values.tolist()})
    assert "at most 1048576 bytes of JSON" in answer["error"]


def test_tensors_in_regions(daemon: DaemonProcess, kept: Kept, tmp_path: Path) -> None:
    path = Path("/dev/shm", f"tensord-test-{tmp_path.name}-{daemon.pid}")
    path.write_bytes(np.arange(4, dtype=np.float32).tobytes() + b"\1\0\0\0a\0\0\0\0" + bytes(4071))
    try:
        fields = json.dumps({"key": f"/{path.name}", "byte_size": 4096}).encode()
        assert daemon.request("POST", "/v2/systemsharedmemory/region/open/register", fields)[0] == 200
        for _ in range(TIMES):
            place = {"shared_memory_region": "open", "shared_memory_byte_size": 16}
            answer = kept.ask("echo_fp32", {"shape": [-1], "datatype": "FP32", "parameters": place})
            assert (answer["shape"], answer["data"]) == ([4], [0, 1, 2, 3])
            place = {"shared_memory_region": "open", "shared_memory_byte_size": 9, "shared_memory_offset": 16}
            answer = kept.ask("echo_bytes", {"shape": [-1], "datatype": "BYTES", "parameters": place})
            assert (answer["shape"], answer["data"]) == ([2], ["a", ""])
    finally:
        assert daemon.request("POST", "/v2/systemsharedmemory/region/open/unregister", b"")[0] == 200
        path.unlink()
