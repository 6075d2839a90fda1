"""Compressed bytes both ways, against Python's own gzip and zlib."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.front.status import BodyTooLarge
from tensord.daemon.http.body import CollectedBody
from tensord.daemon.http.compression import Inflation, answer_coding, deflated, request_coding
from tensord.daemon.http.conversions import at_once
from tensord.shm.errors import InvalidArgument

MIB = 1 << 20
PACK = {"gzip": gzip.compress, "deflate": zlib.compress}
UNPACK = {"gzip": gzip.decompress, "deflate": zlib.decompress}
CODINGS = sorted(PACK)


def inflated(coding: str, content: bytes, limit: int = MIB, size: int = 1 << 30) -> bytes:
    """Inflates content that is fed in pieces of ``size`` bytes."""
    body = CollectedBody()
    inflation = Inflation(coding, body, limit)
    try:
        for at in range(0, len(content), size):
            inflation.feed(content[at : at + size])
            while inflation.step():
                pass
        inflation.finish()
    finally:
        assert body.received <= limit
    return body.whole()


@pytest.mark.parametrize("coding", CODINGS)
@given(content=st.binary(max_size=2000), size=st.integers(1, 50))
def test_what_was_compressed_comes_back(coding: str, content: bytes, size: int) -> None:
    assert inflated(coding, PACK[coding](content), size=size) == content


@pytest.mark.parametrize("coding", CODINGS)
def test_large_and_random(coding: str) -> None:
    for content in (bytes(MIB), random.Random(1).randbytes(MIB)):
        assert inflated(coding, PACK[coding](content)) == content


@pytest.mark.parametrize("coding", CODINGS)
def test_the_limit_is_exact(coding: str) -> None:
    assert len(inflated(coding, PACK[coding](bytes(1000)), 1000)) == 1000
    with pytest.raises(BodyTooLarge) as raised:
        inflated(coding, PACK[coding](bytes(1001)), 1000)
    assert "at most 1000 are allowed" in raised.value.message


@pytest.mark.parametrize("coding", CODINGS)
def test_a_bomb_is_not_inflated(coding: str) -> None:
    """A thousand times its size, in steps none of which makes more than a bounded amount."""
    bomb = PACK[coding](bytes(256 * MIB))
    body = CollectedBody()
    inflation = Inflation(coding, body, 8 * MIB)
    inflation.feed(bomb)
    with pytest.raises(BodyTooLarge):  # noqa: PT012
        before = 0
        while inflation.step():
            assert body.received - before <= 256 << 10
            before = body.received
    assert body.received <= 8 * MIB


@pytest.mark.parametrize(
    ("coding", "content"),
    [
        ("gzip", b""),
        ("deflate", b""),
        ("gzip", b"{}"),
        ("deflate", b"{}"),
        ("gzip", zlib.compress(b"{}")),
        ("deflate", gzip.compress(b"{}", mtime=0)),
        ("deflate", zlib.compress(b"{}", wbits=-15)),
        ("gzip", gzip.compress(b"x" * 100, mtime=0)[:-1]),
        ("gzip", gzip.compress(b"x" * 100, mtime=0)[:5]),
        ("deflate", zlib.compress(b"x" * 100)[:-1]),
        ("gzip", gzip.compress(b"x" * 100, mtime=0)[:-8] + bytes(8)),
        ("gzip", gzip.compress(b"x", mtime=0) + b"garbage"),
        ("deflate", zlib.compress(b"x") + b"garbage"),
        ("deflate", zlib.compress(b"x") * 2),
    ],
)
@pytest.mark.parametrize("size", [1, 1 << 30])
def test_broken_streams(coding: str, content: bytes, size: int) -> None:
    with pytest.raises(InvalidArgument, match="failed to decompress the request body"):
        inflated(coding, content, size=size)


def test_members_of_gzip_follow_each_other() -> None:
    assert inflated("gzip", gzip.compress(b"ab", mtime=0) + gzip.compress(b"") + gzip.compress(b"c"), size=7) == b"abc"
    assert inflated("gzip", gzip.compress(b"", mtime=0) * 4096) == b""


def test_empty_members_have_a_bound_and_take_many_steps() -> None:
    """Each takes a new decompressor, for twenty bytes."""
    member = gzip.compress(b"", mtime=0)
    with pytest.raises(InvalidArgument, match="more than 4096 gzip members are given, at most 4096 are allowed"):
        inflated("gzip", member * 4097)
    inflation = Inflation("gzip", CollectedBody(), MIB)
    inflation.feed(member * 800)
    steps = 1
    while inflation.step():
        steps += 1
    assert steps >= 800 // 16


@pytest.mark.parametrize("coding", CODINGS)
@given(level=st.integers(1, 9), pieces=st.lists(st.binary(max_size=100), max_size=5))
def test_answers(coding: str, level: int, pieces: list[bytes]) -> None:
    assert UNPACK[coding](at_once(deflated(coding, level, pieces))) == b"".join(pieces)


def test_a_large_answer_takes_many_steps() -> None:
    pieces = [b"{}", memoryview(random.Random(2).randbytes(MIB)), b"", b"x" * 100]
    assert len([*deflated("gzip", 1, pieces)]) >= MIB >> 15
    assert gzip.decompress(at_once(deflated("gzip", 1, pieces))) == b"".join(pieces)


@pytest.mark.parametrize(
    ("value", "coding"),
    [
        (b"gzip", "gzip"),
        (b"deflate", "deflate"),
        (b"GZIP", "gzip"),
        (b"x-gzip", "gzip"),
        (b"identity", ""),
        (b"", None),
        (b"br", None),
        (b"gzip, deflate", None),
        (b"\xff", None),
    ],
)
def test_request_codings(value: bytes, coding: str | None) -> None:
    assert request_coding(value) == coding


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        (b"gzip", "gzip"),
        (b"deflate", "deflate"),
        (b"deflate, gzip", "deflate"),
        (b"gzip, deflate, br", "gzip"),
        (b"br, gzip", "gzip"),
        (b"gzip;q=0.2, deflate;q=0.8", "deflate"),
        (b"gzip ; q=0.2 , deflate ;q=0.1", "gzip"),
        (b"identity;q=1.0, gzip;q=0.5", ""),
        (b"gzip;q=0.5, identity;q=0.2", "gzip"),
        (b"gzip;q=0", ""),
        (b"gzip;q=x", ""),
        (b"gzip;q=nan", ""),
        (b"gzip;q=7", ""),
        (b"GZIP", ""),
        (b"*", ""),
        (b"br", ""),
        (b"identity", ""),
        (b"", ""),
        (b";;;", ""),
        (b"\xff\x00", ""),
        (b"a," * 40 + b"gzip", ""),
    ],
)
def test_answer_codings(accept: bytes, coding: str) -> None:
    assert answer_coding(accept) == coding
