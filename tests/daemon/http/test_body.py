"""Tests where a collected body lies while it arrives."""

from __future__ import annotations

import psutil
import pytest

from tensord.daemon.http.body import CollectedBody


@pytest.mark.parametrize("sizes", [[1, 70_000, 1], [60_000, 60_000, 60_000], [100_000], [1 << 20] * 3])
def test_a_large_collected_body_lies_in_pages_of_its_own(sizes: list[int]) -> None:
    """It is never copied as a whole, and what it took is the kernel's again."""
    chunks = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    body = CollectedBody(4 << 20)
    for chunk in chunks:
        body.write(chunk)
    whole = body.whole()
    assert bytes(whole) == b"".join(chunks)
    assert body.received == sum(sizes)
    if len(sizes) > 1:
        assert isinstance(whole, memoryview)
        assert type(whole.obj).__name__ == "mmap"


def test_memory_of_bodies_that_inflate_is_given_back() -> None:
    """Ten of 30 MiB, one after the other: what the process holds is what it held."""
    process, chunk = psutil.Process(), bytes(256 << 10)
    before = process.memory_info().rss
    for _ in range(10):
        body = CollectedBody(64 << 20)
        for _ in range(120):
            body.write(chunk)
        assert len(body.whole()) == 30 << 20
        held = process.memory_info().rss - before
        assert held < 45 << 20
    del body
    assert process.memory_info().rss - before < 8 << 20
