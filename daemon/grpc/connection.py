"""One client's gRPC connection: moves bytes between its socket and ``Http2``, checks its deadlines and closes it.

``Http2`` parses and makes HTTP/2 frames, but does no I/O. Without TLS, the bytes of a large tensor are read from the socket
straight into arena memory.

While the client does not read its responses, the server reads nothing from the client. If the client has sent very many frames,
the server parses some of them in each iteration of the event loop, and reads from the client again once all are parsed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from tensord.daemon.front.drain_rate import DrainRate
from tensord.daemon.front.each import call_each
from tensord.daemon.front.peer import ConnectionEnd
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.arriving_message import NOWHERE
from tensord.daemon.grpc.frames import Violation
from tensord.daemon.grpc.http2 import CLOSED, ENDING, WRITE_BUFFER, ConnectionPhase, Http2
from tensord.daemon.grpc.serving import GrpcServing
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.grpc.unary_infer import StepOrder
from tensord.daemon.submit.accounts import Account

_log = logging.getLogger(__name__)
#: Unsent bytes of a TLS connection in its transport's own buffer.
_TLS_BUFFER = 1 << 20
#: Small pieces are cheaper joined; large ones go to the socket as they lie.
_JOINED = 64 << 10
#: A payload with more bytes to come than this is read straight to its place.
_DIRECT_BYTE_SIZE = 64 << 10
#: The number of reads without anything large after which the connection uses the whole read buffer again.
_READS_AFTER_LARGE = 16
_PING = b"tensord\0"


class Http2Connection(asyncio.BufferedProtocol):
    """Moves bytes between the socket of one client and the connection's ``Http2``, which parses them.

    ``owner``: the client's host, or the client's user on a Unix socket. One memory limit holds for all connections of an owner.
    """

    def __init__(self, serving: GrpcServing, owner: str) -> None:
        self.serving = serving
        self.loop = asyncio.get_running_loop()
        self.http2 = Http2(serving, self)
        self._owner = owner
        #: The account of arena memory that the connection holds while it is open.
        self.account: Account | None = None
        #: Large requests that are not sent yet, and who waits for them.
        self.steps = StepOrder(self.loop)
        #: Tells those who wait that this connection has ended.
        self.connection_end = ConnectionEnd()
        self._transport: asyncio.Transport | None = None
        #: True where bytes to write may be views of leased memory, which is given back once they have left.
        self.is_plain = True
        self._lost = False
        #: Since when, by the front's clock, the client takes nothing; and the rate at which it takes what waits for it.
        self._paused_since = 0.0
        self._pace = DrainRate()
        #: True while received bytes wait for the next iteration of the loop.
        self._resting = False
        #: The part of the front's read buffer that this connection uses: its first pages for some more reads, or all of it.
        self._buffer = serving.read_buffer
        self._first_page_reads = 0
        #: Memory for the next bytes: the buffer, or the place of a tensor that is arriving.
        self._room = self._buffer
        self._opened_at = self._checked_at = self.http2.heard_at = serving.clock()
        #: When it was last of use to its client, as it was noticed, and what had been answered then; when it last had streams.
        self._used_at = self._occupied_at = self._opened_at
        self._answered_before = 0
        #: When our unanswered PING left; 0: none did.
        self._asked_at = 0.0
        self._ending_at = 0.0

    # -------------------------------------------------------------------------------------------------------- transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        # With no room to buffer, a write goes to the socket at once and says whether all of it went. TLS has a buffer of its own.
        self.is_plain = transport.get_extra_info("sslcontext") is None
        transport.set_write_buffer_limits(high=0 if self.is_plain else _TLS_BUFFER)
        serving = self.serving
        full = serving.counters.total() >= serving.options.max_connections
        if (full and not serving.longest_idle.make_room(self._opened_at)) or serving.stopping:
            self.http2.phase = ConnectionPhase.CLOSED
            transport.close()
            return
        serving.connections[self] = None
        self.account = serving.accounts.open(self._owner)
        serving.counters.count(len(serving.connections))
        transport.write(self.http2.hello())

    def connection_lost(self, error: Exception | None) -> None:
        self.connection_end.close()
        if self.account is not None:
            self.serving.accounts.close(self.account)
        self.serving.connections.pop(self, None)
        self.serving.counters.count(len(self.serving.connections))
        self.http2.connection_lost()
        self._lost = True
        self._written()

    def eof_received(self) -> bool:
        # The client could never enlarge a window again.
        self.abort()
        return False

    def fileno(self) -> int:
        """Returns the descriptor of the client's socket, or -1 if the connection is lost."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    # ---------------------------------------------------------------------------------------------------------- reading

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        """Handles ``nbytes`` bytes that the event loop has read from the socket into the memory from ``get_buffer``."""
        http2, room = self.http2, self._room
        if http2.phase is CLOSED:
            return
        direct = room is not self._buffer
        if direct:
            http2.heard_at = self.serving.clock()
            http2.data_read += nbytes
            self._room = room[nbytes:]
            if nbytes < len(room):
                return
            self._room = self._buffer
        http2.is_flushing = True
        try:
            if direct:
                http2.data_was_read()
            elif http2.receive(room[:nbytes].tobytes(), self.serving.clock()):
                self._rest()
        except Violation as violation:
            self._fail(violation)
        finally:
            http2.is_flushing = False
        if http2.out or http2.phase is ENDING:
            self.flush()
        if not direct and (http2.data_left >= _DIRECT_BYTE_SIZE or self._first_page_reads):
            self._choose_room()

    def _rest(self) -> None:
        """Pauses reading for one iteration of the event loop."""
        assert self._transport is not None
        self._resting = True
        self._transport.pause_reading()
        self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Parses more of the bytes that were received before ``_rest`` paused reading. Resumes reading once all are parsed."""
        if self.http2.phase is CLOSED or self._paused_since:
            return
        self._resting = False
        self.buffer_updated(0)
        if self.http2.phase is not CLOSED and not self._resting and not self._paused_since:
            assert self._transport is not None
            self._transport.resume_reading()

    def _choose_room(self) -> None:
        """Chooses where the next bytes are read to: the memory of a large message, or the read buffer."""
        if self.http2.phase is CLOSED or self._paused_since or self._resting:
            return
        stream = self.http2.data_stream
        arriving = None if stream is None else stream.arriving
        place = NOWHERE if arriving is None else arriving.rest[: self.http2.data_left]
        if self.is_plain and len(place) >= _DIRECT_BYTE_SIZE:
            self._room, self._buffer, self._first_page_reads = place, self.serving.first_pages, _READS_AFTER_LARGE
        elif self._first_page_reads:
            self._first_page_reads -= 1
            if not self._first_page_reads:
                self._room = self._buffer = self.serving.read_buffer

    def stop_direct(self, stream: Stream) -> None:
        """Stops reading from the socket into the memory of ``stream``'s message. Later bytes go into the read buffer."""
        http2 = self.http2
        if self._room is not self._buffer and http2.data_stream is stream:
            self._room = self._buffer
            http2.data_left -= http2.data_read
            http2.data_read = 0

    # ---------------------------------------------------------------------------------------------------------- writing

    def flush(self) -> None:
        """Writes all bytes that wait for the client to the transport.

        Then closes the connection if it accepts no new streams and has no open stream.
        """
        http2 = self.http2
        if http2.phase is CLOSED:
            return
        http2.is_flushing = False
        out = http2.out
        if out:
            transport = self._transport
            assert transport is not None
            http2.out = []
            if not self._paused_since:
                http2.room = WRITE_BUFFER
            if len(out) == 1:
                transport.write(out[0])
            elif sum(map(len, out)) > _JOINED:
                transport.writelines(out)
            else:
                transport.write(b"".join(out))
            if http2.on_written and not self._paused_since:
                self._written()
            if http2.blocked:
                http2.pump()
        if http2.phase is ENDING and not http2.streams and not http2.out:
            self._close()

    def pause_writing(self) -> None:
        """Stops reading from a client that takes its responses too slowly."""
        assert self._transport is not None
        self._paused_since = self.serving.clock()
        self.http2.room = 0
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        assert self._transport is not None
        http2 = self.http2
        self._paused_since = 0.0
        http2.room = WRITE_BUFFER - sum(map(len, http2.out))
        if http2.phase is not CLOSED and not self._transport.is_closing():
            if self._resting:
                self.loop.call_soon(self._go_on)
            else:
                self._transport.resume_reading()
        if not http2.out:
            self._written()
        http2.pump()
        if http2.phase is CLOSED:
            self._see_out()

    def when_written(self, on_written: Callable[[], None]) -> None:
        """Calls ``on_written`` once the kernel or the TLS transport has all written bytes, or once the connection is lost."""
        if self._lost or not (self.http2.out or self._paused_since):
            on_written()
        else:
            self.http2.on_written.append(on_written)

    def _written(self) -> None:
        waiting, self.http2.on_written = self.http2.on_written, []
        call_each(waiting, "what follows an answer")

    # ----------------------------------------------------------------------------------------------------------- ending

    def _fail(self, violation: Violation) -> None:
        """Ends the connection and its streams. The client is sent a GOAWAY."""
        _log.debug("closing a connection: %s", violation.reason)
        self.http2.goaway(violation)
        self.flush()
        self.http2.abandon_streams()
        self._close()

    def _close(self) -> None:
        """Closes the connection once all written bytes have left."""
        if self.http2.phase is not CLOSED:
            self.http2.phase = ConnectionPhase.CLOSED
            if not self._paused_since:
                self._see_out()

    def _see_out(self) -> None:
        assert self._transport is not None
        self.serving.lingering.see_out(self._transport)

    def abort(self) -> None:
        """Closes the connection at once. Bytes that are not sent yet are dropped."""
        self.http2.phase = ConnectionPhase.CLOSED
        if self._transport is not None:
            self._transport.abort()

    def announce_end(self) -> None:
        """Tells the client by GOAWAY to open no more streams. Does nothing before the client's preface has come."""
        if self.http2.phase is ConnectionPhase.OPEN:
            self._ending_at = self.serving.clock()
            self.http2.announce_end()

    def stop(self) -> None:
        """Ends the connection because the server stops. New streams are refused. Open streams end once they are answered.

        A connection whose preface has not come is closed.
        """
        if self.http2.phase is ConnectionPhase.OPENING:
            self.abort()
        else:
            self.http2.stop(self.serving.clock())

    def make_room(self) -> None:
        """Ends this idle connection, so that a new connection can be accepted."""
        self._fail(Violation(frames.NO_ERROR, "idle longest of too many connections"))

    # -------------------------------------------------------------------------------------------------------- deadlines

    @property
    def asks_nothing(self) -> bool:
        """Returns True if the connection is open and has no request whose response is still to be computed or sent."""
        if self.http2.phase is CLOSED or self._paused_since:
            return False
        return all(stream.idle for stream in self.http2.streams.values())

    @property
    def used_at(self) -> float:
        """Returns roughly when the connection last had an unanswered request, in seconds of the front's clock.

        Returns when the connection was opened if it has had no request.
        """
        if self.http2.answered != self._answered_before:
            self._answered_before = self.http2.answered
            self._used_at = max(self._used_at, self.http2.heard_at)
        return self._used_at

    def check(self, now: float) -> None:
        """Ends the connection if one of its deadlines has passed. ``now``: seconds of the front's clock."""
        options, http2 = self.serving.options, self.http2
        assert self._transport is not None
        left = self._transport.get_write_buffer_size()
        if self._pace.is_slow(self._paused_since, left, now, options.write_timeout, options.min_rate):
            return self.abort()
        if http2.phase is CLOSED:
            return None
        if http2.phase is ConnectionPhase.OPENING and now - self._opened_at > options.head_timeout:
            return self._close()
        try:
            http2.check(now, now - self._checked_at, bool(self._paused_since or self._resting))
        except Violation as violation:
            return self._fail(violation)
        self._checked_at = now
        if not self._is_alive(now):
            return self.abort()
        return self._check_age(now)

    def _is_alive(self, now: float) -> bool:
        options, heard_at = self.serving.options, self.http2.heard_at
        if self._asked_at:
            if heard_at >= self._asked_at:
                self._asked_at = 0.0
            return not self._asked_at or now - self._asked_at <= options.keepalive_timeout
        if now - heard_at > options.keepalive_time and (self.http2.streams or options.keepalive_permit_without_calls):
            self._asked_at = now
            self.http2.write(frames.frame(frames.PING, 0, 0, _PING))
        return True

    def _check_age(self, now: float) -> None:
        """Ends the connection if it is too old, or has been idle for too long."""
        options = self.serving.options
        if not self.asks_nothing:
            self._used_at = now
        if self.http2.streams:
            self._occupied_at = now
        idle = now - max(self.used_at, self._occupied_at)
        if options.max_connection_idle and idle > options.max_connection_idle:
            self.announce_end()
        if self.http2.phase is ConnectionPhase.ANNOUNCED and now - self._ending_at > options.keepalive_timeout:
            # Whoever has not answered that PING by now will not.
            self.http2.end()
        if options.max_connection_age and now - self._opened_at > options.max_connection_age:
            self.announce_end()
            self._ending_at = self._ending_at or now  # its client said by GOAWAY before that it ends
            if options.max_connection_age_grace and now - self._ending_at > options.max_connection_age_grace:
                self.abort()

    def __repr__(self) -> str:
        return f"<Http2Connection {self.http2!r}>"
