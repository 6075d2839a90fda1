"""Looks at every child again and again: kills those that overran their time, and feeds the service manager's watchdog."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tensord.config.options import Options
from tensord.daemon.processes import watch
from tensord.daemon.processes.fronts import Fronts
from tensord.daemon.processes.notify import Notifier
from tensord.daemon.processes.worker_pool import WorkerPool

#: Between looks.
_INTERVAL = 0.5


class Watchdog:
    """One per daemon. ``options()`` are those in force."""

    def __init__(self, workers: WorkerPool, fronts: Fronts, notifier: Notifier, options: Callable[[], Options]) -> None:
        self._workers = workers
        self._fronts = fronts
        self._notifier = notifier
        self._options = options
        self._pauses = watch.Pauses()

    async def run(self) -> None:
        """Until it is cancelled. The service manager hears that the daemon is well while no child is overdue."""
        fed, due_ns = 0.0, time.monotonic_ns()
        while True:
            now_ns = time.monotonic_ns()
            self._pauses.looked(due_ns, now_ns)
            overdue = False
            self._fronts.ask_idle(now_ns, int(self._options().workers.idle_timeout * 1e9 / 3))
            for child in [*self._workers, *self._fronts]:
                if reason := watch.overdue(watch.snapshot(child), self._options(), now_ns, self._pauses):
                    overdue = True
                    child.kill(reason)
            interval = self._notifier.watchdog_interval
            if interval and not overdue and now_ns / 1e9 - fed >= min(interval, 5.0):
                self._notifier.alive()
                fed = now_ns / 1e9
            seconds = min(_INTERVAL, interval or _INTERVAL)
            due_ns = time.monotonic_ns() + int(seconds * 1e9)
            await asyncio.sleep(seconds)
