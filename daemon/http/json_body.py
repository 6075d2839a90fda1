"""Bodies of control requests, and answers in JSON. Inference has its own ways (``exchange``)."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tensord.daemon.http import control_fields
from tensord.daemon.http.whole_body import read_body

#: What a control request may bring.
MAX_BODY = 1 << 20


async def fields(request: Request, required: bool = False) -> dict[str, Any]:
    """The fields of a control request, as ``control_fields.read`` has them. Raises InvalidArgument."""
    return control_fields.read(await read_body(request, MAX_BODY), required)


def answer(value: Any, status: int = 200) -> Response:
    """A JSON answer: bytes as they are, anything else encoded."""
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return Response(body, status, media_type="application/json")
