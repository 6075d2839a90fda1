"""Tests, with real lanes, that a client that does not read its answers gets no more of them, while others go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensord.config.options import Arenas
from tensord.daemon.submit.accounts import Account
from tensord.shm.control_records import ModelState, WorkerFenced
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, Cancel, PreparedAnswer
from tests.daemon.submit.test_submitter import Setting
from tests.fakes import EchoWorker
from tests.records import Tensor, WholeAnswer, WholeRequest, whole_answer

MIB = 1 << 20


class Asker:
    """A connection that reads its answers when it is told to."""

    def __init__(self, setting: Setting, host: str = "10.0.0.1") -> None:
        self.setting = setting
        self.account: Account = setting.submitter.accounts.open(f"tcp {host}")
        self.answers: list[WholeAnswer] = []
        self.held: list[tuple[SubmitterLane, tuple[int, int, int]]] = []

    def ask(self, model: str = "m") -> int:
        record = WholeRequest(self.setting.submitter.next_id(), model, 0, (Tensor("x", "UINT8", (1,), b"1"),)).record
        self.setting.send(record, self.completed, (), self.account)
        return record.request_id

    def completed(self, prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
        self.answers.append(whole_answer(prepared, record))
        if record.lease is not None:
            assert lane is not None
            self.held.append((lane, record.lease))

    def take(self, count: int = 1) -> None:
        for _ in range(count):
            self.setting.submitter.release(*self.held.pop(0))


@pytest.fixture
def setting() -> Iterator[Setting]:
    made = Setting(arenas=Arenas(byte_size=MIB, max_byte_size=16 * MIB, wait=0.3))
    yield made
    made.close()


def answer(setting: Setting, worker: EchoWorker, byte_size: int = MIB, count: int = 1000) -> list[int]:
    """Has the worker answer its requests with so many bytes each, and those that were cancelled with an error.

    Returns the ids of the answered requests.
    """
    answered: list[int] = []
    for _ in range(6):
        setting.turn()
        worker.poll()
        cancelled, worker.cancelled = set(worker.cancelled), []
        waiting = [worker.next() for _ in range(len(worker._requests))]
        for request in waiting:
            if request.request_id in cancelled:
                worker.complete(request.request_id, code="CANCELLED", message="the request was cancelled")
            elif len(answered) < count:
                worker.answer(request, bytes(byte_size))
                answered.append(request.request_id)
                setting.turn()
                worker.poll()
                cancelled |= set(worker.cancelled)
                worker.cancelled = []
            else:
                worker._requests.append((request, request))
    return answered


def test_a_connection_that_takes_nothing(setting: Setting) -> None:
    """1. it asks for twice its share; 2. what had not begun comes back; 3. others are answered; 4. it goes on as it takes."""
    worker = setting.open_worker()
    setting.ready(worker)
    slow, other = Asker(setting), Asker(setting)
    asked = [slow.ask() for _ in range(8)]
    # A quarter of 16 MiB is four answers.
    assert answer(setting, worker) == asked[:4]
    found = setting.submitter.statistics()
    assert (found["throttled"], found["answers_held"], found["in_flight"]) == (4, 4, 4)
    late = slow.ask()
    setting.turn()
    assert worker.idle(0)
    for _ in range(5):
        other.ask()
    assert len(answer(setting, worker, 100)) == 5
    assert [completion.code for completion in other.answers] == [""] * 5
    for number in (*asked[4:], late):
        slow.take()
        assert answer(setting, worker) == [number]
    slow.take(len(slow.held))
    assert [completion.code for completion in slow.answers] == [""] * 9
    found = setting.submitter.statistics()
    assert (found["throttled"], found["answers_held"], found["in_flight"]) == (0, 0, 0)
    assert (slow.account.answers, slow.account.client.answers) == (0, 0)
    setting.turn()
    assert worker.leases == 0


def test_small_answers_beside_a_full_segment_count_as_small(setting: Setting) -> None:
    """Somebody else reads nothing, so that small answers come from the reserve: they hold up nobody's small answers."""
    worker = setting.open_worker()
    setting.ready(worker)
    other, slow = Asker(setting, "10.0.0.2"), Asker(setting)
    for _ in range(4):
        other.ask()
    assert len(answer(setting, worker, MIB // 4)) == 4
    for _ in range(20):
        slow.ask()
    assert len(answer(setting, worker, 4096)) == 20
    segments = {key[0] for _, key in slow.held}
    assert (len(segments), 0 in segments) == (1, False)
    for asker in (other, slow):
        asker.take(len(asker.held))
    assert slow.account.answers == 0


def test_it_waits_no_longer_than_for_room(setting: Setting) -> None:
    worker = setting.open_worker()
    setting.ready(worker)
    slow = Asker(setting)
    for _ in range(6):
        slow.ask()
    assert len(answer(setting, worker)) == 4
    setting.sleep(1.0)
    assert [completion.code for completion in slow.answers] == [""] * 4 + ["UNAVAILABLE"] * 2
    assert slow.answers[-1].message == (
        f"this connection has not taken {4 * MIB} bytes of its answers, at most {4 * MIB} may wait for it; that did not change "
        "within 0.3 s"
    )
    slow.take(4)
    assert setting.submitter.statistics()["in_flight"] == 0


def test_many_connections_of_one_client(setting: Setting) -> None:
    """Beyond their common share only requests like theirs wait, of that client; other clients have the other half."""
    worker = setting.open_worker()
    setting.ready(worker)
    setting.submitter.model_changed(ModelState("small", 1, "READY", workers=(worker.incarnation,)))
    slow = [Asker(setting) for _ in range(10)]
    for asker in slow:
        asker.ask()
        answer(setting, worker)
    assert sum(len(asker.answers) for asker in slow) == 8
    neighbour, stranger = Asker(setting), Asker(setting, "10.0.0.2")
    neighbour.ask("small")
    stranger.ask()
    assert len(answer(setting, worker, 2000)) == 2
    neighbour.take()
    stranger.take()
    slow[0].take()
    answer(setting, worker)
    assert sum(len(asker.answers) for asker in slow) == 9
    for asker in slow[1:9]:
        asker.take(len(asker.held))
    answer(setting, worker)
    for asker in slow:
        assert [completion.code for completion in asker.answers] == [""]
        asker.take(len(asker.held))
    assert setting.submitter.statistics()["answers_held"] == 0


def test_whoever_waits_may_go(setting: Setting) -> None:
    worker = setting.open_worker()
    setting.ready(worker)
    slow = Asker(setting)
    asked = [slow.ask() for _ in range(6)]
    answer(setting, worker)
    for number in asked[4:]:
        setting.cancel(number)
    assert setting.submitter.in_flight() == 0
    slow.take(4)
    setting.turn()
    assert setting.submitter.statistics()["throttled"] == 0
    assert len(slow.answers) == 4


def test_a_worker_dies_while_some_are_called_back(setting: Setting) -> None:
    worker, second = setting.open_worker(), setting.open_worker()
    setting.ready(worker)
    slow = Asker(setting)
    asked = [slow.ask() for _ in range(6)]
    setting.turn()
    for _ in range(4):
        worker.answer(worker.next(), bytes(MIB))
    setting.turn(8)
    setting.ready(second)
    worker.die()
    setting.submitter.fence(WorkerFenced(worker.incarnation))
    # The two that had not begun are sent again, and not taken for cancelled.
    assert answer(setting, second, 100) == asked[4:]
    assert [completion.code for completion in slow.answers] == [""] * 6
    slow.take(4)
    assert not [each for each in second.cancelled if isinstance(each, Cancel)]
    assert setting.submitter.statistics()["answers_held"] == 0


@pytest.fixture
def patient() -> Iterator[Setting]:
    made = Setting(arenas=Arenas(byte_size=MIB, max_byte_size=16 * MIB, wait=600.0))
    yield made
    made.close()


def test_connections_of_one_client_with_an_answer_each(patient: Setting) -> None:
    """
    1. A client asks on sixteen connections for answers that take half of its share each, and takes none.
    2. With the second its share is full: what has not begun of all its connections comes back, and the worker's arena has room.
    3. Another client is answered. 4. As the first takes its answers, the others come.
    """
    setting = patient
    worker = setting.open_worker()
    setting.ready(worker)
    slow = [Asker(setting) for _ in range(16)]
    for asker in slow:
        asker.ask()
    assert len(answer(setting, worker, 4 * MIB)) == 2
    other = Asker(setting, "10.0.0.2")
    other.ask()
    assert len(answer(setting, worker, 4 * MIB)) == 1
    assert len(other.answers) == 1
    other.take()
    # One more of the same client does not overtake those that wait.
    late = Asker(setting)
    late.ask()
    assert answer(setting, worker, 4 * MIB) == []
    while holders := [asker for asker in (*slow, late) if asker.held]:
        holders[0].take()
        answer(setting, worker, 4 * MIB)
    assert [len(asker.answers) for asker in (*slow, late)] == [1] * 17
    assert not any(asker.answers[0].code for asker in (*slow, late))


def test_answers_count_as_the_arena_gives_them(setting: Setting) -> None:
    """A bit more than a block takes two."""
    worker = setting.open_worker()
    setting.ready(worker)
    asker = Asker(setting)
    asker.ask()
    answer(setting, worker, 100_000)
    assert asker.account.client.answers == 128 << 10
    asker.take()
    assert asker.account.client.answers == 0
