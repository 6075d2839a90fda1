"""The daemon's end: what asks for it, and how children are seen out of the door.

first signal     children are told to stop, and have until a deadline to finish
second signal    whatever still runs is killed at once
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from tensord.daemon.processes.child import Child

_log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """Where the daemon is in its life."""

    #: Not all first loads are settled.
    STARTING = "starting"
    #: It serves.
    SERVING = "serving"
    #: The fronts finish what they accepted; workers are still replaced for it.
    DRAINING = "draining"
    #: Everything is told to exit.
    STOPPING = "stopping"


class Shutdown:
    """Waits for deaths, of which it has to be told."""

    def __init__(self) -> None:
        #: The daemon has to stop.
        self.requested = asyncio.Event()
        #: Of the daemon.
        self.exit_status = 0
        #: Set by the second signal.
        self._hurry = asyncio.Event()
        #: Set whenever a child has died.
        self._death = asyncio.Event()

    def signalled(self) -> None:
        """SIGTERM or SIGINT came."""
        if self.requested.is_set():
            self._hurry.set()
        self.requested.set()

    def fail(self) -> None:
        """The daemon has to stop, and to say that it failed."""
        self.exit_status = 1
        self.requested.set()

    def child_died(self) -> None:
        """A child has died, and is in its owner's table no more."""
        self._death.set()

    async def finish(self, children: Mapping[int, Child], deadline_ns: int) -> None:
        """Tells them to stop; returns when all are gone, at the deadline (CLOCK_MONOTONIC), or at once in a hurry.

        Who died leaves ``children``.
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
        """Nothing outlives us: kills until none of ``children()`` is alive."""
        while alive := [child for child in children() if child.alive]:
            self._death.clear()
            for child in alive:
                child.kill()
            await self._death.wait()
