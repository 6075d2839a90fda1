"""Processes that a worker's models started, and that outlive it: they end with it.

They are found by the worker's mark (``tensord.shm.marked_processes``). A process that was given another environment, by code that
is not Python's, is not found; under a service manager or in a container that ends it as well.
"""

from __future__ import annotations

import asyncio
import logging

from tensord.shm import marked_processes
from tensord.shm.marked_processes import MARK

_log = logging.getLogger(__name__)


class Leftovers:
    """Kills what a dead worker's models have left running. One per daemon; the search runs off the event loop."""

    def __init__(self) -> None:
        self._looks: set[asyncio.Task[None]] = set()

    def end(self, worker: str, mark: str) -> None:
        """Begins to kill the processes that a dead worker's models left behind."""
        if mark:
            task = asyncio.get_running_loop().create_task(self._end(worker, mark))
            self._looks.add(task)
            task.add_done_callback(self._looks.discard)

    async def ended(self) -> None:
        """Returns when all are gone that were to be ended."""
        await asyncio.gather(*self._looks)

    async def _end(self, worker: str, mark: str) -> None:
        if count := await asyncio.to_thread(marked_processes.kill_all, f"{MARK}={mark}".encode()):
            _log.warning("%s left %d processes behind that its models had started: they are killed", worker, count)

    def __repr__(self) -> str:
        return f"<Leftovers of {len(self._looks)} workers>"
