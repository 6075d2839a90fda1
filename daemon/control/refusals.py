"""Counts what a front refuses for want of room, time or a worker, and logs it once a minute."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from tensord.shm.errors import ServingError
from tensord.shm.refusals import Refusal, RefusalLog

#: The reasons for which fronts refuse, in the order of their shared counters (``tensord.daemon.control.shared_counters``).
OF_FRONTS = (
    Refusal.REQUEST_ROOM,
    Refusal.BODIES,
    Refusal.IN_FLIGHT,
    Refusal.NO_WORKER,
    Refusal.NO_ANSWER,
    Refusal.ANSWERS_HELD,
    Refusal.DRAINING,
)

OnRefusal = Callable[[Refusal], None]
T = TypeVar("T")


def uncounted(refusal: Refusal) -> None:
    """Does nothing, in place of counting, in a front without shared counters."""


class Refusals:
    """The refusals of one front; belongs to its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: OnRefusal = uncounted) -> None:
        self._loop = loop
        self._count = count
        self._log = RefusalLog()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, model: str, refusal: Refusal) -> None:
        """Notes one refused request. ``model``: "" where it is not known yet."""
        self._count(refusal)
        self._log.note(model, refusal, time.monotonic_ns())
        self._settle_later()

    def of_room(self, model: str, on_room: Callable[[T | ServingError], None]) -> Callable[[T | ServingError], None]:
        """Wraps the callback of a wait for room, so that an error is noted."""

        def given_room(given: T | ServingError) -> None:
            if isinstance(given, ServingError):
                self.note(model, Refusal.REQUEST_ROOM)
            on_room(given)

        return given_room

    def close(self) -> None:
        """Writes the last line to the log."""
        if self._timer is not None:
            self._timer.cancel()
        if (due_ns := self._log.due_ns) is not None:
            self._log.settle(due_ns)

    def _settle_later(self) -> None:
        due_ns = self._log.due_ns
        if self._timer is None and due_ns is not None:
            self._timer = self._loop.call_later(max(0, due_ns - time.monotonic_ns()) / 1e9, self._settle)

    def _settle(self) -> None:
        self._timer = None
        self._log.settle(time.monotonic_ns())
        self._settle_later()
