"""When a process that is no child of ours ends: its pidfd becomes readable."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class ProcessWatch:
    """Calls back once, on the running loop, also for a process that has ended already. Duplicates the descriptor."""

    def __init__(self, process: int, ended: Callable[[], None]) -> None:
        self._fd = os.dup(process)
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        self.close()
        self._ended()

    def close(self) -> None:
        """Stops watching. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
