"""Tensors from a body to their places, with a real arena."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensord.daemon.http.body import CollectedBody
from tensord.daemon.http.decoded_request import BinaryPart, Source
from tensord.daemon.http.placement import place, room
from tensord.shm.arena import Arena
from tensord.shm.messages import RegionSlice, Slice

MIB = 1 << 20
REGION = RegionSlice("r", 0, 100)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(MIB, MIB, 0)
    yield made
    made.close()


def test_small_tensors_and_regions_need_no_room() -> None:
    body = CollectedBody()
    body.write(b"JSONabcdef")
    sources: list[Source] = [BinaryPart(0, 2), REGION, b"xyz", BinaryPart(2, 4)]
    assert room(sources, body, 16) == 0
    assert place(sources, body, 4, None, 16) == [b"ab", b"xyz", b"cdef"]


def test_larger_ones_lie_aligned_behind_each_other(arena: Arena) -> None:
    body = CollectedBody()
    body.write(b"JSON" + b"a" * 100 + b"b" * 30)
    sources: list[Source] = [BinaryPart(0, 100), b"c" * 70, BinaryPart(100, 30), REGION]
    size = room(sources, body, 16)
    assert size == 128 + 128 + 64
    lease = arena.loan(size)
    assert lease is not None
    first, second, third = place(sources, body, 4, lease, 16)
    for found, content in ((first, b"a" * 100), (second, b"c" * 70), (third, b"b" * 30)):
        assert isinstance(found, Slice)
        at = found.offset - lease.place.offset
        assert at % 64 == 0
        assert lease.view[at : at + found.byte_size] == content
    lease.release()
