"""The submitter against every history: one final callback a request, every lease given back once, nobody asked twice for nothing.

The machine plays clients, supervisor and workers by turns; beside it stands what each request may still get.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from tensord.config.options import Arenas, Options, Requests
from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.in_flight import InFlight
from tensord.daemon.submit.model_states import ModelStates
from tensord.daemon.submit.submitter import Submitter
from tensord.shm import segment
from tensord.shm.arena import Lease
from tensord.shm.channel import pair
from tensord.shm.control_records import Derivative, LaneOpened, ModelGone, ModelState, WorkerFenced
from tensord.shm.errors import Unavailable
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import (
    AnswerRecord,
    Cancel,
    Parameter,
    PrepareAnswer,
    PreparedAnswer,
    PreparedRequest,
    RegionSlice,
    RequestRecord,
    Slice,
)
from tensord.shm.prepared import MAX_NUMBERS, Numbered, Numbers
from tensord.shm.sequence_page import SequenceKeys
from tests.fakes import INCARNATION, CalledBack, EchoWorker, Uncounted
from tests.generated import examples
from tests.records import Tensor, WholeAnswer, WholeRequest, whole_answer, whole_request

MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """Exempts everything imported before from garbage collection, which would take most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Asked:
    """A request as its owner sees it."""

    def __init__(self, request_id: int, size: int, lease: Lease) -> None:
        self.request_id = request_id
        self.size = size
        self.lease = lease
        self.finals: list[WholeAnswer] = []
        self.cancelled = False
        #: How often a worker died with it on its desk.
        self.strikes = 0


class Setting:
    """A submitter on a loop of its own that runs only when told to."""

    def __init__(self, row: int = 0, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        #: The supervisor has sent something that is not read.
        self.behind = False
        #: The workers to which lanes could not be opened.
        self.untaken: list[int] = []
        self.submitter: Submitter = self.loop.run_until_complete(self._make(Options(**options), row))
        self.workers: dict[int, EchoWorker] = {}
        self._last = 100

    async def _make(self, options: Options, row: int) -> Submitter:
        counters = Uncounted()
        counters.is_behind = lambda: self.behind  # type: ignore[method-assign]
        return Submitter(INCARNATION, options, ModelStates(), row, counters, self.untaken.append)

    def has_read(self) -> None:
        """Pretends that the front has read all that the supervisor has sent."""
        self.behind = False
        self.submitter.look_again()

    def turn(self, count: int = 3) -> None:
        """Lets the loop run what is due."""
        for _ in range(count):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def sleep(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def open_worker(self, device: str = "cpu:0") -> EchoWorker:
        self._last += 1
        ours, theirs = pair()
        worker = EchoWorker(ours, self._last)
        pages = [os.dup(worker.page.fd), os.dup(worker.sequences.fd)]
        self.submitter.open_lane(LaneOpened(self._last, device), [theirs.detach(), *pages])
        self.workers[self._last] = worker
        return worker

    def ready(self, *workers: EchoWorker, **kind: Any) -> None:
        """Publishes the model as ready at these workers. ``kind``: fields of ModelState."""
        incarnations = tuple(worker.incarnation for worker in workers)
        self.submitter.model_changed(ModelState("m", 1, "READY", workers=incarnations, **kind))

    def ask(self, size: int = 5000, **said: Any) -> Asked:
        """Sends a request. ``said``: fields of its record."""
        lease = self.submitter.loan(size)
        assert lease is not None
        lease.view[:] = bytes([size % 251]) * size
        asked = Asked(self.submitter.next_id(), size, lease)

        def completed(prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
            assert not asked.cancelled, "nobody waits for it"
            asked.finals.append(whole_answer(prepared, record))
            if record.lease is not None:
                assert lane is not None
                (place,) = record.contents
                assert isinstance(place, Slice)
                assert bytes(lane.view(place)) == bytes([size % 251]) * size
                self.submitter.release(lane, record.lease)

        inputs = (Tensor("x", "UINT8", (size,), lease.place),)
        self.send(WholeRequest(asked.request_id, "m", 0, inputs, **said).record, completed, (lease,))
        assert not asked.finals, "never from within send"
        return asked

    def send(
        self,
        record: RequestRecord,
        on_answer: Callable[[PreparedAnswer, AnswerRecord, SubmitterLane | None], None] = lambda *_: None,
        leases: tuple[Lease, ...] = (),
        owner: Account | None = None,
    ) -> None:
        self.submitter.send(CalledBack(on_answer=on_answer, record=record, leases=leases, account=owner))

    def cancel(self, request_id: int) -> None:
        """Cancels a request if it is still in flight."""
        request = self.submitter._in_flight.get(request_id)
        if request is not None:
            self.submitter.cancel(request)

    def close(self) -> None:
        self.submitter.close()
        for worker in self.workers.values():
            worker.close()
        self.turn()
        self.loop.close()
        # What is in flight still has views of the arena, which keep its mapping.
        del self.submitter
        gc.collect()


class Histories(RuleBasedStateMachine):
    """Runs everything that can happen, in any order."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.setting = Setting(arenas=Arenas(byte_size=MIB, max_byte_size=64 * MIB))
        self.asked: dict[int, Asked] = {}
        #: At each worker: what it has taken and not answered.
        self.taken: dict[int, dict[int, WholeRequest]] = {}
        self.dead: set[int] = set()
        self.fenced: set[int] = set()
        self.new_worker()

    def alive(self) -> list[EchoWorker]:
        return [worker for number, worker in self.setting.workers.items() if number not in self.dead]

    def model_ready(self) -> None:
        self.setting.ready(*self.alive())

    @precondition(lambda self: self.setting.submitter.in_flight() < 8)
    @rule(target=requests, sizes=st.lists(st.sampled_from([5000, 1, 100_000]), min_size=1, max_size=3))
    def ask(self, sizes: list[int]) -> Any:
        made = [self.setting.ask(size) for size in sizes]
        self.asked.update((asked.request_id, asked) for asked in made)
        return multiple(*made)

    @rule(asked=consumes(requests))
    def cancel(self, asked: Asked) -> None:
        if not asked.finals:
            asked.cancelled = True
        self.setting.cancel(asked.request_id)
        self.setting.cancel(asked.request_id)

    @precondition(lambda self: len(self.alive()) < 3)
    @rule()
    def new_worker(self) -> None:
        worker = self.setting.open_worker()
        self.taken[worker.incarnation] = {}
        self.model_ready()

    @rule()
    def model_goes_and_comes(self) -> None:
        self.setting.submitter.model_changed(ModelGone("m", 1))
        self.model_ready()

    @rule(data=st.data(), count=st.integers(1, 4))
    def answer(self, data: st.DataObject, count: int) -> None:
        """Has workers answer some of their requests; their lanes may not be read any more."""
        for worker in self.alive():
            taken = self.take(worker)
            for _ in range(min(count, len(taken))):
                number = data.draw(st.sampled_from(sorted(taken)))
                request = taken.pop(number)
                worker.answer(request, worker.content(request))
                if data.draw(st.integers(0, 4)) == 0:
                    worker.complete(number)  # once more: late, to be ignored

    @rule()
    def answer_error(self) -> None:
        for worker in self.alive():
            for number in list(self.take(worker)):
                del self.taken[worker.incarnation][number]
                worker.complete(number, code="INTERNAL", message="no")

    @precondition(lambda self: self.alive() and self.setting.submitter.in_flight())
    @rule(data=st.data(), answers=st.booleans())
    def die(self, data: st.DataObject, answers: bool) -> None:
        worker = data.draw(st.sampled_from(self.alive()))
        self.setting.turn()
        taken = self.take(worker)
        if answers and taken:
            number = min(taken)
            worker.answer(taken.pop(number), b"" if not taken else self.content_of(number))
        executing = sorted(taken)[: data.draw(st.sampled_from([9, 1, 0]))]
        worker.page.begin(0, [(INCARNATION, number) for number in executing] + [(INCARNATION + 1, 2)], 1, 1)
        for number in executing:
            self.asked[number].strikes += 1
        worker.die()
        self.dead.add(worker.incarnation)

    def content_of(self, number: int) -> bytes:
        size = self.asked[number].size
        return bytes([size % 251]) * size

    @rule()
    def fence(self) -> None:
        for number in sorted(self.dead - self.fenced):
            self.setting.submitter.fence(WorkerFenced(number))
            self.fenced.add(number)
        self.model_ready()

    @rule(count=st.integers(1, 3))
    def turn(self, count: int) -> None:
        self.setting.turn(count)

    def take(self, worker: EchoWorker) -> dict[int, WholeRequest]:
        """Returns the requests that have arrived at a worker, after checking them."""
        taken = self.taken[worker.incarnation]
        while (records := worker.lane.receive()) is not None:
            for record in records:
                if isinstance(record, Cancel):
                    assert self.asked[record.request_id].cancelled
                    continue
                assert isinstance(record, RequestRecord)
                assert isinstance(record.prepared, PreparedRequest)
                whole = whole_request(record.prepared, record)
                asked = self.asked[record.request_id]
                assert not asked.finals, "it is answered already"
                assert worker.content(whole) == self.content_of(record.request_id)
                # A strike counts once its worker is fenced, and this record came after.
                assert record.strikes == asked.strikes < 2
                for other, theirs in self.taken.items():
                    assert other in self.fenced or record.request_id not in theirs, "two workers have it"
                taken[record.request_id] = whole
        return taken

    @invariant()
    def one_final_answer_and_no_lease_twice(self) -> None:
        open_leases = 0
        for asked in self.asked.values():
            assert len(asked.finals) <= 1
            if asked.finals:
                assert not asked.cancelled
                assert "released" in repr(asked.lease)
                if asked.strikes >= 2:
                    assert asked.finals[0].code == "INTERNAL"
            open_leases += "released" not in repr(asked.lease)
        assert self.setting.submitter.statistics()["leases"] == open_leases
        assert self.setting.submitter.in_flight() == open_leases

    def teardown(self) -> None:
        """Checks that everything still open is answered by a last worker."""
        self.dead |= self.setting.workers.keys() - self.dead
        for worker in self.setting.workers.values():
            worker.die()
        self.fence()
        last = self.setting.open_worker()
        self.taken[last.incarnation] = {}
        self.setting.ready(last)
        for _ in range(20):
            self.setting.turn()
            for number in list(self.take(last)):
                last.answer(self.taken[last.incarnation].pop(number), self.content_of(number))
        self.one_final_answer_and_no_lease_twice()
        assert self.setting.submitter.in_flight() == 0
        for asked in self.asked.values():
            assert asked.cancelled != bool(asked.finals)
        self.setting.turn()
        last.poll()
        assert last.leases == 0
        self.setting.close()


Histories.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase


@pytest.fixture
def setting() -> Any:
    made = Setting(
        arenas=Arenas(byte_size=MIB, max_byte_size=MIB, wait=0.05), requests=Requests(max_in_flight=4, worker_wait=0.05)
    )
    yield made
    made.close()


@pytest.mark.parametrize(("row", "order"), [(0, [0, 1, 2]), (1, [1, 2, 0]), (2, [2, 0, 1]), (3, [0, 1, 2])])
def test_idle_workers_are_asked_in_another_order_by_each_front(row: int, order: list[int]) -> None:
    """Fronts do not know of each other's requests: beginning with the same worker they would leave the others idle."""
    setting = Setting(row)
    workers = [setting.open_worker() for _ in range(3)]
    setting.ready(*workers)
    asked = [setting.ask() for _ in order]
    setting.turn()
    for number, request in zip(order, asked, strict=True):
        sent = workers[number].next()
        assert sent.request_id == request.request_id
        workers[number].echo(sent)
    while setting.submitter.in_flight():
        setting.turn()
    setting.close()


def test_too_many_give_the_lease_back(setting: Setting) -> None:
    for _ in range(4):
        setting.ask()
    lease = setting.submitter.loan(5000)
    assert lease is not None
    with pytest.raises(Unavailable, match="4 requests are in flight, at most 4"):
        setting.send(WholeRequest(99, "m", 0, ()).record, leases=(lease,))
    assert setting.submitter.statistics()["leases"] == 4


def test_a_request_gives_up_waiting_for_a_worker(setting: Setting) -> None:
    setting.ready()
    asked = setting.ask()
    setting.sleep(0.4)
    (final,) = asked.finals
    assert (final.code, final.message) == ("UNAVAILABLE", "no worker was ready for model 'm' within 0.05 s")


def open_lane(setting: Setting, worker: EchoWorker, theirs: socket.socket) -> None:
    pages = [os.dup(worker.page.fd), os.dup(worker.sequences.fd)]
    setting.submitter.open_lane(LaneOpened(worker.incarnation, "cpu:0"), [theirs.detach(), *pages])


def test_a_lane_that_its_worker_cannot_take() -> None:
    """1. It ends with three requests, one of them cancelled. 2. They wait. 3. There is another lane to the worker."""
    setting = Setting()
    ours, theirs = pair()
    worker = EchoWorker(ours, 9)
    untaken, of_front = pair()
    open_lane(setting, worker, of_front)
    setting.ready(worker)
    asked = [setting.ask() for _ in range(3)]
    setting.cancel(asked[1].request_id)
    asked[1].cancelled = True
    untaken.close()
    setting.turn()
    assert (setting.untaken, setting.submitter.in_flight()) == ([9], 3)
    open_lane(setting, worker, theirs)
    setting.workers[9] = worker
    setting.turn()
    assert [worker.next().request_id for _ in range(3)] == [each.request_id for each in asked]
    worker.poll()
    assert worker.cancelled == [asked[1].request_id]
    setting.close()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_lane_that_comes_without_some_of_its_descriptors(setting: Setting, count: int) -> None:
    before = os.listdir("/proc/self/fd")
    setting.submitter.open_lane(LaneOpened(9, "cpu:0"), [os.memfd_create("x") for _ in range(count)])
    assert setting.untaken == [9]
    assert os.listdir("/proc/self/fd") == before


def test_a_lane_whose_pages_cannot_be_mapped(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair()
    worker = EchoWorker(ours, 9)
    before = len(os.listdir("/proc/self/fd"))
    pages = [os.dup(worker.page.fd), os.dup(worker.sequences.fd)]
    no_room = Mock(side_effect=OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    with monkeypatch.context() as patched:
        patched.setattr(segment, "mapped", no_room)
        setting.submitter.open_lane(LaneOpened(9, "cpu:0"), [theirs.detach(), *pages])
    assert (setting.untaken, no_room.call_count) == ([9], 1)
    assert len(os.listdir("/proc/self/fd")) == before - 1  # that of the lane is closed
    setting.workers[9] = worker


def test_who_waits_for_a_worker_waits_from_when_it_came(setting: Setting) -> None:
    """1. three wait, and one of them is cancelled; 2. the table changes again and again, and there is still no worker."""
    setting.ready()
    asked = [setting.ask() for _ in range(3)]
    setting.cancel(asked[1].request_id)
    asked[1].cancelled = True
    until = setting.loop.time() + 0.4
    while setting.loop.time() < until:
        setting.ready()
        setting.sleep(0.01)
    assert [len(each.finals) for each in asked] == [1, 0, 1]
    found = setting.submitter.statistics()
    assert (found["waiting_for_worker"], found["in_flight"], found["leases"]) == (0, 0, 0)


def test_who_waits_for_a_worker_is_sent_in_order(setting: Setting) -> None:
    setting.ready()
    asked = [setting.ask() for _ in range(4)]
    setting.cancel(asked[0].request_id)
    setting.cancel(asked[2].request_id)
    worker = setting.open_worker()
    setting.ready(worker)
    setting.turn()
    assert [worker.next().request_id for _ in range(2)] == [asked[1].request_id, asked[3].request_id]
    assert worker.idle(0.01)


def test_a_step_that_is_cancelled_keeps_its_place_until_its_model_is_known(setting: Setting) -> None:
    """Whether the model keeps sequences is not known while it loads: without the START the step would run in another sequence."""
    setting.submitter.model_changed(ModelState("m", 1, "LOADING"))
    start, step = setting.ask(sequence_id=5, sequence_start=True), setting.ask(sequence_id=5)
    setting.cancel(start.request_id)
    start.cancelled = True
    worker = setting.open_worker()
    setting.ready(worker, sticky=True, config=b"{}")
    setting.turn()
    assert [worker.next().request_id for _ in range(2)] == [start.request_id, step.request_id]
    assert worker.cancelled == [start.request_id]


def test_a_derivative_is_waited_for_while_its_model_is_loaded(setting: Setting) -> None:
    setting.submitter.model_changed(ModelState("m", 1, "LOADING"))
    setting.send(RequestRecord(setting.submitter.next_id(), PreparedRequest("m.pull_back")))
    worker = setting.open_worker()
    setting.turn()
    assert worker.idle(0.01)
    setting.ready(worker, derivatives=(Derivative("m.pull_back", b"", b""),))
    setting.turn()
    assert worker.next().prepared.model == "m.pull_back"


def test_steps_stay_in_order_around_a_fence(setting: Setting) -> None:
    """1. A worker dies with a START. 2. A sequence of their id is begun anew. 3. The fence comes, one more step, and a worker."""
    first = setting.open_worker()
    setting.ready(first, sticky=True, config=b"{}")
    steps = [setting.ask(sequence_id=5, sequence_start=True)]
    setting.turn()
    first.die()
    setting.turn()
    steps += [setting.ask(sequence_id=5, sequence_start=start) for start in (True, False)]
    setting.submitter.fence(WorkerFenced(first.incarnation))
    steps.append(setting.ask(sequence_id=5, sequence_end=True))
    second = setting.open_worker()
    setting.ready(second, sticky=True, config=b"{}")
    setting.turn()
    assert [second.next().request_id for _ in steps] == [step.request_id for step in steps]


def test_a_model_that_moves_takes_its_requests_along(setting: Setting) -> None:
    """
    1. Its worker has it no more when two requests come there; one of them is cancelled.
    2. The front reads then that another worker has it.
    Result: the other request runs there. Where nobody has told of another place, what the worker said is the answer.
    """
    former, other = setting.open_worker(), setting.open_worker()
    setting.ready(former)
    asked, cancelled = setting.ask(), setting.ask()
    setting.turn()
    setting.behind = True
    unknown = "Request for unknown model: 'm' is not found"
    for _ in range(2):
        former.complete(former.next().request_id, code="NOT_FOUND", message=unknown)
    setting.turn()
    setting.cancel(cancelled.request_id)
    cancelled.cancelled = True
    setting.ready(other)
    setting.turn()
    assert other.idle()
    setting.has_read()
    setting.turn()
    other.echo(other.next())
    setting.turn()
    assert other.idle()
    assert [final.code for final in asked.finals] == [""]
    for message in (unknown, "the model says so"):
        refused = setting.ask()
        setting.turn()
        other.complete(other.next().request_id, code="NOT_FOUND", message=message)
        setting.turn()
        assert [(final.code, final.message) for final in refused.finals] == [("NOT_FOUND", message)]
    assert setting.submitter.statistics()["leases"] == 0


@pytest.mark.parametrize("told", ["nothing", "fence"])
def test_where_a_sequence_is_is_found_in_what_was_sent_before(setting: Setting, told: str) -> None:
    """
    1. A worker dies with a sequence. 2. Through another front its client begins it anew, on the worker that takes its place.
    3. It goes on through this front, which has read nothing of that, or of the death alone.
    Result: its step waits until the front has read the rest, and is sent to the new worker.
    """
    first = setting.open_worker()
    setting.ready(first, **STICKY)
    admit(first, 5)
    first.die()
    setting.behind = True
    if told == "fence":
        setting.submitter.fence(WorkerFenced(first.incarnation))
    step = setting.ask(sequence_id=5)
    setting.turn()
    assert not step.finals
    if told == "nothing":
        setting.submitter.fence(WorkerFenced(first.incarnation))
    second = setting.open_worker()
    admit(second, 5)
    setting.turn()
    assert not step.finals
    assert second.idle()
    setting.ready(second, **STICKY)
    setting.has_read()
    setting.turn()
    assert second.next().request_id == step.request_id


def test_steps_that_wait_behind_one_that_finds_no_worker_do_not_run(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. Steps wait until the front has read something. 2. The time of the first is over. 3. The front has read it.
    Result: the step behind the first would run on another state; what begins anew, and another sequence, are run.
    """
    worker = setting.open_worker()
    setting.ready(worker, **STICKY)
    admit(worker, 5)
    setting.behind, now = True, setting.loop.time()
    monkeypatch.setattr(setting.loop, "time", lambda: now)
    late = setting.ask(sequence_id=5)
    now += 0.08
    behind = setting.ask(sequence_id=5)
    others = [setting.ask(sequence_id=who, sequence_start=True) for who in (6, 5)]
    now += 0.03
    setting.turn()
    assert [final.code for final in (*late.finals, *behind.finals)] == ["UNAVAILABLE", "CANCELLED"]
    assert behind.finals[0].message == "a request of sequence 5 before this one did not run"
    setting.has_read()
    setting.turn()
    assert [worker.next().request_id for _ in others] == [other.request_id for other in others]


@pytest.mark.parametrize("answered", [False, True])
def test_steps_behind_a_start_that_was_sent_are_not_of_the_sequence_before(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    """
    1. A step waits for the lane to a worker that may have its sequence. 2. Its client begins the sequence anew on another one.
    3. That worker dies; the next step waits for the fence. 4. The time of the first step is over.
    Result: only the first step ends.
    """
    worker = setting.open_worker()
    setting.submitter.model_changed(ModelState("m", 1, "READY", workers=(worker.incarnation, 999), **STICKY))
    now = setting.loop.time()
    monkeypatch.setattr(setting.loop, "time", lambda: now)
    late = setting.ask(sequence_id=5)
    now += 0.08
    start = setting.ask(sequence_id=5, sequence_start=True)
    setting.turn()
    assert worker.next().request_id == start.request_id
    admit(worker, 5)
    if answered:
        worker.complete(start.request_id)
        setting.turn()
    worker.die()
    setting.turn()
    step = setting.ask(sequence_id=5)
    now += 0.03
    setting.turn()
    assert [final.code for final in (*late.finals, *step.finals)] == ["UNAVAILABLE"]


def replaced(setting: Setting, first: EchoWorker, executing: list[Asked], **kind: Any) -> EchoWorker:
    """Lets a worker die while it executes these requests; returns the worker that takes its place."""
    first.page.begin(0, [(INCARNATION, asked.request_id) for asked in executing], 1, 1)
    first.die()
    second = setting.open_worker()
    setting.ready(second, **kind)
    setting.submitter.fence(WorkerFenced(first.incarnation))
    setting.turn()
    return second


#: Whose sequences are remembered for long enough.
STICKY: dict[str, Any] = {
    "repeatable": False,
    "sticky": True,
    "config": b'{"sequence_batching": {"max_sequence_idle_microseconds": 1000000000}}',
}
KEYS = SequenceKeys("m", 1)


def admit(worker: EchoWorker, who: int | str, begun: bool = True) -> None:
    """Writes a sequence on the worker's page."""
    since = worker.sequences.admit(KEYS.key(who), 1)
    if begun:
        worker.sequences.begin(KEYS.key(who), since)


def lost(who: int | str) -> str:
    return f"sequence {who} of model 'm' was lost when its worker died; start it again with the START flag"


def test_nothing_of_a_begun_sequence_is_run_again(setting: Setting) -> None:
    """Neither what was executing nor what waited: its worker had its state. The next START begins anew."""
    first = setting.open_worker()
    setting.ready(first, **STICKY)
    asked = [
        setting.ask(sequence_id=5, sequence_start=True),
        setting.ask(sequence_id=5),
        setting.ask(sequence_id="six"),
    ]
    without = setting.ask()
    setting.turn()
    for who in (5, "six"):
        admit(first, who)
    second = replaced(setting, first, asked[:1], **STICKY)
    for each, sequence in zip(asked, ("5", "5", "six"), strict=True):
        (final,) = each.finals
        assert (final.code, final.message) == ("UNAVAILABLE", lost(sequence))
    # It belongs to no sequence, and whoever is asked says so.
    assert second.next().request_id == without.request_id
    # Nor does it go on later.
    late = setting.ask(sequence_id=5)
    setting.turn()
    assert [final.message for final in late.finals] == [lost(5)]
    again = setting.ask(sequence_id=5, sequence_start=True)
    setting.turn()
    assert second.next().request_id == again.request_id
    assert second.idle(0.01)


@pytest.mark.parametrize("admitted", [True, False])
def test_a_sequence_that_waited_is_moved_in_its_order(setting: Setting, admitted: bool) -> None:
    first = setting.open_worker()
    setting.ready(first, **STICKY)
    asked = [
        setting.ask(sequence_id=5, sequence_start=True),
        setting.ask(sequence_id=5),
        setting.ask(sequence_id=5, sequence_end=True),
    ]
    setting.turn()
    if admitted:
        admit(first, 5, begun=False)
    second = replaced(setting, first, [], **STICKY)
    moved = [second.next() for _ in asked]
    assert [record.request_id for record in moved] == [each.request_id for each in asked]
    assert [record.strikes for record in moved] == [0, 0, 0]
    for record in moved:
        second.echo(record)
    while setting.submitter.in_flight():
        setting.turn()
    assert [final.code for each in asked for final in each.finals] == [""] * 3


def test_who_goes_on_with_a_sequence_of_a_closed_worker_hears_at_the_fence(setting: Setting) -> None:
    """Before it nobody may say that it is lost: the worker might still write."""
    first, second = setting.open_worker(), setting.open_worker()
    setting.ready(first, second, **STICKY)
    admit(first, 5)
    first.die()
    setting.turn()
    late = setting.ask(sequence_id=5)
    setting.turn()
    assert not late.finals
    assert setting.submitter.statistics()["waiting_for_worker"] == 1
    setting.submitter.fence(WorkerFenced(first.incarnation))
    setting.turn()
    assert [final.message for final in late.finals] == [lost(5)]
    assert second.idle(0.01)


def test_a_start_that_ran_before_its_sequence_was_noted_is_lost(setting: Setting) -> None:
    """A worker may die between the two."""
    first = setting.open_worker()
    setting.ready(first, **STICKY)
    start = setting.ask(sequence_id=5, sequence_start=True)
    setting.turn()
    admit(first, 5, begun=False)
    second = replaced(setting, first, [start], **STICKY)
    assert [final.message for final in start.finals] == [lost(5)]
    assert second.idle(0.01)


def test_what_may_not_be_run_twice_is_not(setting: Setting) -> None:
    """A request with a first response is not run again; one without is, for nobody has seen anything of it."""
    kind = {"repeatable": False, "streams": True}
    first = setting.open_worker()
    setting.ready(first, **kind)
    executing, begun, queued = setting.ask(), setting.ask(), setting.ask()
    setting.turn()
    first.complete(begun.request_id, final=False)
    setting.turn()
    second = replaced(setting, first, [executing], **kind)
    message = "the worker process died while it had the request, which may not be run twice"
    assert not executing.finals
    assert [final.message for final in begun.finals] == ["", message]
    again = [second.next() for _ in range(2)]
    assert [(record.request_id, record.strikes) for record in again] == [
        (executing.request_id, 1),
        (queued.request_id, 1),
    ]
    assert second.idle(0.01)


def test_responses_are_taken_by_and_by(setting: Setting) -> None:
    """The worker is told once a quarter of what may be ahead has left, in the bytes that both count."""
    worker = setting.open_worker()
    setting.ready(worker, repeatable=False, streams=True)
    asked = setting.ask()
    setting.turn()
    for number in range(12):
        output = Tensor("y", "UINT8", (100_000,), bytes(100_000))
        worker.complete(asked.request_id, final=False, version=1, outputs=(output,))
        setting.turn()
        setting.submitter.taken(
            setting.submitter._routing.workers[worker.incarnation].lane, asked.finals[number].record
        )
        setting.turn()
    worker.poll()
    assert worker.taken == [(asked.request_id, 3 * 100_256)] * 4


def test_a_lane_that_takes_no_more_is_written_to_later(setting: Setting) -> None:
    """A worker that does not read: the socket's buffer fills, nothing is lost."""
    worker = setting.open_worker()
    setting.ready(worker)
    big: dict[str, Parameter] = {"p": "x" * 60_000}
    for number in range(4):
        setting.send(WholeRequest(1000 + number, "m", 0, (), parameters=big).record)
        setting.turn()
    for number in range(4):
        setting.cancel(1000 + number)
    setting.turn()
    got = []
    for _ in range(50):
        setting.turn()
        worker.poll()
        if not worker.idle(0.01):
            got.append(worker.next().request_id)
    assert got == [1000, 1001, 1002, 1003]
    assert worker.cancelled == got


def test_a_forgotten_lease_is_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Only forgotten leases are reported: one that waits with its request is not."""
    for forgotten in (0, 2):
        caplog.clear()
        made = Setting(arenas=Arenas(byte_size=MIB, max_byte_size=MIB), requests=Requests())
        for _ in range(forgotten):
            assert made.submitter.loan(4096) is not None
        made.close()
        assert [record.message for record in caplog.records] == (
            [f"{forgotten} leases of the request arena belong to no request and were never given back"]
            if forgotten
            else []
        )


# -------------------------------------------------------------------------------------------------------------- numbers


class Repeated(InFlight):
    """A request of a prepared kind, whose tensor is its own number."""

    number: int
    #: Answers with a number; and the others.
    answers: list[WholeAnswer] = msgspec.field(default_factory=list)
    finals: list[WholeAnswer] = msgspec.field(default_factory=list)

    @staticmethod
    def ask(setting: Setting, kind: Numbered[PreparedRequest], number: int = 0) -> Repeated:
        record = RequestRecord(setting.submitter.next_id(), kind.number, (b"%04d" % number,), f"id{number}", 5, 6, 2)
        asked = Repeated(record=record, numbered=kind, number=number)
        setting.submitter.send(asked)
        assert not asked.answers + asked.finals, "never from within send"
        return asked

    @property
    def request_id(self) -> int:
        return self.record.request_id

    def completed(self, prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
        (self.answers if isinstance(record.prepared, int) else self.finals).append(whole_answer(prepared, record))

    def came_whole(self, request: WholeRequest, strikes: int = 0, name: str = "m") -> bool:
        """Returns whether a request at the worker is this one."""
        tensors = (
            Tensor("x", "UINT8", (4,), b"%04d" % self.number),
            Tensor("r", "UINT8", (1,), RegionSlice("r", 0, 1)),
        )
        wanted = WholeRequest(
            self.request_id,
            name,
            0,
            tensors,
            parameters={"p": 1},
            client_id=f"id{self.number}",
            deadline_ns=5,
            received_ns=6,
            priority=2,
            strikes=strikes,
        )
        return request == wanted


def kind_of(setting: Setting, name: str = "m") -> Numbered[PreparedRequest]:
    tensors = (Tensor("x", "UINT8", (4,), b""), Tensor("r", "UINT8", (1,), RegionSlice("r", 0, 1)))
    prepared = WholeRequest(0, name, 0, tensors, parameters={"p": 1}, priority=2).prepared
    return setting.submitter.numbers.number(prepared)


def y_of(content: bytes) -> tuple[Tensor, ...]:
    return (Tensor("y", "UINT8", (len(content),), content),)


def test_requests_of_a_kind_and_both_kinds_of_answers(setting: Setting) -> None:
    worker = setting.open_worker()
    setting.ready(worker)
    kind = kind_of(setting)
    asked = [Repeated.ask(setting, kind, number) for number in range(4)]
    setting.turn()
    for one in asked:
        assert one.came_whole(worker.next())
        assert isinstance(worker.record, RequestRecord)
    assert len(worker.requests.told) == 1
    worker.numbered = True
    worker.complete(asked[0].request_id, version=3, outputs=y_of(b"ab"))
    worker.complete(asked[1].request_id, version=3, outputs=y_of(b"cd"))
    worker.numbered = False
    worker.complete(asked[2].request_id, version=3, outputs=y_of(b"ef"))
    worker.complete(asked[3].request_id, code="INTERNAL", message="no")
    while setting.submitter.in_flight():
        setting.turn()
    assert [one.answers for one in asked[:2]] == [
        [WholeAnswer(one.request_id, version=3, outputs=y_of(content))]
        for one, content in zip(asked, (b"ab", b"cd"), strict=False)
    ]
    assert [one.finals for one in asked[:2]] == [[], []]
    assert asked[2].finals == [WholeAnswer(asked[2].request_id, version=3, outputs=y_of(b"ef"))]
    assert [final.message for final in asked[3].finals] == ["no"]
    assert asked[2].answers == asked[3].answers == []


def test_an_answer_of_a_kind_to_a_request_without_one(setting: Setting) -> None:
    worker = setting.open_worker()
    setting.ready(worker)
    asked = setting.ask()
    setting.turn()
    worker.numbered = True
    worker.complete(worker.next().request_id, outputs=y_of(b"ab"))
    while setting.submitter.in_flight():
        setting.turn()
    assert asked.finals == [WholeAnswer(asked.request_id, version=1, outputs=y_of(b"ab"))]


def test_answers_of_two_kinds_with_one_number_that_come_together(setting: Setting) -> None:
    """A worker has numbered more kinds than there are numbers, and answers an old and a new one in the same turn."""
    worker = setting.open_worker()
    setting.ready(worker)
    kind = kind_of(setting)
    asked = [Repeated.ask(setting, kind, number) for number in range(3)]
    setting.turn()
    contents = (b"a", b"bb", b"c")
    alike = [WholeAnswer(0, version=1, outputs=y_of(content)).prepared for content in contents[:2]]
    # Two senders' first kinds have the number that one sender's first and ``MAX_NUMBERS``-th next have.
    sent = [Numbers[PreparedAnswer]().number(each) for each in alike]
    for one, content, kind in zip(asked, contents, (sent[0], sent[1], sent[0]), strict=True):
        worker.lane.complete(AnswerRecord(one.request_id, kind.number, (content,)), kind)
    assert worker.lane.flush()
    while setting.submitter.in_flight():
        setting.turn()
    assert [[answer.outputs for answer in one.answers] for one in asked] == [[y_of(content)] for content in contents]


def test_more_kinds_than_numbers(setting: Setting) -> None:
    """Each is told again when its number stood for another one; all that are in flight mean what they meant."""
    setting = Setting(requests=Requests(max_in_flight=10_000))
    worker = setting.open_worker()
    names = [f"m{number}" for number in range(MAX_NUMBERS + 20)]
    for name in names:
        setting.submitter.model_changed(ModelState(name, 1, "READY", workers=(worker.incarnation,)))
    kinds = {name: kind_of(setting, name) for name in names}
    order = [*names, *names[:20], *names[MAX_NUMBERS:], *names[30:40]]
    asked = [(name, Repeated.ask(setting, kinds[name], number)) for number, name in enumerate(order)]
    for name, one in asked:
        while worker.idle(0):
            setting.turn()
        assert one.came_whole(worker.next(), name=name)
    assert len(worker.requests.told) == len(names) + 20 + 20
    worker.numbered = True
    for _, one in asked:
        worker.complete(one.request_id, outputs=y_of(b"%d" % one.number))
        setting.turn()
    while setting.submitter.in_flight():
        setting.turn()
    for _, one in asked:
        assert [answer.outputs for answer in one.answers] == [y_of(b"%d" % one.number)]
    setting.close()


def test_a_worker_dies_under_requests_of_a_kind(setting: Setting) -> None:
    """1. two workers die with requests, one executing; 2. the next one is told the kind; 3. a second strike ends the request."""
    kind = kind_of(setting)
    first = setting.open_worker()
    setting.ready(first)
    executing, queued = Repeated.ask(setting, kind, 1), Repeated.ask(setting, kind, 2)
    setting.turn()
    assert executing.came_whole(first.next())
    first.page.begin(0, [(INCARNATION, executing.request_id)], 1, 1)
    first.die()
    second = setting.open_worker()
    setting.ready(second)
    setting.submitter.fence(WorkerFenced(first.incarnation))
    setting.turn()
    arrived = {submit.request_id: submit for submit in (second.next(), second.next())}
    assert executing.came_whole(arrived[executing.request_id], strikes=1)
    assert queued.came_whole(arrived[queued.request_id])
    second.page.begin(0, [(INCARNATION, executing.request_id)], 1, 1)
    second.die()
    third = setting.open_worker()
    setting.ready(third)
    setting.submitter.fence(WorkerFenced(second.incarnation))
    setting.turn()
    assert queued.came_whole(third.next())
    assert third.idle(0.01)
    third.numbered = True
    third.complete(queued.request_id, outputs=y_of(b"ab"))
    while setting.submitter.in_flight():
        setting.turn()
    assert [final.code for final in executing.finals] == ["INTERNAL"]
    assert "2 worker processes ended" in executing.finals[0].message
    assert [answer.outputs for answer in queued.answers] == [y_of(b"ab")]


def test_a_cancelled_request_of_a_kind(setting: Setting) -> None:
    worker = setting.open_worker()
    setting.ready(worker)
    kind = kind_of(setting)
    cancelled, unsent, other = (
        Repeated.ask(setting, kind, 1),
        Repeated.ask(setting, kind, 2),
        Repeated.ask(setting, kind, 3),
    )
    setting.cancel(unsent.request_id)
    setting.turn()
    for _ in range(3):
        worker.next()
    setting.cancel(cancelled.request_id)
    setting.turn()
    worker.poll()
    assert worker.cancelled == [unsent.request_id, cancelled.request_id]
    worker.numbered = True
    for one in (cancelled, unsent, other):
        worker.complete(one.request_id, outputs=y_of(b"ab"))
    # Once more: late, to be ignored.
    worker.complete(other.request_id, outputs=y_of(b"cd"))
    while setting.submitter.in_flight():
        setting.turn()
    setting.turn()
    assert [len(one.answers) + len(one.finals) for one in (cancelled, unsent, other)] == [0, 0, 1]


@pytest.mark.parametrize("told", [None, MAX_NUMBERS, -1])
def test_a_worker_that_answers_with_a_kind_it_never_told(setting: Setting, told: int | None) -> None:
    """Its lane is closed, and whatever is in flight there is answered."""
    worker = setting.open_worker()
    setting.ready(worker)
    formed, whole = Repeated.ask(setting, kind_of(setting)), setting.ask()
    setting.turn()
    if told is None:
        worker.lane.channel.put(AnswerRecord(formed.request_id, 3, (b"ab",)))  # our own end would tell it first
    else:
        worker.lane.channel.put(PrepareAnswer(told, PreparedAnswer()))
    assert worker.lane.flush()
    while not (formed.finals and whole.finals):
        setting.turn()
    for final in (formed.finals, whole.finals):
        assert [(one.code, one.message) for one in final] == [
            ("INTERNAL", "the worker's answer could not be understood")
        ]
    assert not formed.answers
    setting.submitter.fence(WorkerFenced(worker.incarnation))
    assert setting.submitter.in_flight() == 0
