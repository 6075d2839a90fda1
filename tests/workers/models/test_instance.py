"""A model in a thread of its own: started, run, noted on the status page, ended."""

from __future__ import annotations

import select
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensord.shm.errors import Internal
from tensord.shm.status_page import StatusPage
from tensord.workers.models.execution import Execution
from tensord.workers.models.instance import Instance, Planned
from tensord.workers.threads.cancellation import Cancellation
from tensord.workers.threads.inbox import Inbox
from tests.workers.made_requests import request_of


class AModel:
    """Notes what happens to it, and in which thread; runs when it is let."""

    def __init__(self, trouble: BaseException | None = None) -> None:
        self.events: list[str] = []
        self.threads: set[int] = set()
        self.may_run = threading.Event()
        self._trouble = trouble

    def _note(self, event: str) -> None:
        self.events.append(event)
        self.threads.add(threading.get_ident())

    def initialize(self) -> None:
        self._note("initialize")
        if self._trouble is not None:
            raise self._trouble

    def execute(self, execution: Execution) -> None:
        self._note("execute")
        assert self.may_run.wait(600)
        if execution.requests[0].arrays["x"][0] < 0:
            raise SystemExit(1)
        execution.results = [{"y": request.arrays["x"]} for request in execution.requests]

    def describe(self, error: BaseException) -> str:
        return "it failed"

    def close(self) -> None:
        self._note("close")


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    made.close()


@pytest.fixture
def page() -> Iterator[StatusPage]:
    made = StatusPage.create()
    yield made
    made.close()


def until(inbox: Inbox, condition: Callable[[], object]) -> None:
    while not condition():
        assert select.select([inbox.fileno()], [], [], 600)[0]
        inbox.drain()


def execution_of(value: int) -> Execution:
    peer: Any = SimpleNamespace(peer=77, owner=None)
    return Execution([request_of({"x": np.array([value])}, submitter=peer, request_id=5)], 0)


def test_life(inbox: Inbox, page: StatusPage) -> None:
    model = AModel()
    instance = Instance(Planned("m_0"), lambda: model, inbox, page)
    instance.status_slot = 4
    instance.start()
    instance.wait_started(Cancellation())
    done: list[Execution] = []
    instance.run(execution_of(1), done.append)
    instance.run(execution_of(-1), done.append)
    instance.run(execution_of(2), done.append)
    while page.executing() != {(77, 5)}:
        pass
    model.may_run.set()
    until(inbox, lambda: len(done) == 3)
    kinds = [type(execution.results[0]) for execution in done]
    assert kinds == [dict, Internal, dict]
    assert page.executing() == set()
    ended: list[bool] = []
    instance.close(lambda: ended.append(True))
    until(inbox, lambda: ended)
    assert model.events == ["initialize", "execute", "execute", "execute", "close"]
    assert len(model.threads) == 1
    assert threading.get_ident() not in model.threads


@pytest.mark.parametrize("trouble", [ValueError("no"), SystemExit(2)])
def test_a_model_that_does_not_start(inbox: Inbox, page: StatusPage, trouble: BaseException) -> None:
    instance = Instance(Planned("m_0"), lambda: AModel(trouble), inbox, page)
    instance.start()
    with pytest.raises(type(trouble)):
        instance.wait_started(Cancellation())


def test_a_model_that_fails_as_it_is_warmed_up_is_closed(inbox: Inbox, page: StatusPage) -> None:
    model = AModel()

    def warm(_: Any) -> None:
        raise ValueError("no")

    instance = Instance(Planned("m_0"), lambda: model, inbox, page, warm)
    instance.start()
    with pytest.raises(ValueError, match="no"):
        instance.wait_started(Cancellation())
    assert model.events == ["initialize", "close"]


def test_what_a_thread_goes_on_with_is_noted(inbox: Inbox, page: StatusPage) -> None:
    """A generator that rested, and kills the worker afterwards, is known by its request."""
    model, noted = AModel(), list[set[tuple[int, int]]]()
    model.may_run.set()
    instance = Instance(Planned("m_0"), lambda: model, inbox, page)
    instance.start()
    instance.wait_started(Cancellation())
    done: list[Execution] = []
    instance.run(execution_of(1), done.append)
    until(inbox, lambda: done)
    assert page.executing() == set()
    assert done[0].resume is not None
    done[0].resume(lambda: noted.append(page.executing()))
    ended: list[bool] = []
    instance.close(lambda: ended.append(True))
    until(inbox, lambda: ended)
    assert (noted, page.executing()) == ([{(77, 5)}], set())


def test_an_idle_instance_keeps_nothing_of_its_last_requests(inbox: Inbox, page: StatusPage) -> None:
    """An array of a client's region keeps the region mapped."""
    model = AModel()
    model.may_run.set()
    instance = Instance(Planned("m_0"), lambda: model, inbox, page)
    instance.start()
    instance.wait_started(Cancellation())
    execution = execution_of(1)
    ended = threading.Event()
    weakref.finalize(execution.requests[0].arrays["x"], ended.set)
    done = threading.Event()
    instance.run(execution, lambda execution: done.set())
    del execution
    until(inbox, done.is_set)
    # The thread may still be on its way to its next job.
    assert ended.wait(600)
    closed = threading.Event()
    instance.close(closed.set)
    until(inbox, closed.is_set)
