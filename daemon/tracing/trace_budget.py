"""How many traces may still be taken: a counter that every front draws from, so that the number is exact.

It is an eventfd in semaphore mode. The supervisor makes it and sends it to the fronts; each read takes one, atomically and
without waiting, and nobody has to ask anybody.
"""

from __future__ import annotations

import os


class TraceBudget:
    """Owns its descriptor."""

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
