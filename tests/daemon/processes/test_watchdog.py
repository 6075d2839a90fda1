"""Tests which children have overrun their time: a table of moments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from tensord.config.options import Expert, Options, Workers
from tensord.daemon.processes.child import Child, FrontProcess, WorkerProcess
from tensord.daemon.processes.watchdog import Pauses, overdue
from tensord.shm.status_page import StatusPage, WorkerState

OPTIONS = Options(expert=Expert(start_timeout=10), workers=Workers(execute_timeout=20, load_timeout=30, idle_timeout=5))
S = 10**9


def front(**fields: Any) -> Child:
    """Makes a front that has come up at second 0, but for ``fields``."""
    made: Any = FrontProcess("http", 0, Mock(), 1, Mock(), Mock())
    made.ready = True
    for name, value in fields.items():
        setattr(made, name, value)
    return cast(Child, made)


def worker(state: WorkerState = WorkerState.IDLE, since: int = 99, beat: int = 100, load: int | None = None) -> Child:
    """Makes a worker whose state and last beat are of these seconds. ``load``: when its load has last gone on."""
    made = WorkerProcess("worker-0", 1, "cpu:0", Mock(), Mock())
    made.ready = True
    made.page = cast(StatusPage, SimpleNamespace(state=(state, since * S), last_beat_ns=beat * S))
    if load is not None:
        made.owed, made.load_progress_ns = [("m", 1)], load * S
    return made


@pytest.mark.parametrize(
    ("child", "words"),
    [
        (front(ready=False, started_ns=91 * S), ""),
        (front(ready=False, started_ns=89 * S), "did not report within 10 s"),
        (front(), ""),
        (front(owes_since_ns=96 * S), ""),
        (front(owes_since_ns=94 * S), "has not turned its loop for 5 s"),
        (worker(), ""),
        (worker(beat=94), "has not turned its loop for 5 s"),
        (worker(WorkerState.STARTING, beat=94), "has not turned its loop for 5 s"),
        (worker(WorkerState.EXECUTING, 81, beat=81), ""),
        (worker(WorkerState.EXECUTING, 79), "executes one batch for more than 20 s"),
        (worker(WorkerState.STOPPING, 0, beat=0), ""),
        (worker(load=71), ""),
        (worker(load=69), "loads one model for more than 30 s"),
    ],
)
def test_overdue(child: Child, words: str) -> None:
    assert overdue(child, OPTIONS, 100 * S, Pauses()) == words


def test_zero_is_never() -> None:
    never = Options(workers=Workers(execute_timeout=0, load_timeout=0, idle_timeout=0))
    for child in (front(owes_since_ns=1), *(worker(state, 0, beat=0, load=0) for state in WorkerState)):
        assert overdue(child, never, 10**6 * S, Pauses()) == ""


def test_a_pause_of_the_supervisor_counts_for_nobody() -> None:
    """A child has as much time after the pause as before it, and a child that hangs afterwards is found as ever."""
    pauses = Pauses()
    pauses.looked(60 * S, 60 * S + 1_000_000)
    assert pauses.within(0, 100 * S) == 0
    pauses.looked(61 * S, 97 * S)
    beat = worker(beat=60)
    assert overdue(beat, OPTIONS, 97 * S, pauses) == ""
    assert overdue(beat, OPTIONS, 100 * S, pauses) == ""
    assert overdue(beat, OPTIONS, 102 * S, pauses) == "has not turned its loop for 5 s"
    executing = worker(WorkerState.EXECUTING, 45)
    assert overdue(executing, OPTIONS, 100 * S, pauses) == ""
    assert overdue(executing, OPTIONS, 102 * S, pauses) == "executes one batch for more than 20 s"
