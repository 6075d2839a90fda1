"""Counters that all fronts share, to decide which requests are traced.

Each counter is an eventfd in semaphore mode, which the supervisor creates and sends to the fronts. Each read subtracts one,
atomically and without waiting.
"""

from __future__ import annotations

import os

#: The most requests that a front passes over for one look at the shared counter: a front that is asked seldom keeps no more back.
_MAX_BLOCK = 64
#: More requests than ever come.
_ENDLESS = 1 << 62


class TraceBudget:
    """An eventfd that counts how many more requests all fronts together may trace."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls, count: int) -> TraceBudget:
        """Creates a shared counter that allows ``count`` traces. ``count`` must be less than 2^32."""
        return cls(os.eventfd(count, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def take(self) -> bool:
        """Subtracts one from the traces that are left. Returns False if none is left."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True

    def remaining(self) -> int:
        """Returns how many traces may still be taken."""
        with open(f"/proc/self/fdinfo/{self.fd}") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name == "eventfd-count":
                    return int(value, 16)
        return 0

    def close(self) -> None:
        """Closes the eventfd. Call it only once."""
        os.close(self.fd)


class Passes:
    """A countdown. ``left`` is how many further requests are certain not to be traced."""

    __slots__ = ("left",)

    def __init__(self, left: int = _ENDLESS) -> None:
        self.left = left


class SampleCounter(Passes):
    """Selects every ``rate``-th request for tracing. All fronts count their requests in one shared counter."""

    __slots__ = ("_block", "_blocks", "_rest", "fd")

    def __init__(self, fd: int, rate: int) -> None:
        """Takes ownership of ``fd``, the eventfd of a counter that ``create`` made with the same ``rate``."""
        self.fd = fd
        self._block = _block(rate)
        #: Requests between two traced ones: so many whole blocks, and a rest that the front of the first one passes over.
        # Two fronts that find no block left at once both trace a request and add all blocks, so that the rate is kept over time.
        self._blocks, self._rest = divmod(rate - 1, self._block)
        super().__init__(self._rest)

    @classmethod
    def create(cls, rate: int) -> SampleCounter:
        """Makes a shared counter that selects every ``rate``-th request for tracing. ``rate`` is from 1 to 2^32 - 1."""
        blocks = (rate - 1) // _block(rate)
        return cls(os.eventfd(blocks, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC), rate)

    def take(self) -> bool:
        """Counts one request. Returns whether to trace this request."""
        if self.left:
            self.left -= 1
            return False
        if not self._blocks:
            return True
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            os.eventfd_write(self.fd, self._blocks)
            self.left = self._rest
            return True
        self.left = self._block - 1
        return False

    def close(self) -> None:
        """Closes the counter's file descriptor. Call it only once."""
        os.close(self.fd)


def _block(rate: int) -> int:
    # So many requests a front counts by itself, before it looks at the shared counter again.
    return min(_MAX_BLOCK, max(1, rate // 8))
