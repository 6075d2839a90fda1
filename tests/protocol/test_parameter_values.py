"""One table of values for the parameters that schedule a request, sent every way there is: each way gives the same answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tensord_client
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests import repositories
from tests.daemon_process import DaemonProcess

#: The values, and whether each is a whole number without a sign of 64 bits.
_NUMBERS: list[tuple[Any, bool]] = [
    *((0, True), (1, True), (2**63, True), (2**64 - 1, True)),
    *((-1, False), (2**64, False), (True, False), (1.0, False), (None, True)),
]
#: The name over HTTP and gRPC, the client's argument, the value, and the code of the answer; "": it is a good one.
CASES: list[tuple[str, str, Any, str]] = [
    *(
        (name, argument, value, "" if good else "INVALID_ARGUMENT")
        for name, argument in (("priority", "priority"), ("timeout", "timeout_us"), ("sequence_id", "sequence_id"))
        for value, good in _NUMBERS
    ),
    *(
        (name, argument, "1", "INVALID_ARGUMENT")
        for name, argument in (("priority", "priority"), ("timeout", "timeout_us"))
    ),
    ("sequence_id", "sequence_id", "x" * 128, ""),
    ("sequence_id", "sequence_id", "x" * 129, "UNSUPPORTED"),
    *(
        (name, name, value, "" if value is True else "INVALID_ARGUMENT")
        for name in ("sequence_start", "sequence_end")
        for value in (True, 1, "true")
    ),
]
_HTTP = {200: "", 400: "INVALID_ARGUMENT", 501: "UNSUPPORTED"}
_GRPC = {grpc.StatusCode.INVALID_ARGUMENT: "INVALID_ARGUMENT", grpc.StatusCode.UNIMPLEMENTED: "UNSUPPORTED"}
_X = np.ones((1, 4), np.float32)


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    repository = tmp_path_factory.mktemp("repository")
    repositories.scale_model(repository, "scale")
    options = {"clients": {"socket": str(repository.parent / "clients.sock")}}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository], options) as running:
        running.wait_ready()
        yield running


def over_http(daemon: DaemonProcess, name: str, _: str, value: Any) -> str:
    given = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": _X.tolist()}
    body = json.dumps({"inputs": [given], "parameters": {} if value is None else {name: value}})
    return _HTTP[daemon.request("POST", "/v2/models/scale/infer", body.encode())[0]]


def over_grpc(daemon: DaemonProcess, name: str, _: str, value: Any) -> str:
    given = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 4])
    request = service_pb2.ModelInferRequest(model_name="scale", inputs=[given], raw_input_contents=[_X.tobytes()])
    kinds = {bool: "bool_param", float: "double_param", str: "string_param"}
    if value == 2**64:
        return "INVALID_ARGUMENT"  # no parameter of gRPC can hold it
    if name == "timeout" and type(value) is int and value >= 2**63:
        pytest.skip("over gRPC a timeout has a sign, as for Triton")
    if value is not None:
        kind = kinds.get(type(value)) or ("int64_param" if value < 2**63 else "uint64_param")
        setattr(request.parameters[name], kind, value)
    with grpc.insecure_channel(daemon.grpc_url) as channel:
        try:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
        except grpc.RpcError as error:
            return _GRPC[error.code()]  # type: ignore[attr-defined]
    return ""


def _called(model: Any, name: str, argument: str, value: Any) -> str:
    """Returns the code of a call with the argument; with the parameter instead it is the same."""
    codes = []
    for own in ({argument: value}, {"parameters": {} if value is None else {name: value}}):
        try:
            model({"x": _X}, **own)
            codes.append("")
        except tensord_client.ServingError as error:
            codes.append(error.code)
    assert codes[0] == codes[1]
    return codes[0]


def over_a_lane(daemon: DaemonProcess, name: str, argument: str, value: Any) -> str:
    with tensord_client.connect(daemon.sections["clients"]["socket"]) as client:
        return _called(client.model("scale"), name, argument, value)


def by_the_client_over_http(daemon: DaemonProcess, name: str, argument: str, value: Any) -> str:
    with tensord_client.connect(daemon.url) as client:
        return _called(client.model("scale"), name, argument, value)


@pytest.mark.parametrize("way", [over_http, over_grpc, over_a_lane, by_the_client_over_http])
@pytest.mark.parametrize(("name", "argument", "value", "code"), CASES)
def test_a_value_gets_the_same_answer_every_way(
    daemon: DaemonProcess, way: Callable[..., str], name: str, argument: str, value: Any, code: str
) -> None:
    assert way(daemon, name, argument, value) == code
