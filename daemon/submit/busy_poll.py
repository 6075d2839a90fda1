"""A front that does not sleep while the answers of a few requests are about to come.

A process that sleeps on an idle processor takes tens of microseconds to wake up, and whoever wakes it pays as well. With a few
requests in flight every record would meet a sleeping front: its loop goes on turning instead, for a moment after each flush, and
gives the processor away in each turn. With many in flight there is always something to do; with slow models it does not pay,
which ``shm.spin`` finds out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sized
from time import monotonic_ns
from typing import TypeVar

from shm.spin import Spin

#: Four connections gain from it; sixteen keep a front busy by themselves.
_FEW = 4

T = TypeVar("T")


class BusyPoll:
    """One per front. ``in_flight``: the requests that are; ``limit_ns`` 0: it always sleeps."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_ns: int, in_flight: Sized) -> None:
        self._loop = loop
        self._spin = Spin(limit_ns)
        self._in_flight = in_flight
        self._until_ns = 0
        self._turning = False

    def flushed(self) -> None:
        """Requests were sent: the loop does not sleep for a moment, or until they are answered."""
        if 0 < len(self._in_flight) <= _FEW:
            self._until_ns = self._spin.begin(monotonic_ns())
            if self._until_ns and not self._turning:
                self._turning = True
                self._loop.call_soon(self._turn)

    def look(self, receive: Callable[[T], bool], worker: T) -> None:
        """The only request in flight was sent: for a moment nothing but the answer of its worker is looked for.

        receive: takes it if it is there; False: it cannot come.
        """
        until_ns = self._spin.begin(monotonic_ns())
        while until_ns and monotonic_ns() < until_ns and len(self._in_flight) == 1 and receive(worker):
            os.sched_yield()

    def answered(self) -> None:
        """Answers came; call before they are counted as such."""
        if len(self._in_flight) <= _FEW:
            self._spin.end(monotonic_ns())

    def _turn(self) -> None:
        # The callback is what keeps the loop from sleeping: it looks at every descriptor between two of them.
        if 0 < len(self._in_flight) <= _FEW and monotonic_ns() < self._until_ns:
            os.sched_yield()
            self._loop.call_soon(self._turn)
        else:
            self._turning = False

    def __repr__(self) -> str:
        return f"<BusyPoll {self._spin!r}{', turning' if self._turning else ''}>"
