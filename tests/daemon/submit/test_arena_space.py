"""Room goes to whoever came first; who waits too long is told so."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from tensord.config.options import Arenas
from tensord.daemon.submit.accounts import Account, Accounts
from tensord.daemon.submit.arena_space import ArenaSpace
from tensord.shm.arena import Arena, Lease
from tensord.shm.errors import InvalidArgument, ServingError, Unavailable

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
    room = ArenaSpace(arena, 5.0, 4 * MIB)
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
    room = ArenaSpace(arena, 5.0, 4 * MIB)
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


def test_who_waited_behind_one_that_is_told_so_gets_the_room_there_is(arena: Arena) -> None:
    room = ArenaSpace(arena, 5.0, 4 * MIB)
    held = room.loan(MIB // 2)
    assert held is not None
    told: list[Lease | ServingError] = []
    room.wait(MIB, told.append, 10.0)
    room.wait(MIB // 2, told.append, 12.0)
    assert not room.expire(15.0)
    refusal, lease = told
    assert isinstance(refusal, Unavailable)
    assert isinstance(lease, Lease)
    lease.release()
    held.release()


@pytest.fixture
def large_arena() -> Iterator[Arena]:
    made = Arena(4 * MIB, 64 * MIB, 0)
    yield made
    made.close()


def test_small_ones_do_not_wait_for_large_ones(large_arena: Arena) -> None:
    room = ArenaSpace(large_arena, 5.0, 64 * MIB)
    held = [room.loan(20 * MIB) for _ in range(3)]
    granted: list[Lease | ServingError] = []
    assert room.loan(20 * MIB) is None
    room.wait(20 * MIB, granted.append, 0.0)
    # Neither those that lie in the first segment, nor small ones.
    for size in (MIB, 4096):
        lease = room.loan(size)
        assert lease is not None
        room.give_back(lease)
    assert room.loan(10 * MIB) is None, "somebody waits for as large a place"
    for lease in held:
        assert lease is not None
        room.give_back(lease)
    assert isinstance(granted[0], Lease)
    room.give_back(granted[0])
    assert large_arena.statistics()["leases"] == 0


def test_who_holds_its_share_waits_for_nobody_else(large_arena: Arena) -> None:
    room = ArenaSpace(large_arena, 5.0, 64 * MIB)
    accounts = Accounts(Arenas(byte_size=MIB, max_byte_size=64 * MIB), 1024, MIB)
    greedy, other = accounts.open("tcp 10.0.0.1"), accounts.open("tcp 10.0.0.2")
    held = [room.loan(8 * MIB, greedy), room.loan(8 * MIB, greedy)]
    assert room.loan(8 * MIB, greedy) is None
    granted: list[Lease | ServingError] = []
    room.wait(8 * MIB, granted.append, 0.0, greedy)
    lease = room.loan(8 * MIB, other)
    assert lease is not None
    room.give_back(lease)
    assert not granted
    room.give_back(held[0])  # type: ignore[arg-type]
    assert isinstance(granted[0], Lease)
    room.wait(8 * MIB, granted.append, 0.0, greedy)
    assert not room.expire(5.0)
    assert isinstance(granted[1], Unavailable)
    assert granted[1].message == (
        f"the requests of this connection take {16 * MIB} bytes, {8 * MIB} more make over {16 * MIB}, and nothing was given back "
        "within 5 s"
    )
    room.give_back(held[1])  # type: ignore[arg-type]
    room.give_back(granted[0])
    assert (greedy.requests, greedy.client.requests) == (0, 0)


def test_what_is_not_whole_has_a_part(large_arena: Arena) -> None:
    room = ArenaSpace(large_arena, 5.0, 16 * MIB)
    first = room.loan(40 * MIB, arriving=True)
    assert first is not None, "one of any size"
    assert room.loan(2 * MIB, arriving=True) is None
    granted: list[Lease | ServingError] = []
    room.wait(2 * MIB, granted.append, 0.0, arriving=True)
    whole = room.loan(2 * MIB)
    assert whole is not None
    small = room.loan(4096, arriving=True)
    assert small is not None
    room.give_back(small)
    room.arrived(first)
    room.arrived(first)
    assert isinstance(granted[0], Lease)
    for lease in (first, whole, granted[0]):
        room.give_back(lease)
    again = room.loan(16 * MIB, arriving=True)
    assert again is not None
    room.give_back(again)
    assert large_arena.statistics()["leases"] == 0


def test_what_can_never_fit_is_refused(arena: Arena) -> None:
    with pytest.raises(InvalidArgument):
        ArenaSpace(arena, 5.0, 4 * MIB).loan(2 * MIB)


def test_what_the_arena_gives_is_what_counts() -> None:
    """A body of a MiB with its head takes a block of two: six of them are a half of 24 MiB, not twelve."""
    arena = Arena(16 * MIB, 24 * MIB, 0)
    accounts = Accounts(Arenas(max_byte_size=24 * MIB, client_share=0.5), 1, 1)
    room = ArenaSpace(arena, 5.0, 24 * MIB)
    held = []
    while (lease := room.loan(MIB + 64, account := accounts.open("greedy"))) is not None:
        held.append(lease)
    assert len(held) == 6
    assert account.client.requests == 12 * MIB
    assert "take 12582912 bytes, 2097152 more make over 12582912" in account.describe_requests(2 * MIB)
    assert room.loan(MIB + 64, accounts.open("other")) is not None
    for lease in held:
        room.give_back(lease)
    assert account.client.requests == 0
    arena.close()


@pytest.mark.parametrize("connections", [1, 300])
def test_thousands_that_wait_of_one_client_cost_others_nothing(large_arena: Arena, connections: int) -> None:
    """They are not looked at while their client or connection holds all that it may, and all get room once it holds less."""
    room = ArenaSpace(large_arena, 5.0, 64 * MIB)
    accounts = Accounts(Arenas(byte_size=MIB, max_byte_size=64 * MIB), 1024, MIB)
    opened = [accounts.open("tcp 10.0.0.1") for _ in range(connections)]
    held = [
        room.loan(10 * MIB if connections > 1 else 5 * MIB, opened[-1 - number % connections]) for number in range(3)
    ]
    granted: list[Lease | ServingError] = []
    # One that would have room has come and gone: what is known of the others is not what was known with it.
    room.wait(MIB // 2, granted.append, 0.0, accounts.open("tcp 10.0.0.1"))
    for number in range(300):
        room.wait((3 + number % 2) * MIB, granted.append, 1.0, opened[number % connections])
    others = [room.loan(MIB // 4, accounts.open("tcp 10.0.0.2")) for _ in range(20)]
    others += [room.loan(1024, opened[-1]) for _ in range(20)]  # small ones of its own
    room.expire(5.0)
    with mock.patch.object(Account, "owed", autospec=True, side_effect=Account.owed) as asked:
        for lease in others:
            assert lease is not None
            room.give_back(lease)
    assert asked.call_count < 100
    assert not any(isinstance(each, Lease) for each in granted)
    for lease in held:
        assert lease is not None
        room.give_back(lease)
    for each in granted:
        if isinstance(each, Lease):
            room.give_back(each)
    assert sum(isinstance(each, Lease) for each in granted) == 300
    assert large_arena.statistics()["leases"] == 0


def test_thousands_that_wait_for_bodies_to_be_whole_cost_others_nothing(large_arena: Arena) -> None:
    """They are not looked at for what others give back, and all get room once enough has arrived."""
    room = ArenaSpace(large_arena, 5.0, 16 * MIB)
    accounts = Accounts(Arenas(byte_size=MIB, max_byte_size=64 * MIB), 1024, MIB)
    slow = [room.loan(8 * MIB, accounts.open(f"tcp 10.0.1.{number}"), arriving=True) for number in range(2)]
    granted: list[Lease | ServingError] = []
    account = accounts.open("tcp 10.0.0.1")
    for number in range(300):
        room.wait((3 + number % 2) * MIB, granted.append, 1.0, account, arriving=True)
    others = [room.loan(MIB // 4, accounts.open("tcp 10.0.0.2")) for _ in range(20)]
    others += [room.loan(1024, accounts.open("tcp 10.0.0.2"), arriving=True) for _ in range(20)]
    with mock.patch.object(Account, "owed", autospec=True, side_effect=Account.owed) as asked:
        for lease in others:
            assert lease is not None
            room.give_back(lease)
    assert asked.call_count < 400
    assert not granted
    for lease in slow:
        assert lease is not None
        room.arrived(lease)
    for each in granted:
        assert isinstance(each, Lease)
        room.give_back(each)
    assert len(granted) == 300
    for lease in slow:
        assert lease is not None
        room.give_back(lease)
    assert large_arena.statistics()["leases"] == 0


def test_no_request_of_one_client_waits_before_anothers() -> None:
    """1. One client holds much and waits for more. 2. Another one comes later. 3. What comes free is the other's."""
    arena = Arena(4 * MIB, 4 * MIB, 0)
    accounts = Accounts(Arenas(max_byte_size=4 * MIB, connection_share=1.0, client_share=1.0), 1, 1)
    room = ArenaSpace(arena, 5.0, 4 * MIB)
    greedy, other = accounts.open("greedy"), accounts.open("other")
    held = [room.loan(MIB, greedy) for _ in range(4)]
    granted: list[str] = []
    leases: list[Lease | ServingError] = []

    def wait(name: str, size: int) -> None:
        account = greedy if name == "greedy" else other
        room.wait(size, lambda lease: (granted.append(name), leases.append(lease))[0], 10.0, account)  # type: ignore[arg-type, func-returns-value]

    for _ in range(3):
        wait("greedy", MIB)
    wait("other", MIB)
    wait("other", MIB)
    for lease in held[:2]:
        assert lease is not None
        room.give_back(lease)
    assert granted == ["other", "other"]
    for lease in held[2:]:
        assert lease is not None
        room.give_back(lease)
    assert granted == ["other", "other", "greedy", "greedy"]
    # And one that comes when there is room is before those who hold more.
    for given in leases[:1]:
        assert isinstance(given, Lease)
        given.release()
    third = accounts.open("third")
    assert room.loan(MIB, third) is not None
    arena.close()
