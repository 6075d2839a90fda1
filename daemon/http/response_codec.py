"""An inference answer as HTTP bytes: JSON head, binary parts, response line. Sans-I/O.

binary answer   | JSON head (Inference-Header-Content-Length bytes) | part | part | ...     parts in the order of ``outputs``
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from shm.arrays import array
from shm.errors import InvalidArgument
from shm.messages import Completion, Inline, RegionSlice, Slice, Tensor

Buffer = bytes | memoryview
_encode = msgspec.json.Encoder().encode
_REASONS = {200: b"OK", 400: b"Bad Request", 403: b"Forbidden", 404: b"Not Found", 405: b"Method Not Allowed"}
_REASONS |= {408: b"Request Timeout"}
_REASONS |= {413: b"Content Too Large", 431: b"Request Header Fields Too Large", 500: b"Internal Server Error"}
_REASONS |= {501: b"Not Implemented", 503: b"Service Unavailable", 505: b"HTTP Version Not Supported"}
#: The header line that ends a connection.
CLOSE = b"Connection: close\r\n"


def encode(
    completion: Completion,
    model: str,
    client_id: str,
    binary: dict[str, bool],
    all_binary: bool,
    view: Callable[[Slice], memoryview],
) -> tuple[bytes, list[Buffer]]:
    """The JSON head and the binary parts of a good answer.

    Args:
      binary: what the request said of single outputs; the others are as ``all_binary`` says.
      view: the bytes of a slice of the response arena.
    Raises: InvalidArgument: an output cannot be written as JSON; the text says which and what to do.
    """
    parts: list[Buffer] = []
    outputs: list[dict[str, Any]] = []
    for tensor in completion.outputs:
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        place = tensor.place
        if type(place) is not RegionSlice:
            content = place.content if type(place) is Inline else view(place)  # type: ignore[arg-type]
            if binary.get(tensor.name, all_binary):
                entry["parameters"] = {"binary_data_size": len(content)}
                parts.append(content)
            else:
                entry["data"] = json_data(tensor, content)
        outputs.append(entry)
    head: dict[str, Any] = {"id": client_id} if client_id else {}
    head["model_name"] = model
    head["model_version"] = str(completion.version)
    if completion.parameters:
        head["parameters"] = completion.parameters
    head["outputs"] = outputs
    return _encode(head), parts


def json_data(tensor: Tensor, content: Buffer) -> Any:
    """The flat values of an output, as a list or as JSON text. Raises InvalidArgument: they cannot be written as JSON."""
    datatype, name = tensor.datatype, tensor.name
    if datatype in ("FP16", "BF16"):
        raise InvalidArgument(
            f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
        )
    values = array(content, datatype, tensor.shape, f"output '{name}'")
    if datatype == "BYTES":
        try:
            return [value.decode() for value in values.ravel()]
        except UnicodeDecodeError as error:
            raise InvalidArgument(
                f"output '{name}' holds bytes that are not UTF-8 text. Please use the binary data format for output {name}"
            ) from error
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        # Not JSON, but what Triton writes and its clients read; msgspec would write null.
        return msgspec.Raw(json.dumps(values.ravel().tolist(), separators=(",", ":")).encode())
    return values.ravel().tolist()


def response_head(json_size: int, parts: list[Buffer], connection: bytes = b"") -> bytes:
    """Response line and headers of a good answer; ``connection``: the line about the connection, empty or whole."""
    total = json_size + sum(len(part) for part in parts)
    if total == json_size:
        return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n" % (
            connection,
            total,
        )
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n"
        b"Inference-Header-Content-Length: %d\r\n%bContent-Length: %d\r\n\r\n" % (json_size, connection, total)
    )


def compressed_head(json_size: int | None, coding: str, byte_size: int, connection: bytes = b"") -> bytes:
    """The same of an answer that is compressed to ``byte_size`` bytes.

    Args:
      json_size: bytes of the JSON before it was compressed; None: the answer has no binary parts.
    """
    binary = b"" if json_size is None else b"Inference-Header-Content-Length: %d\r\n" % json_size
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/%b\r\n%bContent-Encoding: %b\r\n%bContent-Length: %d\r\n\r\n"
        % (
            b"json" if json_size is None else b"octet-stream",
            binary,
            coding.encode(),
            connection,
            byte_size,
        )
    )


def error_response(status: int, message: str, connection: bytes = b"") -> bytes:
    """A whole error answer: always a JSON object with ``error``."""
    body = _encode({"error": message})
    retry = b"Retry-After: 1\r\n" if status == 503 else b""
    return (
        b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\n%b%bContent-Length: %d\r\n\r\n"
        % (status, _REASONS[status], retry, connection, len(body))
    ) + body
