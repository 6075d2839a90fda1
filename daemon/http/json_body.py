"""Bodies of control requests, and answers in JSON. Inference has its own ways (``exchange``)."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from daemon.http.whole_body import read_body
from shm.errors import InvalidArgument

#: What a control request may bring.
MAX_BODY = 1 << 20


async def fields(request: Request) -> dict[str, Any]:
    """The JSON object of a control request; an empty body is an empty object. Raises InvalidArgument."""
    body = await read_body(request, MAX_BODY)
    if not body.strip():
        return {}
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"failed to parse the request JSON buffer: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument("failed to parse the request JSON buffer: an object is expected")
    return value


def answer(value: Any, status: int = 200) -> Response:
    """A JSON answer: bytes as they are, anything else encoded."""
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return Response(body, status, media_type="application/json")
