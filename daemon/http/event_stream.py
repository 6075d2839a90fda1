"""An answer in server-sent events: ``data: <JSON>`` and an empty line each, sent as they come.

Source: WHATWG HTML "Server-sent events"; Triton docs/protocol/extension_generate.md.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tensord.shm.errors import InvalidArgument

_MEDIA_TYPE = "text/event-stream; charset=utf-8"

T = TypeVar("T")


class EventStream(Response):
    """Sends ``events``, JSON objects of one line each, until there are no more.

    ``most``: bytes that are kept for a client of HTTP/1.0, which gets all of them at once.
    """

    media_type = _MEDIA_TYPE

    def __init__(self, events: AsyncIterator[bytes], most: int, status_code: int = 200) -> None:
        super().__init__(None, status_code)
        # Nobody knows its length yet.
        del self.headers["content-length"]
        self._events = events
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] == "1.0":
            # That version has no chunks: the length has to be known.
            body = bytearray()
            async for event in self._events:
                body += _event(event)
                if len(body) > self._most:
                    raise InvalidArgument(
                        f"the events have {len(body)} bytes so far, at most {self._most} are kept for an answer of HTTP/1.0"
                    )
            await Response(bytes(body), self.status_code, media_type=_MEDIA_TYPE)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": _event(event), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``, or None where the client left before: then it was cancelled. The request's body is read already."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
