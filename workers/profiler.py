"""Takes a profile of a worker while it serves: jax.profiler records what XLA and its threads do, and writes it to a folder.

Only one profile is taken at a time. It is taken in a thread of its own, so requests are answered meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import jax

from tensord.shm.errors import InvalidArgument, ServingError
from tensord.workers.threads.inbox import Inbox
from tensord.workers.threads.work_thread import WorkThread

#: The longest profile: all of it is in memory before it is written.
MAX_SECONDS = 60.0


class Profiler:
    """Records profiles of this process with ``jax.profiler``. Only the thread of the worker's loop uses it."""

    def __init__(self, inbox: Inbox) -> None:
        self._thread = WorkThread("profiler", inbox)

    def take(self, seconds: float, folder: str, done: Callable[[ServingError | None], None]) -> None:
        """Records a profile for ``seconds``, writes it below ``folder``, and then calls ``done`` on the loop.

        Args:
          folder: is made if it does not exist.
          done: gets None, or an error if the profile failed.
        Raises: InvalidArgument: the time is out of bounds, or another profile is being taken.
        """
        if not 0 < seconds <= MAX_SECONDS:
            raise InvalidArgument(f"a profile of {seconds:g} s is asked for, at most {MAX_SECONDS:g} s are recorded")
        if self._thread.pending:
            raise InvalidArgument("a profile of this worker is being taken")

        def finished(outcome: Exception | None) -> None:
            if isinstance(outcome, OSError):
                done(InvalidArgument(f"'{folder}' cannot be written: {outcome.strerror or outcome}"))
            elif outcome is not None:
                done(InvalidArgument(f"the profile failed: {outcome}"))
            else:
                done(None)

        self._thread.do(lambda: _record(seconds, folder), finished)

    def __repr__(self) -> str:
        return f"<Profiler {self._thread.pending} under way>"


def _record(seconds: float, folder: str) -> None:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    jax.profiler.start_trace(folder)
    try:
        time.sleep(seconds)
    finally:
        jax.profiler.stop_trace()
