"""What a stream sends: in one piece where it can be, as the windows and the socket let it, and who hears that it has left."""

from __future__ import annotations

import gzip
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.grpc import frames
from tensord.daemon.grpc.codes import OK
from tests.daemon.grpc.test_stream import Wire, opened, prefixed


def sent(wire: Wire) -> tuple[bytes, list[int]]:
    """The DATA since the last look: all of it, and each frame's size."""
    payloads = [payload for kind, _, payload in wire.frames() if kind == frames.DATA]
    return b"".join(payloads), [len(payload) for payload in payloads]


def test_a_small_answer_is_written_at_once() -> None:
    wire, stream, _ = opened()
    stream.end_receiving()
    done: list[int] = []
    stream.answer([b"ab", memoryview(b"cd")], lambda: done.append(len(wire.out)))
    assert [kind for kind, _, _ in wire.frames()] == [frames.HEADERS, frames.DATA, frames.HEADERS]
    assert done
    assert wire.ended == [stream]
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
    assert (left, call.gone, stream.unsent_size, wire.blocked, wire.ended) == ([True], True, 0, {}, [stream])
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
