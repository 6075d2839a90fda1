"""Bodies while they arrive: collected, or placed so that the first part is aligned."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.http.body import CollectedBody, PlacedBody, located
from tensord.daemon.http.decoded_request import BinaryPart, Source
from tensord.daemon.submit.placement import place, room
from tensord.shm.arena import ALIGNMENT, Arena
from tensord.shm.messages import RegionSlice, Slice


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 20, 1 << 20, 0)
    yield arena
    arena.close()


@given(st.lists(st.binary()))
def test_a_collected_body_is_its_chunks(chunks: list[bytes]) -> None:
    body = CollectedBody()
    for chunk in chunks:
        body.write(chunk)
    assert body.received == sum(map(len, chunks))
    assert body.whole() == body.whole() == b"".join(chunks)
    body.write(b"more")
    assert body.whole() == b"".join(chunks) + b"more"


@given(st.binary(min_size=1), st.lists(st.binary(min_size=1), min_size=1, max_size=4), st.data())
def test_a_placed_body(arena: Arena, head: bytes, parts: list[bytes], draw: st.DataObject) -> None:
    whole = head + b"".join(parts)
    lease = arena.loan(PlacedBody.lease_size(len(whole)))
    assert lease is not None
    body = PlacedBody(lease, len(whole), len(head))
    at = 0
    while at < len(whole):
        piece = whole[at : at + draw.draw(st.integers(1, len(whole)))]
        assert len(body.rest()) == len(whole) - at
        if draw.draw(st.booleans()):
            body.write(piece)
        else:
            body.rest()[: len(piece)] = piece
            body.advance(len(piece))
        at += len(piece)
    assert (body.received, len(body.rest())) == (len(whole), 0)
    assert bytes(body.head(len(head))) == head
    offset, limit = 0, draw.draw(st.integers(0, 20))
    for part in parts:
        place = body.place(len(head), BinaryPart(offset, len(part)), limit)
        if len(part) <= limit:
            assert place == part
        else:
            assert isinstance(place, Slice)
            assert (place.segment, place.byte_size) == (lease.place.segment, len(part))
            start = place.offset - lease.place.offset
            assert bytes(lease.view[start : start + len(part)]) == part
            assert offset or place.offset % ALIGNMENT == 0
        offset += len(part)
    lease.release()


def test_a_placed_body_never_leaves_its_lease(arena: Arena) -> None:
    lease = arena.loan(PlacedBody.lease_size(100))
    assert lease is not None
    body = PlacedBody(lease, 100, 1)
    with pytest.raises(ValueError, match="different structures"):
        body.write(bytes(200))
    lease.release()


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


def test_small_tensors_and_regions_need_no_room() -> None:
    body = CollectedBody()
    body.write(b"JSONabcdef")
    sources: list[Source] = [BinaryPart(0, 2), RegionSlice("r", 0, 100), b"xyz", BinaryPart(2, 4)]
    found = located(sources, body, 4, 16)
    assert room(found, 16) == 0
    assert place(found, None, 16) == (b"ab", b"xyz", b"cdef")


def test_larger_ones_lie_aligned_behind_each_other(arena: Arena) -> None:
    body = CollectedBody()
    body.write(b"JSON" + b"a" * 100 + b"b" * 30)
    sources: list[Source] = [BinaryPart(0, 100), b"c" * 70, BinaryPart(100, 30), RegionSlice("r", 0, 100)]
    inputs = located(sources, body, 4, 16)
    size = room(inputs, 16)
    assert size == 128 + 128 + 64
    lease = arena.loan(size)
    assert lease is not None
    first, second, third = place(inputs, lease, 16)
    for found, content in ((first, b"a" * 100), (second, b"c" * 70), (third, b"b" * 30)):
        assert isinstance(found, Slice)
        at = found.offset - lease.place.offset
        assert at % 64 == 0
        assert lease.view[at : at + found.byte_size] == content
    lease.release()
