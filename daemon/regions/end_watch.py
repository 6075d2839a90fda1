"""When what is not ours ends: a process by its pidfd, a connection by its ``ConnectionEnd``; either becomes readable."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class EndWatch:
    """Calls back once, on the running loop, also for what has ended already. Duplicates the descriptor."""

    def __init__(self, end: int, ended: Callable[[], None]) -> None:
        self._fd = os.dup(end)
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        self.close()
        self._ended()

    def pause(self) -> None:
        """Calls nobody until ``resume``, which tells what has ended meanwhile."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        """Ends ``pause``."""
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._readable)

    def close(self) -> None:
        """Stops watching. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
