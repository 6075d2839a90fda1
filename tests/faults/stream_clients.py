"""Clients that send requests on gRPC streams of their own, cancel some, read some slowly, and compare every response.

Responses come in order and are complete, or the request ends with one error, or the client cancels.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections import Counter

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.daemon_process import ROOT

#: Where the model is: a generator, and a stepped one.
GENERATORS, STEPPED = ROOT / "bench" / "models", ROOT / "tests" / "faults" / "stepped"
_MODEL = "repeat"
#: Of one request.
_MOST = 300
#: Of requests: how many are cancelled by their clients, and how many are read slowly.
_CANCELLED, _SLOW = 0.1, 0.1
#: A request that ends neither way for so long has got lost.
PATIENCE = 240.0


class StreamClient(threading.Thread):
    """A client thread that sends requests until it is stopped. ``seen``: the outcomes of its requests, counted."""

    def __init__(self, address: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._chance = random.Random(seed)
        self._stopped = threading.Event()
        self.seen: Counter[str] = Counter()

    def stop(self) -> None:
        """Stops the client after the request that it has begun."""
        self._stopped.set()

    def run(self) -> None:
        with grpc.insecure_channel(self._address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while not self._stopped.is_set():
                with contextlib.closing(_Stream(stub, self._chance)) as stream:
                    for _ in range(self._chance.randint(1, 5)):
                        outcome = stream.ask()
                        self.seen[outcome] += 1
                        if outcome != "complete":
                            break


class _Stream:
    """A call of ModelStreamInfer, for one request at a time."""

    def __init__(self, stub: service_pb2_grpc.GRPCInferenceServiceStub, chance: random.Random) -> None:
        self._chance = chance
        self._requests: queue.SimpleQueue[service_pb2.ModelInferRequest | None] = queue.SimpleQueue()
        self._call = stub.ModelStreamInfer(iter(self._requests.get, None), timeout=PATIENCE)

    def ask(self) -> str:
        """Sends a request and reads its responses. Returns ``complete``, ``cancelled``, ``error: ...`` or ``wrong: ...``."""
        chance = self._chance
        base = np.float32(chance.randint(0, 1000)) + np.arange(16, dtype=np.float32)
        count, slow = chance.randint(0, _MOST), chance.random() < _SLOW
        leaves_at = chance.randint(0, count) if chance.random() < _CANCELLED else -1
        self._requests.put(_request(base, count))
        try:
            for number in range(count + 1):
                if number == leaves_at:
                    return "cancelled"
                if slow and not number % 50:
                    time.sleep(chance.random() / 5)
                answer = next(self._call)
                inner = answer.infer_response
                final = inner.parameters["triton_final_response"].bool_param
                if answer.error_message:
                    return f"error: {answer.error_message}"
                if final != (number == count):
                    return f"wrong: the end after {number} responses of {count}"
                if not final and inner.raw_output_contents[0] != (base + np.float32(number)).tobytes():
                    return f"wrong: response {number} of {count}"
        except grpc.RpcError as error:
            return f"error: {error.code().name}"
        return "complete"

    def close(self) -> None:
        self._requests.put(None)
        self._call.cancel()


def _request(base: np.ndarray, count: int) -> service_pb2.ModelInferRequest:
    asked = service_pb2.ModelInferRequest(model_name=_MODEL)
    asked.inputs.add(name="base", datatype="FP32", shape=[16])
    asked.inputs.add(name="count", datatype="INT32", shape=[1])
    asked.raw_input_contents.extend((base.tobytes(), np.array([count], np.int32).tobytes()))
    asked.parameters["triton_enable_empty_final_response"].bool_param = True
    return asked


def told(clients: list[StreamClient]) -> Counter[str]:
    """Returns the outcomes of all clients' requests, counted."""
    return sum((client.seen for client in clients), Counter())
