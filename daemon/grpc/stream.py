"""One call: an HTTP/2 stream with length-prefixed messages both ways. The connection feeds it; a ``Call`` gives it sense.

    | compressed 8 | length 32 | message: length bytes |     any number of them, cut into DATA frames anywhere

What the client may still send is bounded by the window it was granted; what it does not take waits in the stream, and a stream
with much unsent grants nothing more, so a client that never reads its answers stops itself.
Source: gRPC's PROTOCOL-HTTP2.md, RFC 9113 sections 5 and 6.9.
"""

from __future__ import annotations

import asyncio
import logging
import time

from tensord.daemon.front.pace import GRACE_SECONDS, SILENCE_SECONDS
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.arriving_message import ArrivingMessage
from tensord.daemon.grpc.call import Call
from tensord.daemon.grpc.codes import DEADLINE_EXCEEDED, INTERNAL, RESOURCE_EXHAUSTED, UNAVAILABLE
from tensord.daemon.grpc.inflation import Refused, inflated
from tensord.daemon.grpc.reception import Reception
from tensord.daemon.grpc.reply import PREFIX, Reply, read_prefix
from tensord.shm.errors import DEFECT
from tensord.shm.messages import Buffer

_log = logging.getLogger(__name__)
#: Larger messages that do not come in one piece may go to where a worker reads them while they arrive.
_RECEIVED_BYTE_SIZE = 64 << 10
#: The last moment that is a number of 63 bits, as records and workers have it.
_NEVER_NS = (1 << 63) - 1


class Stream(Reply):
    """Owned by its connection until ``ended``."""

    call: Call | None = None
    #: Bytes taken from the client and not granted again yet; below 0: granted before they came.
    ungranted = 0
    #: No window is granted while this is set: the call has enough to do.
    held = False
    #: CLOCK_MONOTONIC; 0: the caller waits for ever.
    deadline_ns = 0
    half_closed = False
    ended = False
    #: Since when a message is incomplete, loop time; 0: none is.
    partial_since = 0.0
    #: The first bytes of a message whose prefix is not whole, or the message of which a part is here.
    _begun = b""
    _arriving: ArrivingMessage | None = None
    #: What of ``Serving.collected`` is this stream's.
    _kept = 0
    _timer: asyncio.TimerHandle | None = None
    #: While the server stops: what of its message had come, and since when it is so much, loop time.
    _came = -1
    _silent_since = 0.0

    def begin(self, call: Call) -> None:
        """The call that answers; its deadline runs from now."""
        self.call = call
        if self.head.timeout_ns:
            self.deadline_ns = min(time.monotonic_ns() + self.head.timeout_ns, _NEVER_NS)
            self._timer = self.connection.loop.call_later(self.head.timeout_ns / 1e9, self._expired)

    # ----------------------------------------------------------------------------------------------- receiving

    def receive(self, data: bytes, start: int, end: int) -> None:
        """A piece of the client's messages: those bytes of a chunk."""
        if self._finished:
            return
        try:
            self._receive(data, start, end)
        except Exception:
            self._defect()

    def _receive(self, data: bytes, start: int, end: int) -> None:
        content = start + PREFIX.size
        if content <= end and not self.partial_since:
            flag, length = read_prefix(data, start)
            if length == end - content and length <= self.connection.serving.max_message:
                self._deliver(flag, data, content, end)
                return
            if end - content < length <= self.connection.serving.max_message:
                self._begin(flag, length, memoryview(data)[content:end])
                self._note()
                return
        self._take(memoryview(data)[start:end])
        self._note()

    def _take(self, piece: memoryview) -> None:
        """Messages in several pieces, or several in one."""
        at, end = 0, len(piece)
        while at < end and not self._finished:
            arriving = self._arriving
            if arriving is None:
                known = len(self._begun)
                self._begun += piece[at : at + PREFIX.size - known]
                at += len(self._begun) - known
                if len(self._begun) < PREFIX.size:
                    return
                (flag, length), self._begun = PREFIX.unpack(self._begun), b""
                limit = self.connection.serving.max_message
                if length > limit:
                    self.refuse(RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {limit})")
                    return
                self.partial_since = 0.0
                if length > end - at:
                    self._begin(flag, length, piece[at:])
                    return
                content = at
                at += length
                self._deliver(flag, piece, content, at)
                continue
            size = min(arriving.left, end - at)
            arriving.feed(piece[at : at + size])
            at += size
            if not arriving.left:
                self._arrived(arriving)

    def _begin(self, flag: int, byte_size: int, piece: memoryview) -> None:
        """A message of which a part is there."""
        reception: Reception | None = None
        if not flag and byte_size > _RECEIVED_BYTE_SIZE:
            assert self.call is not None
            reception = self.call.reception(byte_size)
        arriving = self._arriving = ArrivingMessage(flag, byte_size, reception, self._room_came)
        arriving.feed(piece)

    def room(self) -> memoryview:
        """Where the next bytes of its DATA may be written; empty: ``receive`` takes them."""
        return memoryview(b"") if self._arriving is None else self._arriving.rest()

    def advance(self, byte_size: int) -> None:
        """That many bytes were written into ``room``, and nothing more is for now."""
        arriving = self._arriving
        assert arriving is not None
        arriving.advance(byte_size)
        if not arriving.left:
            self._arrived(arriving)
            if self._kept:
                self._note()

    @property
    def waits_for_room(self) -> bool:
        """Whether a message under way has no place to go yet."""
        return self._arriving is not None and self._arriving.waits

    def _room_came(self) -> None:
        """A message that waited for room is placed, or refused: from now on the client's time runs again."""
        self.partial_since = 0.0
        self._note()
        self.connection.grant(self)

    def _note(self) -> None:
        """After every change: what is kept here of messages under way, since when, and how much more of one is welcome."""
        if self._finished:
            return
        arriving, serving = self._arriving, self.connection.serving
        kept = len(self._begun)
        if arriving is not None:
            kept += arriving.kept_byte_size
            if arriving.is_placed and not arriving.is_granted and not self.held:
                arriving.is_granted = True
                self.connection.grant_ahead(self, arriving.left)
        elif not kept:
            self.partial_since = 0.0
        if not self.partial_since and (kept or arriving is not None):
            self.partial_since = self.connection.loop.time()
        serving.collected += kept - self._kept
        self._kept = kept
        if serving.collected > serving.max_collected:
            limit = serving.max_collected
            self.refuse(RESOURCE_EXHAUSTED, f"more than {limit} bytes of request messages are being received at once")

    def _drop(self) -> None:
        self._begun = b""
        if self._arriving is not None:
            self.connection.stop_direct(self)
            self._arriving.drop()
            self._arriving = None
        self.connection.serving.collected -= self._kept
        self._kept = 0
        self.partial_since = 0.0

    def _arrived(self, arriving: ArrivingMessage) -> None:
        """The message under way is whole."""
        self._arriving = None
        self.partial_since = 0.0
        received = arriving.received
        if received is None:
            content = arriving.content()
            arriving.drop()
            self._deliver(arriving.flag, content, 0, len(content))
            return
        assert self.call is not None
        try:
            self.call.received(received)
        except Exception:
            arriving.drop()
            self._defect()

    def _deliver(self, flag: int, content: Buffer, start: int, end: int) -> None:
        assert self.call is not None
        try:
            if flag:
                content = inflated(
                    content[start:end], self.head.encoding if flag == 1 else "", self.connection.serving.max_message
                )
                start, end = 0, len(content)
            self.call.message(content, start, end)
        except Refused as refused:
            self.refuse(refused.code, refused.message)
        except Exception:
            self._defect()

    def end_receiving(self) -> None:
        """The client half-closed."""
        self.half_closed = True
        if self._finished:
            return
        if self._arriving is not None or self._begun:
            self.refuse(INTERNAL, "the stream ended in the middle of a message")
            return
        assert self.call is not None
        try:
            self.call.half_closed()
        except Exception:
            self._defect()

    @property
    def idle(self) -> bool:
        """Whether it asks nothing: no message is on its way, and none waits for its answer."""
        return not self._finished and not self.partial_since and self.call is not None and self.call.idle

    def stop(self, now: float, direct: int) -> None:
        """The server stops: the call ends with its last answer, at once where it waits for none. Said again and again.

        Whoever does not go on with its message is not waited for.

        Args:
          direct: as of ``check``.
        """
        call = self.call
        if self._finished or call is None:
            return
        if not (self.half_closed or call.answers or self.waits_for_room or self.idle):
            came = direct + self._received_byte_size()
            if came != self._came:
                self._came, self._silent_since = came, now
            elif now - self._silent_since > SILENCE_SECONDS:
                self.stopped()
                return
        call.stop()

    def _received_byte_size(self) -> int:
        """Bytes of the message under way."""
        return len(self._begun) + (0 if self._arriving is None else self._arriving.received_byte_size)

    def stopped(self) -> None:
        """Called by the call when it has nothing more to answer: its client may ask another server."""
        self.refuse(UNAVAILABLE, "the server is stopping")

    def _defect(self) -> None:
        """Ours, and no reason to leave a client without its answer."""
        _log.exception("a call of %s met a defect of the server", self.head.path)
        self.refuse(INTERNAL, DEFECT)

    # -------------------------------------------------------------------------------------------------- bounds

    def check(self, now: float, direct: int) -> None:
        """Ends the call if its client sends a message, or takes an answer, too slowly; called about once a second.

        Args:
          direct: bytes of its message that were read and not told of yet.
        """
        options = self.connection.serving.options
        if self._is_stalled(now):
            self.connection.write(frames.rst_stream(self.id, frames.ENHANCE_YOUR_CALM))
            self.abandon()
        elif self.partial_since and not self.waits_for_room:
            # Else it is we who hold it up, for ``arenas.wait`` at most.
            elapsed, came = now - self.partial_since, direct + self._received_byte_size()
            if elapsed > options.body_timeout:
                self.refuse(UNAVAILABLE, f"a message did not arrive within {options.body_timeout:g} s")
            elif came < options.min_rate * (elapsed - GRACE_SECONDS) and not self.held:
                self.refuse(UNAVAILABLE, f"a message came at fewer than {options.min_rate} bytes a second")

    # -------------------------------------------------------------------------------------------------- ending

    def refuse(self, code: int, message: str) -> None:
        """Ends a call over what its client sent: the status, and the call is told that nobody waits."""
        if not self._finished:
            call = self.call
            try:
                self.finish(code, message)
            finally:
                if call is not None:
                    call.abandoned()

    def _expired(self) -> None:
        if not self._finished:
            self._timer = self._unsent = None
            self.refuse(DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _close(self) -> None:
        """Our side is done. A client that still sends is told to stop."""
        connection = self.connection
        connection.answered += 1
        if not self.half_closed:
            connection.cut(self.id, frames.NO_ERROR)
        self._end()

    def abandon(self) -> None:
        """The client reset the stream, or the connection is gone."""
        if self.ended:
            return
        call = None if self._finished else self.call
        self._finished = True
        self._end()
        if call is not None:
            call.abandoned()

    def _end(self) -> None:
        self.ended = True
        # Each refers to the other, and calls shall leave the garbage collector nothing to do.
        self.call = None
        if self.partial_since or self._kept:
            self._drop()
        if self._unsent is not None:
            self._unsent, self.unsent_size = None, 0
        if self._on_sent is not None:
            self._sent()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.blocked:
            self.connection.blocked.pop(self.id, None)
        self.connection.stream_ended(self)

    def __repr__(self) -> str:
        return f"<Stream {self.id} {self.head.path} unsent={self.unsent_size} half_closed={self.half_closed}>"
