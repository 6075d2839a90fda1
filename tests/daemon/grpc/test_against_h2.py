"""Any sequence of frames: the front decides as the library h2 does, or there is a reason here why it does not.

Both are given the same frames. A decision is: the connection ends, with which code; or streams are reset, with which codes.
A sequence ends with the first frame that h2 finds wrong, for what comes after means something else where the two differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import h2.exceptions
from hypothesis import strategies as st

from tensord.config.options import Grpc
from tensord.daemon.grpc import frames, header_blocks
from tests.daemon.grpc.frame_client import STREAM

GOOD = {
    ":method": "POST",
    ":scheme": "http",
    ":path": STREAM,
    ":authority": "x",
    "te": "trailers",
    "content-type": "application/grpc",
}
TRAILERS = {"x": "y"}


def block(fields: list[tuple[str, str]]) -> bytes:
    """Encodes header fields as literals that do not use the HPACK table."""
    return b"".join(header_blocks._literal(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields)


def without(name: str) -> list[tuple[str, str]]:
    return [item for item in GOOD.items() if item[0] != name]


#: Header blocks by name; those that begin with "bad" are malformed as a request.
BLOCKS = {
    "good": block(list(GOOD.items())),
    "trailers": block(list(TRAILERS.items())),
    "bad upper case": block([*GOOD.items(), ("X", "y")]),
    "bad unknown pseudo": block([(":x", "y"), *GOOD.items()]),
    "bad repeated pseudo": block([(":path", STREAM), *GOOD.items()]),
    "bad pseudo behind": block([*without(":path"), (":path", STREAM)]),
    **{f"bad without {name}": block(without(name)) for name in (":method", ":scheme", ":path")},
    "bad empty path": block([(":path", ""), *without(":path")]),
    "bad te": block([*without("te"), ("te", "gzip")]),
    "bad NUL": block([*GOOD.items(), ("x", "a\0b")]),
    "bad line end": block([*GOOD.items(), ("x", "a\nb")]),
    "bad name": block([*GOOD.items(), ("a b", "a")]),
    "length 0": block([*GOOD.items(), ("content-length", "0")]),
    "length 1": block([*GOOD.items(), ("content-length", "1")]),
    "bad length": block([*GOOD.items(), ("content-length", "x")]),
}
NUMBERS = st.sampled_from([1, 1, 1, 3, 3, 5, 7, 0, 2])


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    number: int
    payload: bytes
    #: Of HEADERS: which block.
    name: str = ""

    @property
    def content(self) -> bytes:
        return frames.frame(self.kind, self.flags, self.number, self.payload)


@st.composite
def headers(draw: st.DrawFn) -> Frame:
    name = draw(st.one_of(st.just("good"), st.just("good"), st.sampled_from(sorted(BLOCKS))))
    number, payload, flags = draw(NUMBERS), BLOCKS[name], draw(st.sampled_from([0, 1]))
    flags |= frames.END_HEADERS * draw(st.sampled_from([True, True, True, False]))
    if draw(st.sampled_from([False, False, False, True])):
        flags |= frames.PRIORITIZED
        payload = frames.number(draw(st.sampled_from([0, number, 9]))) + b"\1" + payload
    if draw(st.sampled_from([False, False, False, True])):
        flags |= frames.PADDED
        payload = bytes((3,)) + payload + bytes(3)
    return Frame(frames.HEADERS, flags, number, payload, name)


def of(
    kind: int, flags: list[int], payloads: list[bytes], numbers: st.SearchStrategy[int] = NUMBERS
) -> st.SearchStrategy[Frame]:
    return st.builds(Frame, st.just(kind), st.sampled_from(flags), numbers, st.sampled_from(payloads))


def setting(*pairs: tuple[int, int]) -> bytes:
    return frames.settings(pairs)[frames.HEAD_SIZE :]


@st.composite
def priority(draw: st.DrawFn) -> Frame:
    number = draw(NUMBERS)
    depends = frames.number(draw(st.sampled_from([0, number, 9, 1 << 31]))) + b"\1"
    return Frame(frames.PRIORITY, 0, number, draw(st.sampled_from([depends, depends, depends[:4]])))


MOSTLY_0 = st.sampled_from([0, 0, 0, 0, 1])
FRAMES = st.one_of(
    headers(),
    headers(),
    # Of a message that never gets whole.
    of(frames.DATA, [0, 0, 1], [b"", b"\1"]),
    of(frames.DATA, [frames.PADDED], [b"\1\1\0", b"\0", b"\4\0", b""]),
    of(frames.CONTINUATION, [0, frames.END_HEADERS], [b"", block([("z", "y")])]),
    of(frames.RST_STREAM, [0], [frames.number(frames.CANCEL)] * 4 + [b"123"]),
    of(
        frames.WINDOW_UPDATE,
        [0],
        [frames.number(1), frames.number(1), frames.number(0), frames.number(frames.MAX_WINDOW), b"123"],
    ),
    of(
        frames.SETTINGS,
        [0, 0, 0, frames.ACK],
        [
            b"",
            b"",
            b"12345",
            setting((frames.INITIAL_WINDOW_SIZE, 1)),
            setting((frames.INITIAL_WINDOW_SIZE, frames.MAX_WINDOW)),
            setting((frames.INITIAL_WINDOW_SIZE, 1 << 31)),
            setting((frames.MAX_FRAME_SIZE, 16383)),
            setting((frames.MAX_FRAME_SIZE, 1 << 24)),
            setting((frames.ENABLE_PUSH, 1)),
            setting((frames.ENABLE_PUSH, 2)),
            setting((0x77, 7)),
        ],
        MOSTLY_0,
    ),
    of(frames.PING, [0, frames.ACK], [bytes(8), bytes(8), bytes(7)], MOSTLY_0),
    of(frames.GOAWAY, [0], [bytes(8), b"1234567"], MOSTLY_0),
    priority(),
    of(frames.PUSH_PROMISE, [frames.END_HEADERS], [bytes(4)]),
    of(77, [0, 255], [b"", b"x"]),
)


@dataclass
class Decision:
    #: The code the connection ended with; None: it goes on.
    connection: int | None = None
    #: By stream.
    resets: dict[int, int] = field(default_factory=dict)


class Oracle:
    """Runs the library h2 as a server that answers every request when it is complete, and does nothing else."""

    def __init__(self) -> None:
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
        self._h2.initiate_connection()
        self._h2.receive_data(frames.PREFACE + frames.settings(()))
        self._h2.data_to_send()
        self.decision = Decision()

    def take(self, frame: Frame) -> bool:
        """Passes a frame to h2. Returns whether h2 has found no error so far."""
        try:
            for event in self._h2.receive_data(frame.content):
                if isinstance(event, h2.events.StreamEnded):
                    self._h2.send_headers(event.stream_id, [(b":status", b"200")], end_stream=True)
        except h2.exceptions.ProtocolError as error:
            self.decision.connection = int(error.error_code)
        for kind, number, payload in cut(self._h2.data_to_send()):
            if kind == frames.RST_STREAM:
                self.decision.resets[number] = int.from_bytes(payload, "big")
            elif kind == frames.GOAWAY and self.decision.connection is None:
                self.decision.connection = int.from_bytes(payload[4:8], "big")
        return self.decision == Decision()


def cut(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    at = 0
    while at < len(content):
        high, low, kind, _, number = frames.read_head(content, at)
        at += frames.HEAD_SIZE + (high << 16 | low)
        yield kind, number, content[at - (high << 16 | low) : at]


def is_whole(sequence: list[Frame]) -> bool:
    """Returns whether the last header block is complete."""
    for frame in reversed(sequence):
        if frame.kind in (frames.HEADERS, frames.CONTINUATION):
            return bool(frame.flags & frames.END_HEADERS)
    return True


def malformed(sent: list[Frame], theirs: Decision, ours: Decision) -> bool:
    """Excuses that a malformed request is a stream error here (RFC 9113, 8.1.1): h2 makes it a connection error."""
    return sent[-1].kind in (frames.HEADERS, frames.CONTINUATION) and (
        (theirs.connection, ours.connection, set(ours.resets.values()))
        == (frames.PROTOCOL_ERROR, None, {frames.PROTOCOL_ERROR})
    )


def acknowledgement(sent: list[Frame], theirs: Decision, ours: Decision) -> bool:
    """Excuses that SETTINGS with ACK and a payload are a FRAME_SIZE_ERROR here (RFC 9113, 6.5)."""
    codes = theirs.connection, ours.connection
    return sent[-1].kind == frames.SETTINGS and codes == (frames.PROTOCOL_ERROR, frames.FRAME_SIZE_ERROR)


def continuation(sent: list[Frame], theirs: Decision, ours: Decision) -> bool:
    """Excuses that CONTINUATION without HEADERS is a PROTOCOL_ERROR here on any stream (RFC 9113, 6.10)."""
    return (
        sent[-1].kind == frames.CONTINUATION
        and ours.connection == frames.PROTOCOL_ERROR
        and bool(theirs.connection == frames.STREAM_CLOSED or theirs.resets)
    )


def twice_wrong(sent: list[Frame], theirs: Decision, ours: Decision) -> bool:
    """Excuses a frame with two errors, in itself and in its place: either may be reported first."""
    return None not in (theirs.connection, ours.connection) and (
        not is_whole(sent[:-1])
        or sent[-1].flags & (frames.PADDED | frames.PRIORITIZED) > 0
        or len(sent[-1].payload) in (3, 4, 5, 7)
    )


def after_the_end(sent: list[Frame], theirs: Decision, ours: Decision) -> bool:
    """Excuses that DATA after END_STREAM ends the connection here: a stream error may be one of the connection (5.4.1)."""
    return sent[-1].kind == frames.DATA and (ours.connection, set(theirs.resets.values())) == (
        frames.STREAM_CLOSED,
        {frames.STREAM_CLOSED},
    )


def no_data(sent: list[Frame], theirs: Decision, ours: Decision) -> bool:
    """Excuses that content-length is checked here in a request without DATA (8.1.1): h2 does not check it there."""
    return set(ours.resets.values()) == {frames.PROTOCOL_ERROR} and any(
        frame.name == "length 1" and frame.flags & frames.END_STREAM for frame in sent
    )


def reset_of_nothing(sent: list[Frame], theirs: Decision, ours: Decision) -> bool:
    """Excuses that RST_STREAM of a stream never opened is a PROTOCOL_ERROR here (6.4): h2 ignores it."""
    opened = max((frame.number for frame in sent if frame.kind == frames.HEADERS), default=0)
    idle = [
        frame for frame in sent if frame.kind == frames.RST_STREAM and (frame.number > opened or not frame.number & 1)
    ]
    return ours.connection == frames.PROTOCOL_ERROR and bool(idle)


def pings(sent: list[Frame], theirs: Decision, ours: Decision) -> bool:
    """Excuses that a client with many PINGs and no call gets ENHANCE_YOUR_CALM here (gRPC A8): h2 has no such rule."""
    return ours.connection == frames.ENHANCE_YOUR_CALM and (
        sum(frame.kind == frames.PING and not frame.flags & frames.ACK for frame in sent) > Grpc().max_ping_strikes
    )


#: Why a decision may be another one.
REASONS = (no_data, reset_of_nothing, malformed, acknowledgement, continuation, twice_wrong, after_the_end, pings)


def check(sequence: list[Frame], decide: Callable[[list[Frame]], Decision]) -> None:
    """Fails where ``decide`` decides otherwise than h2 without a reason."""
    oracle, sent = Oracle(), []
    for frame in sequence:
        sent.append(frame)
        if not oracle.take(frame) or frame.kind == frames.GOAWAY:
            break
    if oracle.decision == Decision() and not is_whole(sent):
        number = next(frame.number for frame in reversed(sent) if frame.kind == frames.HEADERS)
        sent.append(Frame(frames.CONTINUATION, frames.END_HEADERS, number, b""))
        oracle.take(sent[-1])
    theirs, decision = oracle.decision, decide(sent)
    if theirs.connection is not None and decision.connection is not None:
        theirs.resets = {}
    if decision != theirs:
        assert any(reason(sent, theirs, decision) for reason in REASONS), (theirs, decision)
