"""A loop's thread is kept on its core, and no other thread is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from shm.loop_core import keep_on


def in_a_thread(do: Callable[[], None]) -> set[int]:
    """The cores of a thread that has done that."""
    cores: set[int] = set()

    def run() -> None:
        do()
        cores.update(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return cores


def test_only_the_thread_that_asks_is_kept() -> None:
    ours = os.sched_getaffinity(0)
    assert in_a_thread(lambda: keep_on(max(ours))) == {max(ours)}
    assert in_a_thread(lambda: keep_on(None)) == ours
    assert os.sched_getaffinity(0) == ours


def test_a_core_that_it_does_not_have_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    ours = os.sched_getaffinity(0)

    def ask() -> None:
        os.sched_setaffinity(0, {min(ours)})
        keep_on(max(ours) if len(ours) > 1 else 8191)

    assert in_a_thread(ask) == {min(ours)}
    assert "the loop is not kept on core" in caplog.text
