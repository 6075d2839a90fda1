"""Runs the ASGI application (Starlette) for one HTTP request other than inference, once earlier requests are answered.

    head, body ─▶ AsgiRequest ─receive─▶ application ─send─▶ AsgiRequest ─▶ socket

``AsgiRequest`` adds the HTTP framing to the answer, which the application must send in one piece. It also sends
``100 Continue`` if the client waits for that before it sends the body.
Source: ASGI 3.0, "HTTP & WebSocket ASGI Message Format"; RFC 9112.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from tensord.daemon.http.response_codec import CLOSE, error_response, status_line
from tensord.daemon.http.serving import HttpServing
from tensord.shm.errors import DEFECT

if TYPE_CHECKING:
    from tensord.daemon.http.answer_order import AnswerOrder

_log = logging.getLogger(__name__)
#: The client is not read while so much of a body waits for the application.
_MAX_WAITING = 64 << 10
#: How the paths of readiness and liveness end.
_PROBED = ("/ready", "/live")
#: Statuses whose answers have no body.
_BODILESS = (204, 304)
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")


class _Error(msgspec.Struct):
    error: str


class AsgiRequest:
    """One HTTP request that is no inference request. ``keep_alive``: whether the connection stays open after the answer."""

    def __init__(self, serving: HttpServing, scope: dict[str, Any], order: AnswerOrder, keep_alive: bool) -> None:
        self._serving = serving
        self._scope = scope
        self._order = order
        self.keep_alive = keep_alive
        #: Bytes of its body that came; which of them were not taken; whether there are more to come.
        self.received = 0
        self._body = bytearray()
        self._more_body = True
        #: Something happened that ``_receive`` waits for.
        self._news = asyncio.Event()
        self._gone = False
        #: The message that begins the answer.
        self._start: Any = None
        self._answered = False

    # ------------------------------------------------------------------------------------------- the connection's side

    def receive(self, chunk: bytes) -> None:
        """Adds ``chunk``, a piece of the body, to what the application will read.

        If the answer is already complete, the piece is dropped.
        """
        self.received += len(chunk)
        if not self._answered:
            self._body += chunk
            if len(self._body) > _MAX_WAITING:
                self._order.flow.pause_reading()
            self._news.set()

    def complete(self) -> None:
        """Notes that the body is complete."""
        self._more_body = False
        self._news.set()

    def take_turn(self) -> None:
        """Starts the application, because all earlier requests of the connection are answered."""
        tasks = self._serving.tasks
        task = asyncio.create_task(self._run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def abandon(self) -> None:
        """Reports to the application that the client has disconnected. What the application still answers is discarded."""
        self._gone = True
        self._news.set()

    # ------------------------------------------------------------------------------------------ the application's side

    async def _run(self) -> None:
        try:
            await self._serving.application(self._scope, self._receive, self._send)
        except Exception:
            _log.exception("the ASGI application failed")
        if not (self._answered or self._gone):
            _log.error("the ASGI application left a request without a complete answer")
            self.keep_alive = False
            self._order.transport.write(error_response(500, DEFECT, CLOSE))
            self._finish(500, b"")

    async def _receive(self) -> dict[str, Any]:
        self._order.ask_for_body(self)
        if not (self._gone or self._answered):
            self._order.flow.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self._gone or self._answered:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self._more_body}

    async def _send(self, message: Any) -> None:
        if self._gone:
            return
        kind = message["type"]
        if kind == "http.response.start" and self._start is None:
            self._order.forgo_body(self)
            self._start = message
        elif kind == "http.response.body" and self._start and not (self._answered or message.get("more_body")):
            self._write(self._start["status"], self._start.get("headers", ()), message.get("body", b""))
        else:
            raise RuntimeError(f"the ASGI message '{kind}' is out of place, or has a part of an answer")

    def _write(self, status: int, fields: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Writes the whole answer, with ``status``, header ``fields`` and ``body``."""
        lines = [status_line(status)]
        if self.keep_alive and self._scope["http_version"] == "1.0":
            # Who speaks HTTP/1.0 must be told that the connection stays.
            lines.append(b"connection: keep-alive\r\n")
        closes, length = False, b"" if status in _BODILESS else None
        for name, value in fields:
            name = name.lower()
            if not (_NAME.fullmatch(name) and _VALUE.fullmatch(value)):
                raise RuntimeError(f"{name!r}: {value!r} is no header field")
            if name == b"content-length":
                length = value
            elif name == b"connection" and b"close" in value.lower():
                closes, self.keep_alive = True, False
            lines.append(b"%b: %b\r\n" % (name, value))
        if length != (b"" if status in _BODILESS else b"%d" % len(body)):
            raise RuntimeError(f"the answer's body has {len(body)} bytes, its Content-Length is {length!r}")
        if not (self.keep_alive or closes):
            lines.append(CLOSE.lower())
        sent = b"" if self._scope["method"] == "HEAD" or status in _BODILESS else body
        self._order.transport.write(b"".join((*lines, b"\r\n", sent)))
        self._finish(status, body)

    def _finish(self, status: int, body: bytes) -> None:
        self._answered = True
        self._news.set()
        # A probe that hears "not ready" has made no mistake.
        if status < 400 or self._scope["path"].endswith(_PROBED):
            self._serving.answered.managed(str(status))
        else:
            scope = self._scope
            what = f"{scope['method']} {scope['path']}{_sentence(body)}"
            self._serving.answered.failed(str(status), what, account=self._order.account)
        self._order.answered()


def _sentence(body: bytes) -> str:
    """Returns a colon and the error message that the JSON in ``body`` has, or "" if ``body`` has no error message."""
    with contextlib.suppress(msgspec.DecodeError):
        return f": {msgspec.json.decode(body, type=_Error).error}"
    return ""
