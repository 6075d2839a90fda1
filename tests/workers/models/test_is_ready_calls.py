"""Calls of ``is_ready()``, by which Triton Python models say whether they can work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from tensord.workers.models import is_ready_calls
from tensord.workers.models.is_ready_calls import IsReadyCalls


class Posted:
    """Keeps what is posted, for the test to call in its own order."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def take(self) -> Callable[[], None]:
        return self._calls.get(timeout=60)


def test_a_time_limit_that_ends_as_the_answer_comes_is_not_that_of_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit of the first question is reached while its answer is on its way: whoever asks next is not told "no" by it."""
    inbox, goes_on, answers = Posted(), threading.Event(), list[bool]()
    calls = IsReadyCalls("m", cast(Any, inbox))
    calls.join(goes_on.wait)
    monkeypatch.setattr(is_ready_calls, "_SECONDS", 0.01)
    calls.ask(answers.append)
    late = inbox.take()
    goes_on.set()
    inbox.take()()
    assert answers == [True]
    goes_on.clear()
    monkeypatch.setattr(is_ready_calls, "_SECONDS", 60.0)
    calls.ask(answers.append)
    late()
    assert answers == [True]
    goes_on.set()
    inbox.take()()
    assert answers == [True, True]


def test_who_asks_while_a_late_call_runs_waits_for_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for a time of its own: with probes more often than the model answers, it is ready all the same."""
    inbox, goes_on, asked, answers = Posted(), threading.Event(), list[str](), dict[str, bool]()

    def is_ready() -> bool:
        asked.append("asked")
        return goes_on.wait(60)

    def ask(who: str, seconds: float) -> None:
        monkeypatch.setattr(is_ready_calls, "_SECONDS", seconds)
        calls.ask(lambda said: answers.update({who: said}))

    calls = IsReadyCalls("m", cast(Any, inbox))
    calls.join(is_ready)
    ask("first", 0.01)
    inbox.take()()
    assert answers == {"first": False}
    ask("second", 0.01)
    ask("third", 60)
    assert answers == {"first": False}
    inbox.take()()
    assert answers == {"first": False, "second": False}
    goes_on.set()
    inbox.take()()
    assert answers == {"first": False, "second": False, "third": True}
    assert asked == ["asked"]


@pytest.mark.parametrize("lacking", ["m is_ready", "Thread-"])
def test_a_question_for_which_no_thread_can_be_started_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """Neither the thread that asks the model nor the one that waits: whoever asks later gets an answer."""
    inbox, answers = Posted(), list[str]()
    calls = IsReadyCalls("m", cast(Any, inbox))
    calls.join(lambda: True)
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith(lacking):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError):
            calls.ask(lambda said: answers.append(f"first {said}"))
    if lacking == "Thread-":
        inbox.take()()
    calls.ask(lambda said: answers.append(f"second {said}"))
    inbox.take()()
    assert answers == ["second True"]
