"""Counters that all fronts share when they decide which requests to trace.

Each is an eventfd in semaphore mode. The supervisor makes it and sends it to the fronts; each read takes one, atomically and
without waiting, and nobody has to ask anybody.
"""

from __future__ import annotations

import os

#: The most requests that a front passes over for one look at the shared counter: a front that is asked seldom keeps no more back.
_MAX_BLOCK = 64


class TraceBudget:
    """Counts the traces that may still be taken. It owns its descriptor."""

    def __init__(self, fd: int) -> None:
        """Takes over a descriptor that ``create`` made in another process."""
        self.fd = fd

    @classmethod
    def create(cls, count: int) -> TraceBudget:
        """Makes a counter of ``count`` traces, below 2^32."""
        return cls(os.eventfd(count, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def take(self) -> bool:
        """Takes one trace off. Returns False if none is left."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True

    def remaining(self) -> int:
        """Returns how many traces are left, without taking any (proc(5), fdinfo of an eventfd)."""
        with open(f"/proc/self/fdinfo/{self.fd}") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name == "eventfd-count":
                    return int(value, 16)
        return 0

    def close(self) -> None:
        """Closes the descriptor; call it once."""
        os.close(self.fd)


class SampleCounter:
    """Samples one request in every ``rate``. It owns its descriptor.

    The counter holds blocks of requests that are passed over before the next one is traced. A front takes a block, and passes
    over that many requests without asking anybody; the request for which there is no block left is traced, and puts them back for
    the next round. When two fronts find none at the same moment both are traced, and so many more are passed over then: over time
    it is one in ``rate``, however the requests are shared out.
    """

    def __init__(self, fd: int, rate: int) -> None:
        """Takes over a descriptor that ``create`` made in another process with the same ``rate``, at least 1."""
        self.fd = fd
        self._block = _block(rate)
        #: Requests between two traced ones: so many whole blocks, and a rest that the front of the first one passes over.
        self._blocks, self._rest = divmod(rate - 1, self._block)
        #: Requests that are passed over before the counter is asked again.
        self.passes = self._rest

    @classmethod
    def create(cls, rate: int) -> SampleCounter:
        """Makes a counter with ``rate`` from 1 to 2^32 - 1; the first request sampled is the one with this number."""
        blocks = (rate - 1) // _block(rate)
        return cls(os.eventfd(blocks, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC), rate)

    def take(self) -> bool:
        """Counts a request. Returns whether it is sampled."""
        if self.passes:
            self.passes -= 1
            return False
        if not self._blocks:
            return True
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            os.eventfd_write(self.fd, self._blocks)
            self.passes = self._rest
            return True
        self.passes = self._block - 1
        return False

    def close(self) -> None:
        """Closes the descriptor; call it once."""
        os.close(self.fd)


def _block(rate: int) -> int:
    """Returns how many requests a front passes over for each system call: few enough that fronts share a round."""
    return min(_MAX_BLOCK, max(1, rate // 8))
