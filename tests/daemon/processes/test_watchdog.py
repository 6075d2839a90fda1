"""Tests which children have overrun their time: a table of moments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensord.config.options import Expert, Options, Workers
from tensord.daemon.processes.watchdog import ChildSnapshot, Pauses, overdue
from tensord.shm.status_page import WorkerState

OPTIONS = Options(expert=Expert(start_timeout=10), workers=Workers(execute_timeout=20, load_timeout=30, idle_timeout=5))
S = 10**9
#: A worker at second 100 whose loop has just turned.
IDLE = ChildSnapshot(True, 0, WorkerState.IDLE, 99 * S, 100 * S)


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        (ChildSnapshot(False, 91 * S), ""),
        (ChildSnapshot(False, 89 * S), "did not report within 10 s"),
        (ChildSnapshot(True, 0), ""),
        (ChildSnapshot(True, 0, owes_since_ns=96 * S), ""),
        (ChildSnapshot(True, 0, owes_since_ns=94 * S), "has not turned its loop for 5 s"),
        (IDLE, ""),
        (replace(IDLE, last_beat_ns=94 * S), "has not turned its loop for 5 s"),
        (replace(IDLE, state=WorkerState.STARTING, last_beat_ns=94 * S), "has not turned its loop for 5 s"),
        (replace(IDLE, state=WorkerState.EXECUTING, state_since_ns=81 * S, last_beat_ns=81 * S), ""),
        (replace(IDLE, state=WorkerState.EXECUTING, state_since_ns=79 * S), "executes one batch for more than 20 s"),
        (replace(IDLE, state=WorkerState.STOPPING, last_beat_ns=0, state_since_ns=0), ""),
        (replace(IDLE, loading=True, load_progress_ns=71 * S), ""),
        (replace(IDLE, loading=True, load_progress_ns=69 * S), "loads one model for more than 30 s"),
        (replace(IDLE, loading=False, load_progress_ns=0), ""),
    ],
)
def test_overdue(moment: ChildSnapshot, words: str) -> None:
    assert overdue(moment, OPTIONS, 100 * S, Pauses()) == words


def test_zero_is_never() -> None:
    never = Options(workers=Workers(execute_timeout=0, load_timeout=0, idle_timeout=0))
    for state in WorkerState:
        assert overdue(ChildSnapshot(True, 0, state, loading=True, owes_since_ns=1), never, 10**6 * S, Pauses()) == ""


def test_a_pause_of_the_supervisor_counts_for_nobody() -> None:
    """A child has as much time after the pause as before it, and a child that hangs afterwards is found as ever."""
    pauses = Pauses()
    pauses.looked(60 * S, 60 * S + 1_000_000)
    assert pauses.within(0, 100 * S) == 0
    pauses.looked(61 * S, 97 * S)
    beat = replace(IDLE, last_beat_ns=60 * S)
    assert overdue(beat, OPTIONS, 97 * S, pauses) == ""
    assert overdue(beat, OPTIONS, 100 * S, pauses) == ""
    assert overdue(beat, OPTIONS, 102 * S, pauses) == "has not turned its loop for 5 s"
    executing = replace(IDLE, state=WorkerState.EXECUTING, state_since_ns=45 * S)
    assert overdue(executing, OPTIONS, 100 * S, pauses) == ""
    assert overdue(executing, OPTIONS, 102 * S, pauses) == "executes one batch for more than 20 s"
