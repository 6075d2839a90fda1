"""Checks every child process regularly: kills those that exceed a time limit, and reports to the service manager's watchdog.

Time in which the supervisor itself did not run does not count: if a container or a machine is paused, its child processes are
paused too.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from tensord.config.options import Options
from tensord.daemon.processes.child import Child, FrontProcess, WorkerProcess
from tensord.daemon.processes.fronts import Fronts
from tensord.daemon.processes.notify import Notifier
from tensord.daemon.processes.worker_pool import WorkerPool
from tensord.shm.status_page import WorkerState

#: Seconds between checks.
_INTERVAL = 0.5

#: A check that is later than this was prevented by a pause.
_LATE_NS = 100_000_000
#: The number of pauses that are remembered; earlier ones count for nothing.
_MAX_PAUSES = 256


class Pauses:
    """Periods in which the supervisor did not run, found by checks that were late. Times are CLOCK_MONOTONIC in ns."""

    def __init__(self) -> None:
        #: Pauses, each from when a check was due until it was made.
        self._late: deque[tuple[int, int]] = deque(maxlen=_MAX_PAUSES)

    def looked(self, due_ns: int, now_ns: int) -> None:
        """Records a pause if the supervisor made a check at ``now_ns`` that was due more than 0.1 s earlier, at ``due_ns``."""
        if now_ns - due_ns > _LATE_NS:
            self._late.append((due_ns, now_ns))

    def within(self, since_ns: int, now_ns: int) -> int:
        """Returns for how many ns between ``since_ns`` and ``now_ns`` the supervisor did not run."""
        return sum(max(0, min(end, now_ns) - max(begin, since_ns)) for begin, end in self._late)

    def __repr__(self) -> str:
        return f"<Pauses {len(self._late)}>"


def overdue(child: Child, options: Options, now_ns: int, pauses: Pauses) -> str:
    """Returns a phrase that says which time limit a child process exceeds, or "" if it exceeds none.

    ``now_ns``: the time of CLOCK_MONOTONIC. ``pauses``: the periods that count towards no time limit.
    """

    def past(since_ns: int, limit: float) -> bool:
        return limit > 0 and now_ns - since_ns - pauses.within(since_ns, now_ns) > limit * 1e9

    if not child.ready:
        limit = options.expert.start_timeout
        return f"did not report within {limit:g} s" if past(child.started_ns, limit) else ""
    limits = options.workers
    hangs = f"has not turned its loop for {limits.idle_timeout:g} s"
    if isinstance(child, FrontProcess):
        return hangs if child.owes_since_ns and past(child.owes_since_ns, limits.idle_timeout) else ""
    if not isinstance(child, WorkerProcess) or child.page is None:
        return ""
    if child.owed and past(child.load_progress_ns, limits.load_timeout):
        return f"loads one model for more than {limits.load_timeout:g} s"
    match child.page.state:
        case WorkerState.EXECUTING, since_ns if past(since_ns, limits.execute_timeout):
            return f"executes one batch for more than {limits.execute_timeout:g} s"
        # Starting, stopping and idling end with an iteration of the loop.
        case WorkerState.IDLE | WorkerState.STARTING, _ if past(child.page.last_beat_ns, limits.idle_timeout):
            return hangs
    return ""


class Watchdog:
    """Kills child processes that exceed a time limit. ``options``: returns the daemon's options, which contain the limits."""

    def __init__(self, workers: WorkerPool, fronts: Fronts, notifier: Notifier, options: Callable[[], Options]) -> None:
        self._workers = workers
        self._fronts = fronts
        self._notifier = notifier
        self._options = options
        self._pauses = Pauses()

    async def run(self) -> None:
        """Checks all child processes every 0.5 s, and kills those that exceed a time limit.

        After a check in which no process exceeded a limit, the service manager's watchdog is told that the daemon is alive.
        """
        fed, due_ns = 0.0, time.monotonic_ns()
        while True:
            now_ns = time.monotonic_ns()
            self._pauses.looked(due_ns, now_ns)
            well = True
            self._fronts.ask_idle(now_ns, int(self._options().workers.idle_timeout * 1e9 / 3))
            for child in [*self._workers, *self._fronts]:
                if reason := overdue(child, self._options(), now_ns, self._pauses):
                    well = False
                    child.kill(reason)
            interval = self._notifier.watchdog_interval
            if interval and well and now_ns / 1e9 - fed >= min(interval, 5.0):
                self._notifier.alive()
                fed = now_ns / 1e9
            seconds = min(_INTERVAL, interval or _INTERVAL)
            due_ns = time.monotonic_ns() + int(seconds * 1e9)
            await asyncio.sleep(seconds)
