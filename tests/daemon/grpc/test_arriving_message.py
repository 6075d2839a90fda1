"""A message while it arrives: the same however it is cut, and as much memory as it is long; messages behind gzip and deflate."""

from __future__ import annotations

import gzip
import itertools
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.grpc.arriving_message import ArrivingMessage, Refused, inflated
from tensord.daemon.grpc.codes import INTERNAL, RESOURCE_EXHAUSTED, UNIMPLEMENTED

SQUEEZE = {"gzip": gzip.compress, "deflate": zlib.compress}


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


@given(st.sampled_from(sorted(SQUEEZE)), st.binary(max_size=500), st.booleans())
def test_there_and_back(encoding: str, content: bytes, view: bool) -> None:
    squeezed = SQUEEZE[encoding](content)
    assert inflated(memoryview(squeezed) if view else squeezed, encoding, 500) == content


@given(st.sampled_from(sorted(SQUEEZE)), st.binary(max_size=100))
def test_anything_is_inflated_or_refused(encoding: str, content: bytes) -> None:
    try:
        assert isinstance(inflated(content, encoding, 500), bytes)
    except Refused as refused:
        assert refused.code in (INTERNAL, RESOURCE_EXHAUSTED)


@pytest.mark.parametrize(
    ("encoding", "content", "code", "text"),
    [
        (
            "identity",
            b"abc",
            UNIMPLEMENTED,
            "message encoding 'identity' is not supported; identity, deflate and gzip are",
        ),
        ("b" * 99, b"abc", UNIMPLEMENTED, f"message encoding '{'b' * 32}' is not supported"),
        ("gzip", b"abc", INTERNAL, "a message is not valid gzip data"),
        ("gzip", gzip.compress(b"abc", mtime=0)[:-1], INTERNAL, "a message is not valid gzip data"),
        ("gzip", gzip.compress(b"abc", mtime=0) + b"x", INTERNAL, "a message is not valid gzip data"),
        ("deflate", gzip.compress(b"abc", mtime=0), INTERNAL, "a message is not valid deflate data"),
        (
            "gzip",
            gzip.compress(bytes(501), mtime=0),
            RESOURCE_EXHAUSTED,
            "larger than max (501 vs. 500) after decompression",
        ),
        ("gzip", gzip.compress(bytes(10**7), mtime=0), RESOURCE_EXHAUSTED, "larger than max (501 vs. 500) after"),
    ],
)
def test_refused(encoding: str, content: bytes, code: int, text: str) -> None:
    with pytest.raises(Refused) as caught:
        inflated(content, encoding, 500)
    assert (caught.value.code, text in caught.value.message) == (code, True)
