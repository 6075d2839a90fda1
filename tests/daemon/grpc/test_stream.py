"""One stream on a bare connection: messages put together from any cuts, limits, compression; what it sends, as windows let it."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.config.options import Arenas, Grpc
from tensord.daemon.control.refusals import Refusals
from tensord.daemon.control.shared_counters import FrontCounters
from tensord.daemon.front.answered import Answered
from tensord.daemon.front.drain_rate import SILENCE_SECONDS
from tensord.daemon.front.status import INTERNAL, OK, RESOURCE_EXHAUSTED, UNIMPLEMENTED
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.call import Call
from tensord.daemon.grpc.header_blocks import CallHead
from tensord.daemon.grpc.serving import GrpcServing
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.submit.accounts import Accounts
from tensord.shm.messages import Buffer

LIMIT = 1024


class AtOnce(list[Callable[[], None]]):
    """Callbacks for when all bytes have left, which they have as soon as they are written."""

    def append(self, on_written: Callable[[], None]) -> None:
        on_written()


class Wire:
    """The parts of a connection that a stream uses: windows, a bounded buffer, and what was written."""

    is_plain = True

    def __init__(self, window: int, room: int, frame_size: int, options: Grpc) -> None:
        words = memoryview(bytearray(4096)).cast("Q")
        counters = FrontCounters(words, words[:1], words[1:2], 0)
        answered = Answered(counters, Refusals(lambda refusal: None), "grpc")
        self.serving = GrpcServing(options, {}, counters, Accounts(Arenas(), 0, 0), answered)
        self.account = None
        self.connection = self
        self.loop = asyncio.new_event_loop()
        self.max_frame_size = frame_size
        self.send_window = window
        self.room = room
        self.answered = self.sent = self.data_read = 0
        self.data_stream: Stream | None = None
        self.blocked: dict[int, Stream] = {}
        self.streams: dict[int, Stream] = {}
        self.out = bytearray()
        self.on_written = AtOnce()

    def stop_direct(self, stream: Stream) -> None:
        """Does nothing, because nothing is read directly here."""

    def write(self, piece: Buffer) -> None:
        self.out += piece

    def write_pieces(self, *pieces: Buffer) -> None:
        self.out += b"".join(pieces)

    def when_written(self, on_written: Callable[[], None]) -> None:
        on_written()

    def rst_stream(self, number: int, code: int) -> None:
        self.write(frames.rst_stream(number, code))

    def frames(self) -> Iterator[tuple[int, int, bytes]]:
        """Yields type, flags and payload of each frame written since the last call."""
        content, self.out = bytes(self.out), bytearray()
        at = 0
        while at < len(content):
            high, low, kind, flags, number = frames.read_head(content, at)
            assert number == 1
            at += frames.HEAD_SIZE + (high << 16 | low)
            yield kind, flags, content[at - (high << 16 | low) : at]


class Received(Call):
    """Keeps what came."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.half = False
        self.gone = False
        self.stopped = False

    def message(self, content: Buffer, start: int, end: int) -> None:
        self.messages.append(bytes(content[start:end]))

    def half_closed(self) -> None:
        self.half = True

    @property
    def idle(self) -> bool:
        return not self.messages

    def stop(self) -> None:
        self.stopped = True

    def abandoned(self) -> None:
        self.gone = True


def opened(
    encoding: str = "identity",
    accepts: tuple[str, ...] = (),
    window: int = 1 << 20,
    connection_window: int = 1 << 20,
    room: int = 1 << 20,
    frame_size: int = 16384,
    **options: Any,
) -> tuple[Wire, Stream, Received]:
    wire = Wire(connection_window, room, frame_size, Grpc(**{"max_message_byte_size": LIMIT, **options}))
    call = Received()
    head = CallHead("/a", encoding=encoding, accepts=accepts)
    stream = Stream(wire, 1, head, window)  # type: ignore[arg-type]
    stream.call = call
    wire.streams[1] = stream
    wire.loop.close()
    return wire, stream, call


def prefixed(content: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(content)) + content


def status(wire: Wire) -> tuple[int, str]:
    """Returns the status and message with which the stream ended."""
    decoder = hpack.Decoder()
    fields: dict[str, str] = {}
    for kind, _, payload in wire.frames():
        if kind == frames.HEADERS:
            fields |= dict(decoder.decode(payload))
    return int(fields["grpc-status"]), fields.get("grpc-message", "")


# ----------------------------------------------------------------------------------------------------------- receiving

MESSAGES = st.lists(st.binary(max_size=60), max_size=6)


def pieces(content: bytes, cuts: list[int]) -> Iterator[bytes]:
    bounds = [0, *sorted(cut % (len(content) + 1) for cut in cuts), len(content)]
    for begin, end in itertools.pairwise(bounds):
        if begin < end:
            yield content[begin:end]


def receive(stream: Stream, piece: bytes) -> None:
    """Passes all of a piece to the stream."""
    stream.receive(piece, 0, len(piece))


@given(MESSAGES, st.lists(st.integers(0, 1000), max_size=30), st.integers(0, 3))
def test_messages_come_whole_however_they_are_cut(messages: list[bytes], cuts: list[int], around: int) -> None:
    """Each piece with something around it that is not the stream's."""
    wire, stream, call = opened()
    for piece in pieces(b"".join(map(prefixed, messages)), cuts):
        stream.receive(bytes(around) + piece + bytes(around), around, around + len(piece))
    stream.frame_arrived(frames.END_STREAM)
    assert call.messages == messages
    assert (call.half, call.gone, wire.serving.collected, stream.partial_since) == (True, False, 0, 0.0)


@given(MESSAGES, st.lists(st.integers(0, 1000), max_size=10), st.sampled_from(["gzip", "deflate"]), st.data())
def test_compressed_ones_among_them(messages: list[bytes], cuts: list[int], encoding: str, data: st.DataObject) -> None:
    squeeze = gzip.compress if encoding == "gzip" else zlib.compress
    flags = data.draw(st.lists(st.booleans(), min_size=len(messages), max_size=len(messages)))
    content = b"".join(
        prefixed(squeeze(message), 1) if flag else prefixed(message)
        for message, flag in zip(messages, flags, strict=True)
    )
    _, stream, call = opened(encoding)
    for piece in pieces(content, cuts):
        receive(stream, piece)
    assert call.messages == messages


@pytest.mark.parametrize("cut", [1, 4, 5, 6, 100_000])
def test_a_message_over_the_limit(cut: int) -> None:
    """Refused as soon as its length is there, and what comes behind it is not looked at."""
    wire, stream, call = opened()
    content = prefixed(bytes(LIMIT)) + prefixed(bytes(LIMIT + 1)) + prefixed(b"more")
    for at in range(0, len(content), cut):
        receive(stream, content[at : at + cut])
    assert call.messages == [bytes(LIMIT)]
    assert (call.gone, wire.serving.collected, wire.streams) == (True, 0, {})
    assert status(wire) == (RESOURCE_EXHAUSTED, f"Received message larger than max ({LIMIT + 1} vs. {LIMIT})")


def test_incomplete_messages_of_all_streams_together() -> None:
    wire, stream, call = opened(max_receiving_byte_size=2 * LIMIT)
    wire.serving.collected = 2 * LIMIT - 100  # what other streams hold
    receive(stream, prefixed(bytes(500))[:100])
    assert stream.partial_since > 0
    assert not call.gone
    receive(stream, bytes(6))
    assert (call.gone, wire.serving.collected) == (True, 2 * LIMIT - 100)
    assert status(wire) == (RESOURCE_EXHAUSTED, "more than 2048 bytes of request messages are being received at once")


def test_a_message_is_not_late_for_what_is_not_read() -> None:
    """Seconds in which the connection was not read do not count towards ``body_timeout``, nor towards ``min_rate``."""
    wire, stream, call = opened(body_timeout=10.0, min_rate=1000)
    receive(stream, prefixed(bytes(500))[:100])
    begun = stream.partial_since
    for second in range(1, 21):
        stream.check(begun + second, 1.0)
    stream.check(begun + 22.0, 0.0)
    assert not call.gone
    stream.check(begun + 23.0, 0.0)
    assert call.gone
    assert "a message came at fewer than 1000 bytes a second" in status(wire)[1]


def test_a_message_is_not_late_of_which_its_buffer_has_enough() -> None:
    wire, stream, call = opened(body_timeout=10.0, min_rate=1000)
    receive(stream, prefixed(bytes(1000))[:100])
    wire.data_stream, wire.data_read = stream, 800
    stream.check(stream.partial_since + 2.7, 0.0)
    assert not call.gone
    wire.data_stream = None
    stream.check(stream.partial_since + 2.7, 0.0)
    assert call.gone


def test_a_message_is_not_late_for_what_its_client_may_not_send() -> None:
    """While the stream is held, its client may have no window: the time for the message begins anew when it goes on."""
    wire, stream, call = opened(body_timeout=10.0, min_rate=1000)
    receive(stream, prefixed(bytes(500))[:100])
    begun = stream.partial_since
    stream.held = True
    stream.check(begun + 60.0, 0.0)
    wire.serving.clock = lambda: begun + 60.5  # type: ignore[assignment, return-value]
    stream.release()
    assert [(kind, payload) for kind, _, payload in wire.frames()] == []
    stream.check(begun + 62.5, 0.0)
    assert not call.gone
    stream.check(begun + 63.0, 0.0)
    assert call.gone
    assert "a message came at fewer than 1000 bytes a second" in status(wire)[1]


@pytest.mark.parametrize(
    ("encoding", "flag", "content", "code", "text"),
    [
        ("identity", 1, b"abc", UNIMPLEMENTED, "message encoding 'identity' is not supported"),
        ("br", 1, b"abc", UNIMPLEMENTED, "message encoding 'br' is not supported"),
        ("gzip", 1, b"abc", INTERNAL, "a message is not valid gzip data"),
        ("gzip", 1, gzip.compress(b"abc", mtime=0)[:-1], INTERNAL, "a message is not valid gzip data"),
        ("gzip", 1, gzip.compress(b"abc", mtime=0) + b"x", INTERNAL, "a message is not valid gzip data"),
        ("deflate", 1, gzip.compress(b"abc", mtime=0), INTERNAL, "a message is not valid deflate data"),
        ("gzip", 1, gzip.compress(bytes(LIMIT + 1), mtime=0), RESOURCE_EXHAUSTED, "after decompression"),
    ],
)
def test_compressed_messages_that_are_refused(encoding: str, flag: int, content: bytes, code: int, text: str) -> None:
    wire, stream, call = opened(encoding)
    receive(stream, prefixed(content, flag))
    assert (call.messages, call.gone) == ([], True)
    found = status(wire)
    assert found[0] == code
    assert text in found[1]


@pytest.mark.parametrize("content", [b"\0", prefixed(b"abc")[:-1], prefixed(b"a") + b"\0\0"])
def test_the_end_in_the_middle_of_a_message(content: bytes) -> None:
    wire, stream, call = opened()
    receive(stream, content)
    stream.frame_arrived(frames.END_STREAM)
    assert (call.half, call.gone, wire.serving.collected) == (False, True, 0)
    assert status(wire) == (INTERNAL, "the stream ended in the middle of a message")


def test_a_defect_of_a_call_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    wire, stream, call = opened()
    call.message = lambda content, start, end: [][0]  # type: ignore[method-assign, assignment]
    receive(stream, prefixed(b"a"))
    assert status(wire) == (INTERNAL, "internal error; the server's log has the details")
    assert "a call of /a met a defect" in caplog.text


def test_what_is_idle() -> None:
    """A stream asks nothing before its first message begins, and none any more once its answer is there."""
    _, stream, call = opened()
    assert stream.idle
    stream.receive(prefixed(b"abc")[:6], 0, 6)
    assert not stream.idle
    stream.receive(b"bc", 0, 2)
    assert not stream.idle
    call.messages.clear()
    assert stream.idle
    stream.finish(0)
    assert not stream.idle


@pytest.mark.parametrize("first", ["whole", "in parts"])
def test_a_stop_waits_for_the_first_message(first: str) -> None:
    """However often it is asked to end before that; a client that sends nothing is not waited for."""
    _, stream, call = opened()
    message = prefixed(b"abcd")
    for now in (0.0, 0.02, 0.04, SILENCE_SECONDS):
        stream.stop(now)
    pieces = [message] if first == "whole" else [message[at : at + 1] for at in range(len(message))]
    for number, piece in enumerate(pieces, 1):
        assert (stream.ended, call.stopped) == (False, False)
        stream.receive(piece, 0, len(piece))
        stream.stop((number + 1) * SILENCE_SECONDS)
    assert call.messages == [b"abcd"]
    assert call.stopped
    wire, stream, call = opened()
    stream.stop(1.0)
    stream.stop(1.1 + SILENCE_SECONDS)
    assert [kind for kind, _, _ in wire.frames()] == [frames.HEADERS, frames.RST_STREAM]
    assert call.gone


def test_a_stop_is_the_calls_affair() -> None:
    wire, stream, call = opened()
    call.message(b"a", 0, 1)
    stream.stop(0.0)
    assert call.stopped
    assert not stream.ended
    stream.stopped()
    assert stream.ended
    assert call.gone
    kinds = [kind for kind, _, _ in wire.frames()]
    assert kinds == [frames.HEADERS, frames.RST_STREAM]
    stream.stop(0.0)


# ------------------------------------------------------------------------------------------------------------- sending


def sent(wire: Wire) -> tuple[bytes, list[int]]:
    """Returns the DATA written since the last call: the bytes, and each frame's size."""
    payloads = [payload for kind, _, payload in wire.frames() if kind == frames.DATA]
    return b"".join(payloads), [len(payload) for payload in payloads]


def test_a_small_answer_is_written_at_once() -> None:
    wire, stream, _ = opened()
    stream.frame_arrived(frames.END_STREAM)
    done: list[int] = []
    stream.answer([b"ab", memoryview(b"cd")], lambda: done.append(len(wire.out)))
    assert [kind for kind, _, _ in wire.frames()] == [frames.HEADERS, frames.DATA, frames.HEADERS]
    assert done
    assert not wire.streams
    assert (wire.send_window, stream.ended) == ((1 << 20) - 9, True)


def test_a_client_that_still_sends_is_told_to_stop() -> None:
    wire, stream, _ = opened()
    stream.answer([b"ab"])
    *_, (kind, _, payload) = wire.frames()
    assert (kind, payload) == (frames.RST_STREAM, bytes(4))


@given(
    st.lists(st.integers(0, 40_000), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.sampled_from(["stream", "connection", "room"]), st.integers(1, 30_000)), min_size=1, max_size=30
    ),
    st.integers(1, 20_000),
)
def test_windows_are_obeyed(sizes: list[int], grants: list[tuple[str, int]], frame_size: int) -> None:
    """Nothing leaves that was not granted, everything once it is; who waits for its bytes to leave hears of it then."""
    wire, stream, _ = opened(window=0, connection_window=0, room=0, frame_size=frame_size)
    stream.half_closed = True
    messages = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    expected = b"".join(map(prefixed, messages))
    left: list[bool] = []
    for message in messages:
        stream.send([message[: len(message) // 2], memoryview(message)[len(message) // 2 :]], lambda: left.append(True))
    stream.finish(OK)
    got = b""
    # It waits for its own window: others' frames and the socket are nothing to it.
    assert (left, stream.ended, stream.blocked, wire.blocked) == ([], False, True, {})
    granted = {"stream": 0, "connection": 0, "room": 0}

    def grant(which: str, size: int) -> None:
        nonlocal got
        granted[which] += size
        if which == "stream":
            stream.send_window += size
        elif which == "connection":
            wire.send_window += size
        else:
            wire.room = size
        stream.pump()
        content, frame_sizes = sent(wire)
        got += content
        assert all(size <= frame_size for size in frame_sizes)
        assert len(got) <= min(granted["stream"], granted["connection"])
        assert granted["room"] or not got
        assert stream.unsent_size == len(expected) - len(got)
        assert stream.blocked == (not stream.ended)
        assert (1 in wire.blocked) == (stream.blocked and stream.send_window > 0)
        assert bool(left) == stream.ended == (not stream.unsent_size)
        if stream.ended:
            assert (wire.blocked, len(left)) == ({}, len(messages))

    for which, size in grants:
        if not stream.ended:
            grant(which, size)
    for which in ("room", "connection", "stream"):
        if not stream.ended:
            grant(which, 1 << 20)
    assert got == expected


def test_what_is_unsent_when_the_client_goes_is_given_back() -> None:
    wire, stream, call = opened(window=10)
    left: list[bool] = []
    stream.send([bytes(100)], lambda: left.append(True))
    assert not left
    stream.abandon()
    assert (left, call.gone, stream.unsent_size, wire.blocked, wire.streams) == ([True], True, 0, {}, {})
    stream.send([b"late"], lambda: left.append(False))
    assert left == [True, False]


@pytest.mark.parametrize(("accepts", "compressed"), [(("identity", "gzip"), True), (("deflate",), False)])
def test_compressed_answers(accepts: tuple[str, ...], compressed: bool) -> None:
    wire, stream, _ = opened(accepts=accepts, response_compression="low")
    stream.send([bytes(1000), bytes(1000)])
    stream.send([b"short"])
    content, _ = sent(wire)
    found = []
    while content:
        flag, size = struct.unpack_from(">BI", content)
        found.append((bool(flag), gzip.decompress(content[5 : 5 + size]) if flag else content[5 : 5 + size]))
        content = content[5 + size :]
    assert found == [(compressed, bytes(2000)), (False, b"short")]
