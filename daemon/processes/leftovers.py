"""Processes that a worker's models started, and that outlive it: they end with it.

Each worker has a mark in its environment, which what it starts inherits, whatever becomes of parents, groups and sessions. A
process that was given another environment is not found; under a service manager or in a container that ends it as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time

_log = logging.getLogger(__name__)
#: In the environment of a worker.
MARK = "_TENSORD_MARK"
#: Looks for those that were started while one looked.
_MAX_LOOKS = 20
_INTERVAL = 0.02


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
        if count := await asyncio.to_thread(_kill_all, f"{MARK}={mark}".encode()):
            _log.warning("%s left %d processes behind that its models had started: they are killed", worker, count)

    def __repr__(self) -> str:
        return f"<Leftovers of {len(self._looks)} workers>"


def _kill_all(variable: bytes) -> int:
    """Kills those with that variable until there is none. Returns how many there were."""
    killed: set[int] = set()
    for _ in range(_MAX_LOOKS):
        found = [pid for name in os.listdir("/proc") if name.isdigit() and _kill_if(pid := int(name), variable)]
        if not found:
            break
        killed.update(found)
        time.sleep(_INTERVAL)
    return len(killed)


def _kill_if(pid: int, variable: bytes) -> bool:
    """Kills a process that has the variable in its environment. Returns whether it had."""
    try:
        # Held before it is looked at: its number may be another's by the time that it is killed.
        process = os.pidfd_open(pid)
    except OSError:
        return False  # it is gone
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            # One that has ended, and that nobody has waited for, has none.
            if variable not in file.read().split(b"\0"):
                return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        return True
    except OSError:
        return False  # it is gone, or somebody else's
    finally:
        os.close(process)
