"""A real daemon and clients that repeat more kinds of requests than a lane has numbers for: each gets its own answer."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tensord.shm.prepared import MAX_NUMBERS
from tests.daemon.grpc.frame_client import FrameClient
from tests.daemon_process import ROOT, DaemonProcess
from tests.fakes import Client

KINDS = MAX_NUMBERS + 76
#: So often in a row, so that it becomes known; and all of them once more.
TIMES = 3


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    models = {"control_mode": "explicit", "load": ["addsub"]}
    with DaemonProcess(
        tmp_path_factory.mktemp("daemon"), [ROOT / "bench" / "models"], {"repository": models}
    ) as running:
        running.wait_ready()
        yield running


def tensors(number: int, time: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((1, 16), number, np.float32), np.full((1, 16), 0.5 * time, np.float32)


def outputs_of(number: int) -> list[str]:
    """Returns which outputs a kind of request asks for, and in which order."""
    return [["OUTPUT0", "OUTPUT1"], ["OUTPUT1"], ["OUTPUT1", "OUTPUT0"], ["OUTPUT0"]][number % 4]


def right(number: int, time: int) -> dict[str, list[float]]:
    a, b = tensors(number, time)
    given = {"OUTPUT0": a + b, "OUTPUT1": a - b}
    return {name: given[name][0].tolist() for name in sorted(outputs_of(number))}


def order() -> list[tuple[int, int]]:
    """Returns which kind is asked for next, and with which tensors."""
    return [(number, time) for number in range(KINDS) for time in range(TIMES)] + [(n, TIMES) for n in range(KINDS)]


def test_over_http(daemon: DaemonProcess) -> None:
    with Client(int(daemon.url.rpartition(":")[2])) as client:
        for number, time in order():
            head = {
                "id": f"{number}",
                "inputs": [
                    {"name": name, "datatype": "FP32", "shape": [1, 16], "parameters": {"binary_data_size": 64}}
                    for name in ("INPUT0", "INPUT1")
                ],
                "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs_of(number)],
                "parameters": {"kind": number},
            }
            text = json.dumps(head).encode()
            body = text + b"".join(tensor.tobytes() for tensor in tensors(number, time))
            client.send(
                b"POST /v2/models/addsub/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n"
                b"Content-Length: %d\r\n\r\n" % (len(text), len(body)) + body
            )
            answer = client.answer()
            assert answer.status == 200, answer.body
            size = int(answer.headers["inference-header-content-length"])
            said, parts = json.loads(answer.body[:size]), np.frombuffer(answer.body[size:], np.float32)
            assert said["id"] == f"{number}"
            names = [output["name"] for output in said["outputs"]]
            found = {name: parts[16 * at : 16 * at + 16].tolist() for at, name in enumerate(names)}
            assert found == right(number, time), (number, time)


def test_over_grpc(daemon: DaemonProcess) -> None:
    infer, parameter = service_pb2.ModelInferRequest, service_pb2.InferParameter
    with FrameClient(int(daemon.grpc_url.rpartition(":")[2])) as client:
        for number, time in order():
            message = infer(
                model_name="addsub",
                id=f"{number}-{time}",
                parameters={"kind": parameter(string_param="k" * (number % 300) + f"{number:05}")},
                inputs=[
                    infer.InferInputTensor(name=name, datatype="FP32", shape=[1, 16]) for name in ("INPUT0", "INPUT1")
                ],
                outputs=[infer.InferRequestedOutputTensor(name=name) for name in outputs_of(number)],
                raw_input_contents=[tensor.tobytes() for tensor in tensors(number, time)],
            )
            answer = client.answer(client.call(message))
            assert answer.status == 0, answer.text
            (content,) = answer.messages
            said = service_pb2.ModelInferResponse.FromString(content)
            assert said.id == f"{number}-{time}"
            found = {
                output.name: np.frombuffer(raw, np.float32).tolist()
                for output, raw in zip(said.outputs, said.raw_output_contents, strict=True)
            }
            assert found == right(number, time), (number, time)
