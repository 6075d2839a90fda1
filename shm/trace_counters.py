"""Counters by which all fronts and workers together trace every n-th request, and no more than a given number of requests.

Each counter is an eventfd in semaphore mode. The supervisor creates the eventfd and sends it to all fronts and workers.
"""

from __future__ import annotations

import os

#: The most requests that a front passes over for one look at the shared counter: a front that is asked seldom keeps no more back.
_MAX_BLOCK = 64
#: More requests than ever come.
_ENDLESS = 1 << 62


class TraceBudget:
    """An eventfd that counts how many more requests all fronts and workers together may trace."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls, count: int) -> TraceBudget:
        """Creates a shared counter that allows ``count`` traces. ``count`` must be less than 2^32."""
        return cls(os.eventfd(count, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def take(self) -> bool:
        """Subtracts one from the number of remaining traces and returns True. If the number is already 0, returns False."""
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
        """Closes this object's file descriptor, ``fd``. Call this method only once."""
        os.close(self.fd)


class Passes:
    """Says in ``left`` how many of the next requests are not sampled for traces. Users subtract one per request."""

    __slots__ = ("left",)

    def __init__(self, left: int = _ENDLESS) -> None:
        self.left = left


class SampleCounter(Passes):
    """Selects every ``rate``-th request for tracing. All fronts and workers count requests in one shared counter."""

    __slots__ = ("_block", "_blocks", "_rest", "fd")

    def __init__(self, fd: int, rate: int) -> None:
        """Takes ownership of ``fd``, an eventfd that ``create`` made to select every ``rate``-th request."""
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
