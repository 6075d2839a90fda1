"""Writes models that answer a request with several responses, in every way there is, and provides a client for them."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.repositories import applying, fields, write_model

CONFIG = fields("n INT32 1, say STRING 1 ?", "y INT32 -1", "model_transaction_policy { decoupled: true }")

_HEAD = """
    import asyncio, threading
    import numpy as np
    import triton_python_backend_utils as pb_utils

    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    kept = []

    def read(request):
        n = int(pb_utils.get_input_tensor_by_name(request, "n").as_numpy()[0])
        say = pb_utils.get_input_tensor_by_name(request, "say")
        return n, "" if say is None else say.as_numpy()[0].decode()

    def response(*values, **more):
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array(values, np.int32))], **more)

    def bad(text):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))

    def refused(call, *arguments, **more):
        try:
            call(*arguments, **more)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"
"""
#: What it sends for each word of ``say``, after 0 .. n - 1.
TALKS = (
    _HEAD
    + """
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                self.answer(request, request.get_response_sender())

        def answer(self, request, sender):
            n, say = read(request)
            buffer = np.zeros(1, np.int32)
            for i in range(n):
                buffer[0] = i
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", buffer)]))
            for word in say.split():
                if word == "error":
                    sender.send(bad("element is bad"))
                elif word == "empty":
                    sender.send(pb_utils.InferenceResponse([]))
                elif word == "told":
                    sender.send(response(7, parameters={"why": "told", "times": 3}))
                elif word == "large":
                    sender.send(response(*range(1 << 16)))
                elif word == "wrong":
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros(2, np.float64))]))
                elif word == "raise":
                    raise ValueError("in the middle")
                elif word == "drop":
                    return
                elif word == "keep":
                    kept.append(sender)
                    return
                elif word == "last":
                    return sender.send(response(9), FINAL)
                elif word == "twice":
                    sender.send(flags=FINAL)
                    sender.send(bad(refused(sender.send, flags=FINAL)), FINAL)
                elif word == "nothing":
                    sender.send(bad(refused(sender.send)))
                elif word == "flags":
                    sender.send(bad(refused(sender.send, response(1), 4)))
            sender.send(flags=FINAL)
    """
)
THREADS = (
    _HEAD
    + """
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                thread = threading.Thread(target=self.answer, args=(request.get_response_sender(), *read(request)))
                thread.start()

        def answer(self, sender, n, say):
            for i in range(n):
                sender.send(response(i))
            if say == "drop":
                return
            sender.send(flags=FINAL)
    """
)
COROUTINES = (
    _HEAD
    + """
    class TritonPythonModel:
        async def execute(self, requests):
            for request in requests:
                sender, (n, say) = request.get_response_sender(), read(request)
                for i in range(n):
                    await asyncio.sleep(0.001)
                    sender.send(response(i))
                if say == "raise":
                    raise ValueError("in the middle")
                sender.send(flags=FINAL)
    """
)
#: A response in each of ``n`` rounds.
ROUNDS = (
    _HEAD
    + """
    class TritonPythonModel:
        rounds = {}

        def execute(self, requests):
            for request in requests:
                n, _ = read(request)
                number = self.rounds.pop(request.correlation_id(), 0)
                sender = request.get_response_sender()
                sender.send(response(number))
                if number + 1 < n:
                    self.rounds[request.correlation_id()] = number + 1
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                else:
                    sender.send(flags=FINAL)
    """
)
#: Not decoupled.
ONCE = (
    _HEAD
    + """
    class TritonPythonModel:
        def execute(self, requests):
            answers = []
            for request in requests:
                n, say = read(request)
                sender = request.get_response_sender() if say else None
                if say == "send":
                    sender.send(response(n), FINAL)
                elif say == "later":
                    threading.Timer(0.01, lambda: (sender.send(response(n)), sender.send(flags=FINAL))).start()
                elif say == "twice":
                    sender.send(response(n))
                    kept.append(refused(sender.send, response(n)))
                elif say == "said":
                    sender.send(bad(kept.pop()), FINAL)
                elif say == "final":
                    sender.send(bad(refused(sender.send, flags=FINAL)), FINAL)
                elif say == "drop":
                    pass
                elif say == "again":
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                answers.append(None if say else response(n))
            return answers
    """
)
ASYNC_ONCE = (
    _HEAD
    + """
    class TritonPythonModel:
        async def execute(self, requests):
            await asyncio.sleep(0)
            return [response(read(request)[0]) for request in requests]
    """
)
RETURNS = (
    _HEAD
    + """
    class TritonPythonModel:
        def execute(self, requests):
            return [response(1) for _ in requests]
    """
)
#: Ours: large responses where there are many. It says in a file of its folder how often it was closed.
COUNTS = """
    import time
    import numpy as np
    import jax, jax.numpy as jnp

    inputs = {"n": "INT32[1]"}
    outputs = {"y": "INT32[w]"}
    host = HOST

    def create(path, config, device):
        step = jax.jit(lambda x: x + 1)

        def apply(params, inputs):
            n = int(inputs["n"][0])
            x = jnp.full(1 if n < 1000 else 4096, -1, jnp.int32)
            try:
                for i in range(abs(n)):
                    x = step(x)
                    time.sleep(SECONDS)
                    if i == 5 and n < 0:
                        raise ValueError("five")
                    yield {"y": x} if i != 3 else ({"y": np.asarray(x)}, {"third": True})
            except GeneratorExit:
                with open(path / "closed", "a") as file:
                    file.write(".")
                raise
        return apply, {}
"""


#: In 64 bits: 2**40, 2**40 + 1, ...
WIDE = applying(
    """
    for i in range(int(inputs["n"][0])):
        yield {"y": jnp.full(1, 2**40, jnp.int64) + i}
    """,
    "n INT32[1]",
    "y INT64[1]",
)


def write_streaming_models(models: Path) -> None:
    """Writes decoupled models, and ``once`` and ``async_once``, which are not."""
    for name, source in (("talks", TALKS), ("threads", THREADS), ("coroutines", COROUTINES), ("returns", RETURNS)):
        write_model(models, name, source, CONFIG)
    write_model(models, "rounds", ROUNDS, CONFIG + "sequence_batching { iterative_sequence: true oldest { } }")
    no_rounds = CONFIG + "dynamic_batching { }"
    for name, source in (("no_rounds", ROUNDS), ("no_async_rounds", ROUNDS.replace("def exec", "async def exec"))):
        write_model(models, name, source, no_rounds)
    for name, source in (("once", ONCE), ("async_once", ASYNC_ONCE)):
        write_model(models, name, source, CONFIG.replace("decoupled: true", "decoupled: false"))
    write_model(models, "wide", WIDE)
    write_model(models, "counts", COUNTS.replace("HOST", "False").replace("SECONDS", "0"))
    write_model(models, "host_counts", COUNTS.replace("HOST", "True").replace("SECONDS", "0"))
    write_model(models, "slow_counts", COUNTS.replace("HOST", "True").replace("SECONDS", "0.002"))


class Stream:
    """One gRPC stream of requests to these models, whose responses are read in order."""

    def __init__(self, url: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._channel = grpc.insecure_channel(url)
        self._requests: queue.SimpleQueue[service_pb2.ModelInferRequest | None] = queue.SimpleQueue()
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self.call = stub.ModelStreamInfer(iter(self._requests.get, None), metadata=metadata)

    def ask(self, model: str, n: int, say: str = "", request_id: str = "", marks: bool = True) -> None:
        """Sends a request. ``marks``: its final mark is sent even where it is no response."""
        asked = service_pb2.ModelInferRequest(model_name=model, id=request_id)
        asked.inputs.add(name="n", datatype="INT32", shape=[1])
        asked.raw_input_contents.append(np.array([n], np.int32).tobytes())
        if say:
            asked.inputs.add(name="say", datatype="BYTES", shape=[1])
            asked.raw_input_contents.append(len(say).to_bytes(4, "little") + say.encode())
        if marks:
            asked.parameters["triton_enable_empty_final_response"].bool_param = True
        self.send(asked)

    def send(self, asked: service_pb2.ModelInferRequest) -> None:
        self._requests.put(asked)

    def half_close(self) -> None:
        self._requests.put(None)

    def take(self) -> tuple[str, Any, bool]:
        """Returns the next response: its request's id; its values, an error's text, or None for a mark; whether it is final."""
        answer = next(self.call)
        inner = answer.infer_response
        final = inner.parameters["triton_final_response"].bool_param
        if answer.error_message:
            return inner.id, answer.error_message, final
        if not inner.outputs:
            return inner.id, None if final else [], final
        return inner.id, np.frombuffer(inner.raw_output_contents[0], np.int32).tolist(), final

    def answers(self, model: str, n: int, say: str = "") -> list[Any]:
        """Sends a request and returns all its responses; errors as their text, a mark without a response as None."""
        self.ask(model, n, say)
        found: list[Any] = []
        final = False
        while not final:
            _, value, final = self.take()
            found.append(value)
        return found

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.half_close()
        self.call.cancel()
        self._channel.close()
