"""Writes models that call other models as a test tells them: the code that they run comes with the request."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.protocol.stepped_models import COUNTS
from tests.repositories import answering, ensemble, fields, scale_model, write_model

#: Runs the text ``code``, which leaves what is answered as ``said``.
SCRIPT = """
    import asyncio
    import json
    import threading
    import time

    import numpy as np
    import triton_python_backend_utils as pb

    def call(model, inputs, outputs=(), **more):
        tensors = [pb.Tensor(name, np.asarray(array)) for name, array in inputs.items()]
        return pb.InferenceRequest(model_name=model, inputs=tensors, requested_output_names=list(outputs), **more)

    def of(response):
        if response.has_error():
            return "error " + response.error().message()
        return {tensor.name(): [*map(text, tensor.as_numpy().tolist())] for tensor in response.output_tensors()}

    def text(value):
        return value.decode() if isinstance(value, bytes) else value

    def script(model, code):
        # What another one leaves as said.
        said = of(call(model, {"code": np.array([code], np.object_)}).exec())
        return said if isinstance(said, str) else json.loads(said["said"][0])

    class TritonPythonModel:
        def initialize(self, args):
            self.name = args["model_name"]

        def execute(self, requests):
            return [self.run(request) for request in requests]

        def run(self, request):
            code = pb.get_input_tensor_by_name(request, "code").as_numpy().ravel()[0].decode()
            scope = {**globals(), "request": request, "self": self}
            exec(code, scope)
            return self.answer(scope["said"])

        def answer(self, said):
            return pb.InferenceResponse([pb.Tensor("said", np.array([json.dumps(said)], np.object_))])
"""
#: The text defines ``main``, a coroutine function, which returns what is answered.
ASYNC = (
    SCRIPT
    + """
        async def execute(self, requests):
            return [await self.run(request) for request in requests]

        async def run(self, request):
            code = pb.get_input_tensor_by_name(request, "code").as_numpy().ravel()[0].decode()
            scope = {**globals(), "request": request, "self": self}
            exec(code, scope)
            return self.answer(await scope["main"]())
"""
)
#: The same, answered by a sender.
ASYNC_DECOUPLED = (
    ASYNC
    + """
        async def execute(self, requests):
            await asyncio.gather(*(self.stream(request) for request in requests))

        async def stream(self, request):
            sender = request.get_response_sender()
            sender.send(await self.run(request), pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)
#: Answers each of its numbers by itself.
REPEAT = """
    import numpy as np
    import triton_python_backend_utils as pb

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                for value in pb.get_input_tensor_by_name(request, "values").as_numpy():
                    if value < 0:
                        sender.send(pb.InferenceResponse(error=pb.TritonError("below zero", pb.TritonError.INVALID_ARG)))
                    else:
                        sender.send(pb.InferenceResponse([pb.Tensor("value", np.array([value], np.float32))]))
                sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
#: Says what it was asked with, or fails.
TELL = answering("""
    x = given(request)
    if x.ravel()[0] == -1:
        raise ValueError("no such number")
    if x.ravel()[0] == -2:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("not that one", pb_utils.TritonError.NOT_FOUND))
    said = {
        "id": request.request_id(), "sequence": request.correlation_id(), "flags": request.flags(),
        "timeout": request.timeout(), "parameters": json.loads(request.parameters()),
        "wanted": request.requested_output_names(),
    }
    return response({"size": x.size, "kind": "told"}, said=np.array([json.dumps(said)], np.object_), y=x)
""")
#: Holds its requests until they are cancelled, or a file is there.
GATE = answering("""
    path = pathlib.Path(given(request, "path").ravel()[0].decode())
    path.with_suffix(".began").touch()
    while not path.exists() and not request.is_cancelled():
        time.sleep(0.005)
    path.with_suffix(".cancelled" if request.is_cancelled() else ".done").touch()
    return response(code=np.array([1], np.int32))
""")
#: Sums what a sequence has sent.
SUMS = answering(
    """
    who, x = request.correlation_id(), given(request)
    if request.flags() & 1:
        self.sums[who] = 0
    self.sums[who] += x
    return response(y=np.asarray(self.sums[who], np.float32).reshape(x.shape))
    """,
    more="sums = {}",
)
SCRIPT_FIELDS = fields("code STRING 1", "said STRING 1")


def write(repository: Path) -> Path:
    """Writes the models that call, and those that are called; returns the repository."""
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(repository, "script", SCRIPT, SCRIPT_FIELDS)
    write_model(repository, "pair", SCRIPT, SCRIPT_FIELDS + "instance_group [ { count: 2 } ]")
    write_model(repository, "many", SCRIPT, SCRIPT_FIELDS + "instance_group [ { count: 8 } ]")
    write_model(repository, "other", SCRIPT, SCRIPT_FIELDS)
    write_model(repository, "async", ASYNC, SCRIPT_FIELDS)
    write_model(repository, "async_decoupled", ASYNC_DECOUPLED, SCRIPT_FIELDS + decoupled)
    write_model(repository, "repeat", REPEAT, fields("values FP32 -1", "value FP32 1", decoupled))
    write_model(repository, "tell", TELL, fields("x FP32 4", "y FP32 4, said STRING 1"))
    write_model(repository, "gate", GATE, fields("path STRING 1", "code INT32 1"))
    direct = "sequence_batching { oldest { max_candidate_sequences: 4 } max_sequence_idle_microseconds: 600000000 }"
    write_model(repository, "sums", SUMS, fields("x FP32 1", "y FP32 1", "max_batch_size: 4 " + direct))
    write_model(
        repository, "series", SCRIPT, SCRIPT_FIELDS + "sequence_batching { direct { } } instance_group [ { count: 2 } ]"
    )
    ordered = "dynamic_batching { preserve_ordering: true } instance_group [ { count: 2 } ]"
    write_model(repository, "ordered", SCRIPT, SCRIPT_FIELDS + ordered)
    needs = 'instance_group [ { rate_limiter { resources [ { name: "R" count: 1 } ] } } ]'
    for name in ("needs", "needs_too"):
        write_model(repository, name, SCRIPT, SCRIPT_FIELDS + needs)
    write_model(repository, "counts", COUNTS)
    scale_model(repository)
    steps = [("scale", {"x": "x"}, {"y": "middle"}), ("scale", {"x": "middle"}, {"y": "y"})]
    ensemble(repository, "twice", ["x FP32 4"], ["y FP32 4"], steps, 8)
    return repository


def run(client: Any, model: str, code: str, **more: Any) -> Any:
    """Sends a model its code; returns what the code leaves as ``said``, or its ``main`` returns."""
    given = (grpcclient if isinstance(client, grpcclient.InferenceServerClient) else httpclient).InferInput(
        "code", [1], "BYTES"
    )
    given.set_data_from_numpy(np.array([dedent(code).encode()], np.object_))
    return json.loads(client.infer(model, [given], **more).as_numpy("said")[0])
