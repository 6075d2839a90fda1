"""Records leave at once for an idle worker, the others with the iteration; what the socket refused leaves when it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tensord.daemon.submit.busy_poll import BusyPoll
from tensord.daemon.submit.in_flight import WorkerLink
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import PreparedRequest, RequestRecord
from tensord.shm.prepared import Numbered
from tests.daemon.submit.test_submitter import Repeated, Setting, kind_of
from tests.fakes import EchoWorker
from tests.records import WholeRequest


class Leaving:
    """A submitter with one worker; notes what is sent on its lane, and whether it polls for an answer."""

    def __init__(self, patch: pytest.MonkeyPatch, numbered: bool) -> None:
        self.setting = Setting()
        self.worker: EchoWorker = self.setting.open_worker()
        self.setting.ready(self.worker)
        self.setting.turn()
        self._kind = kind_of(self.setting) if numbered else None
        self.told: list[str] = []
        #: The socket takes what it gets.
        self.open = True
        self.looked: list[WorkerLink] = []
        self.flushes = 0
        # Its number is published with the first one.
        self.send()
        self.setting.turn()
        self.answer()
        submit, flush = SubmitterLane.submit, SubmitterLane.flush
        at_once = SubmitterLane.submit_at_once

        def told_submit(
            lane: SubmitterLane, record: RequestRecord, numbered: Numbered[PreparedRequest] | None = None
        ) -> None:
            assert numbered is self._kind
            self.told.append(f"submit {record.request_id}")
            submit(lane, record, numbered)

        def told_at_once(
            lane: SubmitterLane, record: RequestRecord, numbered: Numbered[PreparedRequest] | None = None
        ) -> bool:
            assert numbered is self._kind
            self.told.append(f"at once {record.request_id}")
            if self.open:
                return at_once(lane, record, numbered)
            submit(lane, record, numbered)
            return False

        def told_flush(lane: SubmitterLane) -> bool:
            self.told.append("flush")
            return self.open and flush(lane)

        def look(
            poll: BusyPoll, ready: Callable[[int], object], receive: Callable[[WorkerLink], bool], worker: WorkerLink
        ) -> None:
            assert ready == worker.lane.ready
            self.looked.append(worker)
            assert receive(worker) == bool(worker.in_flight and not worker.closed)

        def flushed(poll: BusyPoll) -> None:
            self.flushes += 1

        patch.setattr(SubmitterLane, "submit", told_submit)
        patch.setattr(SubmitterLane, "submit_at_once", told_at_once)
        patch.setattr(SubmitterLane, "flush", told_flush)
        patch.setattr(BusyPoll, "look", look)
        patch.setattr(BusyPoll, "flushed", flushed)

    def send(self) -> None:
        if self._kind is not None:
            Repeated.ask(self.setting, self._kind)
        else:
            self.setting.send(WholeRequest(self.setting.submitter.next_id(), "m", 0, ()).record)

    def answer(self) -> None:
        """Has the worker answer the next request that reached it."""
        self.worker.complete(self.worker.next().request_id)
        self.setting.turn()


@pytest.fixture(params=[False, True], ids=["inline", "numbered"])
def leaving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Leaving]:
    made = Leaving(monkeypatch, request.param)
    yield made
    made.setting.close()


def test_an_idle_worker_gets_one_at_once_and_the_others_with_the_iteration(leaving: Leaving) -> None:
    for _ in range(3):
        leaving.send()
    told = ["at once 2", "submit 3", "submit 4"]
    assert leaving.told == told
    leaving.setting.turn(1)
    assert leaving.told == [*told, "flush"]
    assert (leaving.looked, leaving.flushes) == ([], 1)
    leaving.setting.turn()
    assert leaving.told == [*told, "flush"]


def test_only_the_only_request_is_looked_for(leaving: Leaving) -> None:
    leaving.send()
    leaving.setting.turn()
    assert [worker.incarnation for worker in leaving.looked] == [leaving.worker.incarnation]
    assert leaving.flushes == 0
    leaving.send()
    leaving.setting.turn()
    assert len(leaving.looked) == leaving.flushes == 1


def test_nothing_is_looked_for_where_nothing_can_come(leaving: Leaving) -> None:
    """The only request waits for a worker, or its worker is gone."""
    leaving.setting.ready()
    leaving.send()
    leaving.setting.turn()
    assert (leaving.told, leaving.looked) == ([], [])
    leaving.setting.ready(leaving.worker)
    leaving.setting.turn()
    assert len(leaving.looked) == 1
    leaving.worker.die()
    leaving.setting.turn()
    leaving.told.clear()
    leaving.setting.cancel(2)
    leaving.setting.turn()
    assert "flush" not in leaving.told


def test_what_the_socket_refuses_goes_when_it_can(leaving: Leaving) -> None:
    leaving.open = False
    leaving.send()
    # The next one waits behind it.
    leaving.send()
    leaving.setting.turn()
    assert leaving.told[:3] == ["at once 2", "flush", "submit 3"]
    assert set(leaving.told[3:]) == {"flush"}
    assert leaving.worker.idle(0)
    leaving.open = True
    leaving.setting.turn()
    assert [leaving.worker.next().request_id for _ in range(2)] == [2, 3]
    # Nobody waits to write any more.
    leaving.told.clear()
    leaving.setting.turn()
    assert leaving.told == []


def test_a_worker_that_ends_while_its_socket_is_full_is_not_written_to(leaving: Leaving) -> None:
    leaving.open = False
    leaving.send()
    leaving.setting.turn()
    leaving.worker.die()
    leaving.setting.turn()
    leaving.told.clear()
    leaving.setting.turn()
    assert leaving.told == []


def test_a_large_request_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving = Leaving(monkeypatch, False)
    asked = leaving.setting.ask(5000)
    leaving.setting.turn()
    assert (leaving.looked, leaving.flushes) == ([], 0)
    leaving.worker.echo(leaving.worker.next())
    leaving.setting.turn()
    assert [final.code for final in asked.finals] == [""]
    leaving.setting.close()
