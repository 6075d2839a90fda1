"""One request over HTTP and its answer, which ends the connection. Knows nothing of metrics; h11 reads and writes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus

import h11
import msgspec

#: Request line and headers together.
_MAX_HEAD = 16 << 10
#: What is read of a body that nobody asked for, so that its sender reads the answer instead of a reset connection.
_MAX_BODY = 64 << 10


class BadRequest(Exception):
    """What came is no request; ``status`` is the answer."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked."""

    method: bytes
    #: Without the query.
    path: bytes
    #: "": none.
    accept: str


@dataclass(frozen=True, slots=True)
class Answer:
    """``headers`` besides length and connection."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...]


def refusal(status: int, reason: str, *headers: tuple[str, str]) -> Answer:
    """An error in the form that the other ports have, too."""
    return Answer(status, msgspec.json.encode({"error": reason}), (("Content-Type", "application/json"), *headers))


class Exchange:
    """The server's side of one connection."""

    def __init__(self) -> None:
        self._connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD)
        self._asked: h11.Request | None = None

    async def request(self, reader: asyncio.StreamReader) -> Request | None:
        """The request, when its body has come and is thrown away. None: the client went away before it asked.

        Raises: BadRequest: it is none, or its head is too large.
        """
        try:
            await self._receive(reader)
        except h11.RemoteProtocolError as error:
            raise BadRequest(error.error_status_hint) from None
        if self._asked is None:
            return None
        accept = b",".join(value for name, value in self._asked.headers if name == b"accept")
        return Request(self._asked.method, self._asked.target.partition(b"?")[0], accept.decode("latin-1"))

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        left = _MAX_BODY
        while left > 0:
            event = self._connection.next_event()
            if event is h11.NEED_DATA:
                if self._connection.they_are_waiting_for_100_continue:
                    return
                self._connection.receive_data(await reader.read(_MAX_HEAD))
            elif isinstance(event, h11.Request):
                self._asked = event
            elif isinstance(event, h11.Data):
                left -= len(event.data)
            else:
                return

    def answered(self, answer: Answer) -> bytes:
        """The answer as bytes; the connection ends with it."""
        headers = [*answer.headers, ("Content-Length", str(len(answer.body))), ("Connection", "close")]
        reason = HTTPStatus(answer.status).phrase
        head = self._connection.send(h11.Response(status_code=answer.status, headers=headers, reason=reason))
        body = b"" if self._asked is not None and self._asked.method == b"HEAD" else answer.body
        sent = (head, self._connection.send(h11.Data(data=body)), self._connection.send(h11.EndOfMessage()))
        return b"".join(filter(None, sent))
