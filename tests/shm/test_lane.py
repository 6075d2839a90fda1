"""Lanes: a request's tensors reach the worker, its answer comes back, leases return; whatever is out of step is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tensord.shm.arena import Arena
from tensord.shm.channel import Channel, ChannelClosed, pair
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.shm.forms import (
    MAX_FORMS,
    Form,
    Forms,
    HeardForms,
    answer_template,
    request_template,
    whole_answer,
    whole_request,
)
from tensord.shm.lane import SubmitterLane, WorkerLane
from tensord.shm.messages import (
    AnswerForm,
    Cancel,
    Completion,
    FormCompletion,
    FormSubmit,
    Inline,
    RegionSlice,
    Release,
    RequestForm,
    SegmentOpened,
    Slice,
    Submit,
    Tensor,
    ToSubmitter,
    ToWorker,
)
from tensord.shm.record import Record, decoder
from tests.open_files import no_descriptors_left

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 * MIB, 64 * MIB, 4 * MIB)
    yield arena
    arena.close()


def lane_of(arena: Arena) -> tuple[SubmitterLane, WorkerLane]:
    ours, theirs = pair()
    return SubmitterLane(ours, arena), WorkerLane(theirs, 1 * MIB, 64 * MIB, 4 * MIB)


def received(worker: WorkerLane) -> list[Submit | RequestForm | FormSubmit | Cancel]:
    found: list[Submit | RequestForm | FormSubmit | Cancel] = []
    while (records := worker.receive()) is not None:
        found += records
    return found


def answered(submitter: SubmitterLane) -> list[tuple[Completion, FormCompletion | None]]:
    found: list[tuple[Completion, FormCompletion | None]] = []
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

        ((completion, own),) = answered(submitter)
        assert own is None
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


def test_a_segment_of_answers_that_is_closed_is_said_without_another_answer(arena: Arena) -> None:
    submitter, worker = lane_of(arena)
    lease = worker.loan(5 * MIB)  # 4 MiB are kept
    assert lease is not None
    worker.complete(Completion(1, outputs=(Tensor("y", "UINT8", (5 * MIB,), lease.place),), lease=lease.key))
    worker.flush()
    ((completion, _),) = answered(submitter)
    assert completion.lease is not None
    submitter.release(completion.lease)
    submitter.flush()
    assert not worker.unsaid
    assert received(worker) == []
    assert worker.unsaid
    worker.flush()
    assert not worker.unsaid
    assert answered(submitter) == []
    with pytest.raises(InvalidArgument, match="not open"):
        submitter.view(lease.place)
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


def test_a_segment_the_worker_cannot_take_is_one_error_and_comes_again(arena: Arena) -> None:
    submitter, worker = lane_of(arena)
    lease = arena.loan(5 * MIB)
    assert lease is not None
    lease.view[:4] = b"here"
    request = Submit(1, "m", 0, (Tensor("x", "UINT8", (5 * MIB,), lease.place),))
    submitter.submit(request)
    submitter.flush()
    with no_descriptors_left():
        assert received(worker) == [request]
        with pytest.raises(
            Unavailable, match=f"{5 * MIB} bytes of a tensor cannot be reached: .* as many files open as it may"
        ):
            worker.view(lease.place)
        worker.flush()
        assert answered(submitter) == []
    submitter.submit(request)
    submitter.flush()
    assert received(worker) == [request]
    assert bytes(worker.view(lease.place)[:4]) == b"here"
    submitter.close()
    worker.close()


@pytest.mark.parametrize("formed", [False, True])
def test_an_answer_the_submitter_cannot_reach_is_an_error_and_gives_its_room_back(arena: Arena, formed: bool) -> None:
    submitter, worker = lane_of(arena)

    def answer(number: int) -> None:
        lease = worker.loan(5 * MIB)
        assert lease is not None
        lease.view[:4] = b"%04d" % number
        tensor = Tensor("y", "UINT8", (5 * MIB,), lease.place)
        whole = Completion(number, outputs=(tensor,), lease=lease.key)
        if formed:
            form = worker.answer_form(answer_template(whole))
            worker.complete_formed(form, FormCompletion(number, form.number, (lease.place,), lease.key))
        else:
            worker.complete(whole)
        worker.flush()

    answer(1)
    with no_descriptors_left():
        ((error, own),) = answered(submitter)
    assert own is None
    assert (error.request_id, error.code) == (1, Unavailable.code)
    assert "as many files open as it may" in error.message
    submitter.flush()
    assert received(worker) == []
    assert worker.arena.statistics()["leases"] == 0
    answer(2)
    ((completion, own),) = answered(submitter)
    place = own.contents[0] if own is not None else completion.outputs[0].place
    assert isinstance(place, Slice)
    assert bytes(submitter.view(place)[:4]) == b"0002"
    submitter.close()
    worker.close()


def test_an_answer_whose_segment_cannot_be_sent_is_an_error(arena: Arena) -> None:
    submitter, worker = lane_of(arena)
    lease = worker.loan(5 * MIB)
    assert lease is not None
    whole = Completion(1, outputs=(Tensor("y", "UINT8", (5 * MIB,), lease.place),), lease=lease.key)
    with no_descriptors_left():
        with pytest.raises(Unavailable, match="no file can be opened for another arena segment"):
            worker.loan(20 * MIB)
        worker.complete(whole)
        worker.flush()
        ((error, _),) = answered(submitter)
    assert error.code == Unavailable.code
    assert worker.arena.statistics()["leases"] == 0
    submitter.close()
    worker.close()


def test_a_request_whose_segment_cannot_be_sent_is_refused_where_it_is(arena: Arena) -> None:
    submitter, worker = lane_of(arena)
    lease = arena.loan(5 * MIB)
    assert lease is not None
    request = Submit(1, "m", 0, (Tensor("x", "UINT8", (5 * MIB,), lease.place),))
    with no_descriptors_left(), pytest.raises(Unavailable, match="no file can be opened for sending an arena segment"):
        submitter.submit(request)
    submitter.submit(request)
    submitter.flush()
    assert received(worker) == [request]
    submitter.close()
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


def test_leases_of_one_datagram_are_given_back_all_or_none(arena: Arena) -> None:
    submitter, worker = lane_of(arena)
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


# ---------------------------------------------------------------------------------------------------------------- forms


def request_form(name: str) -> Form[Submit]:
    """The next one of a new sender: its number is 0."""
    tensors = (Tensor("x", "UINT8", (2,), Inline(b"")), Tensor("r", "UINT8", (2,), RegionSlice(name, 0, 2)))
    return Forms[Submit]().form(request_template(Submit(0, name, 0, tensors)))


def test_requests_of_forms_come_in_order_each_after_its_form(arena: Arena) -> None:
    """Also where two forms have one number, and ends, cancellations and other requests are between them."""
    submitter, worker = lane_of(arena)
    a, b = request_form("a"), request_form("b")
    assert a.number == b.number == 0
    heard: HeardForms[Submit] = HeardForms()
    for number, form in enumerate((a, a, b, a)):
        submitter.submit_formed(form, FormSubmit(number, form.number, (b"%02d" % number,), f"id{number}"))
    submitter.cancel(1)
    submitter.submit(Submit(9, "whole", 0, ()))
    submitter.flush()
    found: list[tuple[int, str]] = []
    kinds = []
    for record in received(worker):
        kinds.append(type(record))
        if isinstance(record, RequestForm):
            heard.learn(record.number, record.submit)
        elif isinstance(record, FormSubmit):
            whole = whole_request(heard.find(record.form), record)
            assert whole.inputs[0].place == Inline(b"%02d" % record.request_id)
            assert whole.client_id == f"id{record.request_id}"
            found.append((record.request_id, whole.model))
    assert found == [(0, "a"), (1, "a"), (2, "b"), (3, "a")]
    q, form_ = FormSubmit, RequestForm
    assert kinds == [form_, q, q, form_, q, form_, q, Cancel, Submit]
    submitter.close()
    worker.close()


def answer_of(number: int, size: int = 2) -> Completion:
    return Completion(number, version=3, outputs=(Tensor("y", "UINT8", (size,), Inline(b"%0*d" % (size, number))),))


def complete_formed(worker: WorkerLane, form: Form[Completion], number: int, *contents: bytes) -> None:
    worker.complete_formed(form, FormCompletion(number, form.number, contents))


def test_answers_of_a_form(arena: Arena) -> None:
    submitter, worker = lane_of(arena)
    form = worker.answer_form(answer_template(answer_of(7)))
    assert worker.answer_form(answer_template(answer_of(8))) is form
    templates = []
    for number in range(3):
        complete_formed(worker, form, number, b"%02d" % number)
        worker.complete(Completion(10 + number))
        worker.flush()
        (template, own), (whole, none) = answered(submitter)
        assert own is not None
        assert whole_answer(template, own) == answer_of(number)
        assert (whole, none) == (Completion(10 + number), None)
        templates.append(template)
    # What is remembered of answers like that is found by it.
    assert templates[0] is templates[1] is templates[2]
    submitter.close()
    worker.close()


@pytest.mark.parametrize("together", [True, False])
def test_answers_of_two_forms_with_one_number(arena: Arena, together: bool) -> None:
    """A worker has numbered more kinds than there are numbers; it answers old and new ones in one datagram, or in several."""
    submitter, worker = lane_of(arena)
    forms = [Forms[Completion]().form(answer_template(answer_of(0, size))) for size in (1, 2)]
    assert forms[0].number == forms[1].number
    expected, found = [], []
    for number in range(6):
        answer = answer_of(number, 1 + number % 2)
        expected.append(answer)
        place = answer.outputs[0].place
        assert isinstance(place, Inline)
        complete_formed(worker, forms[number % 2], number, place.content)
        if not together:
            worker.flush()
            found += answered(submitter)
    worker.flush()
    found += answered(submitter)
    assert [whole_answer(template, own) for template, own in found if own is not None] == expected
    submitter.close()
    worker.close()


@pytest.mark.parametrize("contents", [(), (b"ab", b"cd")])
def test_an_answer_that_is_not_like_its_form_is_refused(arena: Arena, contents: tuple[bytes, ...]) -> None:
    submitter, worker = lane_of(arena)
    form = worker.answer_form(answer_template(answer_of(7)))
    complete_formed(worker, form, 1, *contents)
    worker.flush()
    with pytest.raises(InvalidArgument, match=f"{len(contents)} tensors came in an answer whose form has 1 there"):
        submitter.receive()
    submitter.close()
    worker.close()


def test_an_answer_of_a_form_that_was_never_told_is_refused(arena: Arena) -> None:
    ours, theirs = pair()
    submitter, enemy = SubmitterLane(ours, arena), Channel(theirs, decoder(ToWorker))
    enemy.put(AnswerForm(3, answer_template(answer_of(1))))
    enemy.put(FormCompletion(1, 4, (b"ab",)))
    enemy.flush()
    with pytest.raises(InvalidArgument, match="form 4 was never told"):
        submitter.receive()
    submitter.close()
    enemy.close()


@pytest.mark.parametrize("number", [-1, MAX_FORMS])
def test_a_worker_that_numbers_out_of_range_is_refused(arena: Arena, number: int) -> None:
    ours, theirs = pair()
    submitter, enemy = SubmitterLane(ours, arena), Channel(theirs, decoder(ToWorker))
    enemy.put(AnswerForm(number, Completion(0)))
    enemy.flush()
    with pytest.raises(InvalidArgument, match="forms have numbers below"):
        submitter.receive()
    submitter.close()
    enemy.close()


def test_records_of_the_other_direction_are_refused(arena: Arena) -> None:
    for record in (RequestForm(0, Submit(0, "m", 0, ())), FormSubmit(1, 0, ())):
        ours, theirs = pair()
        submitter, enemy = SubmitterLane(ours, arena), Channel(theirs, decoder(ToWorker))
        enemy.put(record)
        enemy.flush()
        with pytest.raises(InvalidArgument):
            submitter.receive()
        submitter.close()
        enemy.close()
