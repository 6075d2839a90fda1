"""Runs the ASGI application (Starlette) for one HTTP request other than inference, once earlier requests are answered.

    head, body ─▶ AsgiRequest ─receive─▶ application ─send─▶ AsgiRequest ─▶ socket

This is the server's side of ASGI: it frames the answer, asks for the body if the client waits for ``100 Continue``, and lets the
application wait while the client does not read the answer.
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
    """The JSON body of an error response."""

    error: str


class AsgiRequest:
    """One HTTP request that the ASGI application answers: any request other than inference.

    Args:
      order: the order of answers of the request's connection.
    """

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
        #: The answer's head, from its start to the first bytes of its body.
        self._head = b""
        self._begun = self._answered = False
        self._status = 0
        #: The first bytes of the body of an answer that is an error.
        self._said = b""
        #: Bytes that the answer still owes; None: it is sent in chunks.
        self._owed: int | None = 0

    # ------------------------------------------------------------------------------------------- the connection's side

    def receive(self, chunk: bytes) -> None:
        """Receives a piece of the request's body for the application, or discards it if the answer is already complete."""
        self.received += len(chunk)
        if not self._answered:
            self._body += chunk
            if len(self._body) > _MAX_WAITING:
                self._order.flow.pause_reading()
            self._news.set()

    def complete(self) -> None:
        """Marks the body as complete; the application is told so once it has read all received bytes."""
        self._more_body = False
        self._news.set()

    def take_turn(self) -> None:
        """Starts the application, once every earlier request of the connection is answered."""
        tasks = self._serving.tasks
        task = asyncio.create_task(self._run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def abandon(self) -> None:
        """Reports to the application that the client has disconnected, and discards what the application still answers."""
        self._gone = True
        self._news.set()

    # ------------------------------------------------------------------------------------------ the application's side

    async def _run(self) -> None:
        try:
            await self._serving.application(self._scope, self._receive, self._send)
        except Exception:
            _log.exception("the ASGI application failed")
        if self._answered or self._gone:
            return
        _log.error("the ASGI application left a request without a complete answer")
        if self._begun:
            self._order.cut()
        else:
            self.keep_alive = False
            self._order.transport.write(error_response(500, DEFECT, CLOSE))
            self._status = 500
            self._finish()

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
        await self._order.flow.drain()
        if self._gone:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self._head:
            self._order.forgo_body(self)
            self._start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self._head and not self._answered:
            self._write(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"the ASGI message '{kind}' is out of place")

    def _start(self, status: int, fields: Iterable[tuple[bytes, bytes]]) -> None:
        """Encodes the head of the answer, which is sent with the first bytes of its body.

        Raises: RuntimeError: the application gave a header field that is malformed.
        """
        self._status = status
        lines = [status_line(status)]
        if self.keep_alive and self._scope["http_version"] == "1.0":
            # Who speaks HTTP/1.0 must be told that the connection stays.
            lines.append(b"connection: keep-alive\r\n")
        length: int | None = None
        closes = chunked = False
        for name, value in fields:
            if not (_NAME.fullmatch(name) and _VALUE.fullmatch(value)):
                raise RuntimeError(f"{name!r}: {value!r} is no header field")
            name = name.lower()
            if name == b"content-length":
                length = int(value)
            elif name == b"connection" and b"close" in value.lower():
                closes, self.keep_alive = True, False
            elif name == b"transfer-encoding":
                chunked = True
            lines.append(b"%b: %b\r\n" % (name, value))
        if not (self.keep_alive or closes):
            lines.append(CLOSE.lower())
        if self._scope["method"] == "HEAD" or status in _BODILESS:
            self._owed = 0
        else:
            self._owed = None if chunked else length
            if self._owed is None and not chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
        self._head = b"".join((*lines, b"\r\n"))

    def _write(self, body: bytes, more: bool) -> None:
        """Writes a piece of the answer's body to the client. ``more``: further pieces follow.

        Raises: RuntimeError: the body is longer or shorter than the answer's Content-Length.
        """
        if self._status >= 400:
            self._said = self._said or body
        if self._scope["method"] == "HEAD":
            body = b""
        if self._owed is None:
            framed = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            framed += b"" if more else b"0\r\n\r\n"
        else:
            self._owed -= len(body)
            if self._owed < 0 or (self._owed and not more):
                raise RuntimeError("the answer's body is longer or shorter than its Content-Length")
            framed = body
        if not self._begun:
            self._begun = True
            framed = self._head + framed
        if framed:
            self._order.transport.write(framed)
        if not more:
            self._finish()

    def _finish(self) -> None:
        self._answered = True
        self._news.set()
        # A probe that hears "not ready" has made no mistake.
        if self._status < 400 or self._scope["path"].endswith(_PROBED):
            self._serving.answered.managed(str(self._status))
        else:
            scope = self._scope
            what = f"{scope['method']} {scope['path']}{_sentence(self._said)}"
            self._serving.answered.failed(str(self._status), what, account=self._order.account)
        self._order.answered()


def _sentence(body: bytes) -> str:
    """Returns a colon and the error message in the JSON body of an error response; "": the body has no message."""
    with contextlib.suppress(msgspec.DecodeError):
        return f": {msgspec.json.decode(body, type=_Error).error}"
    return ""
