"""Watches the sockets of a front's clients with an epoll instance, which is a single descriptor for the event loop.

    loop ─▶ epoll readable ─▶ poll: (socket, events) ... ─▶ each transport reads, or writes what it has kept

A connection costs one registration, which ends when its socket is closed. A transport that pauses reading is taken off the epoll
only if something arrives meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import select
from select import EPOLLIN
from socket import SocketType

from tensord.daemon.front.socket_transport import SocketTransport

_log = logging.getLogger(__name__)
#: Sockets handled at once; the others come with the next poll.
_MOST = 256


class SocketWatch:
    """Reads and writes the client sockets of one front when epoll reports them ready. Used in a running loop until ``close``.

    Args:
      heeds_end: whether a client that has ended its sending side counts as gone, while bytes that it sent are still unread.
    """

    def __init__(self, heeds_end: bool = True) -> None:
        self.heeds_end = heeds_end
        self._epoll = select.epoll()
        self._transports: dict[int, SocketTransport] = {}
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self._epoll.fileno(), self._ready)

    def open(self, connection: SocketType, protocol: asyncio.Protocol) -> None:
        """Opens an accepted connection: starts its protocol, and gives it the bytes that have arrived already."""
        transport = SocketTransport(self, connection, protocol)
        self._transports[transport.fd] = transport
        try:
            transport.begin()
        except Exception:
            self._cut(transport)

    def change(self, transport: SocketTransport, watched: int, wanted: int) -> None:
        if not wanted:
            self._epoll.unregister(transport.fd)
        elif watched:
            self._epoll.modify(transport.fd, wanted)
        else:
            self._epoll.register(transport.fd, wanted)

    def forget(self, transport: SocketTransport) -> None:
        del self._transports[transport.fd]

    def _ready(self) -> None:
        transports = self._transports
        for fd, events in self._epoll.poll(0, _MOST):
            transport = transports.get(fd)
            if transport is None:  # ended by one before it
                continue
            try:
                if events == EPOLLIN and transport.reading:
                    transport.read()
                else:
                    transport.ready(events)
            except Exception:
                self._cut(transport)

    def _cut(self, transport: SocketTransport) -> None:
        _log.exception("a connection met a defect of the server")
        transport.abort()

    def close(self) -> None:
        """Closes the epoll instance. Idempotent."""
        if not self._epoll.closed:
            self.loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def __repr__(self) -> str:
        return f"<SocketWatch of {len(self._transports)} connections>"
