"""An asyncio transport for a client's socket, which costs less to create and to close than asyncio's own transports.

If the socket does not take all written bytes at once, the transport keeps the rest, and calls the protocol's ``pause_writing``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

_log = logging.getLogger(__name__)
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
#: The client has ended its side, perhaps with data unread; and the errors that the kernel reports unasked.
_LEFT, _BROKEN = select.EPOLLRDHUP, select.EPOLLHUP | select.EPOLLERR
#: The socket itself may block: making it non-blocking would be a system call for each connection.
_AT_ONCE = socket.MSG_DONTWAIT
#: The most bytes of one read, for a protocol that gives no buffer.
READ_BYTE_SIZE = 256 << 10
#: The most reads in one iteration of the loop, if each is as large as it may be.
_READS_A_TURN = 32
#: The most pieces of one write; the kernel accepts 1,024.
_PIECES = 512
#: Sockets handled at once; the others come with the next poll.
_MOST = 256


class SocketTransport(asyncio.Transport):
    """An asyncio transport for one client connection, which costs less than asyncio's own.

    Its ``SocketWatch`` calls ``begin`` once, and ``ready`` whenever epoll reports events of the socket.
    """

    __slots__ = (
        "_closing",
        "_ended",
        "_ending",
        "_protocol",
        "_receive",
        "_send",
        "_shut",
        "_socket",
        "_unsent",
        "_watch",
        "_watched",
        "fd",
        "gives_buffers",
        "reading",
    )

    def __init__(self, watch: SocketWatch, connection: socket.SocketType, protocol: asyncio.Protocol) -> None:
        self._watch = watch
        self._socket = connection
        self.fd = connection.fileno()
        self._receive, self._send = connection.recv, connection.send
        self._protocol: Any = protocol
        #: True if the protocol gives the buffers that are read into.
        self.gives_buffers = False
        #: True if the protocol wants what comes.
        self.reading = True
        #: True once the client has ended its side.
        self._ended = False
        #: The events that epoll watches; it may watch for input although reading is paused, until something comes.
        self._watched = 0
        self._unsent: deque[memoryview] | None = None
        #: True if our side ends once nothing is unsent.
        self._shut = False
        #: True once nothing more is read or written, except what is unsent.
        self._closing = False
        #: True once the protocol is about to lose the connection, or has lost it.
        self._ending = False

    def begin(self) -> None:
        """Calls the protocol's ``connection_made``, and reads the bytes that have arrived already."""
        self._protocol.connection_made(self)
        if self.reading:
            self.read()
        if self.reading:
            if not self._watched & _IN:
                self._look_for(self._watched | _IN)
        elif not (self._closing or self._ended):
            # More came than is wanted now, but the client's end is of interest.
            self._look_for(self._watched | _LEFT)

    def ready(self, events: int) -> None:
        """Handles events that epoll has reported for the socket. ``events``: the events as epoll's bit mask."""
        if self._unsent and events & ~_IN:
            self._send_rest()
        if self.reading:
            if events & ~_OUT:
                self.read()
        elif self._ending:
            return
        elif events & (_LEFT | _BROKEN):
            self._left_unread(events)
        elif self._watched & _IN:
            # What comes is not wanted now. The client's end is, and it stands behind what is unread.
            self._look_for((_OUT if self._unsent else 0) | _LEFT)

    def _left_unread(self, events: int) -> None:
        if events & _BROKEN:
            self._fail(ConnectionResetError("the client has gone"))
        elif self._watch.heeds_end:
            self._end_of_stream()
        else:
            # The protocol gets the end in its order, once what is before it was read.
            self._look_for(self._watched & ~_LEFT)

    def _look_for(self, wanted: int) -> None:
        watched, self._watched = self._watched, wanted
        try:
            self._watch.change(self, watched, wanted)
        except OSError as error:  # no memory, or no room for one more
            self._fail(error)

    # ------------------------------------------------------------------------------------------------------- reading

    def read(self) -> None:
        """Reads the bytes that have arrived, and passes them, or the end of file, to the protocol."""
        if self.gives_buffers:
            self._read_into_buffers()
            return
        try:
            data = self._receive(READ_BYTE_SIZE, _AT_ONCE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(error)
            return
        if data:
            self._protocol.data_received(data)
        else:
            self._end_of_stream()

    def _read_into_buffers(self) -> None:
        for _ in range(_READS_A_TURN):
            room = self._protocol.get_buffer(-1)
            whole = len(room)
            try:
                size = self._socket.recv_into(room, 0, _AT_ONCE)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._fail(error)
                return
            if not size:
                self._end_of_stream()
                return
            self._protocol.buffer_updated(size)
            if size < whole or not (self.reading and self.gives_buffers):
                return

    def _end_of_stream(self) -> None:
        self.reading, self._ended = False, True
        if not self._protocol.eof_received() and not self._closing:
            self._closing = True
            if not self._unsent:
                self._end(None)
        if not self._ending:
            # The end stays, and epoll would report it in each iteration of the loop.
            self._look_for((_OUT if self._unsent else 0) | _BROKEN)

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        # Epoll learns it when something comes: mostly reading is resumed before.
        self.reading = False

    def resume_reading(self) -> None:
        if not (self._closing or self._ended):
            self.reading = True
            if not self._watched & _IN:
                self._look_for(self._watched & ~_LEFT | _IN)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        self.gives_buffers = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    # ------------------------------------------------------------------------------------------------------- writing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._unsent or self._closing:
            self.writelines((data,))
            return
        try:
            sent = self._send(data, _AT_ONCE)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._fail(error)
            return
        if sent < len(data):
            self._keep((data,), sent)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        pieces = tuple(list_of_data)
        if self._unsent:
            self._unsent.extend(memoryview(piece) for piece in pieces)
        elif not self._closing:
            try:
                sent = self._socket.sendmsg(pieces[:_PIECES], (), _AT_ONCE)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                self._fail(error)
                return
            if sent < sum(map(len, pieces)):
                self._keep(pieces, sent)

    def _keep(self, pieces: Iterable[bytes | bytearray | memoryview], sent: int) -> None:
        """Keeps ``pieces`` without their first ``sent`` bytes for a later write. Calls the protocol's ``pause_writing``."""
        self._unsent = deque(memoryview(piece) for piece in pieces)
        self._drop(sent)
        self._look_for(self._watched | _OUT)
        self._protocol.pause_writing()

    def _drop(self, sent: int) -> None:
        unsent = self._unsent
        assert unsent is not None
        while unsent and sent >= len(unsent[0]):
            sent -= len(unsent.popleft())
        if sent:
            unsent[0] = unsent[0][sent:]

    def _send_rest(self) -> None:
        unsent = self._unsent
        assert unsent is not None
        try:
            self._drop(self._socket.sendmsg(tuple(islice(unsent, _PIECES)), (), _AT_ONCE))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(error)
            return
        if unsent:
            return
        self._unsent = None
        self._look_for(self._watched & ~_OUT)
        self._protocol.resume_writing()
        if self._unsent:  # it had more
            return
        if self._shut:
            self._shut_down()
        if self._closing and not self._ending:
            self._end(None)

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._unsent or ()))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._shut = True
        if not self._unsent:
            self._shut_down()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    # ------------------------------------------------------------------------------------------------------- the end

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing, self.reading = True, False
            if not self._unsent:
                self._end_soon(None)

    def abort(self) -> None:
        self._fail(None)

    def _fail(self, error: OSError | None) -> None:
        self._unsent = None
        self._closing, self.reading = True, False
        if not self._ending:
            self._end_soon(error)

    def _end_soon(self, error: OSError | None) -> None:
        """Closes the socket in the next iteration of the event loop, after calling the protocol's ``connection_lost(error)``."""
        self._ending = True
        self._watch.loop.call_soon(self._end, error)

    def _end(self, error: OSError | None) -> None:
        self._ending = True
        self._watch.forget(self)
        # Each refers to the other: the garbage collector shall have nothing to do.
        protocol, self._protocol = self._protocol, None
        try:
            protocol.connection_lost(error)
        finally:
            self._socket.close()  # which the epoll forgets then

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else default

    def __repr__(self) -> str:
        state = "closing" if self._closing else "reading" if self.reading else "paused"
        return f"<SocketTransport {self.fd} {state}, {self.get_write_buffer_size()} bytes unsent>"


class SocketWatch:
    """Watches the client sockets of a front with epoll, and reads and writes the sockets that are ready.

    ``heeds_end``: if True, a protocol's ``eof_received`` is called as soon as the client ends its sending, even while reading is
    paused. If False, ``eof_received`` is called only after the protocol has got all bytes that the client sent.
    """

    def __init__(self, heeds_end: bool = True) -> None:
        self.heeds_end = heeds_end
        self._epoll = select.epoll()
        self._transports: dict[int, SocketTransport] = {}
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self._epoll.fileno(), self._ready)

    def open(self, connection: socket.SocketType, protocol: asyncio.Protocol) -> None:
        """Opens an accepted connection: calls the protocol's ``connection_made``, and reads the bytes that have arrived."""
        transport = SocketTransport(self, connection, protocol)
        self._transports[transport.fd] = transport
        try:
            transport.begin()
        except Exception:
            self._cut(transport)

    def change(self, transport: SocketTransport, watched: int, wanted: int) -> None:
        """Changes the epoll events of a transport's socket from ``watched`` to ``wanted``. 0: epoll does not watch the socket.

        Raises OSError if the kernel has no memory or room for the socket.
        """
        if not wanted:
            self._epoll.unregister(transport.fd)
        elif watched:
            self._epoll.modify(transport.fd, wanted)
        else:
            self._epoll.register(transport.fd, wanted)

    def forget(self, transport: SocketTransport) -> None:
        """Removes a transport that is being closed."""
        del self._transports[transport.fd]

    def _ready(self) -> None:
        transports = self._transports
        for fd, events in self._epoll.poll(0, _MOST):
            transport = transports.get(fd)
            if transport is None:  # ended by one before it
                continue
            try:
                if events == _IN and transport.reading:
                    transport.read()
                else:
                    transport.ready(events)
            except Exception:
                self._cut(transport)

    def _cut(self, transport: SocketTransport) -> None:
        _log.exception("a connection met a defect of the server")
        transport.abort()

    def close(self) -> None:
        """Closes the epoll instance. May be called again."""
        if not self._epoll.closed:
            self.loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def __repr__(self) -> str:
        return f"<SocketWatch of {len(self._transports)} connections>"
