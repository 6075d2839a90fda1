"""Room goes to whoever came first; who waits too long is told so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from daemon.submit.arena_space import ArenaSpace
from shm.arena import Arena, Lease
from shm.errors import InvalidArgument, ServingError, Unavailable

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(4 * MIB, 4 * MIB, 0)
    # A quarter of it is left.
    for _ in range(3):
        assert made.loan(MIB) is not None
    yield made
    made.close()


def test_nobody_overtakes_who_waits(arena: Arena) -> None:
    room = ArenaSpace(arena, 5.0)
    held = room.loan(MIB)
    assert held is not None
    assert room.loan(MIB) is None
    granted: list[Lease | ServingError] = []
    room.wait(MIB, granted.append, 10.0)
    room.wait(MIB // 2, granted.append, 10.0)
    room.give_back(held)
    (first,) = granted
    assert isinstance(first, Lease)
    assert first.place.byte_size == MIB
    assert room.loan(MIB // 2) is None, "somebody waits"
    room.give_back(first)
    assert len(granted) == 2
    small = room.loan(MIB // 2)
    assert small is not None
    small.release()
    assert isinstance(granted[1], Lease)
    granted[1].release()


def test_who_waits_too_long_is_told_so(arena: Arena) -> None:
    room = ArenaSpace(arena, 5.0)
    held = room.loan(MIB)
    assert held is not None
    told: list[Lease | ServingError] = []
    room.wait(MIB // 2, told.append, 10.0)
    room.wait(MIB // 2, told.append, 12.0)
    assert room.expire(14.9)
    assert not told
    assert room.expire(15.0)
    (error,) = told
    assert isinstance(error, Unavailable)
    assert "none came free within 5 s" in error.message
    assert "1 wait" in repr(room)
    assert not room.expire(17.0)
    assert len(told) == 2
    held.release()


def test_what_can_never_fit_is_refused(arena: Arena) -> None:
    with pytest.raises(InvalidArgument):
        ArenaSpace(arena, 5.0).loan(2 * MIB)
