"""Arenas: no two leases overlap, what is given back is found again, stale keys do nothing."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensord.shm.arena import BLOCK, Arena, ArenaMap, Buddies, Lease
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import Slice
from tests.generated import examples

MIB = 1 << 20


class ArenaMachine(RuleBasedStateMachine):
    """Takes and gives back leases at random and checks the rules of an arena."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(1 * MIB, 8 * MIB, 2 * MIB)
        self.leases: list[Lease] = []
        self.stale: list[tuple[int, int, int]] = []

    @rule(byte_size=st.one_of(st.integers(0, 300_000), st.integers(0, 7 * MIB)))
    def loan(self, byte_size: int) -> None:
        lease = self.arena.loan(byte_size)
        if lease is None:
            return
        assert lease.place.byte_size == len(lease.view) == byte_size
        assert lease.place.offset % 64 == 0
        if byte_size:
            lease.view[:1] = lease.view[-1:] = bytes([lease.generation % 251])
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), by_key=st.booleans())
    def give_back(self, data: st.DataObject, by_key: bool) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        if lease.place.byte_size:
            assert lease.view[0] == lease.view[-1] == lease.generation % 251
        if by_key:
            assert self.arena.release(lease.key)
        else:
            lease.release()
        self.stale.append(lease.key)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def give_back_again(self, data: st.DataObject) -> None:
        before = self.arena.statistics()
        assert not self.arena.release(data.draw(st.sampled_from(self.stale)))
        assert self.arena.statistics() == before

    @invariant()
    def leases_are_disjoint(self) -> None:
        taken: dict[int, list[tuple[int, int]]] = {}
        for lease in self.leases:
            taken.setdefault(lease.place.segment, []).append((lease.place.offset, max(lease.place.byte_size, 1)))
        for ranges in taken.values():
            ranges.sort()
            assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ranges))

    @invariant()
    def bounds_hold(self) -> None:
        numbers = self.arena.statistics()
        assert numbers["byte_size"] <= numbers["max_byte_size"]
        assert numbers["leases"] == len(self.leases)

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()
        assert self.arena.statistics()["leased_byte_size"] == 0
        whole = self.arena.loan(self.arena.statistics()["max_byte_size"] // 8)
        assert whole is not None
        whole.release()
        self.arena.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 6), max_size=60))
def test_buddies_join_again(orders: list[int]) -> None:
    buddies = Buddies(1 << 20)
    taken = [(offset, order) for order in orders if (offset := buddies.take(order)) is not None]
    for offset, order in taken:
        assert offset % (BLOCK << order) == 0
        buddies.give(offset, BLOCK << order)
    assert buddies.take(((1 << 20) // BLOCK).bit_length() - 1) == 0


def test_a_block_is_taken_again_as_it_was_given_back_and_joined_where_nothing_else_is_left() -> None:
    buddies = Buddies(1 << 20)
    first, second = buddies.take(2), buddies.take(2)
    assert first is not None
    assert second is not None
    buddies.give(second, 1 << 14)
    buddies.give(first, 1 << 14)
    assert (buddies.take(2), buddies.take(2)) == (first, second)
    buddies.give(first, 1 << 14)
    assert buddies.take(8) is None
    buddies.give(second, 1 << 14)
    assert buddies.take(8) == 0
    assert buddies.take(0) is None


def test_a_large_tensor_gets_a_segment_and_the_next_one_reuses_it() -> None:
    arena = Arena(1 * MIB, 64 * MIB, 32 * MIB)
    first = arena.loan(16 * MIB)
    assert first is not None
    assert first.place == Slice(1, 0, 16 * MIB)
    first.release()
    again = arena.loan(15 * MIB)
    assert again is not None
    assert again.place.segment == 1
    assert again.generation > first.generation
    arena.close()


def test_segments_beyond_what_is_kept_are_closed() -> None:
    arena = Arena(1 * MIB, 64 * MIB, 10 * MIB)
    leases = [arena.loan(8 * MIB) for _ in range(4)]
    for lease in leases:
        assert lease is not None
        lease.release()
    assert arena.statistics()["byte_size"] <= 1 * MIB + 10 * MIB
    assert arena.closures == 3
    arena.close()


def test_full_says_none_and_never_fitting_says_why() -> None:
    arena = Arena(1 * MIB, 4 * MIB, 0)
    held = arena.loan(3 * MIB)
    assert held is not None
    assert arena.loan(2 * MIB) is None
    with pytest.raises(InvalidArgument, match=r"5242880 bytes cannot fit .* 3145728 bytes"):
        arena.loan(5 * MIB)
    arena.close()


def test_never_fitting_names_a_size_that_fits() -> None:
    arena = Arena(1 * MIB, 4 * MIB + MIB // 2, 0)
    with pytest.raises(InvalidArgument, match=f"{3 * MIB + 1} bytes cannot fit .* {3 * MIB} bytes"):
        arena.loan(3 * MIB + 1)
    assert arena.loan(3 * MIB) is not None
    arena.close()


def test_the_peer_reads_what_the_owner_wrote_and_cannot_write() -> None:
    arena, peer = Arena(1 * MIB, 1 * MIB, 0), ArenaMap()
    lease = arena.loan(8)
    assert lease is not None
    peer.open(0, 1 * MIB, os.dup(arena.segments[0].fd))
    lease.view[:] = b"abcdefgh"
    seen = peer.view(lease.place)
    assert bytes(seen) == b"abcdefgh"
    assert seen.readonly
    del seen
    peer.close()
    arena.close()


@pytest.mark.parametrize(
    "place",
    [
        Slice(0, -1, 4),
        Slice(0, 0, -4),
        Slice(0, 1 * MIB, 1),
        Slice(0, 1, 1 * MIB),
        Slice(0, 2**63, 2**63),
        Slice(7, 0, 1),
    ],
)
def test_ranges_outside_a_segment_are_refused(place: Slice) -> None:
    arena, peer = Arena(1 * MIB, 1 * MIB, 0), ArenaMap()
    peer.open(0, 1 * MIB, os.dup(arena.segments[0].fd))
    with pytest.raises(InvalidArgument):
        peer.view(place)
    peer.close()
    arena.close()


def test_a_segment_is_not_announced_twice() -> None:
    arena, peer = Arena(1 * MIB, 1 * MIB, 0), ArenaMap()
    fd = arena.segments[0].fd
    peer.open(0, 1 * MIB, os.dup(fd))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidArgument, match="twice"):
        peer.open(0, 1 * MIB, os.dup(fd))
    assert set(os.listdir("/proc/self/fd")) <= before
    peer.close()
    arena.close()
