"""The body of a request that Starlette answers, whole and bounded."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request


async def read_body(request: Request, limit: int) -> bytes:
    """Raises HTTPException 413: more than ``limit`` bytes; no more of it is kept."""
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise HTTPException(413, f"the request body has more than {limit} bytes, at most {limit} are allowed")
        pieces.append(piece)
    return b"".join(pieces)
