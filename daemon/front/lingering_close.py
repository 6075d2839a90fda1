"""Closes connections without losing answers: ends the sending side, waits for the client to close, and then closes the socket.

If a socket is closed while bytes from the client are unread, or if the client then sends more bytes, the kernel resets the
connection. The kernel then drops answers that it has not sent yet, and many clients drop answers that they have not read. So
the server reads and discards the client's bytes until the client has closed the connection.

The server closes the socket at once if the client receives too slowly for more than ``LINGER_SECONDS``, or sends more than
``MOST_DROPPED`` bytes. If more than ``MOST_LINGERING`` connections wait for their clients, the server closes the oldest one.
While the server waits, the connection does not count for the limit of connections. With TLS, the server cannot end its sending
side alone: the client learns of the end when the server closes the socket. Source: RFC 9112, section 9.6.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios

from tensord.daemon.front.drain_rate import DrainRate
from tensord.shm.running_time import RunningTime

#: Seconds to wait for a client that reads nothing more and does not close.
LINGER_SECONDS = 5.0
#: The most lingering connections; the oldest one is closed for a new one.
MOST_LINGERING = 1024
#: The most bytes discarded of one connection. A client mostly sends the rest of a refused body before it reads why.
MOST_DROPPED = 256 << 20


class LingeringClose:
    """Closes connections on which the server sends nothing more, each once the client closes its side or receives too slowly.

    A client is too slow if it receives at most ``min_rate`` bytes a second for more than ``LINGER_SECONDS``, even if it has
    received everything.
    ``clock``: returns the present time in seconds.
    """

    def __init__(self, min_rate: int, clock: RunningTime) -> None:
        self._min_rate = min_rate
        self.clock = clock
        #: The lingering connections, oldest first.
        self._lingering: dict[Lingering, None] = {}

    def see_out(self, transport: asyncio.Transport) -> None:
        """Ends the sending side of a connection. Closes the connection once the client closes its side or receives too slowly.

        Call this method only after the kernel or the TLS transport has got all bytes written to ``transport``. The protocol of
        ``transport`` gets ``connection_lost`` in the next iteration of the event loop, and no more data.
        """
        asyncio.get_running_loop().call_soon(self._begin, transport)

    def _begin(self, transport: asyncio.Transport) -> None:
        if transport.is_closing():
            return
        former, lingering = transport.get_protocol(), Lingering(self, transport)
        # The transport looks at its protocol's kind when reading starts.
        transport.pause_reading()
        transport.set_protocol(lingering)
        if transport.can_write_eof():
            transport.write_eof()
        transport.resume_reading()
        if len(self._lingering) >= MOST_LINGERING:
            next(iter(self._lingering)).cut()
        self._lingering[lingering] = None
        former.connection_lost(None)

    def check(self, now: float) -> None:
        """Closes connections passed to ``see_out`` whose clients receive too slowly. ``now``: seconds of the front's clock."""
        for lingering in list(self._lingering):
            if lingering.is_late(now, self._min_rate):
                lingering.cut()

    def forget(self, lingering: Lingering) -> None:
        """Removes the connection whose protocol is ``lingering`` from the connections that ``check`` may close."""
        self._lingering.pop(lingering, None)

    def __len__(self) -> int:
        return len(self._lingering)

    def __repr__(self) -> str:
        return f"<LingeringClose of {len(self)} connections>"


class Lingering(asyncio.Protocol):
    """Discards what a client still sends on a connection that the server is about to close."""

    __slots__ = ("_dropped", "_lingering_close", "_pace", "_since", "_transport")

    def __init__(self, lingering_close: LingeringClose, transport: asyncio.Transport) -> None:
        self._lingering_close = lingering_close
        self._transport = transport
        self._since = lingering_close.clock()
        self._pace = DrainRate()
        self._dropped = 0

    def data_received(self, data: bytes) -> None:
        self._dropped += len(data)
        if self._dropped > MOST_DROPPED:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lingering_close.forget(self)

    def is_late(self, now: float, min_rate: int) -> bool:
        """Returns whether the client received at most ``min_rate`` bytes a second in ``LINGER_SECONDS`` before ``now``."""
        untaken = _waiting(self._transport, termios.TIOCOUTQ)
        return self._pace.is_slow(self._since, untaken, now, LINGER_SECONDS, min_rate)

    def cut(self) -> None:
        """Closes the connection at once."""
        self._lingering_close.forget(self)
        self._transport.abort()


def is_quiet(transport: asyncio.Transport) -> bool:
    """Returns whether the client took all bytes written to ``transport``, and no bytes of the client wait to be read."""
    return not (_waiting(transport, termios.TIOCOUTQ) or has_unread(transport))


def has_unread(transport: asyncio.Transport) -> bool:
    """Returns whether bytes of the client wait to be read."""
    return bool(_waiting(transport, termios.FIONREAD))


def _waiting(transport: asyncio.Transport, request: int) -> int:
    sock = transport.get_extra_info("socket")
    if transport.is_closing() or sock is None:
        return 0
    (size,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), request, bytes(4)))
    return int(size)
