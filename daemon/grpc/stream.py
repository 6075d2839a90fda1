"""Carries one gRPC call over one HTTP/2 stream: passes a client's messages to a ``Call``, and sends the ``Call``'s responses.

    client ─▶ | compressed: 8 bits | length: 32 bits | message | ... in DATA frames of any size ─▶ END_STREAM
    client ◀─ HEADERS ◀─ | compressed: 8 bits | length: 32 bits | message | ... in DATA frames ◀─ HEADERS: the trailers

Response bytes that the client does not accept yet wait in a queue. While this queue is long, the client gets no more window.
Source: gRPC's PROTOCOL-HTTP2.md, RFC 9113 sections 5, 6.9 and 8.1.1.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tensord.daemon.front import load_report
from tensord.daemon.front.access import Restricted
from tensord.daemon.front.drain_rate import GRACE_SECONDS, SILENCE_SECONDS, DrainRate
from tensord.daemon.front.each import call_each
from tensord.daemon.front.status import (
    DEADLINE_EXCEEDED,
    INTERNAL,
    NAMES,
    OK,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNIMPLEMENTED,
)
from tensord.daemon.grpc import frames, header_blocks
from tensord.daemon.grpc.arriving_message import (
    PREFIX,
    PREFIX_SIZE,
    ArrivingMessage,
    CallRefused,
    inflated,
    read_prefix,
)
from tensord.daemon.grpc.call import Call, OnSent
from tensord.daemon.grpc.header_blocks import CallHead
from tensord.shm.errors import DEFECT
from tensord.shm.messages import Buffer

if TYPE_CHECKING:
    from tensord.daemon.grpc.http2 import Http2

_log = logging.getLogger(__name__)
#: Packs the header of a DATA frame and the prefix of the message that fills it.
_message_head = struct.Struct(">BHBBIBI").pack
#: Larger messages that do not come in one piece may go to where a worker reads them while they arrive.
_RECEIVED_BYTE_SIZE = 64 << 10
#: The receive window: bytes that a client may send on a stream before it is granted more.
STREAM_WINDOW = 4 << 20
#: More than that is granted again.
MUCH_OF_STREAM = STREAM_WINDOW // 4
#: A window is below 2^31; what of a message is beyond this is granted as it comes.
_MAX_AHEAD = 1 << 30
#: The last moment that is a number of 63 bits, as records and workers have it.
_NEVER_NS = (1 << 63) - 1
#: Answers up to this size leave in one piece: no client takes smaller frames only.
_SMALL = 16384
#: Less is not worth compressing.
_MIN_COMPRESSED = 512


class Stream:
    """Carries one gRPC call over one HTTP/2 stream.

    ``send_window``: how many bytes of DATA may be sent on this stream until the client grants more.
    """

    # What nearly every call leaves as it is costs nothing here.
    call: Call | None = None
    ended = False
    #: CLOCK_MONOTONIC; 0: the caller waits for ever.
    deadline_ns = 0
    _timer: asyncio.TimerHandle | None = None
    # --- receiving
    #: Bytes taken from the client and not granted again yet; below 0: granted before they came.
    ungranted = 0
    #: No window is granted while this is set: the call has enough to do. ``release`` ends it.
    held = False
    half_closed = False
    #: Since when a message is incomplete, by the front's clock; 0: none is.
    partial_since = 0.0
    #: The first bytes of a message whose prefix is not whole, or the message of which a part is here.
    _begun = b""
    arriving: ArrivingMessage | None = None
    #: Bytes that this stream has added to ``GrpcServing.collected``.
    _kept = 0
    #: Bytes that its client still has to send, where it has said how many; gRPC's clients do not.
    _promised: int | None = None
    #: While the server stops: what of its message had come, and since when it is so much, by the front's clock.
    _came = -1
    _silent_since = 0.0
    # --- sending
    _head_sent = False
    #: The status is known: nothing is added any more.
    _finished = False
    #: Something waits for its window, for the connection's, or for the socket.
    blocked = False
    #: The data that waits for a window, or for the socket.
    _unsent: deque[Buffer] | None = None
    unsent_size = 0
    #: Since when, by the front's clock, some of it has not left, while it is blocked; how much had left then; and at which rate
    #: it leaves.
    _blocked_since = 0.0
    _taken = 0
    _pace: DrainRate | None = None
    #: Functions that are called once all of that has left.
    _on_sent: list[Callable[[], None]] | None = None
    _trailers = b""

    def __init__(self, http2: Http2, number: int, head: CallHead, send_window: int) -> None:
        self.http2 = http2
        self.connection = http2.connection
        self.id = number
        self.head = head
        #: The number of bytes that may still be sent to the client.
        self.send_window = send_window
        if head.content_length is not None:
            self._promised = head.content_length
        if head.timeout_ns:
            self.deadline_ns = min(time.monotonic_ns() + head.timeout_ns, _NEVER_NS)
            self._timer = self.connection.loop.call_later(head.timeout_ns / 1e9, self._expired)

    def begin(self) -> None:
        """Starts the call that the headers of the stream ask for.

        The call ends with an error if its method is unknown, if it is no gRPC call, or if the client did not send an access key
        that the method needs.
        """
        head, serving = self.head, self.http2.serving
        if head.http_status != 200:
            self.answer_http(head.http_status)
            return
        if serving.rules and (rule := serving.rules.get(head.path)) is not None:
            try:
                rule.check([(name.encode(), value.encode("latin-1")) for name, value in head.metadata])
            except Restricted as error:
                self.finish(UNAVAILABLE, error.message)
                return
        make = serving.methods.get(head.path)
        if make is None:
            self.finish(UNIMPLEMENTED, f"Method not found: {head.path[:200]}")
            return
        self.call = make(self)

    # ----------------------------------------------------------------------------------------------- receiving

    def receive(self, data: bytes, start: int, end: int) -> None:
        """Parses ``data[start:end]``, the next bytes of this stream, and passes complete messages to the call."""
        if self._promised is not None and not self._counts(end - start):
            return
        if self._finished:
            return
        try:
            content = start + PREFIX_SIZE
            if content <= end and not self.partial_since:
                flag, length = read_prefix(data, start)
                if not flag and length == end - content and length <= self.http2.serving.max_message:
                    # Common case: one whole message, not compressed.
                    self.call.message(data, content, end)  # type: ignore[union-attr]
                    return
            self._take(memoryview(data)[start:end])
            self._note()
        except CallRefused as refused:
            self.refuse(refused.code, refused.message)
        except Exception:
            self.meet_defect()

    def _take(self, piece: memoryview) -> None:
        """Cuts received bytes into messages, and passes complete ones to the call."""
        at, end = 0, len(piece)
        while at < end and not self._finished:
            arriving = self.arriving
            if arriving is None:
                known = len(self._begun)
                self._begun += piece[at : at + PREFIX_SIZE - known]
                at += len(self._begun) - known
                if len(self._begun) < PREFIX_SIZE:
                    return
                (flag, length), self._begun = PREFIX.unpack(self._begun), b""
                limit = self.http2.serving.max_message
                if length > limit:
                    self.refuse(RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {limit})")
                    return
                self.partial_since = 0.0
                if length > end - at:
                    arriving = None
                    if not flag and length > _RECEIVED_BYTE_SIZE:
                        arriving = self.call.arriving(length, self._go_on)  # type: ignore[union-attr]
                    self.arriving = arriving or ArrivingMessage(flag, length)
                    self.arriving.feed(piece[at:])
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

    def advance(self, byte_size: int) -> None:
        """Counts ``byte_size`` bytes that were read into the memory of the arriving message.

        A message that is now complete is passed to the call.
        """
        if self._promised is not None and not self._counts(byte_size):
            return
        arriving = self.arriving
        assert arriving is not None
        arriving.rest = arriving.rest[byte_size:]
        arriving.left -= byte_size
        if not arriving.left:
            try:
                self._arrived(arriving)
            except Exception:
                self.meet_defect()

    @property
    def waits_for_room(self) -> bool:
        """Returns whether the arriving message still waits for memory in the arena."""
        return self.arriving is not None and self.arriving.waits_for_room

    def release(self) -> None:
        """Lets the client send messages again, after the call had set ``held``."""
        self.held = False
        self._go_on()

    def _go_on(self) -> None:
        """Grants window again, and restarts the time limit for the message that the client is sending."""
        self.partial_since = 0.0
        self._note()
        self.grant()

    def frame_arrived(self, flags: int) -> None:
        """Handles the end of a DATA or HEADERS frame of this stream. ``flags``: the frame's flags.

        If END_STREAM is not set, grants the client more window once the client has used much of it. If END_STREAM is set, tells
        the stream's ``Call`` that the client sends no more. If the client's last message is incomplete, or if fewer bytes came
        than the content-length says, the gRPC call ends with an error instead.
        """
        if not flags & frames.END_STREAM:
            if self.ungranted > MUCH_OF_STREAM:
                self.grant()
            return
        if self._promised and not self.ended:
            self.http2.reset(self, frames.PROTOCOL_ERROR)
            return
        self.half_closed = True
        if self._finished:
            return
        if self.arriving is not None or self._begun:
            self.refuse(INTERNAL, "the stream ended in the middle of a message")
            return
        assert self.call is not None
        try:
            self.call.half_closed()
        except Exception:
            self.meet_defect()

    def grant(self) -> None:
        """Sends a WINDOW_UPDATE that restores the full window of the stream, if the client has used part of the window.

        Sends nothing while the call accepts no further messages, or while the arriving message waits for arena memory.
        Sends nothing after the stream has ended, or after the client has sent END_STREAM.
        """
        if self.ungranted > 0 and not (self.held or self.half_closed or self.ended or self.waits_for_room):
            self.http2.write(frames.window_update(self.id, self.ungranted))
            self.ungranted = 0

    def _note(self) -> None:
        if self._finished:
            return
        arriving, serving = self.arriving, self.http2.serving
        kept = len(self._begun)
        if arriving is not None:
            kept += arriving.kept_byte_size
            if arriving.is_placed and not arriving.is_granted and not self.held:
                arriving.is_granted = True
                if arriving.left > STREAM_WINDOW - self.ungranted and not self.half_closed and not self.ended:
                    # On top of the ordinary window. Once all of it has come, what is granted is as much as before.
                    ahead = min(arriving.left, _MAX_AHEAD)
                    self.http2.write(frames.window_update(self.id, self.ungranted + ahead))
                    self.ungranted = -ahead
        elif not kept:
            self.partial_since = 0.0
        if not self.partial_since and (kept or arriving is not None):
            self.partial_since = self.http2.serving.clock()
        serving.collected += kept - self._kept
        self._kept = kept
        if serving.collected > serving.max_collected:
            limit = serving.max_collected
            self.refuse(RESOURCE_EXHAUSTED, f"more than {limit} bytes of request messages are being received at once")

    def _drop(self) -> None:
        self._begun = b""
        if self.arriving is not None:
            self.connection.stop_direct(self)
            self.arriving.drop()
            self.arriving = None
        self.http2.serving.collected -= self._kept
        self._kept = 0
        self.partial_since = 0.0

    def _arrived(self, arriving: ArrivingMessage) -> None:
        """Passes ``arriving``, a complete message, to the call."""
        self.arriving = None
        self.partial_since = 0.0
        self.http2.serving.collected -= self._kept
        self._kept = 0
        if not arriving.is_placed:
            content = arriving.take_content()
            arriving.drop()
            self._deliver(arriving.flag, content, 0, len(content))
            return
        if arriving.on_placed is not None:
            try:
                arriving.on_placed(arriving)
            except BaseException:
                arriving.drop()
                raise

    def _deliver(self, flag: int, content: Buffer, start: int, end: int) -> None:
        """Passes the message ``content[start:end]`` to the call, decompressed if ``flag`` is 1."""
        assert self.call is not None
        if flag:
            content = inflated(
                content[start:end], self.head.encoding if flag == 1 else "", self.http2.serving.max_message
            )
            start, end = 0, len(content)
        self.call.message(content, start, end)

    def _counts(self, byte_size: int) -> bool:
        """Counts received bytes. Returns False, after resetting the stream, if they exceed the content-length."""
        assert self._promised is not None
        self._promised -= byte_size
        if self._promised < 0 and not self.ended:
            self.http2.reset(self, frames.PROTOCOL_ERROR)
        return self._promised >= 0

    # -------------------------------------------------------------------------------------------------- sending

    def answer(self, parts: list[Buffer], on_sent: OnSent = None) -> None:
        """Sends the only response message of a unary call, and the trailers.

        ``on_sent``: called once the memory of ``parts`` may be reused. If it is None, nothing is called.
        """
        if self._finished:
            if on_sent is not None:
                on_sent()
            return
        size = sum(map(len, parts))
        http2 = self.http2
        framed = size + PREFIX_SIZE
        if (
            framed > http2.max_frame_size
            or framed > http2.send_window
            or framed > self.send_window
            or (http2.serving.compression and self._compresses(size))
            or self._head_sent
            or self.head.load_format
            # TLS copies what is large, and says nothing of when that was.
            or (framed > _SMALL and (framed > http2.room or not self.connection.is_plain))
        ):
            self.send(parts, on_sent)
            self.finish(OK)
            return
        http2.send_window -= framed
        head, number = frames.write_head, self.id
        begin = (
            head(0, len(header_blocks.RESPONSE), frames.HEADERS, frames.END_HEADERS, number),
            header_blocks.RESPONSE,
            _message_head(framed >> 16, framed & 0xFFFF, frames.DATA, 0, number, 0, size),
        )
        end = (
            head(0, len(header_blocks.TRAILERS_OK), frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, number),
            header_blocks.TRAILERS_OK,
        )
        self._finished = True
        if framed <= _SMALL:
            self._end(b"".join((*begin, *parts, *end)))
            if on_sent is not None:
                on_sent()
        else:
            http2.answered += 1
            http2.sent += framed
            if on_sent is not None:
                http2.on_written.append(on_sent)
            self._end(b"".join(begin), *parts, b"".join(end))

    def send(self, parts: list[Buffer], on_sent: OnSent = None) -> None:
        """Sends a response message as far as the windows allow, and queues the rest.

        ``on_sent``: called once the memory of ``parts`` may be reused. If it is None, nothing is called.
        """
        if self._finished:
            if on_sent is not None:
                on_sent()
            return
        size = sum(map(len, parts))
        http2 = self.http2
        compressed = bool(http2.serving.compression) and self._compresses(size)
        if not self._head_sent:
            self._send_head()
        framed = size + PREFIX_SIZE
        if (
            not self._unsent
            and not compressed
            and framed <= self.send_window
            and framed <= http2.send_window
            and framed <= http2.max_frame_size
            and framed <= http2.room
            # TLS copies what is large, and says nothing of when that was.
            and (framed <= _SMALL or self.connection.is_plain)
        ):
            self.send_window -= framed
            http2.send_window -= framed
            http2.answered += 1
            head = _message_head(framed >> 16, framed & 0xFFFF, frames.DATA, 0, self.id, 0, size)
            if framed <= _SMALL:
                http2.write(b"".join((head, *parts)))
                if on_sent is not None:
                    on_sent()
                return
            http2.sent += framed
            http2.write_pieces(head, *parts)
            if on_sent is not None:
                http2.on_written.append(on_sent)
            return
        flag = 0
        if compressed:
            deflate = zlib.compressobj(self.http2.serving.compression, wbits=31)
            parts = [deflate.compress(b"".join(parts)) + deflate.flush()]
            size, flag = len(parts[0]), 1
        prefix = PREFIX.pack(flag, size)
        if self._unsent is None:
            self._unsent = deque()
        if size <= _SMALL:
            self._unsent.append(b"".join((prefix, *parts)))
        else:
            self._unsent.append(prefix)
            # TLS copies when it comes to it, and says nothing of when that was.
            plain = self.connection.is_plain
            self._unsent.extend(memoryview(part if plain else bytes(part)) for part in parts if len(part))
        self.unsent_size += size + PREFIX_SIZE
        http2.answered += 1
        if on_sent is not None:
            self.send_later(on_sent)
        self.pump()

    def send_later(self, on_sent: Callable[[], None]) -> None:
        """Has ``on_sent`` called once all unsent bytes of this stream have left, or the stream has ended."""
        if self._on_sent is None:
            self._on_sent = []
        self._on_sent.append(on_sent)

    def finish(self, code: int, message: str = "") -> None:
        """Ends the call with the gRPC status ``code`` and ``message``, after all response bytes."""
        if self._finished:
            return
        self._finished = True
        if code:
            call = self.call
            asked = None if call is None else call.asked
            self.http2.serving.answered.failed(NAMES[code], message, asked, self.connection.account)
        if self.arriving is not None or self.partial_since or self._kept:
            self._drop()
        self._trailers = header_blocks.trailers(code, message) if code or message else header_blocks.TRAILERS_OK
        if not self._head_sent:
            self._head_sent = True
            self._trailers = header_blocks.trailers_only(code, message)
        submitter = self.http2.serving.submitter
        if self.head.load_format and submitter is not None:
            report = load_report.header(submitter, self.head.load_format)
            self._trailers = header_blocks.with_field(self._trailers, *report)
        self.pump()

    def answer_http(self, status: int) -> None:
        """Answers a request that is no gRPC call with an HTTP status and no body."""
        self.http2.serving.answered.managed("other")
        self._finished = self._head_sent = True
        self._trailers = header_blocks.http_error(status)
        self.pump()

    def pump(self) -> None:
        """Sends as many queued bytes as the windows and the socket allow, and the trailers after the last of them."""
        http2, unsent = self.http2, self._unsent
        while unsent:
            room = min(self.send_window, http2.send_window, http2.max_frame_size, http2.room)
            if room <= 0:
                if not self.blocked:
                    self.blocked = True
                    self._blocked_since = self.http2.serving.clock()
                if self.send_window > 0:
                    http2.blocked[self.id] = self
                else:
                    http2.blocked.pop(self.id, None)
                return
            pieces: list[Buffer] = []
            size = 0
            while unsent and size < room:
                piece = unsent[0]
                if len(piece) <= room - size:
                    unsent.popleft()
                else:
                    unsent[0] = memoryview(piece)[room - size :]
                    piece = memoryview(piece)[: room - size]
                pieces.append(piece)
                size += len(piece)
            self.send_window -= size
            http2.send_window -= size
            http2.sent += size
            self.unsent_size -= size
            self._taken += size
            header = frames.head(frames.DATA, 0, self.id, size)
            if size < _SMALL // 2:
                http2.write(b"".join((header, *pieces)))
            else:
                http2.write_pieces(header, *pieces)
        if self.blocked:
            self.blocked = False
            self._blocked_since = 0.0
            http2.blocked.pop(self.id, None)
        if self._on_sent is not None:
            self._sent()
        if self._trailers:
            flags = frames.END_HEADERS | frames.END_STREAM
            self._end(frames.frame(frames.HEADERS, flags, self.id, self._trailers))

    def _sent(self) -> None:
        waiting, self._on_sent = self._on_sent or (), None
        when_written = self.connection.when_written
        call_each((partial(when_written, on_sent) for on_sent in waiting), "what follows an answer")

    def _send_head(self) -> None:
        self._head_sent = True
        compresses = bool(self.http2.serving.compression) and "gzip" in self.head.accepts
        block = header_blocks.RESPONSE_GZIP if compresses else header_blocks.RESPONSE
        self.http2.write(frames.frame(frames.HEADERS, frames.END_HEADERS, self.id, block))

    def _compresses(self, size: int) -> bool:
        return size >= _MIN_COMPRESSED and "gzip" in self.head.accepts

    # -------------------------------------------------------------------------------------------------- bounds

    def check(self, now: float, unread: float) -> None:
        """Ends the call if the client sends a message too slowly, or takes responses too slowly.

        ``now``: seconds of the front's clock.
        ``unread``: seconds in which nothing was read from the client. The time limit of the arriving message grows by them.
        """
        if self.partial_since:
            self.partial_since = min(now, self.partial_since + unread)
        options = self.http2.serving.options
        if self._is_stalled(now):
            self.http2.reset(self, frames.ENHANCE_YOUR_CALM)
        elif self.partial_since and not (self.held or self.waits_for_room):
            # Else it is we who hold it up: the rest may lie beyond the client's window.
            elapsed, came = now - self.partial_since, self._received_byte_size()
            if elapsed > options.body_timeout:
                self.refuse(UNAVAILABLE, f"a message did not arrive within {options.body_timeout:g} s")
            elif came < options.min_rate * (elapsed - GRACE_SECONDS):
                self.refuse(UNAVAILABLE, f"a message came at fewer than {options.min_rate} bytes a second")

    def _is_stalled(self, now: float) -> bool:
        """Returns whether the client receives the stream more slowly than allowed. ``now``: seconds of the front's clock."""
        if not self.blocked:
            return False
        if self._pace is None:
            self._pace = DrainRate()
        options = self.http2.serving.options
        return self._pace.is_slow(self._blocked_since, -self._taken, now, options.write_timeout, options.min_rate)

    @property
    def idle(self) -> bool:
        """Returns whether the call is open, no request message is arriving, and every request has its answer."""
        return not self._finished and not self.partial_since and self.call is not None and self.call.idle

    def stop(self, now: float) -> None:
        """Has the call end once its requests are answered. A stopping server calls this repeatedly until the call has ended.

        Refuses the call if it owes no answer, lacks its first message or the rest of a message, and gets no byte of it for
        ``SILENCE_SECONDS``.
        ``now``: seconds of the front's clock.
        """
        call = self.call
        if self._finished or call is None:
            return
        # The first message of a new call may be under way.
        is_new = call.is_new
        if not (self.half_closed or call.answers or self.waits_for_room) and (is_new or not self.idle):
            came = self._received_byte_size()
            if came != self._came:
                self._came, self._silent_since = came, now
            elif now - self._silent_since > SILENCE_SECONDS:
                self.stopped()
                return
        if not is_new:
            call.stop()

    def _received_byte_size(self) -> int:
        """Returns how many bytes of the arriving message have come, or 0 if no message is arriving."""
        arriving, http2 = self.arriving, self.http2
        untold = http2.data_read if http2.data_stream is self else 0
        return len(self._begun) + (0 if arriving is None else arriving.byte_size - arriving.left + untold)

    def stopped(self) -> None:
        """Ends the call with UNAVAILABLE, because the server is stopping."""
        self.refuse(UNAVAILABLE, "the server is stopping")

    def meet_defect(self) -> None:
        """Logs the current exception, and ends the call with INTERNAL."""
        _log.exception("a call of %s met a defect of the server", self.head.path)
        self.refuse(INTERNAL, DEFECT)

    # -------------------------------------------------------------------------------------------------- ending

    def refuse(self, code: int, message: str) -> None:
        """Ends the call with the gRPC status ``code`` and ``message``, and cancels its unanswered requests."""
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

    def abandon(self) -> None:
        """Ends the stream without a response, and cancels its call."""
        if self.ended:
            return
        call = None if self._finished else self.call
        self._finished = True
        self._end()
        if call is not None:
            call.abandoned()

    def _end(self, *last: Buffer) -> None:
        http2 = self.http2
        if last:
            http2.write_pieces(*last)
            http2.answered += 1
            if not self.half_closed:
                http2.rst_stream(self.id, frames.NO_ERROR)
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
            http2.blocked.pop(self.id, None)
        # What has ended it was written, or came with bytes that are looked at now: the connection is flushed.
        http2.streams.pop(self.id, None)

    def __repr__(self) -> str:
        return f"<Stream {self.id} {self.head.path} unsent={self.unsent_size} half_closed={self.half_closed}>"
