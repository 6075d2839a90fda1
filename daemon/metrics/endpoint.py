"""The port that Prometheus scrapes: GET /metrics, one request a connection. Belongs to the supervisor's loop.

    connection ─▶ head, whole in time ─▶ snapshot ─▶ text, written in a thread ─▶ answer, taken in time ─▶ closed

The loop parses a head of at most 16 KiB and waits for nobody: whoever sends nothing, or takes nothing, is cut off after a while,
or when his place is needed. Nobody is authenticated; a scrape changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus

import h11
import msgspec

from config.options import Metrics
from daemon import listening
from daemon.listening import Listener
from daemon.metrics.snapshot import Snapshot

_log = logging.getLogger(__name__)
PATH = "/metrics"
#: At a time; the oldest one makes room.
MAX_CONNECTIONS = 32
_MAX_HEAD = 16 << 10
#: What is read of a body that nobody asked for, so that its sender reads the answer instead of a reset connection.
_MAX_BODY = 64 << 10
#: Seconds for all of a connection. Prometheus gives up after ten.
_TIMEOUT = 20.0


class Endpoint:
    """Owns the listening socket. ``snapshot()`` gathers what is shown."""

    def __init__(self, options: Metrics, snapshot: Callable[[], Awaitable[Snapshot]]) -> None:
        self._options = options
        self._snapshot = snapshot
        self._listener: Listener | None = None
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], None] = {}
        #: One: texts are written one after the other, and take no thread from those who read files.
        self._thread = ThreadPoolExecutor(1, "metrics")

    async def open(self) -> None:
        """Serves on the running loop, where it is enabled. Raises ListenError: address, port and reason."""
        if not self._options.enabled:
            return
        self._listener = listening.listen(self._options.address, self._options.port, "http")
        self._server = await asyncio.start_server(self._serve, sock=self._listener.socket, limit=_MAX_HEAD)
        _log.info("serving metrics on %s", self.url)

    @property
    def url(self) -> str | None:
        """As scrapers are told; None: it is not served."""
        return None if self._listener is None or self._listener.url is None else self._listener.url + PATH

    def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._listener is not None:
            self._listener.close()
        self._thread.shutdown(wait=False)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            next(iter(self._connections)).cancel()
        self._connections[task] = None
        try:
            async with asyncio.timeout(_TIMEOUT):
                await self._exchange(reader, writer)
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # it went away, took too long, or had to make room
        finally:
            del self._connections[task]
            # What it has not taken by now is thrown away.
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request and its answer."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD)
        method = b""
        try:
            request = await _request(connection, reader)
        except h11.RemoteProtocolError as error:
            answer = _refusal(error.error_status_hint, "Bad Request")
        else:
            if request is None:
                return
            method = request.method
            answer = await self._answer(request)
        writer.write(_sent(connection, answer, method))
        await writer.drain()

    async def _answer(self, request: h11.Request) -> _Answer:
        if request.target.partition(b"?")[0] != PATH.encode():
            return _refusal(404, "Not Found")
        if request.method != b"GET":
            return _refusal(405, "Method Not Allowed", ("Allow", "GET"))
        accept = b",".join(value for name, value in request.headers if name == b"accept").decode("latin-1")
        try:
            snapshot = await self._snapshot()
            loop = asyncio.get_running_loop()
            text, content_type = await loop.run_in_executor(self._thread, _render, snapshot, accept)
        except Exception:
            _log.exception("a scrape of the metrics failed")
            return _refusal(500, "internal error; the server's log has the details")
        return _Answer(200, text, (("Content-Type", content_type),))


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...]


def _refusal(status: int, reason: str, *headers: tuple[str, str]) -> _Answer:
    return _Answer(status, msgspec.json.encode({"error": reason}), (("Content-Type", "application/json"), *headers))


def _render(snapshot: Snapshot, accept: str) -> tuple[bytes, str]:
    # Imported by the first scrape, in its thread: the start of the daemon does not wait for it.
    from daemon.metrics import exposition

    return exposition.render(snapshot, accept)


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """The request, with what came of its body thrown away; None: the client went away before it was whole.

    Raises: RemoteProtocolError: it is none, or its head is too large.
    """
    request: h11.Request | None = None
    left = _MAX_BODY
    while left > 0:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if connection.they_are_waiting_for_100_continue:
                break
            connection.receive_data(await reader.read(_MAX_HEAD))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            left -= len(event.data)
        else:
            break
    return request


def _sent(connection: h11.Connection, answer: _Answer, method: bytes) -> bytes:
    """The answer as bytes; the connection ends with it."""
    headers = [*answer.headers, ("Content-Length", str(len(answer.body))), ("Connection", "close")]
    reason = HTTPStatus(answer.status).phrase
    head = connection.send(h11.Response(status_code=answer.status, headers=headers, reason=reason))
    body = b"" if method == b"HEAD" else answer.body
    return b"".join(filter(None, (head, connection.send(h11.Data(data=body)), connection.send(h11.EndOfMessage()))))
