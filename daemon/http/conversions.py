"""Large pieces of work that the event loop does in small steps, so that no client waits for another one's numbers.

    loop turn   | sockets | one step | sockets | one step | ...      one step a turn, whatever is waiting; jobs take turns

Threads would not help: the libraries that read and write JSON hold the interpreter's lock while they do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

_log = logging.getLogger(__name__)


class Job:
    """Holds one piece of work that is done in steps."""

    __slots__ = ("_done", "_failed", "_steps", "cancelled")

    def __init__(
        self,
        steps: Generator[None, None, Any],
        done: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._steps = steps
        self._done = done
        self._failed = failed
        self.cancelled = False

    def cancel(self) -> None:
        """Cancels the job: neither callback is called, and its memory may be freed."""
        self.cancelled = True
        self._steps.close()

    def step(self) -> bool:
        """Runs one step. Returns whether there is more to do."""
        try:
            next(self._steps)
            return True
        except StopIteration as end:
            self._done(end.value)
        except Exception as error:
            self._failed(error)
        return False


class Conversions:
    """Runs the jobs of one front in turn, one step of each at a time."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def run(
        self, steps: Generator[None, None, Any], done: Callable[[Any], None], failed: Callable[[Exception], None]
    ) -> Job:
        """Runs a generator step by step, then calls ``done`` with its result, or ``failed``; never before this returns."""
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
