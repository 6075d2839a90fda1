"""When records leave: the first for an idle worker at once, the others with the turn, what the socket refused when it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from tensord.daemon.submit.pending import Calling, Pending, Worker
from tensord.daemon.submit.sending import Sending
from tensord.shm.messages import PreparedRequest, RequestRecord
from tensord.shm.prepared import Numbered

KIND = Numbered(0, PreparedRequest("m"))


class Lane:
    """Notes what it is told; ``open``: the socket takes what it gets."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.open = True

    def fileno(self) -> int:
        return 5

    def ready(self, timeout: int) -> bool:
        raise AssertionError("whoever looks asks")

    def submit(self, record: RequestRecord, numbered: Numbered[PreparedRequest] | None) -> None:
        assert numbered is (None if record.prepared == KIND.prepared else KIND)
        self.told.append(f"submit {record.request_id}")

    def submit_at_once(self, record: RequestRecord, numbered: Numbered[PreparedRequest] | None) -> bool:
        assert numbered is (None if record.prepared == KIND.prepared else KIND)
        self.told.append(f"at once {record.request_id}")
        return self.open

    def flush(self) -> bool:
        self.told.append("flush")
        return self.open


class Loop:
    """What is to be called soon, and who waits to write."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []
        self.writers: dict[int, Callable[[], None]] = {}

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def add_writer(self, fd: int, callback: Callable[[Worker], None], worker: Worker) -> None:
        self.writers[fd] = lambda: callback(worker)

    def remove_writer(self, fd: int) -> None:
        del self.writers[fd]


class Poll:
    """Whether an answer is looked for, and of which worker."""

    def __init__(self) -> None:
        self.looked: list[Worker] = []
        self.flushes = 0

    def look(self, ready: Callable[[int], object], receive: Callable[[Worker], bool], worker: Worker) -> None:
        assert ready == worker.lane.ready
        self.looked.append(worker)
        assert receive(worker) == bool(worker.in_flight and not worker.closed)

    def flushed(self) -> None:
        self.flushes += 1


class Setting:
    def __init__(self) -> None:
        self.loop, self.poll, self.lane = Loop(), Poll(), Lane()
        self.pending: dict[int, Pending] = {}
        self.received: list[Worker] = []
        self.sending = Sending(cast(Any, self.loop), cast(Any, self.poll), self.pending, self.received.append)
        self.worker = Worker(1, "cpu:0", cast(Any, self.lane), *cast(Any, (None, None)))

    def send(self, numbered: bool) -> Pending:
        number = len(self.pending) + 1
        pending: Pending
        if numbered:
            pending = Calling(lambda *_: None, record=RequestRecord(number, 0, ()), numbered=KIND)
        else:
            pending = Calling(lambda *_: None, record=RequestRecord(number, KIND.prepared))
        self.pending[number] = pending
        self.sending.send(self.worker, pending)
        assert pending.worker is self.worker
        assert self.worker.in_flight[number] is pending
        return pending

    def turn(self) -> None:
        soon, self.loop.soon = self.loop.soon, []
        assert len(soon) <= 1
        for callback in soon:
            callback()


@pytest.fixture
def setting() -> Setting:
    return Setting()


@pytest.mark.parametrize("numbered", [False, True])
def test_an_idle_worker_gets_one_at_once_and_the_others_with_the_turn(setting: Setting, numbered: bool) -> None:
    for _ in range(3):
        setting.send(numbered)
    told = ["at once 1", "submit 2", "submit 3"]
    assert setting.lane.told == told
    setting.turn()
    assert setting.lane.told == [*told, "flush"]
    assert setting.poll.flushes == 1
    setting.turn()
    assert setting.lane.told[-2:] == ["submit 3", "flush"]


@pytest.mark.parametrize("numbered", [False, True])
def test_only_the_only_request_is_looked_for(setting: Setting, numbered: bool) -> None:
    setting.send(numbered)
    setting.turn()
    assert setting.poll.looked == setting.received == [setting.worker]
    assert setting.poll.flushes == 0
    setting.send(numbered)
    setting.turn()
    assert len(setting.poll.looked) == setting.poll.flushes == 1


def test_nothing_is_looked_for_where_nothing_can_come(setting: Setting) -> None:
    """The only request waits for a worker, or its worker is gone."""
    pending = setting.send(True)
    setting.worker.closed = True
    setting.turn()
    assert not setting.received
    pending.worker = None
    setting.sending.flush_later(setting.worker)
    setting.turn()
    assert len(setting.poll.looked) == 1
    assert "flush" not in setting.lane.told


@pytest.mark.parametrize("numbered", [False, True])
def test_what_the_socket_refuses_goes_when_it_can(setting: Setting, numbered: bool) -> None:
    setting.lane.open = False
    setting.send(numbered)
    (write,) = setting.loop.writers.values()
    # The next one waits behind it, though there is only that one.
    setting.pending.clear()
    setting.worker.in_flight.clear()
    setting.send(numbered)
    assert setting.lane.told[-1] == "submit 1"
    setting.turn()
    setting.lane.open = True
    write()
    assert not setting.loop.writers
    assert not setting.worker.writing
    setting.lane.open = False
    setting.sending.flush_later(setting.worker)
    setting.turn()
    assert setting.worker.writing
    setting.sending.stop(setting.worker)
    assert not setting.loop.writers


def test_a_large_request_is_not_looked_for(setting: Setting) -> None:
    setting.send(False).leases = (cast(Any, None),)
    setting.turn()
    assert (setting.poll.looked, setting.poll.flushes) == ([], 0)
