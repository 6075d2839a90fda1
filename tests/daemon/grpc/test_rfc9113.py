"""Tests what RFC 9113 says a server MUST do about each frame, a case each; and gRPC's own rules for requests.

Every case has a connection of its own, on which a stream that was opened before has to go on if the connection does. Another
client, which was connected before, is served after each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tensord.daemon.grpc import frames
from tensord.daemon.grpc.frames import (
    COMPRESSION_ERROR,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    HEADERS,
    PADDED,
    PRIORITIZED,
    PROTOCOL_ERROR,
    STREAM_CLOSED,
    frame,
    settings,
    window_update,
)
from tests.daemon.grpc.frame_client import STREAM, FrameClient, GrpcFrontProcess, prefixed, request, serving
from tests.daemon.grpc.test_against_h2 import BLOCKS, GOOD, block
from tests.fakes import EchoWorker

#: Stream 1 is open and goes on; what a case does is about 3 and above.
OPEN = frame(HEADERS, END_HEADERS, 3, BLOCKS["good"])
WHOLE = frame(HEADERS, END_HEADERS | END_STREAM, 3, BLOCKS["good"])
#: A block that is not whole.
BEGUN = frame(HEADERS, 0, 3)
RESET = OPEN + frames.rst_stream(3, frames.CANCEL)
#: Not a gRPC call: we answer at once, and tell the client to stop.
CUT = frame(HEADERS, END_HEADERS, 3, block([*[f for f in GOOD.items() if f[0] != "content-type"]]))
SELF = frames.number(3) + b"\1"
ACCEPTED = None


@dataclass(frozen=True)
class Connection:
    """Expects that the connection ends with an error code."""

    code: int


@dataclass(frozen=True)
class Stream:
    """Expects that a stream is reset with an error code, and everything else goes on."""

    code: int
    number: int = 3


def malformed(*fields: tuple[str, str]) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, 3, block([*GOOD.items(), *fields]))


def measured(length: str, *data: bytes, end: bool = True) -> bytes:
    """Builds a request with a content-length and DATA frames."""
    head = frame(HEADERS, END_HEADERS, 3, block([*GOOD.items(), ("content-length", length)]))
    pieces = [frame(DATA, END_STREAM * (end and n == len(data) - 1), 3, piece) for n, piece in enumerate(data)]
    return head + b"".join(pieces)


CASES: dict[str, tuple[bytes, Connection | Stream | None]] = {
    # 4.1, 5.5: unknown types, flags and settings are ignored.
    "unknown type": (frame(77, 255, 0, b"x") + frame(78, 0, 3) + frame(79, 0, 2, b"x"), ACCEPTED),
    "unknown setting": (settings([(0x4242, 1)]), ACCEPTED),
    "unknown flags": (frame(frames.PING, 0xFE, 0, bytes(8)), ACCEPTED),
    # 4.2
    "a frame larger than allowed": (frames.head(DATA, 0, 1, (4 << 20) + 1), Connection(FRAME_SIZE_ERROR)),
    # 4.3
    "a block that is none": (frame(HEADERS, END_HEADERS, 3, b"\xff" * 8), Connection(COMPRESSION_ERROR)),
    "an index of nothing": (frame(HEADERS, END_HEADERS, 3, b"\xfe"), Connection(COMPRESSION_ERROR)),
    "a block of a refused stream is decoded": (
        frame(HEADERS, END_HEADERS, 3, b"\x40\x01x\x01y" + BLOCKS["bad upper case"])
        + frame(HEADERS, END_HEADERS, 5, BLOCKS["good"] + b"\xbe"),
        Stream(PROTOCOL_ERROR),
    ),
    # 5.1: idle
    "DATA on an idle stream": (frame(DATA, 0, 3), Connection(PROTOCOL_ERROR)),
    "RST_STREAM on an idle stream": (frames.rst_stream(3, 0), Connection(PROTOCOL_ERROR)),
    "WINDOW_UPDATE on an idle stream": (window_update(3, 1), Connection(PROTOCOL_ERROR)),
    "PRIORITY on an idle stream": (frame(frames.PRIORITY, 0, 3, bytes(5)), ACCEPTED),
    "CONTINUATION on an idle stream": (frame(frames.CONTINUATION, END_HEADERS, 3), Connection(PROTOCOL_ERROR)),
    # 5.1: half-closed by the client, while our side is open (window 0 keeps the answer back)
    "DATA after END_STREAM": (WHOLE + frame(DATA, 0, 3, b"x"), Connection(STREAM_CLOSED)),
    "HEADERS after END_STREAM": (WHOLE + WHOLE, Connection(STREAM_CLOSED)),
    "CONTINUATION after END_STREAM": (WHOLE + frame(frames.CONTINUATION, END_HEADERS, 3), Connection(PROTOCOL_ERROR)),
    "PRIORITY after END_STREAM": (WHOLE + frame(frames.PRIORITY, 0, 3, bytes(5)), ACCEPTED),
    "WINDOW_UPDATE after END_STREAM": (WHOLE + window_update(3, 1), ACCEPTED),
    "RST_STREAM after END_STREAM": (WHOLE + frames.rst_stream(3, frames.CANCEL), ACCEPTED),
    # 5.1: closed by the client
    "DATA after RST_STREAM": (RESET + frame(DATA, 0, 3, b"x"), Stream(STREAM_CLOSED)),
    "much DATA after RST_STREAM is told once": (RESET + frame(DATA, 0, 3, b"x") * 9, Stream(STREAM_CLOSED)),
    "HEADERS after RST_STREAM": (RESET + OPEN, Stream(STREAM_CLOSED)),
    "PRIORITY after RST_STREAM": (RESET + frame(frames.PRIORITY, 0, 3, bytes(5)), ACCEPTED),
    "WINDOW_UPDATE after RST_STREAM": (RESET + window_update(3, 1), ACCEPTED),
    "RST_STREAM twice": (RESET + frames.rst_stream(3, 0), ACCEPTED),
    # 5.1: closed by us before the client was done; what it had sent is passed over.
    "DATA on a stream that we ended": (CUT + frame(DATA, END_STREAM, 3, b"x"), ACCEPTED),
    "trailers on a stream that we ended": (
        CUT + frame(HEADERS, END_HEADERS | END_STREAM, 3, BLOCKS["trailers"]),
        ACCEPTED,
    ),
    "RST_STREAM on a stream that we ended": (CUT + frames.rst_stream(3, frames.CANCEL), ACCEPTED),
    # 5.1.1
    "HEADERS on an even stream": (frame(HEADERS, END_HEADERS, 4, BLOCKS["good"]), Connection(PROTOCOL_ERROR)),
    "DATA on an even stream": (frame(DATA, 0, 2), Connection(PROTOCOL_ERROR)),
    "RST_STREAM on an even stream": (frames.rst_stream(2, 0), Connection(PROTOCOL_ERROR)),
    "a lower stream that was passed over": (
        frame(HEADERS, END_HEADERS, 7, BLOCKS["good"]) + frame(HEADERS, END_HEADERS, 5, BLOCKS["good"]),
        Connection(PROTOCOL_ERROR),
    ),
    "DATA on a stream that was passed over": (
        frame(HEADERS, END_HEADERS, 7, BLOCKS["good"]) + frame(DATA, 0, 5),
        Connection(STREAM_CLOSED),
    ),
    "streams that are passed over": (frame(HEADERS, END_HEADERS, 9, BLOCKS["good"]), ACCEPTED),
    # 5.3.1 of RFC 7540
    "a stream that depends on itself": (frame(frames.PRIORITY, 0, 3, SELF), Connection(PROTOCOL_ERROR)),
    "HEADERS that depend on themselves": (
        frame(HEADERS, END_HEADERS | PRIORITIZED, 3, SELF + BLOCKS["good"]),
        Connection(PROTOCOL_ERROR),
    ),
    "HEADERS that depend on another": (
        frame(HEADERS, END_HEADERS | PRIORITIZED, 3, bytes(5) + BLOCKS["good"]),
        ACCEPTED,
    ),
    # 6.1
    "DATA on stream 0": (frame(DATA, 0, 0, b"x"), Connection(PROTOCOL_ERROR)),
    "more padding than payload": (frame(DATA, PADDED, 1, b"\2\0"), Connection(PROTOCOL_ERROR)),
    "padding without its size": (frame(DATA, PADDED, 1), Connection(FRAME_SIZE_ERROR)),
    "padding alone": (frame(DATA, PADDED, 1, b"\1\0"), ACCEPTED),
    # 6.2
    "HEADERS on stream 0": (frame(HEADERS, END_HEADERS, 0, BLOCKS["good"]), Connection(PROTOCOL_ERROR)),
    "a first piece of HEADERS on stream 0": (frame(HEADERS, 0, 0, b"\x83"), Connection(PROTOCOL_ERROR)),
    "HEADERS with more padding than payload": (
        frame(HEADERS, PADDED | END_HEADERS, 3, b"\x09x"),
        Connection(PROTOCOL_ERROR),
    ),
    "HEADERS without room for their priority": (
        frame(HEADERS, PRIORITIZED | END_HEADERS, 3, b"\0\0"),
        Connection(FRAME_SIZE_ERROR),
    ),
    "a block that is interrupted": (BEGUN + frame(frames.PING, 0, 0, bytes(8)), Connection(PROTOCOL_ERROR)),
    "a block interrupted by an unknown type": (BEGUN + frame(77, 0, 0), Connection(PROTOCOL_ERROR)),
    "a block interrupted by another stream's": (BEGUN + frame(DATA, 0, 1), Connection(PROTOCOL_ERROR)),
    # 6.3
    "PRIORITY on stream 0": (frame(frames.PRIORITY, 0, 0, bytes(5)), Connection(PROTOCOL_ERROR)),
    "PRIORITY of four bytes": (frame(frames.PRIORITY, 0, 3, bytes(4)), Connection(FRAME_SIZE_ERROR)),
    # 6.4
    "RST_STREAM on stream 0": (frames.rst_stream(0, 0), Connection(PROTOCOL_ERROR)),
    "RST_STREAM of three bytes": (frame(frames.RST_STREAM, 0, 1, bytes(3)), Connection(FRAME_SIZE_ERROR)),
    # 6.5
    "SETTINGS on a stream": (frame(frames.SETTINGS, 0, 1), Connection(PROTOCOL_ERROR)),
    "SETTINGS of five bytes": (frame(frames.SETTINGS, 0, 0, bytes(5)), Connection(FRAME_SIZE_ERROR)),
    "SETTINGS that acknowledge with values": (
        frame(frames.SETTINGS, frames.ACK, 0, bytes(6)),
        Connection(FRAME_SIZE_ERROR),
    ),
    "ENABLE_PUSH of 2": (settings([(frames.ENABLE_PUSH, 2)]), Connection(PROTOCOL_ERROR)),
    "ENABLE_PUSH of 1": (settings([(frames.ENABLE_PUSH, 1)]), ACCEPTED),
    "an initial window of 2^31": (settings([(frames.INITIAL_WINDOW_SIZE, 1 << 31)]), Connection(FLOW_CONTROL_ERROR)),
    "frames of 16383 bytes": (settings([(frames.MAX_FRAME_SIZE, 16383)]), Connection(PROTOCOL_ERROR)),
    "frames of 2^24 bytes": (settings([(frames.MAX_FRAME_SIZE, 1 << 24)]), Connection(PROTOCOL_ERROR)),
    "a bad value that a good one follows": (
        settings([(frames.ENABLE_PUSH, 2), (frames.ENABLE_PUSH, 0)]),
        Connection(PROTOCOL_ERROR),
    ),
    # 6.6
    "PUSH_PROMISE": (frame(frames.PUSH_PROMISE, END_HEADERS, 1, bytes(4)), Connection(PROTOCOL_ERROR)),
    # 6.7
    "PING on a stream": (frame(frames.PING, 0, 1, bytes(8)), Connection(PROTOCOL_ERROR)),
    "PING of seven bytes": (frame(frames.PING, 0, 0, bytes(7)), Connection(FRAME_SIZE_ERROR)),
    "an answer to no PING": (frame(frames.PING, frames.ACK, 0, bytes(8)), ACCEPTED),
    # 6.8
    "GOAWAY on a stream": (frame(frames.GOAWAY, 0, 1, bytes(8)), Connection(PROTOCOL_ERROR)),
    "GOAWAY of seven bytes": (frame(frames.GOAWAY, 0, 0, bytes(7)), Connection(FRAME_SIZE_ERROR)),
    "what follows GOAWAY on new streams is passed over": (
        frames.goaway(0, 0) + OPEN + frame(DATA, 0, 3, b"x") + window_update(3, 1) + frames.rst_stream(3, 0),
        ACCEPTED,
    ),
    # 6.9
    "WINDOW_UPDATE of three bytes": (frame(frames.WINDOW_UPDATE, 0, 1, bytes(3)), Connection(FRAME_SIZE_ERROR)),
    "a connection's window of nothing more": (window_update(0, 0), Connection(PROTOCOL_ERROR)),
    "a stream's window of nothing more": (OPEN + window_update(3, 0), Stream(PROTOCOL_ERROR)),
    "a connection's window beyond 2^31-1": (window_update(0, frames.MAX_WINDOW), Connection(FLOW_CONTROL_ERROR)),
    "a stream's window beyond 2^31-1": (
        OPEN + window_update(3, 1) + window_update(3, frames.MAX_WINDOW),
        Stream(FLOW_CONTROL_ERROR),
    ),
    "an initial window that lifts a stream's beyond 2^31-1": (
        window_update(1, 2) + settings([(frames.INITIAL_WINDOW_SIZE, frames.MAX_WINDOW)]),
        Connection(FLOW_CONTROL_ERROR),
    ),
    # 6.10
    "CONTINUATION on stream 0": (BEGUN + frame(frames.CONTINUATION, END_HEADERS, 0), Connection(PROTOCOL_ERROR)),
    "CONTINUATION after END_HEADERS": (OPEN + frame(frames.CONTINUATION, END_HEADERS, 3), Connection(PROTOCOL_ERROR)),
    "CONTINUATION of another stream": (BEGUN + frame(frames.CONTINUATION, END_HEADERS, 5), Connection(PROTOCOL_ERROR)),
    "CONTINUATION without end": (BEGUN + frame(frames.CONTINUATION, 0, 3) * 99, Connection(ENHANCE_YOUR_CALM)),
    # 8.1
    "trailers": (OPEN + frame(HEADERS, END_HEADERS | END_STREAM, 3, BLOCKS["trailers"]), ACCEPTED),
    "trailers in pieces": (
        OPEN + frame(HEADERS, END_STREAM, 3) + frame(frames.CONTINUATION, END_HEADERS, 3, BLOCKS["trailers"]),
        ACCEPTED,
    ),
    "trailers without END_STREAM": (OPEN + frame(HEADERS, END_HEADERS, 3, BLOCKS["trailers"]), Stream(PROTOCOL_ERROR)),
    "a pseudo header in trailers": (
        OPEN + frame(HEADERS, END_HEADERS | END_STREAM, 3, BLOCKS["good"]),
        Stream(PROTOCOL_ERROR),
    ),
    "upper case in trailers": (
        OPEN + frame(HEADERS, END_HEADERS | END_STREAM, 3, block([("X", "y")])),
        Stream(PROTOCOL_ERROR),
    ),
    # 8.1.1
    "a content-length that is kept": (measured("3", b"\1", b"\1\1"), ACCEPTED),
    "less than the content-length": (measured("4", b"\1", b"\1\1"), Stream(PROTOCOL_ERROR)),
    "more than the content-length": (measured("2", b"\1", b"\1\1"), Stream(PROTOCOL_ERROR)),
    "more than the content-length, before the end": (measured("1", b"\1\1", end=False), Stream(PROTOCOL_ERROR)),
    "a content-length without DATA": (malformed(("content-length", "1")), Stream(PROTOCOL_ERROR)),
    "a content-length of trailers": (
        measured("4", b"\1", end=False) + frame(HEADERS, END_HEADERS | END_STREAM, 3, BLOCKS["trailers"]),
        Stream(PROTOCOL_ERROR),
    ),
    "two content-lengths": (malformed(("content-length", "0"), ("content-length", "1")), Stream(PROTOCOL_ERROR)),
    # 8.2, 8.3
    **{
        name.removeprefix("bad "): (frame(HEADERS, END_HEADERS, 3, content), Stream(PROTOCOL_ERROR))
        for name, content in BLOCKS.items()
        if name.startswith("bad ")
    },
    "a carriage return in a value": (malformed(("x", "a\rb")), Stream(PROTOCOL_ERROR)),
    "te of trailers": (frame(HEADERS, END_HEADERS, 3, BLOCKS["good"]), ACCEPTED),
    # 10.5.1
    "a block larger than allowed, by its head": (
        frames.head(HEADERS, END_HEADERS, 3, 1 << 19),
        Connection(ENHANCE_YOUR_CALM),
    ),
    "headers larger than allowed": (
        frame(
            HEADERS, END_HEADERS, 3, BLOCKS["good"] + b"".join(block([(f"x{n}", "y" * 1000)]) for n in range(30)) * 3
        ),
        Connection(ENHANCE_YOUR_CALM),
    ),
}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[GrpcFrontProcess, EchoWorker]]:
    with serving() as (front, (worker,)):
        yield front, worker


@pytest.mark.parametrize("name", CASES)
def test_what_is_decided(served: tuple[GrpcFrontProcess, EchoWorker], name: str) -> None:
    front, worker = served
    content, decision = CASES[name]
    # Without a window answers do not leave, so no stream ends but by what is sent here.
    with FrameClient(front.port, ((frames.INITIAL_WINDOW_SIZE, 0),)) as client, front.frames() as other:
        first = client.open(STREAM)
        client.send(content)
        if isinstance(decision, Connection):
            assert client.goaway()[1] == decision.code
            assert client.ends()
        else:
            client.synchronise()
            assert not client.goaways
            resets = {number: answer.reset for number, answer in client.answers.items() if answer.reset}
            assert resets == ({decision.number: decision.code} if decision else {})
            client.send(settings([(frames.INITIAL_WINDOW_SIZE, 65535)]))
            client.data(first, prefixed(request(b"\7")), end=True)
            worker.echo(worker.next())
            (answer,) = client.answer(first).streamed()
            assert answer.infer_response.raw_output_contents == [b"\7"]
        stream = other.call(request(b"\3"))
        worker.echo(worker.next())
        assert other.answer(stream).values == b"\3"
