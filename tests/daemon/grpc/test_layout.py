"""Messages cut up by their layout: what is theirs, and whether the rest is as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.grpc.layout import Layout, large_layout
from daemon.grpc.request_codec import DecodedHead
from shm.arena import Arena

PIECES = st.lists(st.binary(max_size=6), min_size=3, max_size=9).filter(lambda pieces: len(pieces) % 2 == 1)


@given(PIECES, st.booleans(), st.data())
def test_what_is_its_own(pieces: list[bytes], view: bool, data: st.DataObject) -> None:
    """Fixed, own, fixed, own, ..., fixed."""
    places, at = [], 0
    for number, piece in enumerate(pieces):
        if number % 2:
            places.append((at, at + len(piece)))
        at += len(piece)
    layout = Layout(b"".join(pieces), places, DecodedHead("m", 1))
    assert layout.own(b"".join(pieces)) == tuple(pieces[1::2])
    for number, piece in enumerate(pieces):
        pieces[number] = data.draw(st.binary(min_size=len(piece), max_size=len(piece))) if number % 2 else piece
    message = b"".join(pieces)
    assert layout.own(memoryview(message) if view else message) == tuple(pieces[1::2])
    for at in range(len(message)):
        other = message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]
        inside = [begin <= at < end for begin, end in places]
        assert (layout.own(other) is not None) == any(inside)


HEAD = b"\x0a\x01m\x1a\x02id\x2a\x03abc"


@pytest.mark.parametrize(
    ("began", "sizes", "behind"),
    [
        (HEAD + b"\x3a\x05", [5], 0),
        (HEAD + b"\x3a\xac\x02", [300, 0, 7], 4),
        # Behind another id, which is no more than other bytes that do not change.
        (b"\x1a\x01i" + HEAD + b"\x3a\x05", [5], 0),
    ],
)
def test_a_large_one(began: bytes, sizes: list[int], behind: int) -> None:
    arena = Arena(1 << 16, 1 << 16, 0)
    lease = arena.loan(sum(sizes) + 64)
    assert lease is not None
    places = [(sum(sizes[:number]), size) for number, size in enumerate(sizes)]
    byte_size = len(began) + sum(sizes) + behind
    layout = large_layout(began, places, byte_size, lease, DecodedHead("m", 1))
    assert layout is not None
    assert (layout.byte_size, layout.head_size, layout.lease_byte_size) == (byte_size, len(began), sum(sizes) + 64)
    assert layout.own(began.replace(b"id", b"di")) == (b"di",)
    assert layout.own(began.replace(b"abc", b"cba")) is None
    assert (len(layout.starts), sum(map(len, layout.starts))) == (len(sizes) - 1, behind)
    assert not layout.is_one
    arena.close()


@pytest.mark.parametrize(
    ("began", "sizes", "behind"),
    [
        # The size takes more bytes than it needs.
        (HEAD + b"\x3a\x85\x00", [5], 0),
        (HEAD + b"\x3a\x05", [5, 7], 3),
        # Something comes between tensors, or behind them: an id, perhaps.
        (HEAD + b"\x3a\x05", [5, 7], 6),
        (HEAD + b"\x3a\x05", [5], 4),
    ],
)
def test_a_large_one_that_says_more_than_its_head_does(began: bytes, sizes: list[int], behind: int) -> None:
    arena = Arena(1 << 16, 1 << 16, 0)
    lease = arena.loan(sum(sizes))
    assert lease is not None
    places = [(sum(sizes[:number]), size) for number, size in enumerate(sizes)]
    byte_size = len(began) + sum(sizes) + behind
    assert large_layout(began, places, byte_size, lease, DecodedHead("m", 1)) is None
    arena.close()
