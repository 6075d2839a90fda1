"""The reserve of an arena: small leases find room though large ones have taken all there is, and it is used again and again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensord.shm.arena import Arena, Lease

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(MIB, 4 * MIB, 0)
    yield made
    made.close()


def filled(arena: Arena, byte_size: int) -> list[Lease]:
    """Takes leases of a size until there are no more; returns them."""
    leases: list[Lease] = []
    while (lease := arena.loan(byte_size)) is not None:
        leases.append(lease)
    return leases


def test_small_ones_find_room_besides_large_ones(arena: Arena) -> None:
    large = filled(arena, MIB // 4)
    assert sum(lease.place.byte_size for lease in large) >= MIB
    for _ in range(3):
        small = filled(arena, arena.small_byte_size)
        assert len(small) * arena.small_byte_size == MIB // 8
        assert arena.loan(arena.small_byte_size + 1) is None
        for number, lease in enumerate(small):
            lease.view[:] = bytes([number]) * arena.small_byte_size
        assert [bytes(lease.view) for lease in small] == [
            bytes([number]) * arena.small_byte_size for number in range(len(small))
        ]
        for lease in small:
            assert arena.release(lease.key)
            assert not arena.release(lease.key)
    assert arena.statistics()["leases"] == len(large)


def test_small_ones_take_the_common_room_first(arena: Arena) -> None:
    lease = arena.loan(100)
    assert lease is not None
    assert lease.place.segment == 0
    assert arena.statistics()["segments"] == 1
