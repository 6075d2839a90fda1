"""Runs long jobs in small steps on the event loop, so that no client waits while another client's large JSON is converted.

    iteration   | sockets | one step | sockets | one step | ...      each iteration runs one step of one job; jobs take turns

Threads would not help: the JSON libraries hold the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class Job:
    """Holds one conversion between JSON and tensors, which runs in steps."""

    _steps: Generator[None, None, Any]
    _done: Callable[[Any], None]
    _failed: Callable[[Exception], None]
    cancelled: bool = False

    def cancel(self) -> None:
        """Stops the conversion at once. Neither ``done`` nor ``failed``, which ``Conversions.run`` was given, is then called.

        After this call, the caller may free the memory from which the conversion reads and to which the conversion writes.
        """
        self.cancelled = True
        self._steps.close()

    def step(self) -> bool:
        """Runs one step of the conversion between JSON and tensors. Returns whether there are more steps.

        The last step calls ``done`` or ``failed``, which ``Conversions.run`` was given.
        """
        try:
            next(self._steps)
            return True
        except StopIteration as end:
            self._done(end.value)
        except Exception as error:
            self._failed(error)
        return False


class Conversions:
    """Runs long conversions between JSON and tensors on the event loop, one step in each iteration. Conversions take turns."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def run(
        self, steps: Generator[None, None, Any], done: Callable[[Any], None], failed: Callable[[Exception], None]
    ) -> Job:
        """Starts to run ``steps``, a conversion, and returns an object that can cancel it.

        Later ``done`` is called with what the generator returns, or ``failed`` with the exception that the generator raises.
        """
        job = Job(steps, done, failed)
        if not self._jobs:
            asyncio.get_running_loop().call_soon(self._turn)
        self._jobs.append(job)
        return job

    def _turn(self) -> None:
        job, more = self._jobs[0], False
        try:
            more = not job.cancelled and job.step()
        except Exception:
            # Whoever it was for could not take it; the others' work goes on.
            _log.exception("what was converted could not be used")
        self._jobs.popleft()
        if more:
            self._jobs.append(job)
        if self._jobs:
            asyncio.get_running_loop().call_soon(self._turn)


def at_once(steps: Generator[None, None, T]) -> T:
    """Runs all of ``steps`` now, and returns the generator's result. Call it only if the work is short."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
