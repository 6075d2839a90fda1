"""Shuts the daemon down: after a first signal, child processes may finish until a deadline; at a second one they are killed."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from tensord.daemon.processes.child import Child

_log = logging.getLogger(__name__)


class DaemonPhase(enum.Enum):
    """Names the phases of the daemon's life."""

    #: Some first loads are not settled.
    STARTING = "starting"
    #: The daemon serves.
    SERVING = "serving"
    #: The fronts finish what they accepted; workers are still replaced for it.
    DRAINING = "draining"
    #: All children are asked to exit.
    STOPPING = "stopping"


class Shutdown:
    """Knows whether the daemon has to stop, and waits until its child processes are dead."""

    def __init__(self) -> None:
        #: Set when the daemon has to stop.
        self.requested = asyncio.Event()
        #: The daemon's exit status.
        self.exit_status = 0
        #: Set by the second signal.
        self._hurry = asyncio.Event()
        #: Set whenever a child has died.
        self._death = asyncio.Event()

    def signalled(self) -> None:
        """Notes a SIGTERM or SIGINT. The first signal stops the daemon. At the second signal, child processes are killed."""
        if self.requested.is_set():
            self._hurry.set()
        self.requested.set()

    def fail(self) -> None:
        """Asks the daemon to stop and to exit with status 1."""
        self.exit_status = 1
        self.requested.set()

    def child_died(self) -> None:
        """Tells ``finish`` and ``bury``, which wait until all child processes are dead, that a child process has died."""
        self._death.set()

    async def hurried(self, seconds: float) -> None:
        """Waits for ``seconds``, or until a second SIGTERM or SIGINT asks for a fast stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    async def finish(self, children: Mapping[int, Child], deadline_ns: int) -> None:
        """Asks the processes in ``children`` to stop, and waits until this mapping is empty.

        The wait also ends at ``deadline_ns``, a time of CLOCK_MONOTONIC, and when a second SIGTERM or SIGINT comes.
        ``children``: processes by number. Whoever removes a dead process from this mapping must then call ``child_died``.
        """
        for child in children.values():
            child.stop(deadline_ns - time.monotonic_ns())
        hurry = asyncio.ensure_future(self._hurry.wait())
        while children and not hurry.done():
            self._death.clear()
            left = (deadline_ns - time.monotonic_ns()) / 1e9
            if left <= 0:
                _log.warning(
                    "stopping: %s did not finish in time", ", ".join(child.name for child in children.values())
                )
                break
            death = asyncio.ensure_future(self._death.wait())
            await asyncio.wait((death, hurry), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            death.cancel()
        hurry.cancel()

    async def bury(self, children: Callable[[], Iterable[Child]]) -> None:
        """Kills the processes that ``children`` returns until none is alive.

        Calls ``children`` again after each death, because new processes may have started.
        """
        while alive := [child for child in children() if child.alive]:
            self._death.clear()
            for child in alive:
                child.kill()
            await self._death.wait()
