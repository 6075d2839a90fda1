"""Lanes: a request's tensors reach the worker, its answer comes back, leases return; whatever is out of step is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tensord.shm.arena import Arena, Lease
from tensord.shm.channel import Channel, ChannelClosed, pair
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.shm.lane import Instruction, SubmitterLane, WorkerLane
from tensord.shm.messages import (
    WIRE_VERSION,
    AnswerRecord,
    Cancel,
    Content,
    Prepare,
    PrepareAnswer,
    PreparedAnswer,
    PreparedRequest,
    RegionSlice,
    Release,
    RequestRecord,
    SegmentOpened,
    Slice,
    ToSubmitter,
    ToWorker,
    WireVersion,
)
from tensord.shm.prepared import MAX_NUMBERS, Numbered, Numbers, ReceivedNumbers
from tensord.shm.record import Record, decoder
from tests.open_files import no_descriptors_left
from tests.records import Tensor, WholeAnswer, WholeRequest, whole_answer, whole_request

MIB = 1 << 20

Lanes = tuple[SubmitterLane, WorkerLane]


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 * MIB, 64 * MIB, 4 * MIB)
    yield arena
    arena.close()


def lane_of(arena: Arena) -> Lanes:
    ours, theirs = pair()
    return SubmitterLane(ours, arena), WorkerLane(theirs, 1 * MIB, 64 * MIB, 4 * MIB)


@pytest.fixture
def lanes(arena: Arena) -> Iterator[Lanes]:
    """Yields both ends of a lane."""
    submitter, worker = lane_of(arena)
    yield submitter, worker
    submitter.close()
    worker.close()


def send(submitter: SubmitterLane, request: WholeRequest, *leases: Lease) -> None:
    """Queues a request whose tensors lie in these leases."""
    for lease in leases:
        if lease.place.segment not in submitter.announced:
            submitter.announce(lease.place.segment)
    submitter.submit(request.record)


def received(worker: WorkerLane) -> list[Instruction]:
    found: list[Instruction] = []
    while (records := worker.receive()) is not None:
        found += records
    return found


def answered(submitter: SubmitterLane) -> list[tuple[PreparedAnswer, AnswerRecord]]:
    found: list[tuple[PreparedAnswer, AnswerRecord]] = []
    while (records := submitter.receive()) is not None:
        found += records
    return found


@pytest.mark.parametrize("size", [1, 4096, 300_000, 5 * MIB])
def test_there_and_back(arena: Arena, lanes: Lanes, size: int) -> None:
    submitter, worker = lanes
    for round_ in range(3):
        content = bytes([round_ + 1]) * size
        lease = arena.loan(size)
        assert lease is not None
        lease.view[:] = content
        send(submitter, WholeRequest(round_, "m", 0, (Tensor("x", "UINT8", (size,), lease.place),)), lease)
        assert submitter.flush()

        (request,) = received(worker)
        assert isinstance(request, RequestRecord)
        (place,) = request.contents
        assert isinstance(place, Slice)
        assert bytes(worker.view(place)) == content
        answer = worker.loan(size)
        assert answer is not None
        answer.view[:] = content[::-1]
        worker.complete(
            WholeAnswer(round_, outputs=(Tensor("y", "UINT8", (size,), answer.place),), lease=answer.key).record
        )
        assert worker.flush()

        ((_, own),) = answered(submitter)
        assert bytes(submitter.view(answer.place)) == content[::-1]
        assert own.lease is not None
        submitter.release(own.lease)
        lease.release()
        submitter.flush()
        assert received(worker) == []
        assert worker.arena.statistics()["leases"] == 0


def test_one_arena_serves_two_lanes(arena: Arena) -> None:
    """Memory that a dead worker had is given to another one without a copy."""
    first, second = lane_of(arena), lane_of(arena)
    lease = arena.loan(4)
    assert lease is not None
    lease.view[:] = b"same"
    request = WholeRequest(1, "m", 0, (Tensor("x", "UINT8", (4,), lease.place),))
    for submitter, worker in (first, second):
        send(submitter, request, lease)
        submitter.flush()
        assert received(worker) == [request.record]
        assert bytes(worker.view(lease.place)) == b"same"
        submitter.close()
        worker.close()


def test_closed_segments_are_unmapped_by_the_worker(arena: Arena, lanes: Lanes) -> None:
    submitter, worker = lanes
    leases = [arena.loan(3 * MIB) for _ in range(2)]
    for i, lease in enumerate(leases):
        assert lease is not None
        send(submitter, WholeRequest(i, "m", 0, (Tensor("x", "UINT8", (3 * MIB,), lease.place),)), lease)
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


def test_a_segment_of_answers_that_is_closed_is_said_without_another_answer(lanes: Lanes) -> None:
    submitter, worker = lanes
    lease = worker.loan(5 * MIB)  # 4 MiB are kept
    assert lease is not None
    worker.complete(WholeAnswer(1, outputs=(Tensor("y", "UINT8", (5 * MIB,), lease.place),), lease=lease.key).record)
    worker.flush()
    ((_, own),) = answered(submitter)
    assert own.lease is not None
    submitter.release(own.lease)
    submitter.flush()
    assert not worker.unsaid
    assert received(worker) == []
    assert worker.unsaid
    worker.flush()
    assert not worker.unsaid
    assert answered(submitter) == []
    with pytest.raises(InvalidArgument, match="not open"):
        submitter.view(lease.place)


@pytest.mark.parametrize(
    "record", [Release(((0, 0, 1),)), Release(((9, 0, 1),)), SegmentOpened(0, 4096)], ids=lambda record: str(record)
)
def test_a_submitter_out_of_step_is_refused(record: Record) -> None:
    ours, theirs = pair()
    enemy = Channel(ours, decoder(ToSubmitter))
    worker = WorkerLane(theirs, 1 * MIB, 1 * MIB, 0)
    enemy.send(WireVersion(WIRE_VERSION))
    enemy.send(record)
    with pytest.raises(InvalidArgument):
        worker.receive()
    enemy.close()
    worker.close()


def test_a_segment_the_worker_cannot_take_is_one_error_and_comes_again(arena: Arena, lanes: Lanes) -> None:
    submitter, worker = lanes
    lease = arena.loan(5 * MIB)
    assert lease is not None
    lease.view[:4] = b"here"
    request = WholeRequest(1, "m", 0, (Tensor("x", "UINT8", (5 * MIB,), lease.place),))
    send(submitter, request, lease)
    submitter.flush()
    with no_descriptors_left():
        assert received(worker) == [request.record]
        with pytest.raises(
            Unavailable, match=f"{5 * MIB} bytes of a tensor cannot be reached: .* as many files open as it may"
        ):
            worker.view(lease.place)
        worker.flush()
        assert answered(submitter) == []
    send(submitter, request, lease)
    submitter.flush()
    assert received(worker) == [request.record]
    assert bytes(worker.view(lease.place)[:4]) == b"here"


@pytest.mark.parametrize("numbered", [False, True])
def test_an_answer_the_submitter_cannot_reach_is_an_error_and_gives_its_room_back(lanes: Lanes, numbered: bool) -> None:
    submitter, worker = lanes

    def answer(number: int) -> None:
        lease = worker.loan(5 * MIB)
        assert lease is not None
        lease.view[:4] = b"%04d" % number
        tensor = Tensor("y", "UINT8", (5 * MIB,), lease.place)
        whole = WholeAnswer(number, outputs=(tensor,), lease=lease.key)
        if numbered:
            kind = worker.number(whole.prepared)
            worker.complete(whole.of(kind.number), kind)
        else:
            worker.complete(whole.record)
        worker.flush()

    answer(1)
    with no_descriptors_left():
        ((prepared, error),) = answered(submitter)
    assert prepared.final
    assert (error.request_id, error.code) == (1, Unavailable.code)
    assert "as many files open as it may" in error.message
    submitter.flush()
    assert received(worker) == []
    assert worker.arena.statistics()["leases"] == 0
    answer(2)
    ((_, own),) = answered(submitter)
    (place,) = own.contents
    assert isinstance(place, Slice)
    assert bytes(submitter.view(place)[:4]) == b"0002"


def test_a_response_the_submitter_cannot_reach_cancels_its_request(lanes: Lanes) -> None:
    submitter, worker = lanes
    lease = worker.loan(5 * MIB)
    assert lease is not None
    tensor = Tensor("y", "UINT8", (5 * MIB,), lease.place)
    worker.complete(WholeAnswer(1, outputs=(tensor,), lease=lease.key, final=False).record)
    worker.flush()
    with no_descriptors_left():
        ((prepared, error),) = answered(submitter)
    assert (prepared.final, error.request_id, error.code) == (True, 1, Unavailable.code)
    submitter.flush()
    assert received(worker) == [Cancel(1)]
    assert worker.arena.statistics()["leases"] == 0


def test_an_answer_whose_segment_cannot_be_sent_is_refused(lanes: Lanes) -> None:
    submitter, worker = lanes
    lease = worker.loan(5 * MIB)
    assert lease is not None
    whole = WholeAnswer(1, outputs=(Tensor("y", "UINT8", (5 * MIB,), lease.place),), lease=lease.key)
    with no_descriptors_left():
        with pytest.raises(Unavailable, match="no file can be opened for another arena segment"):
            worker.loan(20 * MIB)
        with pytest.raises(Unavailable, match="no file can be opened for sending an arena segment"):
            worker.complete(whole.record)
        worker.flush()
        assert answered(submitter) == []
    worker.complete(whole.record)
    worker.flush()
    assert [record.request_id for _, record in answered(submitter)] == [1]


def test_a_request_whose_segment_cannot_be_sent_is_refused_where_it_is(arena: Arena, lanes: Lanes) -> None:
    submitter, worker = lanes
    lease = arena.loan(5 * MIB)
    assert lease is not None
    request = WholeRequest(1, "m", 0, (Tensor("x", "UINT8", (5 * MIB,), lease.place),))
    with no_descriptors_left(), pytest.raises(Unavailable, match="no file can be opened for sending an arena segment"):
        send(submitter, request, lease)
    send(submitter, request, lease)
    submitter.flush()
    assert received(worker) == [request.record]


def test_a_lease_is_given_back_once(lanes: Lanes) -> None:
    submitter, worker = lanes
    answer = worker.loan(10_000)
    assert answer is not None
    submitter.release(answer.key)
    submitter.release(answer.key)
    submitter.flush()
    with pytest.raises(InvalidArgument, match="not on loan"):
        received(worker)


def test_leases_of_one_datagram_are_given_back_all_or_none(lanes: Lanes) -> None:
    submitter, worker = lanes
    good, twice = worker.loan(10_000), worker.loan(10_000)
    assert good is not None
    assert twice is not None
    for key in (good.key, twice.key, twice.key):
        submitter.release(key)
    submitter.flush()
    with pytest.raises(InvalidArgument, match=re.escape(f"lease {twice.key} is given back but not on loan")):
        received(worker)
    assert worker.arena.statistics()["leases"] == 2
    submitter.release(good.key)
    submitter.flush()
    assert received(worker) == []
    assert worker.arena.statistics()["leases"] == 1


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


# -------------------------------------------------------------------------------------------------------------- numbers


def kind_of(name: str) -> Numbered[PreparedRequest]:
    """Returns the first prepared request of a new sender, with the number 0."""
    tensors = (Tensor("x", "UINT8", (2,), b""), Tensor("r", "UINT8", (2,), RegionSlice(name, 0, 2)))
    return Numbers[PreparedRequest]().number(WholeRequest(0, name, 0, tensors).prepared)


def test_requests_with_numbers_come_in_order_each_after_what_its_number_stands_for(lanes: Lanes) -> None:
    """The order also holds where a number is used for two kinds, and among ends, cancellations and other requests."""
    submitter, worker = lanes
    a, b = kind_of("a"), kind_of("b")
    assert a.number == b.number == 0
    known: ReceivedNumbers[PreparedRequest] = ReceivedNumbers()
    for number, kind in enumerate((a, a, b, a)):
        submitter.submit(RequestRecord(number, kind.number, (b"%02d" % number,), f"id{number}"), kind)
    submitter.cancel(1)
    whole = WholeRequest(9, "whole", 0, ())
    submitter.submit(whole.record)
    submitter.flush()
    found: list[tuple[int, str]] = []
    kinds = []
    for record in received(worker):
        kinds.append(type(record))
        if isinstance(record, Prepare):
            known.learn(record.number, record.prepared)
        elif record == whole.record:
            found.append((9, "whole"))
        elif isinstance(record, RequestRecord):
            assert isinstance(record.prepared, int)
            request = whole_request(known[record.prepared], record)
            assert request.inputs[0].place == b"%02d" % record.request_id
            assert request.client_id == f"id{record.request_id}"
            found.append((record.request_id, request.model))
    assert found == [(0, "a"), (1, "a"), (2, "b"), (3, "a"), (9, "whole")]
    q = RequestRecord
    assert kinds == [Prepare, q, q, Prepare, q, Prepare, q, Cancel, q]


def answer_of(number: int, size: int = 2) -> WholeAnswer:
    return WholeAnswer(number, version=3, outputs=(Tensor("y", "UINT8", (size,), b"%0*d" % (size, number)),))


def complete(worker: WorkerLane, kind: Numbered[PreparedAnswer], number: int, *contents: Content) -> None:
    worker.complete(AnswerRecord(number, kind.number, contents), kind)


def test_answers_with_a_number(lanes: Lanes) -> None:
    submitter, worker = lanes
    kind = worker.number(answer_of(7).prepared)
    assert worker.number(answer_of(8).prepared) is kind
    known = []
    for number in range(3):
        complete(worker, kind, number, b"%02d" % number)
        worker.complete(WholeAnswer(10 + number).record)
        worker.flush()
        (prepared, own), other = answered(submitter)
        assert whole_answer(prepared, own) == answer_of(number)
        assert whole_answer(*other) == WholeAnswer(10 + number)
        known.append(prepared)
    # What is remembered of answers like that is found by it.
    assert known[0] is known[1] is known[2]


@pytest.mark.parametrize("together", [True, False])
def test_answers_of_two_kinds_with_one_number(lanes: Lanes, together: bool) -> None:
    """A worker has numbered more kinds than there are numbers; it answers old and new ones in one datagram, or in several."""
    submitter, worker = lanes
    kinds = [Numbers[PreparedAnswer]().number(answer_of(0, size).prepared) for size in (1, 2)]
    assert kinds[0].number == kinds[1].number
    expected, found = [], []
    for number in range(6):
        answer = answer_of(number, 1 + number % 2)
        expected.append(answer)
        complete(worker, kinds[number % 2], number, *answer.contents)
        if not together:
            worker.flush()
            found += answered(submitter)
    worker.flush()
    found += answered(submitter)
    assert [whole_answer(prepared, own) for prepared, own in found] == expected


@pytest.mark.parametrize("contents", [(), (b"ab", b"cd")])
@pytest.mark.parametrize("numbered", [False, True])
def test_an_answer_that_is_not_like_what_was_prepared_is_refused(
    lanes: Lanes, contents: tuple[bytes, ...], numbered: bool
) -> None:
    submitter, worker = lanes
    if numbered:
        complete(worker, worker.number(answer_of(7).prepared), 1, *contents)
    else:
        worker.complete(AnswerRecord(1, answer_of(7).prepared, contents))
    worker.flush()
    with pytest.raises(InvalidArgument, match=f"{len(contents)} tensors came in an answer that was prepared for 1"):
        submitter.receive()


def stranger(arena: Arena, *records: Record) -> SubmitterLane:
    """Returns a lane on which these records came from the other end."""
    ours, theirs = pair()
    submitter, enemy = SubmitterLane(ours, arena), Channel(theirs, decoder(ToWorker))
    for record in records:
        enemy.send(record)
    enemy.close()
    return submitter


def test_an_answer_with_a_number_that_was_never_prepared_is_refused(arena: Arena) -> None:
    known = PrepareAnswer(3, answer_of(1).prepared)
    submitter = stranger(arena, WireVersion(WIRE_VERSION), known, AnswerRecord(1, 4, (b"ab",)))
    assert submitter.receive() == []
    with pytest.raises(InvalidArgument, match="number 4 was never prepared"):
        submitter.receive()
    submitter.close()


@pytest.mark.parametrize("number", [-1, MAX_NUMBERS])
def test_a_worker_that_numbers_out_of_range_is_refused(arena: Arena, number: int) -> None:
    submitter = stranger(arena, WireVersion(WIRE_VERSION), PrepareAnswer(number, PreparedAnswer()))
    with pytest.raises(InvalidArgument, match="numbers are below"):
        submitter.receive()
    submitter.close()


def test_records_of_the_other_direction_are_refused(arena: Arena) -> None:
    for record in (Prepare(0, PreparedRequest("m")), RequestRecord(1, 0, ())):
        submitter = stranger(arena, WireVersion(WIRE_VERSION), record)
        with pytest.raises(InvalidArgument):
            submitter.receive()
        submitter.close()


# ------------------------------------------------------------------------------------------------- version of the wire


def test_another_version_of_the_wire_is_refused_with_both_numbers(arena: Arena) -> None:
    """The bytes after the version do not matter: this end may be unable to read them."""
    words = f"the other end speaks version {WIRE_VERSION + 1} of the wire, this one version {WIRE_VERSION}"
    submitter = stranger(arena, WireVersion(WIRE_VERSION + 1), Cancel(1))
    with pytest.raises(InvalidArgument, match=words):
        submitter.receive()
    submitter.close()
    ours, theirs = pair()
    enemy, worker = Channel(ours, decoder(ToSubmitter)), WorkerLane(theirs, 1 * MIB, 1 * MIB, 0)
    enemy.send(WireVersion(WIRE_VERSION + 1))
    enemy.send(PrepareAnswer(0, PreparedAnswer()))
    with pytest.raises(InvalidArgument, match=words):
        worker.receive()
    enemy.close()
    worker.close()


def test_a_lane_begins_with_the_version_of_the_wire(arena: Arena) -> None:
    submitter = stranger(arena, AnswerRecord(1, PreparedAnswer()))
    with pytest.raises(InvalidArgument, match="a lane begins with the version of the wire, not with AnswerRecord"):
        submitter.receive()
    submitter.close()
    ours, theirs = pair()
    enemy, worker = Channel(ours, decoder(ToSubmitter)), WorkerLane(theirs, 1 * MIB, 1 * MIB, 0)
    enemy.send(Cancel(1))
    with pytest.raises(InvalidArgument, match="a lane begins with the version of the wire, not with Cancel"):
        worker.receive()
    enemy.close()
    worker.close()
