"""Counters that every front draws from when it decides about a trace, so that they count over all fronts.

Each is an eventfd in semaphore mode. The supervisor makes it and sends it to the fronts; each read takes one, atomically and
without waiting, and nobody has to ask anybody.
"""

from __future__ import annotations

import os


class TraceBudget:
    """How many traces may still be taken. Owns its descriptor."""

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over, as it came from ``create`` in another process."""
        self.fd = fd

    @classmethod
    def create(cls, count: int) -> TraceBudget:
        """``count`` below 2^32."""
        return cls(os.eventfd(count, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def take(self) -> bool:
        """One trace less. False: none is left."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True

    def remaining(self) -> int:
        """What is left now, without taking any (proc(5), fdinfo of an eventfd)."""
        with open(f"/proc/self/fdinfo/{self.fd}") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name == "eventfd-count":
                    return int(value, 16)
        return 0

    def close(self) -> None:
        """Once."""
        os.close(self.fd)


class TraceTurn:
    """Which request is the one in so many. Owns its descriptor.

    The counter holds how many requests are passed over before the next one is traced. Each request takes one; the one that finds
    none is traced, and puts them back for the next round. When two fronts find none at the same moment both are traced, and so
    many more are passed over then: over time it is exactly one in ``rate``.
    """

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
