"""Reading a connection that sends large bodies: straight into where they go, past the HTTP parser, one after the other.

It stays until a request comes that is not large: whoever sends one large body will most often send another. Of that no more than
the first pages are read as everything is, and the transport's protocol need not be exchanged twice for each:

    read     | head, JSON, first bytes of the body | rest of the body ...                      |
    into     | pages of our own ─▶ parser          | the lease, in as few reads as there can be |
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from daemon.direct_body import Body, Connection, StandIn

#: What is read of a request before it is known to be large.
_FIRST_BYTE_SIZE = 16 << 10


class Reading(Connection, Protocol):
    """Whose bodies they are."""

    def data_received(self, data: bytes) -> None: ...


class BodyReader(StandIn):
    """Stands in for a connection that sends large bodies."""

    def __init__(self, connection: Reading, transport: asyncio.Transport) -> None:
        super().__init__(connection, transport)
        self._reading = connection
        #: The one that is arriving; None: what arrives is the connection's to understand.
        self._body: Body | None = None
        self._first = memoryview(bytearray(_FIRST_BYTE_SIZE))
        self._started = False

    def receive(self, body: Body) -> None:
        """What arrives next is the rest of ``body``; it is read even if nothing else were."""
        self._body = body
        if self._started:
            self._transport.resume_reading()
        else:
            self._started = True
            self._exchange(self)

    def stop(self) -> None:
        """The body will not be whole."""
        self._body = None

    def leave(self) -> None:
        """Gives the transport back."""
        self._exchange(self._connection)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._first if self._body is None else self._body.rest()

    def buffer_updated(self, nbytes: int) -> None:
        body = self._body
        if body is None:
            self._reading.data_received(bytes(self._first[:nbytes]))
            return
        body.advance(nbytes)
        if not len(body.rest()):
            self._body = None
            self._connection.direct_body_complete()
