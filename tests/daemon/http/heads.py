"""Builds the JSON of inference requests, and decodes it."""

from __future__ import annotations

import json
from typing import Any

from tensord.daemon.http import json_cut, request_codec
from tensord.daemon.http.conversions import at_once
from tensord.daemon.http.decoded_request import DecodedRequest
from tensord.daemon.http.json_steps import JsonArray, JsonBase64, JsonStrings


def decode(head: bytes | memoryview, tail_size: int) -> DecodedRequest:
    return request_codec.decode(head, tail_size, "m", at_once(json_cut.steps(head)))


def input_text(data: str, datatype: str = "FP32", shape: str = "[1]") -> bytes:
    return f'{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":{shape},"data":{data}}}]}}'.encode()


def request_of(*inputs: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"inputs": inputs, **fields}).encode()


def tensor(name: str = "x", datatype: str = "FP32", shape: tuple[int, ...] = (1,), **fields: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **fields}


def content(decoded: DecodedRequest) -> bytes:
    ((_, _, _, source),) = decoded.inputs
    assert isinstance(source, bytes)
    return source


def filled(source: JsonArray | JsonBase64 | JsonStrings) -> bytes:
    """Converts a tensor of a request's JSON; returns its bytes."""
    place = bytearray(source.byte_size)
    steps = source.fill(memoryview(place))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bytes(place[: end.value])
