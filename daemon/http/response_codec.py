"""Encodes the answer to an inference request as an HTTP response: status line, headers, JSON, binary parts. Sans-I/O.

binary answer   | JSON head (Inference-Header-Content-Length bytes) | part | part | ...     parts in the order of ``outputs``
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from http import HTTPStatus
from typing import Any, TypeGuard

import msgspec

from tensord.daemon.http import json_text
from tensord.daemon.http.decoded_request import DecodedRequest
from tensord.daemon.http.json_text import View
from tensord.shm.messages import Buffer, Content, PreparedAnswer, PreparedTensor, RegionSlice, Slice, placed

_encode = msgspec.json.Encoder().encode
_STATUS_LINES = {each.value: b"HTTP/1.1 %d %b\r\n" % (each, each.phrase.encode()) for each in HTTPStatus}
# Its name since RFC 9110, which HTTPStatus has in newer Pythons alone.
_STATUS_LINES[413] = b"HTTP/1.1 413 Content Too Large\r\n"
#: Tensors of more bytes are written in steps.
_LARGE = 64 << 10
#: Stands for a tensor's text in the head. No model knows it.
_PLACEHOLDER = f'"{secrets.token_hex(16)}"'.encode()
#: The header line that ends a connection.
CLOSE = b"Connection: close\r\n"


def encode(
    prepared: PreparedAnswer,
    contents: tuple[Content, ...],
    model: str,
    client_id: str,
    asked: DecodedRequest,
    view: View,
    in_steps: bool = False,
) -> tuple[bytes, list[Buffer]]:
    """Encodes an answer that is no error. Returns the JSON, and the bytes of each tensor that is sent as binary data.

    Args:
      prepared: the part of the answer that repeats.
      contents: the bytes of each output, or their slice of the response arena.
      model: the name of the model.
      client_id: the id of the request, or "" if it has none.
      asked: the request, which says which outputs are binary.
      view: returns the bytes of a slice of the response arena.
      in_steps: whether the JSON gets ``_PLACEHOLDER`` in place of each tensor that ``large_texts`` returns.
    Raises InvalidArgument if an output cannot be written as JSON.
    """
    parts: list[Buffer] = []
    outputs: list[dict[str, Any]] = []
    for tensor, place in placed(prepared.outputs, contents):
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if type(place) is not RegionSlice:
            content = place if type(place) is bytes else view(place)  # type: ignore[arg-type]
            if asked.binary.get(tensor.name, asked.all_binary):
                entry["parameters"] = {"binary_data_size": len(content)}
                parts.append(content)
            else:
                apart = in_steps and _is_large(place)
                entry["data"] = msgspec.Raw(_PLACEHOLDER if apart else json_text.writer(tensor)(content))
        outputs.append(entry)
    head: dict[str, Any] = {"id": client_id} if client_id else {}
    head["model_name"] = model
    head["model_version"] = str(prepared.version)
    if prepared.parameters:
        head["parameters"] = prepared.parameters
    head["outputs"] = outputs
    return _encode(head), parts


def large_texts(
    prepared: PreparedAnswer, contents: tuple[Content, ...], asked: DecodedRequest
) -> list[tuple[PreparedTensor, Slice]]:
    """Returns the outputs that the answer has as JSON and that are too large to be written at once, each with its arena slice.

    The arguments are those of ``encode``.
    """
    return [
        (tensor, place)
        for tensor, place in placed(prepared.outputs, contents)
        if _is_large(place) and not asked.binary.get(tensor.name, asked.all_binary)
    ]


def _is_large(place: Content | RegionSlice) -> TypeGuard[Slice]:
    return type(place) is Slice and place.byte_size > _LARGE


def encode_in_steps(
    prepared: PreparedAnswer,
    contents: tuple[Content, ...],
    model: str,
    client_id: str,
    asked: DecodedRequest,
    view: View,
) -> Generator[None, None, tuple[list[Buffer], list[Buffer]]]:
    """Encodes an answer that is no error, as ``encode`` does, and yields after each piece of the JSON of a large tensor.

    Returns the pieces of the JSON head, and the binary tensors. The arguments are those of ``encode``.
    Raises InvalidArgument if an output cannot be written as JSON.
    """
    texts: list[list[Buffer]] = []
    for tensor, place in large_texts(prepared, contents, asked):
        text: list[Buffer] = []
        for piece in json_text.pieces(tensor, view(place)):
            text.append(piece)
            yield
        texts.append(text)
    head, parts = encode(prepared, contents, model, client_id, asked, view, in_steps=True)
    pieces: list[Buffer] = []
    for number, rest in enumerate(head.split(_PLACEHOLDER)):
        pieces += [*texts[number - 1], rest] if number else [rest]
    return pieces, parts


def response_head(json_size: int, tail_size: int, lines: bytes = b"", compressed_size: int | None = None) -> bytes:
    """Returns the status line and headers of an answer that is no error.

    Args:
      json_size: the number of bytes of JSON in the body, before compression.
      tail_size: the number of bytes of binary tensors that follow the JSON, or 0.
      lines: further header lines, each with its line end.
      compressed_size: the number of bytes of the compressed body, or None if the body is not compressed.
    """
    total = json_size + tail_size if compressed_size is None else compressed_size
    if not tail_size:
        return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n" % (lines, total)
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n"
        b"Inference-Header-Content-Length: %d\r\n%bContent-Length: %d\r\n\r\n" % (json_size, lines, total)
    )


def timing_line(timing: tuple[int, int, int]) -> bytes:
    """Returns the Tensord-Timing header line.

    ``timing``: the ns in the queue, the ns of computing, and the number of bytes that were copied.
    """
    return b"Tensord-Timing: queue-ns=%d, compute-ns=%d, copied-bytes=%d\r\n" % timing


def status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def error_response(status: int, message: str, lines: bytes = b"") -> bytes:
    """Returns a response with ``status``, whose body is the message as JSON.

    ``lines``: further header lines, each with its line end.
    """
    body = _encode({"error": message})
    retry = b"Retry-After: 1\r\n" if status == 503 else b""
    return (
        b"%bContent-Type: application/json\r\n%b%bContent-Length: %d\r\n\r\n"
        % (status_line(status), retry, lines, len(body))
    ) + body
