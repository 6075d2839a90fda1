"""One table of tensors, sent every way there is: the answers are the same to the bit, whatever carried them."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as system
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

from tests.daemon_process import PATIENCE, DaemonProcess
from tests.protocol.tensors import JSON_DATATYPES, TENSORS, Array, same

_FIELDS = {"BOOL": "bool", "INT64": "int64", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64", "BYTES": "bytes"}
_FIELDS |= dict.fromkeys(("INT8", "INT16", "INT32"), "int") | dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint")


def http(daemon: DaemonProcess, datatype: str, values: Array, binary: bool) -> Array:
    with httpclient.InferenceServerClient(daemon.url) as client:
        given = httpclient.InferInput("x", list(values.shape), datatype)
        given.set_data_from_numpy(values, binary_data=binary)
        wanted = [httpclient.InferRequestedOutput("y", binary_data=binary)]
        got = client.infer(f"echo_{datatype.lower()}", [given], outputs=wanted).as_numpy("y")
        return np.array([value.encode() for value in got], np.object_) if datatype == "BYTES" and not binary else got


def http_json(daemon: DaemonProcess, datatype: str, values: Array) -> Array:
    return http(daemon, datatype, values, False)


def http_binary(daemon: DaemonProcess, datatype: str, values: Array) -> Array:
    return http(daemon, datatype, values, True)


def grpc_input(datatype: str, values: Array) -> Any:
    given = grpcclient.InferInput("x", list(values.shape), datatype)
    given.set_data_from_numpy(values)
    return given


def grpc_raw(daemon: DaemonProcess, datatype: str, values: Array) -> Array:
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        return client.infer(f"echo_{datatype.lower()}", [grpc_input(datatype, values)]).as_numpy("y")


def grpc_typed(daemon: DaemonProcess, datatype: str, values: Array) -> Array:
    given = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=values.shape)
    getattr(given.contents, f"{_FIELDS[datatype]}_contents").extend(values.tolist())
    with grpc.insecure_channel(daemon.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(service_pb2.ModelInferRequest(model_name=f"echo_{datatype.lower()}", inputs=[given]))
    (content,), (output,) = answer.raw_output_contents, answer.outputs
    if datatype == "BYTES":
        return deserialize_bytes_tensor(content).reshape(output.shape)
    return np.frombuffer(content, triton_to_np_dtype(datatype)).reshape(output.shape)


def grpc_stream(daemon: DaemonProcess, datatype: str, values: Array) -> Array:
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(f"echo_{datatype.lower()}", [grpc_input(datatype, values)])
        return answers.get(timeout=PATIENCE).as_numpy("y")


def regions(module: Any, url: str, daemon: DaemonProcess, datatype: str, values: Array) -> Array:
    """Input and output in one system region, over either protocol."""
    wire = serialize_byte_tensor(values).item() if datatype == "BYTES" else values.tobytes()
    name = f"tensord-test-{uuid.uuid4()}"
    region = system.create_shared_memory_region(name, f"/{name}", 4096)
    try:
        system.set_shared_memory_region(region, [np.frombuffer(wire, np.uint8)])
        with module.InferenceServerClient(url) as client:
            client.register_system_shared_memory(name, f"/{name}", 4096)
            given = module.InferInput("x", list(values.shape), datatype)
            given.set_shared_memory(name, len(wire))
            wanted = module.InferRequestedOutput("y")
            wanted.set_shared_memory(name, 2048, offset=2048)
            try:
                client.infer(f"echo_{datatype.lower()}", [given], outputs=[wanted])
            finally:
                client.unregister_system_shared_memory(name)
        return system.get_contents_as_numpy(
            region, triton_to_np_dtype(datatype), list(values.shape), offset=2048
        ).copy()
    finally:
        system.destroy_shared_memory_region(region)


def http_regions(daemon: DaemonProcess, datatype: str, values: Array) -> Array:
    return regions(httpclient, daemon.url, daemon, datatype, values)


def grpc_regions(daemon: DaemonProcess, datatype: str, values: Array) -> Array:
    return regions(grpcclient, daemon.grpc_url, daemon, datatype, values)


WAYS = (http_json, http_binary, grpc_typed, grpc_raw, grpc_stream, http_regions, grpc_regions)
#: Without a text form there is no typed field either. BF16: numpy knows it only with ml_dtypes, which tritonclient does not use.
_NOT_RAW = (http_json, grpc_typed)


@pytest.mark.parametrize("datatype", sorted(set(TENSORS) - {"BF16"}))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_same_bits(daemon: DaemonProcess, way: Callable[..., Array], datatype: str) -> None:
    if way in _NOT_RAW and datatype not in JSON_DATATYPES:
        pytest.skip("FP16 has no text form and no contents field")
    got = way(daemon, datatype, TENSORS[datatype])
    assert same(got, TENSORS[datatype]), (way.__name__, got)
