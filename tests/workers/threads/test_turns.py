"""Tests who may begin: in order, so many at a time, and a few more beside those that take very long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from tensord.shm.errors import Cancelled
from tensord.workers.threads.cancellation import Cancellation
from tensord.workers.threads.turns import Turns


class Someone:
    """Takes a turn in a thread of its own, and keeps it until ``ends``."""

    def __init__(self, turns: Turns, cancellation: Cancellation | None = None) -> None:
        self.cancellation = cancellation or Cancellation()
        self.begun, self.ends = threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self.renew: Callable[[], None] = lambda: None
        self.thread = threading.Thread(target=self._run, args=(turns,), daemon=True)
        self.thread.start()

    def _run(self, turns: Turns) -> None:
        try:
            with turns.turn(self.cancellation) as self.renew:
                self.begun.set()
                assert self.ends.wait(600)
        except Cancelled as error:
            self.failure = error

    def end(self) -> None:
        self.ends.set()
        self.thread.join()


def test_one_after_the_other() -> None:
    turns = Turns(0)
    first = Someone(turns)
    assert first.begun.wait(600)
    second, third = Someone(turns), Someone(turns)
    assert not second.begun.wait(0.1)
    assert not third.begun.is_set()
    first.end()
    later = second if second.begun.wait(0.5) else third
    for each in (later, second, third):
        assert each.begun.wait(600)
        each.end()


def test_beside_one_that_takes_very_long() -> None:
    """Up to three more, however many take very long."""
    turns = Turns(0.05)
    everybody = [Someone(turns) for _ in range(4)]
    for each in everybody:
        assert each.begun.wait(600)
    last = Someone(turns)
    assert not last.begun.wait(0.3)
    everybody[0].end()
    assert last.begun.wait(600)
    for each in (*everybody, last):
        each.end()


def test_a_new_step_is_not_long() -> None:
    turns = Turns(600)
    first = Someone(turns)
    assert first.begun.wait(600)
    turns._under_way = dict.fromkeys(turns._under_way, -1000.0)
    first.renew()
    second = Someone(turns)
    assert not second.begun.wait(0.1)
    first.end()
    assert second.begun.wait(600)
    second.end()


def test_who_waits_can_be_cancelled() -> None:
    turns = Turns(0)
    first = Someone(turns)
    assert first.begun.wait(600)
    second = Someone(turns)
    second.cancellation.cancel()
    second.thread.join()
    assert isinstance(second.failure, Cancelled)
    third = Someone(turns)
    first.end()
    assert third.begun.wait(600)
    third.end()
    with pytest.raises(Cancelled), turns.turn(second.cancellation):
        pass


class CancelledAtOnce(Cancellation):
    """Is cancelled between the moment from which on it is told and the one from which on anybody waits."""

    @contextlib.contextmanager
    def interrupting(self, interrupt: Callable[[], None]) -> Iterator[None]:
        with super().interrupting(interrupt):
            self.cancel()
            yield


def test_who_is_cancelled_before_he_waits_does_not_wait() -> None:
    turns = Turns(0)
    first = Someone(turns)
    assert first.begun.wait(600)
    second = Someone(turns, CancelledAtOnce())
    second.thread.join(600)
    assert isinstance(second.failure, Cancelled)
    first.end()
