"""Generates requests as many different clients would send them, each with the answer that is right for it.

There are small tensors of changing shapes and values, in binary and, over HTTP, in JSON with an id and a trace header of its own;
tensors of 256 KiB, too large to travel in a record; a tensor in a registered region; models that do not exist. The generators
never end.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tritonclient.grpc import service_pb2

from bench.closed_loop import infer_request
from bench.grpc_connection import call
from bench.grpc_connection import infer_request as grpc_infer_request

_LARGE = 1 << 16
_MOST_ROWS = 16
#: What part of the requests are for a model that is not there, are large, use the region, and, over HTTP, are in JSON.
_MISSING, _LARGE_PART, _REGION, _JSON = 0.02, 0.05, 0.05, 0.2


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request as bytes, and the right answer to it."""

    request: bytes
    #: The last bytes of the answer; None: an error is the right answer.
    values: bytes | None
    #: Instead, of an answer in JSON: the output's elements.
    elements: list[float] | None = None

    def check(self, answer: bytes | bytearray) -> None:
        """Raises AssertionError unless the answer is the right one. ``answer``: over HTTP with its head."""
        head, _, content = bytes(answer).partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 ") and head.startswith(b"HTTP/1.1 200") == self.is_error:
            raise AssertionError(f"{head.splitlines()[0].decode()}: {content[:150]!r}")
        if self.elements is not None:
            (output,) = json.loads(content)["outputs"]
            right = output["data"] == self.elements
        else:
            right = self.values is None or answer.endswith(self.values)
        if not right:
            raise AssertionError(f"wrong answer: {bytes(answer[:150])!r}")

    @property
    def is_error(self) -> bool:
        """Returns True where an error is the right answer."""
        return self.values is None and self.elements is None


def small(protocol: str) -> Iterator[Exchange]:
    """Yields requests with small binary tensors, each of another shape and with other values. ``protocol``: "http" or "grpc"."""
    build = grpc_infer_request if protocol == "grpc" else infer_request
    numbers = np.random.default_rng()
    while True:
        a, b = _operands(numbers)
        yield Exchange(build("addsub", [("INPUT0", a), ("INPUT1", b)], "OUTPUT0"), (a + b).tobytes())


def mebibyte(protocol: str) -> Iterator[Exchange]:
    """Yields requests with one tensor of 1 MiB, whose answer is as large."""
    values = np.random.default_rng().random(1 << 18, np.float32)
    build = grpc_infer_request if protocol == "grpc" else infer_request
    exchange = Exchange(build("identity", [("INPUT0", values)], "OUTPUT0"), values.tobytes())
    while True:
        yield exchange


def mixed(protocol: str, region: str, values: np.ndarray) -> Iterator[Exchange]:
    """Yields requests of all kinds. ``region``: a registered region that begins with ``values``, FP32[N]."""
    build = grpc_infer_request if protocol == "grpc" else infer_request
    chance, numbers = random.Random(), np.random.default_rng()
    usual = small(protocol)
    in_region = Exchange(_from_region(protocol, region, values), values.tobytes())
    while True:
        kind = chance.random()
        if (kind := kind - _MISSING) < 0:
            yield Exchange(build(f"missing-{chance.randint(0, 9)}", [("INPUT0", values)], "OUTPUT0"), None)
        elif (kind := kind - _LARGE_PART) < 0:
            large = numbers.random(_LARGE - chance.randint(0, 3), np.float32)
            yield Exchange(build("identity", [("INPUT0", large)], "OUTPUT0"), large.tobytes())
        elif (kind := kind - _REGION) < 0:
            yield in_region
        elif kind < _JSON and protocol == "http":
            a, b = _operands(numbers)
            yield Exchange(_json(a, b, chance), None, (a + b).ravel().tolist())
        else:
            yield next(usual)


def _operands(numbers: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns two random FP32[rows, 16] of integers, which every text format writes without loss."""
    shape = (int(numbers.integers(1, _MOST_ROWS + 1)), 16)
    return numbers.integers(0, 1 << 16, shape).astype(np.float32), numbers.integers(0, 1 << 16, shape).astype(
        np.float32
    )


def _json(a: np.ndarray, b: np.ndarray, chance: random.Random) -> bytes:
    inputs = [
        {"name": name, "datatype": "FP32", "shape": list(values.shape), "data": values.ravel().tolist()}
        for name, values in (("INPUT0", a), ("INPUT1", b))
    ]
    body = json.dumps({"id": str(chance.getrandbits(64)), "inputs": inputs, "outputs": [{"name": "OUTPUT0"}]}).encode()
    trace = f"00-{chance.getrandbits(128):032x}-{chance.getrandbits(64):016x}-01"
    return _posted("addsub", body, f"traceparent: {trace}\r\n")


def _posted(model: str, body: bytes, more: str = "") -> bytes:
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: bench\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _from_region(protocol: str, region: str, values: np.ndarray) -> bytes:
    """Builds a request to ``identity`` with the tensor that lies in the region."""
    if protocol == "grpc":
        tensor = service_pb2.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=values.shape)
        tensor.parameters["shared_memory_region"].string_param = region
        tensor.parameters["shared_memory_byte_size"].int64_param = values.nbytes
        return call(service_pb2.ModelInferRequest(model_name="identity", inputs=[tensor]).SerializeToString())
    place = {"shared_memory_region": region, "shared_memory_byte_size": values.nbytes}
    tensors = [{"name": "INPUT0", "datatype": "FP32", "shape": list(values.shape), "parameters": place}]
    body = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    return _posted("identity", body)
