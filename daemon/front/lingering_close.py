"""The last of a connection: our side is ended at once, the client's is waited for, and only then is the socket closed.

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

from tensord.daemon.front.pace import Pace

#: For a client that takes nothing more and does not close.
LINGER_SECONDS = 5.0
#: At a time; the oldest one makes room.
MOST_LINGERING = 1024
#: Bytes that are thrown away of one. Of a body that is refused the client mostly sends the rest before it reads why.
MOST_DROPPED = 256 << 20


class LingeringClose:
    """Of one front.

    Args:
      min_rate: bytes a second that a client takes at least.
    """

    def __init__(self, min_rate: int) -> None:
        self._min_rate = min_rate
        #: Oldest first.
        self._lingering: dict[Lingering, None] = {}

    def see_out(self, transport: asyncio.Transport) -> None:
        """Ends a connection, once what its protocol is doing is done. That is told that it is lost, and hears no more of it.

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
        """Closes those that have taken long enough; called about once a second. ``now``: monotonic seconds."""
        for lingering in list(self._lingering):
            if lingering.is_late(now, self._min_rate):
                lingering.cut()

    def forget(self, lingering: Lingering) -> None:
        """It is closed."""
        self._lingering.pop(lingering, None)

    def __len__(self) -> int:
        return len(self._lingering)

    def __repr__(self) -> str:
        return f"<LingeringClose of {len(self)} connections>"


class Lingering(asyncio.Protocol):
    """Stands in for a connection that is over."""

    __slots__ = ("_dropped", "_lingering_close", "_pace", "_since", "_transport")

    def __init__(self, lingering_close: LingeringClose, transport: asyncio.Transport) -> None:
        self._lingering_close = lingering_close
        self._transport = transport
        self._since = monotonic()
        self._pace = Pace()
        self._dropped = 0

    def data_received(self, data: bytes) -> None:
        self._dropped += len(data)
        if self._dropped > MOST_DROPPED:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lingering_close.forget(self)

    def is_late(self, now: float, min_rate: int) -> bool:
        """Whether it has taken fewer than ``min_rate`` bytes a second for ``LINGER_SECONDS``, or had nothing more to take."""
        untaken = _waiting(self._transport, termios.TIOCOUTQ)
        return self._pace.is_slow(self._since, untaken, now, LINGER_SECONDS, min_rate)

    def cut(self) -> None:
        """Closes it, whatever the client does."""
        self._lingering_close.forget(self)
        self._transport.abort()


def is_quiet(transport: asyncio.Transport) -> bool:
    """Whether the client's side has taken everything that was written, and nothing of what it sent waits to be read."""
    return not (_waiting(transport, termios.TIOCOUTQ) or _waiting(transport, termios.FIONREAD))


def _waiting(transport: asyncio.Transport, request: int) -> int:
    """Bytes in one of the socket's queues."""
    sock = transport.get_extra_info("socket")
    if transport.is_closing() or sock is None:
        return 0
    (size,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), request, bytes(4)))
    return int(size)
