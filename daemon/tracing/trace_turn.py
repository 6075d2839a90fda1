"""Which request is the one in so many: a counter that every front draws from, so that it counts over all of them.

It is an eventfd in semaphore mode that holds how many requests are passed over before the next one is traced. Each request
takes one, atomically and without waiting; the one that finds none is traced, and puts them back for the next round. When two
fronts find none at the same moment both are traced, and so many more are passed over then: over time it is exactly one in
``rate``.
"""

from __future__ import annotations

import os


class TraceTurn:
    """Owns its descriptor."""

    def __init__(self, fd: int, rate: int) -> None:
        """Takes the descriptor over, as it came from ``create`` in another process with the same ``rate``, at least 1."""
        self.fd = fd
        self._skipped = rate - 1

    @classmethod
    def create(cls, rate: int) -> TraceTurn:
        """``rate`` from 1 to 2^32 - 1; the first turn is that of the request with this number."""
        return cls(os.eventfd(rate - 1, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC), rate)

    def take(self) -> bool:
        """Counts a request. True: trace it."""
        if not self._skipped:
            return True
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            os.eventfd_write(self.fd, self._skipped)
            return True
        return False

    def close(self) -> None:
        """Once."""
        os.close(self.fd)
