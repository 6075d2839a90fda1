"""HTTP/2 without a socket: as h2 decides, however it is cut; budgets, windows both ways, tensors read to their place."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.config.options import Arenas, Grpc
from tensord.daemon.control.refusals import Refusals
from tensord.daemon.control.shared_counters import FrontCounters
from tensord.daemon.front.answered import Answered
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.arriving_message import ArrivingMessage
from tensord.daemon.grpc.call import Call
from tensord.daemon.grpc.floods import FRAMES_A_TURN
from tensord.daemon.grpc.frames import END_HEADERS, END_STREAM, Violation, frame
from tensord.daemon.grpc.http2 import ConnectionPhase, Http2
from tensord.daemon.grpc.serving import GrpcServing
from tensord.daemon.grpc.stream import STREAM_WINDOW, Stream
from tensord.daemon.submit.accounts import Accounts
from tensord.shm.messages import Buffer
from tests.daemon.grpc.frame_client import STREAM, prefixed
from tests.daemon.grpc.test_against_h2 import BLOCKS, FRAMES, Decision, Frame, check
from tests.generated import examples

OPENING = frames.PREFACE + frames.settings(())
OPEN = frame(frames.HEADERS, END_HEADERS, 1, BLOCKS["good"])


class Echo(Call):
    """Sends back each message when it comes, and ends with its client."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def message(self, content: Buffer, start: int, end: int) -> None:
        self._stream.send([content[start:end]])

    def half_closed(self) -> None:
        self._stream.finish(0)

    @property
    def idle(self) -> bool:
        return True

    is_new = False

    def stop(self) -> None:
        self._stream.stopped()

    def abandoned(self) -> None:
        """Does nothing, because nothing is in flight."""


class Owner:
    """A connection that sends nothing by itself."""

    is_plain = True
    account = None

    def __init__(self) -> None:
        self.loop = Mock(time=lambda: 1.0)

    @property
    def wanted(self) -> int:
        """Returns how often a flush was scheduled."""
        return len(self.loop.call_soon.mock_calls)

    def flush(self) -> None:
        """Does nothing, because the test looks at what is queued."""

    def stop_direct(self, stream: Stream) -> None:
        """Does nothing, because nothing is read directly."""


def made(owner: Owner | None = None, **options: Any) -> Http2:
    """Makes one, whose streams echo."""
    words = memoryview(bytearray(4096)).cast("Q")
    counters = FrontCounters(words, words[:1], words[1:2], 0)
    answered = Answered(counters, Refusals(lambda refusal: None), "grpc")
    serving = GrpcServing(Grpc(**options), {STREAM: Echo}, counters, Accounts(Arenas(), 0, 0), answered)
    return Http2(serving, owner or Owner())  # type: ignore[arg-type]


def opened(**options: Any) -> Http2:
    """Makes one with stream 1 open, and nothing to send."""
    http2 = made(**options)
    http2.receive(OPENING + OPEN, 1.0)
    sent(http2)
    return http2


def sent(http2: Http2) -> list[tuple[int, int, int, bytes]]:
    """Takes what is to be sent: type, flags, stream and payload of each frame."""
    content, found, at = b"".join(http2.out), [], 0
    http2.out.clear()
    while at < len(content):
        high, low, kind, flags, number = frames.read_head(content, at)
        at += frames.HEAD_SIZE + (high << 16 | low)
        found.append((kind, flags, number, content[at - (high << 16 | low) : at]))
    return found


def all_of(http2: Http2, pieces: list[bytes]) -> tuple[list[tuple[int, int, int, bytes]], int | None]:
    """Gives all pieces. Returns what is sent, and the code that the connection ended with; None: it goes on."""
    try:
        for piece in pieces:
            more = http2.receive(piece, 1.0)
            while more:
                more = http2.receive(b"", 1.0)
    except Violation as violation:
        return sent(http2), violation.code
    return sent(http2), None


@given(st.lists(FRAMES, max_size=10), st.lists(st.integers(0, 2000), max_size=10), st.integers(0, 2))
def test_any_cut(sequence: list[Frame], cuts: list[int], messages: int) -> None:
    """The bytes of a client mean the same in one piece and in many."""
    data = b"".join(frame(frames.DATA, 0, 1, prefixed(bytes(700))) for _ in range(messages))
    content = OPENING + OPEN + data + b"".join(each.content for each in sequence)
    bounds = [0, *sorted(cut % len(content) for cut in cuts), len(content)]
    pieces = [content[begin:end] for begin, end in itertools.pairwise(bounds)]
    assert all_of(made(), pieces) == all_of(made(), [content])


@settings(max_examples=examples(1000))
@given(st.lists(FRAMES, min_size=1, max_size=12))
def test_as_h2_decides(sequence: list[Frame]) -> None:
    """The decisions agree with those of h2 (test_against_h2.py)."""

    def decide(sequence: list[Frame]) -> Decision:
        answers, code = all_of(made(), [OPENING + b"".join(each.content for each in sequence)])
        if code is not None:
            return Decision(code)
        resets = {number: payload for kind, _, number, payload in answers if kind == frames.RST_STREAM}
        codes = {number: int.from_bytes(payload, "big") for number, payload in resets.items()}
        return Decision(None, {number: code for number, code in codes.items() if code})

    check(sequence, decide)


def test_a_message_and_its_answer() -> None:
    http2 = opened()
    assert not http2.receive(frame(frames.DATA, END_STREAM, 1, prefixed(b"abc")), 2.0)
    kinds = [(kind, flags) for kind, flags, _, _ in sent(http2)]
    assert kinds == [(frames.HEADERS, END_HEADERS), (frames.DATA, 0), (frames.HEADERS, END_HEADERS | END_STREAM)]
    assert not http2.streams


def test_whoever_owns_it_is_told_once_that_there_is_something_to_send() -> None:
    owner = Owner()
    http2 = made(owner)
    http2.write(b"a")
    assert owner.wanted == 1
    http2.is_flushing = True
    http2.write(b"b")
    http2.write_pieces(b"c", b"d")
    assert (owner.wanted, http2.out) == (1, [b"a", b"b", b"c", b"d"])


@pytest.mark.parametrize(
    ("one", "most"),
    [
        (frame(77, 0, 0), FRAMES_A_TURN),
        (frame(frames.PING, frames.ACK, 0, bytes(8)), FRAMES_A_TURN // 4),
        (frames.settings([(0x77, 1)]), FRAMES_A_TURN // 4),
    ],
)
def test_the_budget_of_an_iteration(one: bytes, most: int) -> None:
    """Frames beyond the budget are kept, and handled at the next call."""
    http2 = opened()
    assert http2.receive(one * 1000, 1.0)
    again = 1
    while http2.receive(b"", 1.0):
        again += 1
    assert 1000 / most <= again + 1 <= 1000


def test_the_clients_windows() -> None:
    """Bytes that the stream's or the connection's window does not allow wait for both."""
    http2 = made()
    http2.receive(frames.PREFACE + frames.settings([(frames.INITIAL_WINDOW_SIZE, 10)]) + OPEN, 1.0)
    http2.receive(frame(frames.DATA, 0, 1, prefixed(bytes(100))), 1.0)
    assert [len(payload) for kind, _, _, payload in sent(http2) if kind == frames.DATA] == [10]
    http2.receive(frames.window_update(1, 5), 1.0)
    assert [len(payload) for _, _, _, payload in sent(http2)] == [5]
    http2.send_window = 3
    http2.receive(frames.window_update(1, 100), 1.0)
    assert [len(payload) for _, _, _, payload in sent(http2)] == [3]
    assert list(http2.blocked) == [1]
    http2.receive(frames.window_update(0, 1000), 1.0)
    assert [len(payload) for _, _, _, payload in sent(http2)] == [105 - 18]
    assert not http2.blocked


def test_a_stream_whose_answers_are_not_read_ends_alone() -> None:
    """DATA that a client sent before it learns of its stream's reset is ignored, and its other streams are served."""
    http2 = made(write_timeout=10)
    http2.receive(frames.PREFACE + frames.settings([(frames.INITIAL_WINDOW_SIZE, 10)]) + OPEN, 1.0)
    http2.receive(frame(frames.DATA, 0, 1, prefixed(bytes(100))), 1.0)
    sent(http2)
    now = http2.serving.clock()
    http2.check(now, 1.0, False)
    http2.check(now + 11.0, 11.0, False)
    assert sent(http2) == [(frames.RST_STREAM, 0, 1, frames.number(frames.ENHANCE_YOUR_CALM))]
    http2.receive(frame(frames.DATA, 0, 1, prefixed(b"more")), 13.0)
    http2.receive(frame(frames.HEADERS, END_HEADERS, 3, BLOCKS["good"]), 13.0)
    http2.receive(frame(frames.DATA, 0, 3, prefixed(b"x")), 13.0)
    answers = [(number, payload) for kind, _, number, payload in sent(http2) if kind == frames.DATA]
    assert answers == [(3, prefixed(b"x"))]


def test_our_windows() -> None:
    """A client is granted again what it sent before it runs out; one that sends more than it was granted is not served."""
    http2 = opened(max_message_byte_size=1 << 30)
    half = STREAM_WINDOW // 2
    http2.streams[1].receive(prefixed(bytes(1 << 25))[:5], 0, 5)
    http2.receive(frame(frames.DATA, 0, 1, bytes(half)), 1.0)
    assert sent(http2) == [(frames.WINDOW_UPDATE, 0, 1, frames.number(half))]
    http2.streams[1].held = True
    http2.receive(frame(frames.DATA, 0, 1, bytes(half)) * 2, 1.0)
    assert not [each for each in sent(http2) if each[2] == 1]
    with pytest.raises(Violation) as caught:
        http2.receive(frame(frames.DATA, 0, 1, bytes(1)), 1.0)
    assert caught.value.code == frames.FLOW_CONTROL_ERROR


@pytest.mark.parametrize("steps", [[60], [1, 59], [20] * 3])
def test_what_is_read_to_its_place(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame's part of a tensor and no more; the stream is told once, and the next frame is parsed again."""
    tensor, advanced = memoryview(bytearray(100)), []
    arriving = ArrivingMessage(0, 100)
    arriving.rest = tensor
    monkeypatch.setattr(Stream, "arriving", arriving)
    monkeypatch.setattr(Stream, "advance", lambda stream, byte_size: advanced.append(byte_size))
    http2 = opened()
    http2.receive(frame(frames.DATA, 0, 1, bytes(60))[: frames.HEAD_SIZE], 1.0)
    assert http2.data_stream is http2.streams[1]
    assert http2.data_left == 60
    place = tensor[:60]
    for number, step in enumerate(steps, 1):
        place[:step] = b"%d" % number * step
        place = place[step:]
        http2.data_read += step
    assert not advanced
    http2.data_was_read()
    assert (advanced, http2.data_left, http2.data_read, http2.data_stream) == ([60], 0, 0, None)
    assert bytes(tensor) == b"".join(b"%d" % number * step for number, step in enumerate(steps, 1)) + bytes(40)
    http2.receive(frame(frames.PING, 0, 0, bytes(8)), 2.0)
    assert [kind for kind, _, _, _ in sent(http2)] == [frames.PING]


def test_the_end_that_is_announced() -> None:
    """New streams are served until the client can know of it, then the open ones alone."""
    http2 = opened()
    http2.announce_end()
    (goaway, ping) = sent(http2)
    assert (goaway[0], goaway[3][:4]) == (frames.GOAWAY, frames.number(frames.STREAM_ID))
    http2.receive(frame(frames.HEADERS, END_HEADERS, 3, BLOCKS["good"]), 1.0)
    assert sorted(http2.streams) == [1, 3]
    http2.receive(frame(frames.PING, frames.ACK, 0, ping[3]), 1.0)
    assert (http2.phase, sent(http2)[0][3][:4]) == (ConnectionPhase.ENDING, frames.number(3))
    http2.receive(frame(frames.HEADERS, END_HEADERS, 5, BLOCKS["good"]), 1.0)
    assert sorted(http2.streams) == [1, 3]


def test_what_is_begun_and_does_not_go_on() -> None:
    """A frame, a header block, a payload; while it is not read, nothing of it is late."""
    for begun in (
        frame(frames.PING, 0, 0, bytes(8))[:-1],
        frame(frames.HEADERS, 0, 3, b""),
        frame(frames.DATA, 0, 1, bytes(9))[:-1],
    ):
        http2 = opened(head_timeout=10, body_timeout=10, min_rate=0)
        http2.receive(begun, 100.0)
        http2.check(110.0, 1.0, False)
        http2.check(115.0, 1.0, True)
        http2.check(125.0, 1.0, False)
        with pytest.raises(Violation) as caught:
            http2.check(126.0, 1.0, False)
        assert caught.value.code == frames.ENHANCE_YOUR_CALM


def test_a_preface_in_pieces() -> None:
    """A client whose preface comes in pieces is late ``head_timeout`` after the first piece, not at any check before that."""
    for late in (False, True):
        http2 = made(head_timeout=10)
        http2.receive(OPENING[:3], 100.0)
        http2.check(101.0, 1.0, False)
        http2.receive(OPENING[3:20], 109.0)
        if late:
            with pytest.raises(Violation):
                http2.check(110.1, 1.0, False)
        else:
            http2.receive(OPENING[20:], 109.5)
            http2.check(130.0, 1.0, False)
            assert http2.phase is ConnectionPhase.OPEN
