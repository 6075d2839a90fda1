"""Builds HTTP requests as four clients write them: their head, their JSON and its order, with binary tensors.

The heads are those that these clients send for a body of bytes and one header, `traceparent`. The JSON is tritonclient's, and for
the others that of `json.dumps`, of Go's `json.Marshal` and of a person.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

#: Makes a whole request of model, id, trace, inputs and the outputs' names; without id or trace where these are empty.
Writer = Callable[[str, str, str, Mapping[str, np.ndarray], tuple[str, ...]], bytes]


class Step(NamedTuple):
    """One step of a sequence: the sequence's id, and whether the step begins or ends it."""

    sequence_id: int
    start: bool
    end: bool

    @property
    def parameters(self) -> dict[str, int | bool]:
        """Returns the request's parameters, named as Triton's clients name them."""
        return {"sequence_id": self.sequence_id, "sequence_start": self.start, "sequence_end": self.end}


def tritonclient(
    model: str,
    id: str,
    trace: str,
    inputs: Mapping[str, np.ndarray],
    outputs: tuple[str, ...],
    step: Step | None = None,
) -> bytes:
    """Builds a request as tritonclient.http of 2.60 and later does."""
    last = {} if step is None else {"parameters": step.parameters}
    content = {**_id(id), "inputs": _inputs(inputs), "outputs": _outputs(outputs), **last}
    head = """User-Agent: python/gevent-http-client-2.6.1
{trace}
Inference-Header-Content-Length: {json_size}
Host: bench:8000
Content-Length: {size}"""
    return _joined(model, head, trace and f"traceparent: {trace}", content, inputs)


def requests(model: str, id: str, trace: str, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> bytes:
    """Builds a request as Python's requests does with a session: spaces in the JSON, all outputs asked for."""
    said = _inputs(inputs, "name", "datatype", "shape", "parameters")
    content = {"inputs": said, "parameters": {"binary_data_output": True}, **_id(id)}
    head = """Host: bench:8000
User-Agent: python-requests/2.34.2
Accept-Encoding: gzip, deflate
Accept: */*
Connection: keep-alive
Content-Type: application/octet-stream
Inference-Header-Content-Length: {json_size}
{trace}
Content-Length: {size}"""
    return _joined(model, head, trace and f"traceparent: {trace}", content, inputs, " ")


def go(model: str, id: str, trace: str, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> bytes:
    """Builds a request as Go's net/http does: its own fields, then the caller's by name, each word with a capital letter."""
    content = {**_id(id), "inputs": _inputs(inputs), "outputs": _outputs(outputs)}
    head = """Host: bench:8000
User-Agent: Go-http-client/1.1
Content-Length: {size}
Content-Type: application/octet-stream
Inference-Header-Content-Length: {json_size}
{trace}
Accept-Encoding: gzip"""
    return _joined(model, head, trace and f"Traceparent: {trace}", content, inputs)


def curl(model: str, id: str, trace: str, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> bytes:
    """Builds a request as curl does with `--data-binary`, with JSON as people type it."""
    said = _inputs(inputs, "datatype", "shape", "name", "parameters")
    content = {"outputs": _outputs(outputs), "inputs": said, **_id(id)}
    head = """Host: bench:8000
User-Agent: curl/7.88.1
Accept: */*
Content-Type: application/octet-stream
Inference-Header-Content-Length: {json_size}
{trace}
Content-Length: {size}"""
    return _joined(model, head, trace and f"traceparent: {trace}", content, inputs, " ")


def _id(id: str) -> dict[str, object]:
    return {"id": id} if id else {}


def _inputs(inputs: Mapping[str, np.ndarray], *order: str) -> list[dict[str, object]]:
    """Describes the tensors. ``order``: their keys as a client writes them; none: as tritonclient does."""
    described = []
    for name, values in inputs.items():
        size = {"binary_data_size": values.nbytes}
        said = {"name": name, "shape": values.shape, "datatype": "FP32", "parameters": size}
        described.append({key: said[key] for key in order or said})
    return described


def _outputs(outputs: tuple[str, ...]) -> list[dict[str, object]]:
    return [{"name": name, "parameters": {"binary_data": True}} for name in outputs]


def _joined(
    model: str, head: str, trace: str, content: object, inputs: Mapping[str, np.ndarray], space: str = ""
) -> bytes:
    """Builds the request. ``space``: what follows commas and colons of the JSON."""
    text = json.dumps(content, separators=(f",{space}", f":{space}")).encode()
    tensors = b"".join(values.tobytes() for values in inputs.values())
    fields = head.format(trace=trace, json_size=len(text), size=len(text) + len(tensors)).splitlines()
    lines = "\r\n".join((f"POST /v2/models/{model}/infer HTTP/1.1", *filter(None, fields)))
    return f"{lines}\r\n\r\n".encode() + text + tensors
