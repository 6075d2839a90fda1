"""The framing of chunked bodies, cut anywhere, beside the parser: the same end, and what is too much is refused when seen."""

from __future__ import annotations

import itertools

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.http.chunk_sizes import ChunkRefused, ChunkSizes

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = st.lists(
    st.tuples(st.binary(min_size=1, max_size=40), st.sampled_from([b"", b";a", b";a=b;c", b';a="b c"'])), max_size=8
)
TRAILERS = st.lists(st.sampled_from([b"X: y\r\n", b"Zz:\r\n"]), max_size=3).map(b"".join)


def framed(chunks: list[tuple[bytes, bytes]], trailers: bytes = b"") -> bytes:
    pieces = [b"%x%b\r\n%b\r\n" % (len(content), extension, content) for content, extension in chunks]
    return b"".join(pieces) + b"0\r\n" + trailers + b"\r\n"


class Parsed:
    """Notes where the parser sees the end of a message that it is fed byte by byte."""

    def __init__(self) -> None:
        self.done = False

    def on_message_complete(self) -> None:
        self.done = True


@given(CHUNKS, TRAILERS, st.lists(st.integers(1, 30), max_size=30))
def test_the_end_is_where_the_parser_sees_it(
    chunks: list[tuple[bytes, bytes]], trailers: bytes, cuts: list[int]
) -> None:
    """However it arrives, with another request behind it."""
    content = framed(chunks, trailers)
    parsed = Parsed()
    parser = httptools.HttpRequestParser(parsed)
    parser.feed_data(HEAD)
    fed = 0
    while not parsed.done:
        parser.feed_data(content[fed : fed + 1])
        fed += 1
    assert fed == len(content)
    data, sizes, at = content + HEAD, ChunkSizes(1000, 1000), 0
    for size in itertools.chain(cuts, itertools.repeat(7)):
        end = min(len(data), at + size)
        taken = sizes.take(data, at, end)
        at = taken
        if sizes.ended:
            break
        assert taken == end
    assert at == len(content)


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (b"401\r\n", 413, "the request body has at least 1025 bytes, at most 1024 are allowed"),
        (b"FFFFFFFFFFFFFFF\r\n", 413, "has at least 1152921504606846975 bytes"),
        (b"f" * 200 + b"\r\n", 413, "has at least 9223372036854775808 bytes"),
        (b"0" * 9 + b"1" * 17, 413, "has at least 9223372036854775808 bytes"),
        (b"f" * 17 + b"no extension\r\n", 413, "has at least 9223372036854775808 bytes"),
        (b"1;" + b"a" * 230 + b"\r\nx\r\n" + b"f" * 300, 413, "has at least 9223372036854775808 bytes"),
        (b"1;" + b"a" * 240 + b"\r\nx\r\n" + b"f" * 17, 431, "the chunk extensions have at least"),
        (b"400\r\n" + bytes(1024) + b"\r\n1\r\n", 413, "has at least 1025 bytes"),
        (b"1;" + b"a" * 255, 431, "the chunk extensions have at least 257 bytes, at most 256 are allowed"),
        (b"0" * 257, 431, "the chunk extensions have at least 257 bytes"),
        (b"1;aaaaaaaaaa\r\nx\r\n" * 30, 431, "the chunk extensions have at least"),
        (b"0\r\n" + b"X: y\r\n" * 50, 431, "the trailers have at least"),
        (b"0\r\nX: " + b"a" * 300, 431, "the trailers have at least"),
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_too_much(content: bytes, status: int, text: str, piece: int) -> None:
    sizes = ChunkSizes(1024, 256)

    def feed() -> None:
        for at in range(0, len(content), piece):
            sizes.take(content, at, min(len(content), at + piece))

    with pytest.raises(ChunkRefused) as refused:
        feed()
    assert refused.value.args[0] == status
    assert text in refused.value.args[1]


def test_a_size_of_more_digits_than_are_ever_told() -> None:
    with pytest.raises(ChunkRefused) as refused:
        ChunkSizes(1024, 1 << 16).take(b"f" * 50_000 + b"\r\n", 0, 50_002)
    assert refused.value.args[0] == 413


@given(st.binary(max_size=60))
def test_any_bytes(content: bytes) -> None:
    """Bytes that are no chunked body are left to the parser."""
    sizes = ChunkSizes(1 << 70, 1000)
    assert 0 <= sizes.take(content, 0, len(content)) <= len(content)
