"""Known answers: they leave at once and take their windows, or nothing is done."""

from __future__ import annotations

from typing import Any

import pytest

from daemon.grpc import frames
from daemon.grpc.codes import OK
from daemon.grpc.known_answer import KnownAnswer
from shm.messages import Completion, Content, FormCompletion, Inline, Slice, Tensor
from tests.daemon.grpc.test_stream import opened


def known_answer(size: int, streamed: bool) -> KnownAnswer:
    template = Completion(0, version=1, outputs=(Tensor("y", "UINT8", (size,), Inline(b"")),))
    return KnownAnswer(template, FormCompletion(1, 0, (bytes(size),)), "m", b"id", streamed)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_known_answer_takes_its_windows(streamed: bool) -> None:
    wire, stream, _ = opened()
    stream.half_closed = True
    known = known_answer(3, streamed)
    if streamed:
        stream.send([b"first"])
        list(wire.frames())
    before = wire.send_window, stream.send_window
    give = stream.send_known if streamed else stream.answer_known
    assert give(known, b"id", (b"abc",))
    found = list(wire.frames())
    assert [kind for kind, _, _ in found] == [frames.HEADERS, frames.DATA, frames.HEADERS][streamed : 3 - streamed]
    (size,) = [len(payload) for kind, _, payload in found if kind == frames.DATA]
    assert known.framed == size == before[0] - wire.send_window
    assert not streamed or size == before[1] - stream.send_window
    assert (stream.ended, wire.ended) == ((False, []) if streamed else (True, [stream]))


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("why", ["window", "connection_window", "compression", "large", "finished", "head"])
def test_a_known_answer_with_something_in_its_way(why: str, streamed: bool) -> None:
    """Nothing is done then: it is written as any other."""
    known = known_answer(17_000 if why == "large" else 1000, streamed)
    options: dict[str, Any] = {
        "window": {"window": 1020},
        "connection_window": {"connection_window": 1020},
        "compression": {"response_compression": "low"},
    }.get(why, {})
    wire, stream, _ = opened(**options)
    if why == "finished":
        stream.finish(OK)
    elif (why == "head") != streamed:
        stream.send([])
    list(wire.frames())
    before = wire.send_window, stream.send_window
    assert not (stream.send_known if streamed else stream.answer_known)(known, b"id", (bytes(1000),))
    assert (wire.send_window, stream.send_window, list(wire.frames())) == (*before, [])


def lent_answer(size: int, streamed: bool) -> tuple[KnownAnswer, tuple[Content, ...]]:
    template = Completion(0, version=1, outputs=(Tensor("y", "UINT8", (size,), Inline(b"")),))
    contents = (Slice(0, 0, size),)
    return KnownAnswer(template, FormCompletion(1, 0, contents, (0, 0, 1)), "m", b"id", streamed), contents


def zeros(place: Slice) -> memoryview:
    return memoryview(bytes(place.byte_size))


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_in_a_lease_takes_its_windows(streamed: bool) -> None:
    wire, stream, _ = opened(frame_size=1 << 20)
    stream.half_closed = True
    known, contents = lent_answer(100_000, streamed)
    if streamed:
        stream.send([b"first"])
        list(wire.frames())
    before, left = (wire.send_window, stream.send_window), []
    give = stream.send_lent if streamed else stream.answer_lent
    assert give(known, b"id", contents, zeros, lambda: left.append(True))
    assert left == [True]
    found = list(wire.frames())
    assert [kind for kind, _, _ in found] == [frames.HEADERS, frames.DATA, frames.HEADERS][streamed : 3 - streamed]
    (size,) = [len(payload) for kind, _, payload in found if kind == frames.DATA]
    assert known.framed == size == before[0] - wire.send_window
    assert not streamed or size == before[1] - stream.send_window
    assert (stream.ended, wire.ended) == ((False, []) if streamed else (True, [stream]))


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    "why", ["window", "connection_window", "compression", "frame", "room", "tls", "finished", "head", "view"]
)
def test_an_answer_in_a_lease_with_something_in_its_way(why: str, streamed: bool) -> None:
    """Nothing is done then: it is written as any other, or the error is whoever's who asks for it."""
    known, contents = lent_answer(100_000, streamed)
    options: dict[str, Any] = {
        "window": {"window": known.framed - 1},
        "connection_window": {"connection_window": known.framed - 1},
        "compression": {"response_compression": "low"},
        "frame": {"frame_size": known.framed - 1},
        "room": {"room": known.framed - 1},
    }.get(why, {})
    wire, stream, _ = opened(**{"frame_size": 1 << 20, **options})
    wire.is_plain = why != "tls"
    if why == "finished":
        stream.finish(OK)
    elif (why == "head") != streamed:
        stream._send_head()
    list(wire.frames())
    before = wire.send_window, stream.send_window
    give = stream.send_lent if streamed else stream.answer_lent
    if why == "view":
        with pytest.raises(ZeroDivisionError):
            give(
                known, b"id", contents, lambda place: memoryview(bytes(1 // 0)), lambda: pytest.fail("it has not left")
            )
    else:
        assert not give(known, b"id", contents, zeros, lambda: pytest.fail("it has not left"))
    assert (wire.send_window, stream.send_window, list(wire.frames())) == (*before, [])


def test_a_known_message_behind_others_that_wait() -> None:
    known = known_answer(1000, True)
    wire, stream, _ = opened(room=0)
    stream.send([b"before"])
    wire.room = 1 << 20
    assert not stream.send_known(known, b"id", (bytes(1000),))
    stream.pump()
    assert stream.send_known(known, b"id", (bytes(1000),))
    wire.room = known.framed - 1
    assert not stream.send_known(known, b"id", (bytes(1000),))


def test_one_in_a_lease_behind_others_that_wait() -> None:
    known, contents = lent_answer(100_000, True)
    wire, stream, _ = opened(room=0, frame_size=1 << 20)
    stream.send([b"before"])
    wire.room = 1 << 20
    assert not stream.send_lent(known, b"id", contents, zeros, lambda: pytest.fail("it has not left"))
    stream.pump()
    assert stream.send_lent(known, b"id", contents, zeros, lambda: None)
