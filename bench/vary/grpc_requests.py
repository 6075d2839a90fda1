"""Builds gRPC requests as several clients write them: a ModelInferRequest each, and the frames that carry it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from tritonclient.grpc import service_pb2

from bench import grpc_frames
from bench.vary.http_requests import Step
from tensord.daemon.grpc import frames

#: Makes a message of model, id, inputs and the outputs' names.
Writer = Callable[[str, str, Mapping[str, np.ndarray], tuple[str, ...]], bytes]


def tritonclient(
    model: str, id: str, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...], step: Step | None = None
) -> bytes:
    """Builds a message as tritonclient.grpc does when it is told which outputs are wanted."""
    return _message(model, id, inputs, outputs, step=step)


def all_outputs(model: str, id: str, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> bytes:
    """Builds a message that names no output, as Triton's Java and JavaScript examples do."""
    return _message(model, id, inputs, ())


def versioned(model: str, id: str, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> bytes:
    """Builds a message with a version, as Triton's Go example does."""
    return _message(model, id, inputs, outputs, version="1")


def reordered(model: str, id: str, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> bytes:
    """Builds a message with inputs and outputs in reverse order, as a client may that keeps them in a hash table."""
    return _message(model, id, dict(reversed(inputs.items())), outputs[::-1])


def _message(
    model: str,
    id: str,
    inputs: Mapping[str, np.ndarray],
    outputs: tuple[str, ...],
    version: str = "",
    step: Step | None = None,
) -> bytes:
    message = service_pb2.ModelInferRequest(
        model_name=model,
        model_version=version,
        id=id,
        inputs=[
            service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype="FP32", shape=values.shape)
            for name, values in inputs.items()
        ],
        outputs=[service_pb2.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in outputs],
        raw_input_contents=[values.tobytes() for values in inputs.values()],
    )
    for name, value in ({} if step is None else step.parameters).items():
        setattr(message.parameters[name], "bool_param" if isinstance(value, bool) else "int64_param", value)
    content = message.SerializeToString()
    assert isinstance(content, bytes)
    return content


def unary(message: bytes) -> bytes:
    """Builds the frames of a unary call on stream 0."""
    return grpc_frames.call(0, message)


def unary_with(block: bytes, message: bytes) -> bytes:
    """Builds the frames of a unary call on stream 0 with a given header block."""
    return frames.frame(frames.HEADERS, frames.END_HEADERS, 0, block) + grpc_frames.data(0, message)


def on_stream(message: bytes) -> bytes:
    """Builds the DATA frame of a message on a stream that is already open."""
    return grpc_frames.data(0, message, flags=0)


def opening(streams: bool) -> bytes:
    """Returns the bytes that begin a connection; with ``streams`` they also open ModelStreamInfer as stream 1."""
    # A stream carries many answers: the client in C grants its window again.
    return grpc_frames.HELLO + (grpc_frames.headers("ModelStreamInfer", 1) if streams else b"")
