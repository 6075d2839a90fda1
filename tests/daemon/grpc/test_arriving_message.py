"""A message while it arrives: the same however it is cut, and as much memory as it is long however small the pieces are."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.grpc.arriving_message import ArrivingMessage


def collected(byte_size: int) -> ArrivingMessage:
    """One that no reception takes."""
    return ArrivingMessage(0, byte_size, None, lambda: pytest.fail("nothing waits for room"))


@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_any_cut(content: bytes, cuts: list[int]) -> None:
    message = collected(len(content))
    bounds = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    for begin, end in itertools.pairwise(bounds):
        assert message.left == len(content) - begin
        message.feed(memoryview(content)[begin:end])
        assert message.kept_byte_size == end
    assert (message.left, message.is_placed, message.waits) == (0, False, False)
    assert message.content() == content


def test_tiny_pieces_take_no_more_than_they_bring() -> None:
    content = memoryview(bytes(range(256)) * 200)
    tracemalloc.start()
    try:
        message = collected(len(content))
        for at in range(len(content)):
            message.feed(content[at : at + 1])
        assert tracemalloc.get_traced_memory()[1] < 2 * len(content)
    finally:
        tracemalloc.stop()
    assert message.content() == content


def test_what_has_not_come_takes_nothing() -> None:
    """A length that is only announced: no bytes of it are counted, and none may be written yet."""
    message = collected(1 << 30)
    assert (message.kept_byte_size, len(message.rest())) == (0, 0)
    message.feed(memoryview(b"abc"))
    assert (message.kept_byte_size, message.left) == (3, (1 << 30) - 3)
    message.drop()
    assert message.kept_byte_size == 0
