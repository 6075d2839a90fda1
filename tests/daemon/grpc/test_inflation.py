"""Messages behind gzip and deflate, and what is none."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.grpc.codes import INTERNAL, RESOURCE_EXHAUSTED, UNIMPLEMENTED
from tensord.daemon.grpc.inflation import Refused, inflated

SQUEEZE = {"gzip": gzip.compress, "deflate": zlib.compress}


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
