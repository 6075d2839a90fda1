"""Reads large request bodies from a connection's socket straight into the memory where they stay."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensord.daemon.http.connection import Http1Connection

#: Bytes that are read before it is known what comes.
_FIRST_BYTE_SIZE = 16 << 10


class BodyReader(asyncio.BufferedProtocol):
    """Receives the bytes of ``connection``, and writes large request bodies straight into the memory reserved for them."""

    def __init__(self, connection: Http1Connection, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport
        self._first = memoryview(bytearray(_FIRST_BYTE_SIZE))
        #: Memory for the next bytes.
        self._room = self._first
        #: True while that is a body's; else the connection gets what arrives.
        self.reads_body = False
        #: Bytes of the body that were read since ``receive``; the connection counts them once it is complete, or stopped.
        self.byte_size = 0
        self._started = False

    def receive(self, room: memoryview) -> None:
        """Lets the next bytes of a request's body be read from the socket into ``room``, and does not wait for them.

        Once ``room`` is full, the connection's ``direct_body_complete`` is called.
        """
        self._room, self.reads_body, self.byte_size = room, True, 0
        if self._started:
            self._transport.resume_reading()
        else:
            self._started = True
            self._exchange(self)

    def stop(self) -> None:
        """Ends reading into the memory of a body. The connection's own buffer receives later bytes."""
        self._room, self.reads_body = self._first, False

    def leave(self) -> None:
        """Ends this reader: the connection receives all further bytes itself."""
        self._exchange(self._connection)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        if not self.reads_body:
            self._connection.data_received(bytes(self._first[:nbytes]))
            return
        self.byte_size += nbytes
        self._room = self._room[nbytes:]
        if not self._room:
            self._room, self.reads_body = self._first, False
            self._connection.direct_body_complete()

    def _exchange(self, protocol: object) -> None:
        # The transport looks at its protocol's kind when reading starts.
        self._transport.pause_reading()
        self._transport.set_protocol(protocol)  # type: ignore[arg-type]
        self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop()
        self._connection.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
