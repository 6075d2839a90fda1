"""One table of tensors, sent every way there is: the answers are the same to the bit, whatever carried them.

CUDA regions lie on the tests' stand-in for the driver, where copies take their time. A CPU worker copies them through the host, a
GPU worker uses them where they lie.
"""

from __future__ import annotations

import os
import queue
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as system
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

from tests import repositories
from tests.cuda_owner import CudaOwner
from tests.cuda_stub.library import CudaStub
from tests.daemon_process import PATIENCE, DaemonProcess
from tests.on_stub import daemon_on
from tests.protocol.tensors import JSON_DATATYPES, TENSORS, Array, same

_FIELDS = {"BOOL": "bool", "INT64": "int64", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64", "BYTES": "bytes"}
_FIELDS |= dict.fromkeys(("INT8", "INT16", "INT32"), "int") | dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint")


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    return CudaStub(tmp_path_factory.mktemp("cuda"), delay_us=500)


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def daemon(
    request: pytest.FixtureRequest, leaves_nothing: None, stub: CudaStub, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    repository = tmp_path_factory.mktemp("repository")
    repositories.echo_models(repository)
    options, environment = daemon_on(request.param, stub)
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository], options, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def owner(stub: CudaStub) -> Iterator[CudaOwner]:
    with CudaOwner(os.environ | stub.environment) as owner:
        yield owner


def wire_bytes(values: Array) -> bytes:
    return bytes(serialize_byte_tensor(values).item()) if values.dtype == np.object_ else values.tobytes()


def from_wire(content: bytes, datatype: str, shape: Any) -> Array:
    if datatype == "BYTES":
        return deserialize_bytes_tensor(content).reshape(shape)
    dtype = ml_dtypes.bfloat16 if datatype == "BF16" else triton_to_np_dtype(datatype)
    return np.frombuffer(content, dtype).reshape(shape)


def http(daemon: DaemonProcess, datatype: str, values: Array, binary: bool) -> Array:
    with httpclient.InferenceServerClient(daemon.url) as client:
        given = httpclient.InferInput("x", list(values.shape), datatype)
        given.set_data_from_numpy(values, binary_data=binary)
        wanted = [httpclient.InferRequestedOutput("y", binary_data=binary)]
        got = client.infer(f"echo_{datatype.lower()}", [given], outputs=wanted).as_numpy("y")
        return np.array([value.encode() for value in got], np.object_) if datatype == "BYTES" and not binary else got


def http_json(daemon: DaemonProcess, owner: CudaOwner, datatype: str, values: Array) -> Array:
    return http(daemon, datatype, values, False)


def http_binary(daemon: DaemonProcess, owner: CudaOwner, datatype: str, values: Array) -> Array:
    return http(daemon, datatype, values, True)


def grpc_input(datatype: str, values: Array) -> Any:
    given = grpcclient.InferInput("x", list(values.shape), datatype)
    given.set_data_from_numpy(values)
    return given


def grpc_raw(daemon: DaemonProcess, owner: CudaOwner, datatype: str, values: Array) -> Array:
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        return client.infer(f"echo_{datatype.lower()}", [grpc_input(datatype, values)]).as_numpy("y")


def grpc_typed(daemon: DaemonProcess, owner: CudaOwner, datatype: str, values: Array) -> Array:
    given = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=values.shape)
    getattr(given.contents, f"{_FIELDS[datatype]}_contents").extend(values.tolist())
    with grpc.insecure_channel(daemon.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(service_pb2.ModelInferRequest(model_name=f"echo_{datatype.lower()}", inputs=[given]))
    (content,), (output,) = answer.raw_output_contents, answer.outputs
    return from_wire(content, datatype, output.shape)


def grpc_stream(daemon: DaemonProcess, owner: CudaOwner, datatype: str, values: Array) -> Array:
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(f"echo_{datatype.lower()}", [grpc_input(datatype, values)])
        return answers.get(timeout=PATIENCE).as_numpy("y")


def infer_in_region(client: Any, module: Any, name: str, datatype: str, values: Array) -> None:
    """Sends a request with its input at a region's start and its output in the second half."""
    given, wanted = module.InferInput("x", list(values.shape), datatype), module.InferRequestedOutput("y")
    given.set_shared_memory(name, len(wire_bytes(values)))
    wanted.set_shared_memory(name, 2048, offset=2048)
    client.infer(f"echo_{datatype.lower()}", [given], outputs=[wanted])


def system_regions(module: Any, url: str, datatype: str, values: Array) -> Array:
    """Sends a request with input and output in one system region; returns the output."""
    wire = wire_bytes(values)
    name = f"tensord-test-{uuid.uuid4()}"
    region = system.create_shared_memory_region(name, f"/{name}", 4096)
    try:
        system.set_shared_memory_region(region, [np.frombuffer(wire, np.uint8)])
        with module.InferenceServerClient(url) as client:
            client.register_system_shared_memory(name, f"/{name}", 4096)
            try:
                infer_in_region(client, module, name, datatype, values)
            finally:
                client.unregister_system_shared_memory(name)
        got = system.get_contents_as_numpy(region, np.uint8, [len(wire)], offset=2048).tobytes()
    finally:
        system.destroy_shared_memory_region(region)
    return from_wire(got, datatype, values.shape)


def cuda_regions(module: Any, url: str, owner: CudaOwner, datatype: str, values: Array) -> Array:
    """Sends a request with input and output in GPU memory of another process; returns the output."""
    wire = wire_bytes(values)
    name = f"g-{uuid.uuid4().hex}"
    handle = owner.create(name, 4096)
    owner.put(name, np.frombuffer(wire, np.uint8))
    with module.InferenceServerClient(url) as client:
        client.register_cuda_shared_memory(name, handle, 0, 4096)
        try:
            infer_in_region(client, module, name, datatype, values)
        finally:
            client.unregister_cuda_shared_memory(name)
    return from_wire(owner.get(name, np.uint8, (len(wire),), 2048).tobytes(), datatype, values.shape)


def http_regions(daemon: DaemonProcess, owner: CudaOwner, datatype: str, values: Array) -> Array:
    return system_regions(httpclient, daemon.url, datatype, values)


def grpc_regions(daemon: DaemonProcess, owner: CudaOwner, datatype: str, values: Array) -> Array:
    return system_regions(grpcclient, daemon.grpc_url, datatype, values)


def http_cuda_regions(daemon: DaemonProcess, owner: CudaOwner, datatype: str, values: Array) -> Array:
    return cuda_regions(httpclient, daemon.url, owner, datatype, values)


def grpc_cuda_regions(daemon: DaemonProcess, owner: CudaOwner, datatype: str, values: Array) -> Array:
    return cuda_regions(grpcclient, daemon.grpc_url, owner, datatype, values)


WAYS = (http_json, http_binary, grpc_typed, grpc_raw, grpc_stream)
WAYS += (http_regions, grpc_regions, http_cuda_regions, grpc_cuda_regions)
#: Without a text form there is no typed field either.
_NOT_RAW = (http_json, grpc_typed)
CASES = [
    (way, datatype) for way in WAYS for datatype in sorted(TENSORS) if way not in _NOT_RAW or datatype in JSON_DATATYPES
]


@pytest.mark.parametrize(("way", "datatype"), CASES, ids=[f"{way.__name__}-{datatype}" for way, datatype in CASES])
def test_the_same_bits(daemon: DaemonProcess, owner: CudaOwner, way: Callable[..., Array], datatype: str) -> None:
    got = way(daemon, owner, datatype, TENSORS[datatype])
    assert same(got, TENSORS[datatype]), (way.__name__, got)
