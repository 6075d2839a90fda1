"""Builds HTTP requests as four clients write them: their head, their JSON and its order, with binary tensors.

The heads are those that these clients send for a body of bytes and one header, `traceparent`. The JSON is tritonclient's, and for
the others that of `json.dumps`, of Go's `json.Marshal` and of a person.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.vary.step import Step

#: Makes a whole request of model, id, trace, inputs and the outputs' names; without id or trace where these are empty.
Writer = Callable[[str, str, str, Mapping[str, np.ndarray], tuple[str, ...]], bytes]


def tritonclient(
    model: str,
    id: str,
    trace: str,
    inputs: Mapping[str, np.ndarray],
    outputs: tuple[str, ...],
    step: Step | None = None,
) -> bytes:
    """Builds a request as tritonclient.http of 2.60 and later does."""
    said = {"id": id} if id else {}
    last = {} if step is None else {"parameters": step.parameters}
    content, tensors = _body(
        {
            **said,
            "inputs": _described(inputs),
            "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
            **last,
        },
        inputs,
    )
    return _joined(
        model,
        "User-Agent: python/gevent-http-client-2.6.1",
        trace and f"traceparent: {trace}",
        f"Inference-Header-Content-Length: {len(content)}",
        "Host: bench:8000",
        f"Content-Length: {len(content) + len(tensors)}",
        body=content + tensors,
    )


def requests(model: str, id: str, trace: str, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> bytes:
    """Builds a request as Python's requests does with a session: spaces in the JSON, all outputs asked for."""
    said = {"id": id} if id else {}
    content, tensors = _body(
        {
            "inputs": [
                {"name": name, "datatype": "FP32", "shape": values.shape, "parameters": _size(values)}
                for name, values in inputs.items()
            ],
            "parameters": {"binary_data_output": True},
            **said,
        },
        inputs,
        spaces=True,
    )
    return _joined(
        model,
        "Host: bench:8000",
        "User-Agent: python-requests/2.34.2",
        "Accept-Encoding: gzip, deflate",
        "Accept: */*",
        "Connection: keep-alive",
        "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {len(content)}",
        trace and f"traceparent: {trace}",
        f"Content-Length: {len(content) + len(tensors)}",
        body=content + tensors,
    )


def go(model: str, id: str, trace: str, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> bytes:
    """Builds a request as Go's net/http does: its own fields, then the caller's by name, each word with a capital letter."""
    said = {"id": id} if id else {}
    content, tensors = _body(
        {
            **said,
            "inputs": _described(inputs),
            "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
        },
        inputs,
    )
    return _joined(
        model,
        "Host: bench:8000",
        "User-Agent: Go-http-client/1.1",
        f"Content-Length: {len(content) + len(tensors)}",
        "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {len(content)}",
        trace and f"Traceparent: {trace}",
        "Accept-Encoding: gzip",
        body=content + tensors,
    )


def curl(model: str, id: str, trace: str, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> bytes:
    """Builds a request as curl does with `--data-binary`, with JSON as people type it."""
    said = {"id": id} if id else {}
    content, tensors = _body(
        {
            "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
            "inputs": [
                {"datatype": "FP32", "shape": values.shape, "name": name, "parameters": _size(values)}
                for name, values in inputs.items()
            ],
            **said,
        },
        inputs,
        spaces=True,
    )
    return _joined(
        model,
        "Host: bench:8000",
        "User-Agent: curl/7.88.1",
        "Accept: */*",
        "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {len(content)}",
        trace and f"traceparent: {trace}",
        f"Content-Length: {len(content) + len(tensors)}",
        body=content + tensors,
    )


def _described(inputs: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": values.shape, "datatype": "FP32", "parameters": _size(values)}
        for name, values in inputs.items()
    ]


def _size(values: np.ndarray) -> dict[str, int]:
    return {"binary_data_size": values.nbytes}


def _body(content: object, inputs: Mapping[str, np.ndarray], spaces: bool = False) -> tuple[bytes, bytes]:
    """Returns the JSON, and the bytes of all tensors that follow it."""
    separators = (", ", ": ") if spaces else (",", ":")
    return json.dumps(content, separators=separators).encode(), b"".join(values.tobytes() for values in inputs.values())


def _joined(model: str, *fields: str, body: bytes) -> bytes:
    """Builds the request from its head's fields and its body; empty fields are left out."""
    head = "\r\n".join((f"POST /v2/models/{model}/infer HTTP/1.1", *filter(None, fields)))
    return f"{head}\r\n\r\n".encode() + body
