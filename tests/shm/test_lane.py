"""Lanes: a request's tensors reach the worker, its answer comes back, leases return; whatever is out of step is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm.arena import Arena
from shm.channel import Channel, ChannelClosed, pair
from shm.errors import InvalidArgument
from shm.lane import SubmitterLane, WorkerLane
from shm.messages import Cancel, Completion, Record, Release, SegmentOpened, Slice, Submit, Tensor, ToSubmitter, decoder

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 * MIB, 64 * MIB, 4 * MIB)
    yield arena
    arena.close()


def lane_of(arena: Arena) -> tuple[SubmitterLane, WorkerLane]:
    ours, theirs = pair()
    return SubmitterLane(ours, arena), WorkerLane(theirs, 1 * MIB, 64 * MIB, 4 * MIB)


def received(worker: WorkerLane) -> list[Submit | Cancel]:
    found: list[Submit | Cancel] = []
    while (records := worker.receive()) is not None:
        found += records
    return found


def answered(submitter: SubmitterLane) -> list[Completion]:
    found: list[Completion] = []
    while (records := submitter.receive()) is not None:
        found += records
    return found


@pytest.mark.parametrize("size", [1, 4096, 300_000, 5 * MIB])
def test_there_and_back(arena: Arena, size: int) -> None:
    submitter, worker = lane_of(arena)
    for round_ in range(3):
        content = bytes([round_ + 1]) * size
        lease = arena.loan(size)
        assert lease is not None
        lease.view[:] = content
        submitter.submit(Submit(round_, "m", 0, (Tensor("x", "UINT8", (size,), lease.place),)))
        assert submitter.flush()

        (request,) = received(worker)
        assert isinstance(request, Submit)
        place = request.inputs[0].place
        assert isinstance(place, Slice)
        assert bytes(worker.view(place)) == content
        answer = worker.loan(size)
        assert answer is not None
        answer.view[:] = content[::-1]
        worker.complete(Completion(round_, outputs=(Tensor("y", "UINT8", (size,), answer.place),), lease=answer.key))
        assert worker.flush()

        (completion,) = answered(submitter)
        assert bytes(submitter.view(answer.place)) == content[::-1]
        assert completion.lease is not None
        submitter.release(completion.lease)
        lease.release()
        submitter.flush()
        assert received(worker) == []
        assert worker.arena.statistics()["leases"] == 0
    submitter.close()
    worker.close()


def test_one_arena_serves_two_lanes(arena: Arena) -> None:
    """What a dead worker had is given to another one without a copy."""
    first, second = lane_of(arena), lane_of(arena)
    lease = arena.loan(4)
    assert lease is not None
    lease.view[:] = b"same"
    request = Submit(1, "m", 0, (Tensor("x", "UINT8", (4,), lease.place),))
    for submitter, worker in (first, second):
        submitter.submit(request)
        submitter.flush()
        assert received(worker) == [request]
        assert bytes(worker.view(lease.place)) == b"same"
        submitter.close()
        worker.close()


def test_closed_segments_are_unmapped_by_the_worker(arena: Arena) -> None:
    submitter, worker = lane_of(arena)
    leases = [arena.loan(3 * MIB) for _ in range(2)]
    for i, lease in enumerate(leases):
        assert lease is not None
        submitter.submit(Submit(i, "m", 0, (Tensor("x", "UINT8", (3 * MIB,), lease.place),)))
    submitter.flush()
    received(worker)
    for lease in leases:
        assert lease is not None
        lease.release()  # 4 MiB are kept, so the first segment goes
    submitter.flush()
    received(worker)
    assert leases[0] is not None
    with pytest.raises(InvalidArgument, match="not open"):
        worker.view(leases[0].place)
    submitter.close()
    worker.close()


@pytest.mark.parametrize(
    "record", [Release(((0, 0, 1),)), Release(((9, 0, 1),)), SegmentOpened(0, 4096)], ids=lambda record: str(record)
)
def test_a_submitter_out_of_step_is_refused(record: Record) -> None:
    ours, theirs = pair()
    enemy = Channel(ours, decoder(ToSubmitter))
    worker = WorkerLane(theirs, 1 * MIB, 1 * MIB, 0)
    enemy.put(record)
    enemy.flush()
    with pytest.raises(InvalidArgument):
        worker.receive()
    enemy.close()
    worker.close()


def test_a_lease_is_given_back_once(arena: Arena) -> None:
    submitter, worker = lane_of(arena)
    answer = worker.loan(10_000)
    assert answer is not None
    submitter.release(answer.key)
    submitter.release(answer.key)
    submitter.flush()
    with pytest.raises(InvalidArgument, match="not on loan"):
        received(worker)
    submitter.close()
    worker.close()


def test_end_of_file_both_ways(arena: Arena) -> None:
    submitter, worker = lane_of(arena)
    worker.close()
    with pytest.raises(ChannelClosed):
        submitter.receive()
    submitter.close()
    submitter, worker = lane_of(arena)
    submitter.close()
    with pytest.raises(ChannelClosed):
        worker.receive()
    worker.close()
