"""Closes connections without losing answers: ends our side at once, waits for the client's, and only then closes the socket.

    last bytes written ─▶ our side ends ─▶ what still comes is thrown away ─▶ the client's end, or it was long enough ─▶ closed

A socket that is closed while bytes of the client are unread, or that the client sends more to, is reset: the kernel throws away
what of the answers the client has not been sent yet, and many clients what they have not read. Clients of gRPC are never silent:
they grant windows and answer pings while they read. So whoever takes what was written gets all of it. Whoever takes nothing more,
and does not close, is waited for no longer than ``LINGER_SECONDS``, and looked at about once a second.

Who has come this far is a connection of its protocol no more, and takes nobody's place. TLS cannot end one side: there the client
is waited for as well, and is told with the close.
Source: RFC 9112, section 9.6.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from time import monotonic

from tensord.daemon.front.drain_rate import DrainRate

#: Seconds to wait for a client that reads nothing more and does not close.
LINGER_SECONDS = 5.0
#: The most lingering connections; the oldest one is closed for a new one.
MOST_LINGERING = 1024
#: The most bytes discarded of one connection. A client mostly sends the rest of a refused body before it reads why.
MOST_DROPPED = 256 << 20


class LingeringClose:
    """Keeps the lingering connections of one front.

    Args:
      min_rate: bytes a second that a client takes at least.
    """

    def __init__(self, min_rate: int) -> None:
        self._min_rate = min_rate
        #: The lingering connections, oldest first.
        self._lingering: dict[Lingering, None] = {}

    def see_out(self, transport: asyncio.Transport) -> None:
        """Closes a connection gently, once its protocol has finished the current step.

        The protocol is told that it is lost, and gets no more data.

        What was written has left for the kernel, or is the transport's own (TLS).
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
        """Closes connections that have lingered long enough; called about once a second. ``now``: monotonic seconds."""
        for lingering in list(self._lingering):
            if lingering.is_late(now, self._min_rate):
                lingering.cut()

    def forget(self, lingering: Lingering) -> None:
        """Forgets a connection that is closed."""
        self._lingering.pop(lingering, None)

    def __len__(self) -> int:
        return len(self._lingering)

    def __repr__(self) -> str:
        return f"<LingeringClose of {len(self)} connections>"


class Lingering(asyncio.Protocol):
    """Discards what arrives on a connection that lingers."""

    __slots__ = ("_dropped", "_lingering_close", "_pace", "_since", "_transport")

    def __init__(self, lingering_close: LingeringClose, transport: asyncio.Transport) -> None:
        self._lingering_close = lingering_close
        self._transport = transport
        self._since = monotonic()
        self._pace = DrainRate()
        self._dropped = 0

    def data_received(self, data: bytes) -> None:
        self._dropped += len(data)
        if self._dropped > MOST_DROPPED:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lingering_close.forget(self)

    def is_late(self, now: float, min_rate: int) -> bool:
        """Returns whether the client has read fewer than ``min_rate`` bytes a second for ``LINGER_SECONDS``, or nothing."""
        untaken = _waiting(self._transport, termios.TIOCOUTQ)
        return self._pace.is_slow(self._since, untaken, now, LINGER_SECONDS, min_rate)

    def cut(self) -> None:
        """Closes the connection, whatever the client does."""
        self._lingering_close.forget(self)
        self._transport.abort()


def is_quiet(transport: asyncio.Transport) -> bool:
    """Returns whether the client has received everything that was written, and nothing that it sent waits to be read."""
    return not (_waiting(transport, termios.TIOCOUTQ) or _waiting(transport, termios.FIONREAD))


def _waiting(transport: asyncio.Transport, request: int) -> int:
    """Returns the bytes in one of the socket's queues."""
    sock = transport.get_extra_info("socket")
    if transport.is_closing() or sock is None:
        return 0
    (size,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), request, bytes(4)))
    return int(size)
