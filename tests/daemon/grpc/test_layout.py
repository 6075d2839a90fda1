"""Messages cut up by their layout: what is theirs, and whether the rest is as it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daemon.grpc.layout import Layout
from daemon.grpc.request_codec import DecodedHead

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
