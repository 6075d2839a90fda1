"""Tests where a sequence is: with the worker whose page tells of it, and nowhere once that is dead."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from tensord.daemon.submit.in_flight import InFlight, WorkerLink
from tensord.daemon.submit.sequences import LostSequences, SequenceRouting
from tensord.shm.control_records import ModelState
from tensord.shm.errors import Unavailable
from tensord.shm.messages import RequestRecord
from tensord.shm.prepared import Numbered
from tensord.shm.sequence_page import Key, SequenceKeys, SequencePage, SequenceState
from tests.fakes import CalledBack
from tests.records import Tensor, WholeRequest
from tests.work.counter import Work, without_collector

KIND = Numbered(0, WholeRequest(0, "m", 0, (Tensor("x", "UINT8", (1,), b"1"),)).prepared)
KEYS = SequenceKeys("m", 1)
IDLE = 5


class Fleet:
    """Workers with real sequence pages, and fronts that route to them."""

    def __init__(self, count: int, platform: str = "cpu", slots: int = 100) -> None:
        self.platform = platform
        self.pages = [SequencePage.create(64) for _ in range(count)]
        self.now = 0.0
        self.numbers = itertools.count(1)
        self._fronts: list[Front] = []
        for page in self.pages:
            page.publish_slots(KEYS.slots, slots, 0)

    def front(self) -> Front:
        made = Front(self)
        self._fronts.append(made)
        return made

    def close(self) -> None:
        for front in self._fronts:
            for worker in front.workers:
                worker.sequences.close()
        for page in self.pages:
            page.close()


class Front:
    """One front's routing. What it sends reaches the worker at once, and is admitted when the test says so."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.in_flight: dict[int, InFlight] = {}
        self.workers = [
            WorkerLink(
                number, f"{fleet.platform}:{number}", *cast(Any, (None, None)), SequencePage.attach(os.dup(page.fd))
            )
            for number, page in enumerate(fleet.pages)
        ]
        self.alive = dict(enumerate(self.workers))
        self.routing = SequenceRouting(self.in_flight, self.alive, 100, lambda: fleet.now)
        self.state = ModelState(
            *("m", 1, "READY"),
            workers=tuple(self.alive),
            config=json.dumps({"sequence_batching": {"max_sequence_idle_microseconds": f"{IDLE}000000"}}).encode(),
            repeatable=False,
            sticky=True,
        )

    def make(self, who: int | str, flags: str = "") -> InFlight:
        number = next(self.fleet.numbers)
        own = RequestRecord(number, 0, (b"1",), sequence_id=who, sequence_start="S" in flags, sequence_end="E" in flags)
        pending = self.in_flight[number] = CalledBack(on_answer=lambda *_: None, record=own, numbered=KIND)
        return pending

    def find(self, pending: InFlight, gpu: str = "") -> int | None:
        """Routes a request; returns the number of the worker, which has the request from now on, or None."""
        worker = pending.worker = self.routing.find(pending, self.routing.model(self.state), gpu)
        if worker is None:
            return None
        worker.in_flight[pending.record.request_id] = pending
        return worker.incarnation

    def send(self, who: int | str, flags: str = "", gpu: str = "") -> int | None:
        return self.find(self.make(who, flags), gpu)

    def answered(self) -> None:
        """Pretends that everything that was sent is answered."""
        self.in_flight.clear()
        for worker in self.workers:
            worker.in_flight.clear()

    def bury(self, number: int) -> tuple[list[InFlight], list[InFlight]]:
        """Removes a dead worker; returns its requests that are lost, and those that are to be sent again."""
        worker = self.alive.pop(number)
        orphans = list(worker.in_flight.values())
        gone = self.routing.bury(worker, orphans)
        for pending in orphans:
            pending.worker = None
        return [each for each in orphans if each in gone], [each for each in orphans if each not in gone]


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet(3)
    yield made
    made.close()


def admit(fleet: Fleet, worker: int, who: int | str, begun: bool = True) -> int:
    since = fleet.pages[worker].admit(KEYS.key(who), 1000)
    if begun:
        fleet.pages[worker].begin(KEYS.key(who), since)
    return since


# ------------------------------------------------------------------------------------------------------------- living


def test_every_front_finds_what_a_page_tells_of(fleet: Fleet) -> None:
    fronts = [fleet.front(), fleet.front()]
    for worker in range(3):
        for who in (f"at {worker}", worker + 10):
            admit(fleet, worker, who, begun=who != "at 1")
            assert [front.send(who) for front in fronts] == [worker, worker]
            assert [front.send(who, "S") for front in fronts] == [worker, worker]


def test_a_step_waits_for_the_lane_to_a_worker_that_may_have_its_sequence(fleet: Fleet) -> None:
    """1. There is no lane to the worker that has it. 2. There is. 3. The worker dies."""
    front = fleet.front()
    worker = front.alive.pop(1)
    admit(fleet, 1, 5)
    assert front.send(5) is None
    assert front.send(6, "S") in (0, 2)
    front.alive[1] = worker
    assert front.send(5) == 1
    front.bury(1)
    with pytest.raises(Unavailable, match="was lost"):
        front.send(5)


def test_what_follows_a_start_goes_where_that_went(fleet: Fleet) -> None:
    """No page tells of it yet, whatever these tell meanwhile."""
    front = fleet.front()
    home = front.send(5, "S")
    assert home is not None
    for page in fleet.pages:
        page.publish_slots(KEYS.slots, 0, 9)
    fleet.pages[(home + 1) % 3].publish_slots(KEYS.slots, 100, 0)
    assert [front.send(5), front.send(5, "E"), front.send(5, "S"), front.send(5, "E")] == [home] * 4
    # Once it is answered, what its page says holds: that it is over.
    front.answered()
    assert front.send(5, "S") == (home + 1) % 3


def test_of_two_that_have_it_the_last_one_counts(fleet: Fleet) -> None:
    front = fleet.front()
    fleet.pages[0].admit(KEYS.key(5), 2000)
    fleet.pages[1].admit(KEYS.key(5), 1000)
    assert front.send(5) == 0
    fleet.pages[2].admit(KEYS.key(5), 3000)
    assert front.send(5) == 2


def test_what_has_ended_is_anywhere(fleet: Fleet) -> None:
    """It is on its page until its answers have left."""
    front, since = fleet.front(), admit(fleet, 0, 5)
    fleet.pages[0].end(KEYS.key(5), since)
    for page in fleet.pages[::2]:
        page.publish_slots(KEYS.slots, 0, 0)
    assert front.send(5, "S") == 1


def test_a_sequence_that_nobody_has_goes_where_slots_are_free(fleet: Fleet) -> None:
    front = fleet.front()
    for page in (fleet.pages[0], fleet.pages[2]):
        page.publish_slots(KEYS.slots, 0, 0)
    assert {front.send(who, "S") for who in range(1, 50)} == {1}


def test_fronts_share_out_new_sequences_alike() -> None:
    fleet = Fleet(5, slots=1 << 19)
    first, second = fleet.front(), fleet.front()
    homes = [first.send(who, "S") for who in range(1, 1001)]
    assert homes == [second.send(who, "S") for who in range(1, 1001)]
    counts = Counter(homes)
    assert set(counts) == set(range(5))
    assert min(counts.values()) > 100
    # One that goes takes only those along that it has.
    for front in (first, second):
        front.answered()
        del front.alive[3]
    moved = [second.send(who, "S") for who in range(1, 1001)]
    assert all(now == before for now, before in zip(moved, homes, strict=True) if before != 3)
    fleet.close()


def test_starts_that_no_page_tells_of_take_slots_as_well(fleet: Fleet) -> None:
    """Three workers with two slots each, and six STARTs before any of them says what it has left."""
    front = fleet.front()
    for page in fleet.pages:
        page.publish_slots(KEYS.slots, 2, 0)
    assert Counter(front.send(who, "S") for who in range(1, 7)) == {0: 2, 1: 2, 2: 2}
    # Where none is free the shortest backlog is taken; what a worker says then is the truth again.
    fleet.pages[0].publish_slots(KEYS.slots, 0, 7)
    fleet.pages[1].publish_slots(KEYS.slots, 0, 3)
    fleet.pages[2].publish_slots(KEYS.slots, 0, 8)
    assert [front.send(who, "S") for who in range(7, 11)] == [1] * 4
    fleet.pages[0].publish_slots(KEYS.slots, 1, 0)
    assert front.send(20, "S") == 0


def test_regions_decide_where_a_sequence_begins_and_not_where_it_goes_on() -> None:
    fleet = Fleet(3, "cuda")
    front = fleet.front()
    admit(fleet, 0, 5)
    assert [front.send(5, gpu=f"cuda:{number}") for number in range(3)] == [0, 0, 0]
    assert {front.send(who, "S", gpu="cuda:1") for who in range(10, 30)} == {1}
    assert front.send(40, "S", gpu="cuda:7") is None
    front.state = msgspec.structs.replace(front.state, devices=("cuda:0", "cuda:1", "cuda:2"))
    front.routing.model_changed("m", 1)
    assert len({front.send(who, "S", gpu="cuda:7") for who in range(50, 70)}) > 1
    fleet.close()


def test_what_was_never_begun_goes_to_some_worker(fleet: Fleet) -> None:
    """Its answer says so."""
    fronts = [fleet.front(), fleet.front()]
    homes = [fronts[0].send(who) for who in range(1, 50)]
    assert homes == [fronts[1].send(who) for who in range(1, 50)]
    assert set(homes) == {0, 1, 2}


def test_starts_that_were_answered_are_forgotten(fleet: Fleet) -> None:
    front = fleet.front()
    for who in range(1, 3000):
        front.send(who, "S")
        front.answered()
    assert len(front.routing._starts) <= 300


# -------------------------------------------------------------------------------------------------------------- deaths


def refusal(front: Front, who: int | str) -> str:
    with pytest.raises(Unavailable) as caught:
        front.send(who)
    return caught.value.message


@pytest.mark.parametrize("who", [1001, "1001"])
def test_a_sequence_is_lost_with_its_worker_until_a_start(fleet: Fleet, who: int | str) -> None:
    front, other = fleet.front(), fleet.front()
    admit(fleet, 0, who)
    going = [front.make(who), front.make(who)]
    assert [front.find(each) for each in going] == [0, 0]
    assert front.bury(0) == (going, [])
    text = "sequence 1001 of model 'm' was lost when its worker died; start it again with the START flag"
    assert [refusal(front, who), refusal(front, who)] == [text] * 2
    # It is begun anew through another front, which had nothing in flight of it.
    assert other.bury(0) == ([], [])
    assert refusal(other, who) == text
    home = other.send(who, "S")
    assert home in (1, 2)
    admit(fleet, home, who)
    assert [front.send(who), other.send(who)] == [home, home]
    assert front.send(who, "S") == home


def test_who_has_no_answer_to_its_last_step_is_told_the_same_by_every_front(fleet: Fleet) -> None:
    """It has ended on the worker, whose answer never left: for its client it was lost."""
    front, other, since = fleet.front(), fleet.front(), admit(fleet, 0, 5)
    last = front.make(5, "E")
    assert front.find(last) == 0
    fleet.pages[0].end(KEYS.key(5), since)
    assert [front.bury(0), other.bury(0)] == [([last], []), ([], [])]
    text = "sequence 5 of model 'm' was lost when its worker died; start it again with the START flag"
    assert [refusal(front, 5), refusal(other, 5)] == [text] * 2
    assert other.send(5, "S") in (1, 2)


def test_it_is_lost_no_longer_than_it_would_have_lived(fleet: Fleet) -> None:
    front = fleet.front()
    admit(fleet, 0, 5)
    front.bury(0)
    fleet.now = IDLE
    assert "lost" in refusal(front, 5)
    fleet.now = IDLE + 0.5
    assert front.send(5) in (1, 2)


def test_who_asks_before_the_fence_waits_for_it(fleet: Fleet) -> None:
    """The lane is at its end: its worker is dead, but may still write."""
    front = fleet.front()
    admit(fleet, 0, 5)
    front.workers[0].closed = True
    waiting = front.make(5)
    assert front.find(waiting) is None
    # A START need not wait: it begins elsewhere.
    assert front.send(5, "S") in (1, 2)
    admit(fleet, 1, 6)
    front.workers[1].closed = True
    waiting = front.make(6)
    assert front.find(waiting) is None
    front.bury(1)
    with pytest.raises(Unavailable, match="sequence 6 of model 'm' was lost"):
        front.find(waiting)


@pytest.mark.parametrize("answered", [False, True])
def test_what_waits_for_a_fence_runs_in_no_later_sequence_of_its_id(fleet: Fleet, answered: bool) -> None:
    """1. A worker dies with a sequence. 2. Its client sends a step, and, unanswered, a START. 3. The worker is fenced."""
    front = fleet.front()
    admit(fleet, 0, 5)
    front.workers[0].closed = True
    step, start = front.make(5), front.make(5, "S")
    assert front.find(step) is None
    home = front.find(start)
    assert home in (1, 2)
    admit(fleet, home, 5)
    if answered:
        del front.in_flight[start.record.request_id]
    front.bury(0)
    with pytest.raises(Unavailable, match="sequence 5 of model 'm' was lost"):
        front.find(step)
    assert front.send(5) == home


def test_a_start_stays_behind_one_of_its_id_whose_worker_died(fleet: Fleet) -> None:
    front = fleet.front()
    first = front.make(5, "S")
    home = front.find(first)
    assert home is not None
    front.workers[home].closed = True
    second, step = front.make(5, "S"), front.make(5)
    assert [front.find(each) for each in (second, step)] == [None, None]
    assert front.bury(home) == ([], [first])
    moved = front.find(first)
    assert moved is not None
    assert [front.find(each) for each in (second, step)] == [moved, moved]
    assert front.routing._starts[KEYS.key(5)] is second


@pytest.mark.parametrize("known", [False, True])
def test_what_waited_begins_elsewhere_in_its_order(fleet: Fleet, known: bool) -> None:
    """``known``: the worker had admitted it, or not even read it."""
    front = fleet.front()
    run = [front.make(5, "S"), front.make(5), front.make(5, "E")]
    home, *_ = [front.find(each) for each in run]
    assert home is not None
    if known:
        admit(fleet, home, 5, begun=False)
    assert front.bury(home) == ([], run)
    moved = [front.find(each) for each in run]
    assert moved[0] not in (None, home)
    assert len(set(moved)) == 1
    assert front.send(5) == moved[0]


def test_what_waited_stays_behind_its_start_where_there_is_no_worker(fleet: Fleet) -> None:
    front = fleet.front()
    for worker in front.workers:
        worker.closed = True
    run = [front.make(5, "S"), front.make(5, "E"), front.make(5, "S"), front.make(5, "E")]
    assert [front.find(each) for each in run] == [None] * 4
    front.workers[1].closed = False
    assert [front.find(each) for each in run] == [1] * 4


@pytest.mark.parametrize(
    ("state", "requests", "lost_ones"),
    [
        (SequenceState.BEGUN, ["S", "", "E"], 3),
        (SequenceState.BEGUN, ["", ""], 2),
        (SequenceState.WAITING, ["", "E"], 2),
        (SequenceState.WAITING, ["S", "S", ""], 0),
        # Of two sequences of one id the first may have run.
        (SequenceState.WAITING, ["S", "E", "S", ""], 2),
        (SequenceState.WAITING, ["", "E", "S", "E"], 2),
        (SequenceState.WAITING, ["SE", "SE"], 1),
        # They ran, and their answers had not left.
        (SequenceState.ENDED, ["SE"], 1),
        (SequenceState.ENDED, ["S", "E"], 2),
        # Nothing was admitted.
        (None, ["SE", "SE"], 0),
        # Nothing of them either: another worker says so.
        (None, ["", "E"], 0),
    ],
)
def test_which_requests_may_run_elsewhere(
    fleet: Fleet, state: SequenceState | None, requests: list[str], lost_ones: int
) -> None:
    front = fleet.front()
    for worker in (1, 2):
        front.workers[worker].closed = True
    run = [front.make(5, flags) for flags in requests]
    assert {front.find(each) for each in run} == {0}
    if state is not None:
        since = admit(fleet, 0, 5, begun=state is not SequenceState.WAITING)
        if state is SequenceState.ENDED:
            fleet.pages[0].end(KEYS.key(5), since)
    assert front.bury(0) == (run[:lost_ones], run[lost_ones:])
    front.workers[1].closed = False
    for each in run[lost_ones:]:
        assert front.find(each) == 1
    if lost_ones == len(run):
        assert "lost" in refusal(front, 5)


@pytest.mark.parametrize("known", [False, True])
def test_a_sequence_with_a_hole_is_lost(fleet: Fleet, known: bool) -> None:
    """Its client took one of its requests back."""
    front = fleet.front()
    run = [front.make(5, "S"), front.make(5), front.make(5, "E")]
    home, *_ = [front.find(each) for each in run]
    assert home is not None
    if known:
        admit(fleet, home, 5, begun=False)
    run[1].cancelled = True
    assert front.bury(home) == (run, [])
    assert "lost" in refusal(front, 5)


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 100)), max_size=60), st.integers(1, 5))
@settings(deadline=None)
def test_no_more_are_remembered_than_may_be(lives: list[tuple[int, float]], most: int) -> None:
    remembered, now = LostSequences(most), 0.0
    latest: dict[Key, float] = {}
    for who, later in lives:
        now += later
        remembered.add((who, who), now)
        latest.pop((who, who), None)
        latest[who, who] = now
    expected = dict(list(latest.items())[-most:])
    assert len(remembered) == len(expected)
    for key in latest:
        held = key in expected and now - expected[key] <= 50
        assert remembered.holds(key, 50, now) is held
        remembered.forget(key)
        assert not remembered.holds(key, 50, now)
    assert "LostSequences 0" in repr(remembered)


def test_the_work_of_a_probe() -> None:
    """Four workers: what a request of a living sequence costs its front before it is sent."""
    fleet = Fleet(4)
    front = fleet.front()
    for who in range(1, 40):
        admit(fleet, who % 4, who)
    front.send(1)
    pending = front.make(5)
    work = Work()
    with without_collector(), work.counting():  # which would count what others' garbage does as it goes
        front.routing.find(pending, front.routing.model(front.state), "")
    assert work.instructions <= 440
    fleet.close()
