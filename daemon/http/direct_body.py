"""Reading a large body from the socket straight into the request arena, past the HTTP parser.

While a body of known length arrives there is nothing to parse: the transport's protocol is exchanged for this one, which offers
the rest of the lease as the buffer to read into, and put back when the body is whole. It saves two copies of every byte.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from daemon.http.body import PlacedBody, TextBody


class Connection(Protocol):
    """What is put back afterwards."""

    def direct_body_complete(self) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def eof_received(self) -> bool: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class DirectBody(asyncio.BufferedProtocol):
    """Stands in for the connection until ``body`` is whole."""

    def __init__(self, connection: Connection, transport: asyncio.Transport, body: PlacedBody | TextBody) -> None:
        self._connection = connection
        self._transport = transport
        self._body = body

    def start(self) -> None:
        """Takes the transport over."""
        self._exchange(self)

    def stop(self, ended: bool) -> None:
        """Gives the transport back before the body is whole. ``ended``: nothing more can be read anyway."""
        if ended:
            self._transport.set_protocol(self._connection)  # type: ignore[arg-type]
        else:
            self._exchange(self._connection)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._body.rest()

    def buffer_updated(self, nbytes: int) -> None:
        self._body.advance(nbytes)
        if not len(self._body.rest()):
            self._exchange(self._connection)
            self._connection.direct_body_complete()

    def _exchange(self, protocol: object) -> None:
        # The transport looks at its protocol's kind when reading starts.
        self._transport.pause_reading()
        self._transport.set_protocol(protocol)  # type: ignore[arg-type]
        self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
