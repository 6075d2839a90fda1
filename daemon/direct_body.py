"""Reading a large body from the socket straight into the request arena, past whatever parses the protocol.

While a body of known length arrives (HTTP/1), or a frame's part of one tensor (HTTP/2), there is nothing to parse: the
transport's protocol is exchanged for this one, which offers the rest of the lease as the buffer to read into, and put back when
all of it is there. It saves two copies of every byte.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Connection(Protocol):
    """What is put back afterwards."""

    def direct_body_complete(self) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def eof_received(self) -> bool | None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class Body(Protocol):
    """Where the bytes go."""

    def rest(self) -> memoryview:
        """What is still to come; empty: all is there."""

    def advance(self, byte_size: int) -> None:
        """That many bytes were written into ``rest``."""


class StandIn(asyncio.BufferedProtocol):
    """Takes a transport over and gives it back; all but what arrives is the connection's."""

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport

    def _exchange(self, protocol: object) -> None:
        # The transport looks at its protocol's kind when reading starts.
        self._transport.pause_reading()
        self._transport.set_protocol(protocol)  # type: ignore[arg-type]
        self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


class DirectBody(StandIn):
    """Stands in for the connection until ``body`` is whole."""

    def __init__(self, connection: Connection, transport: asyncio.Transport, body: Body) -> None:
        super().__init__(connection, transport)
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
