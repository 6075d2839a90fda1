"""The shared memory that inputs are copied to: which requests use it again, and how much of it waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import numpy as np
import pytest
from tensord_client.common.call import Call
from tensord_client.memory import Memory
from tensord_client.native import wire
from tensord_client.placement import Placement, Slot
from tensord_client.worker_lane import OpenedModel

MIB = 1 << 20
#: The memory that the daemon allows; free slots may have half of it.
ALLOWED = 16 * MIB


@pytest.fixture
def placement() -> Iterator[Placement]:
    memory = Memory()
    memory.limit(64, ALLOWED)
    yield Placement(memory)
    memory.close()


@pytest.fixture
def model() -> OpenedModel:
    metadata = {"inputs": [{"name": "x", "datatype": "UINT8"}], "outputs": []}
    return OpenedModel(Mock(metadata=metadata), [], 0, 0.0, 0.0)


def placed(placement: Placement, model: OpenedModel, byte_size: int, count: int) -> list[wire.Placed]:
    """Places requests that are in flight together."""
    return [placement.place(Call("m", {"x": np.full(byte_size, at % 256, np.uint8)}), model) for at in range(count)]


def slots(requests: list[wire.Placed]) -> list[Slot]:
    return [request.slot for request in requests if request.slot is not None]


def answer(requests: list[wire.Placed]) -> None:
    for slot in slots(requests):
        slot.give_back()


def used(placement: Placement) -> int:
    """Counts the bytes of shared memory that are not free."""
    placement.memory._collect()
    return sum(segment.byte_size - sum(segment.sizes) for segment in placement.memory.segments.values())


def test_as_many_requests_as_before_use_the_same_slots(placement: Placement, model: OpenedModel) -> None:
    first = placed(placement, model, 17_000, 64)
    assert len({request.prepared for request in first}) == 64
    answer(first)
    again = placed(placement, model, 17_000, 64)
    assert set(slots(again)) == set(slots(first))
    assert {slot.arrays["x"][0] for slot in slots(again)} == set(range(64))


def test_a_slot_is_for_requests_of_its_kind(placement: Placement, model: OpenedModel) -> None:
    (first,) = placed(placement, model, 17_000, 1)
    answer([first])
    (other,) = placed(placement, model, 17_001, 1)
    assert other.slot is not first.slot


def test_slots_of_the_kind_used_longest_ago_are_dropped(placement: Placement, model: OpenedModel) -> None:
    older, newer = placed(placement, model, MIB, 6), placed(placement, model, MIB // 2, 8)
    older_slots, newer_slots = set(slots(older)), set(slots(newer))
    answer(older)
    answer(newer)
    del older, newer
    assert newer_slots == set(slots(placed(placement, model, MIB // 2, 8)))
    kept = older_slots & set(slots(placed(placement, model, MIB, 6)))
    assert len(kept) == 4  # with 4 MiB of newer ones


def test_dropped_slots_leave_their_memory(placement: Placement, model: OpenedModel) -> None:
    answer(placed(placement, model, MIB, 12))
    assert used(placement) == ALLOWED // 2
    # There is room for that only without them.
    placement.room(np.empty(ALLOWED - MIB, np.uint8))
    assert used(placement) == 0


def test_a_slot_larger_than_that_is_used_again(placement: Placement, model: OpenedModel) -> None:
    small = placed(placement, model, MIB, 2)
    answer(small)
    del small
    (large,) = placed(placement, model, ALLOWED // 2 + MIB, 1)
    answer([large])
    assert slots(placed(placement, model, ALLOWED // 2 + MIB, 1)) == [large.slot]
    assert used(placement) == ALLOWED // 2 + MIB


def test_kinds_are_bounded(placement: Placement, model: OpenedModel) -> None:
    kinds = [placed(placement, model, 17_000 + at, 1) for at in range(300)]
    for requests in kinds:
        answer(requests)
    found = [slots(placed(placement, model, 17_000 + at, 1)) == slots(kinds[at]) for at in range(300)]
    assert found == [False] * 44 + [True] * 256


def test_a_forked_process_waits_for_no_lock_of_the_parent(placement: Placement, model: OpenedModel) -> None:
    requests = placed(placement, model, 17_000, 2)
    answer(requests[:1])
    with placement.slots._lock:
        placement.slots.forget()
        # The child's own end of a request that was the parent's.
        answer(requests[1:])
    assert slots(placed(placement, model, 17_000, 1)) == slots(requests[1:])
