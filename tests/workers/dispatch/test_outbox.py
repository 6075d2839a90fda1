"""Answers that find no room: kept in order, given up in time, and their submitter's requests held meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tensord.config.model_config import parse_pbtxt
from tensord.config.options import Arenas
from tensord.shm.arena import Arena
from tensord.shm.errors import Cancelled, Internal, Unavailable
from tensord.workers.dispatch.outbox import Outbox
from tensord.workers.models.execution import Execution
from tensord.workers.models.statistics import Failure, VersionStatistics
from tensord.workers.requests.request import Request
from tensord.workers.requests.submitter_link import LaneOwner, SubmitterLink
from tensord.workers.scheduling.agenda import NEVER, Agenda
from tensord.workers.tensors.signature import signature
from tests.records import WholeAnswer, noting
from tests.workers.made_requests import request_of


class Version(SimpleNamespace):
    """Stands for a ModelVersion: equal only to itself."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


VERSION = Version(
    name="m",
    version=3,
    ordered=False,
    senders={},
    statistics=VersionStatistics("m", 3),
    signature=signature(parse_pbtxt('name: "m" output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }', "m"), {}, {}),
)
MEBIBYTE = 1 << 20


class ALane:
    """The worker's end of a lane, with a real arena and no socket."""

    def __init__(self) -> None:
        self.arena = Arena(MEBIBYTE, MEBIBYTE, 0)
        self.sent: list[WholeAnswer] = []
        self.complete = noting(self.sent)
        self.loan = lambda byte_size: self.arena.loan(byte_size)
        self.announce = lambda segment: None

    def take(self) -> None:
        """Gives the first lease back."""
        completion = self.sent.pop(0)
        assert completion.lease is not None
        assert self.arena.release(completion.lease)

    def take_one(self, request_id: int) -> None:
        """Gives the lease of that one back."""
        (completion,) = [one for one in self.sent if one.request_id == request_id]
        assert completion.lease is not None
        assert self.arena.release(completion.lease)


@pytest.fixture
def outbox() -> Outbox:
    arenas = Arenas(byte_size=MEBIBYTE, max_byte_size=MEBIBYTE, inline_byte_size=0, wait=1.0)
    return Outbox(arenas, Agenda(), lambda request: None)


Submitters = Callable[[], tuple[SubmitterLink, ALane]]


@pytest.fixture
def submitter_of() -> Iterator[Submitters]:
    """Yields a function that makes a submitter and its lane, whose arena is closed when the test ends."""
    with contextlib.ExitStack() as made:

        def make() -> tuple[SubmitterLink, ALane]:
            lane = ALane()
            made.callback(lane.arena.close)
            return SubmitterLink(1, cast(Any, lane)), lane

        yield make


def request_from(submitter: SubmitterLink, request_id: int) -> Request:
    request = request_of({}, version=VERSION, submitter=submitter, request_id=request_id)
    submitter.in_flight[request_id] = request
    return request


def a_quarter() -> dict[str, Any]:
    return {"y": np.zeros(MEBIBYTE // 16, np.float32)}


def ids(lane: ALane) -> list[int]:
    return [completion.request_id for completion in lane.sent]


def test_blocked_answers_leave_in_order(outbox: Outbox, submitter_of: Submitters) -> None:
    submitter, lane = submitter_of()
    for i in range(1, 7):
        outbox.answer(request_from(submitter, i), a_quarter(), now_ns=0)
    outbox.answer(request_from(submitter, 7), a_quarter(), now_ns=0)
    assert ids(lane) == [1, 2, 3, 4]
    assert outbox.next_give_up_ns == 1_000_000_000
    lane.take()
    assert outbox.retry(1) == []
    assert ids(lane) == [2, 3, 4, 5]
    lane.take()
    lane.take()
    outbox.retry(1)
    assert ids(lane) == [4, 5, 6, 7]
    assert outbox.next_give_up_ns == NEVER
    assert submitter.blocked_byte_size == 0
    assert submitter.in_flight == {}


def test_small_answers_do_not_wait_for_the_room_of_large_ones(outbox: Outbox, submitter_of: Submitters) -> None:
    """1. large answers are blocked, and requests like theirs held; 2. small ones leave and others run; 3. until too many do."""
    submitter, lane = submitter_of()
    for i in range(1, 10):
        outbox.answer(request_from(submitter, i), a_quarter(), now_ns=0)
    other = request_from(submitter, 10)
    other.key = "of other shapes"
    assert not outbox.hold(other)
    small = {"y": np.zeros(lane.arena.small_byte_size // 4, np.float32)}
    sent = 10
    while not isinstance(outbox.answer(request_from(submitter, sent), small, now_ns=0), Unavailable):
        sent += 1
        if len(submitter.blocked) > 5:
            break
    placed = ids(lane)
    assert placed == [1, 2, 3, 4, *range(10, 10 + len(placed) - 4)]
    assert len(placed) > 10
    # The small one that found the reserve full takes the first small place that is free; the large ones go on waiting.
    late = submitter.blocked[-1].request.request_id
    lane.take_one(placed[-1])
    assert outbox.retry(1) == []
    assert ids(lane)[-1] == late
    assert len(submitter.blocked) == 5


def test_nothing_overtakes_an_answer_of_a_model_whose_answers_leave_in_order(
    outbox: Outbox, submitter_of: Submitters
) -> None:
    """Neither a small one, nor an error, nor requests of other shapes; of other models all do."""
    submitter, lane = submitter_of()
    ordered = Version(**(vars(VERSION) | {"ordered": True}))

    def next_of(version: Version, number: int) -> Request:
        request = request_of({}, version=version, submitter=submitter, request_id=number)
        submitter.in_flight[number] = request
        return request

    small = {"y": np.zeros(1, np.float32)}
    for number in range(1, 7):
        outbox.answer(next_of(ordered, number), a_quarter(), now_ns=0)
    outbox.answer(next_of(ordered, 7), small, now_ns=0)
    outbox.answer(next_of(ordered, 8), Internal("no"), now_ns=0)
    outbox.fail(next_of(ordered, 9), Unavailable("too late"))
    outbox.answer(next_of(VERSION, 10), small, now_ns=0)
    assert ids(lane) == [1, 2, 3, 4, 10]
    lane.take_one(1)
    outbox.retry(1)
    assert ids(lane) == [1, 2, 3, 4, 10, 5]
    for number in range(11, 16):
        outbox.answer(next_of(ordered, number), a_quarter(), now_ns=0)
    other = next_of(ordered, 16)
    other.key = "of other shapes"
    assert outbox.hold(other)
    # What waits too long is given up, and what was behind it leaves.
    outbox.retry(1_000_000_000)
    assert ids(lane) == [1, 2, 3, 4, 10, 5, *range(6, 10), *range(11, 16)]
    assert [completion.code for completion in lane.sent if completion.code] == [
        *["UNAVAILABLE", "INTERNAL", "UNAVAILABLE"],
        *["UNAVAILABLE"] * 5,
    ]
    assert not submitter.blocked


def test_too_many_blocked_answers_are_refused_at_once(outbox: Outbox, submitter_of: Submitters) -> None:
    submitter, _ = submitter_of()
    results = [outbox.answer(request_from(submitter, i), a_quarter(), now_ns=0) for i in range(1, 22)]
    assert [isinstance(result, Unavailable) for result in results] == [False] * 20 + [True]


def test_given_up_with_both_numbers(outbox: Outbox, submitter_of: Submitters) -> None:
    submitter, lane = submitter_of()
    for i in range(1, 7):
        outbox.answer(request_from(submitter, i), a_quarter(), now_ns=0)
    outbox.retry(999_999_999)
    assert len(lane.sent) == 4
    outbox.retry(1_000_000_000)
    assert [completion.code for completion in lane.sent] == ["", "", "", "", "UNAVAILABLE", "UNAVAILABLE"]
    assert lane.sent[4].message == (
        f"no room for an answer of {MEBIBYTE // 4} bytes in the response arena: {MEBIBYTE} of {MEBIBYTE} are in use"
    )
    assert submitter.in_flight == {}


def test_a_full_lane_is_not_said_to_be_its_user_s_limit(outbox: Outbox, submitter_of: Submitters) -> None:
    """The lane's arena has half a MiB left, and a segment takes whole ones; its user may have much more."""
    submitter, lane = submitter_of()
    submitter.owner = owner = LaneOwner("anna", 64 * MEBIBYTE)
    lane.arena = Arena(MEBIBYTE, MEBIBYTE * 3 // 2, 0, lazy=True, budget=owner)
    for i in range(1, 6):
        outbox.answer(request_from(submitter, i), a_quarter(), now_ns=0)
    outbox.retry(1_000_000_000)
    assert lane.sent[4].message == (
        f"no room for an answer of {MEBIBYTE // 4} bytes in the response arena: {MEBIBYTE} of {MEBIBYTE * 3 // 2} are in use"
    )
    lane.arena.close()


def test_requests_are_held_while_too_much_is_blocked(outbox: Outbox, submitter_of: Submitters) -> None:
    submitter, lane = submitter_of()
    other, _ = submitter_of()
    for i in range(1, 10):
        outbox.answer(request_from(submitter, i), a_quarter(), now_ns=0)
    held = request_from(submitter, 10)
    assert outbox.hold(held)
    assert not outbox.hold(request_from(other, 1))
    assert outbox.retry(1) == []
    lane.take()
    assert outbox.retry(1) == [held]
    assert not outbox.hold(held)


def test_errors_and_cancelled_requests(outbox: Outbox, submitter_of: Submitters) -> None:
    submitter, lane = submitter_of()
    outbox.answer(request_from(submitter, 1), Internal("no"), 0)
    cancelled = request_from(submitter, 2)
    cancelled.cancelled = True
    assert isinstance(outbox.answer(cancelled, a_quarter(), 0), Cancelled)
    strange = outbox.answer(request_from(submitter, 3), {"y": np.zeros(1, np.complex64)}, 0)
    assert isinstance(strange, Internal)
    outbox.fail(request_from(submitter, 4), Unavailable("later"))
    assert [(completion.request_id, completion.code, completion.version) for completion in lane.sent] == [
        (1, "INTERNAL", 3),
        (2, "CANCELLED", 3),
        (3, "INTERNAL", 3),
        (4, "UNAVAILABLE", 3),
    ]
    assert submitter.in_flight == {}


def test_why_requests_of_a_batch_failed(outbox: Outbox, submitter_of: Submitters) -> None:
    submitter, _ = submitter_of()
    good, refused, cancelled, strange = (request_from(submitter, i) for i in range(1, 5))
    cancelled.cancelled = True
    execution = Execution([good, refused, cancelled, strange], 0)
    execution.results = [a_quarter(), Internal("no"), a_quarter(), {"y": np.zeros(1, np.complex64)}]
    assert outbox.answer_all(execution, 0) == {
        refused: Failure.BACKEND,
        cancelled: Failure.CANCELED,
        strange: Failure.OTHER,
    }


def test_a_submitter_that_is_gone_gets_nothing(outbox: Outbox, submitter_of: Submitters) -> None:
    submitter, lane = submitter_of()
    for i in range(1, 7):
        outbox.answer(request_from(submitter, i), a_quarter(), now_ns=0)
    running = request_from(submitter, 7)
    submitter.closed = True
    outbox.drop(submitter)
    outbox.answer(running, a_quarter(), 0)
    assert submitter.in_flight == {}
    assert len(lane.sent) == 4
    assert outbox.next_give_up_ns == NEVER
