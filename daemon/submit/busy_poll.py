"""Makes a front poll its lanes for answers for a short time before it sleeps, which saves the time to wake the process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from time import monotonic_ns
from typing import TypeVar

from tensord.shm.spin import Spin

#: Four connections gain from it; sixteen keep a front busy by themselves.
_FEW = 4
#: The number of requests, one after the other, that shows a client which waits for each.
_MANY = 16

T = TypeVar("T")


class BusyPoll:
    """Makes a front's event loop poll for answers instead of sleeping, while only a few requests are in flight.

    ``spin``: decides how long the front polls before it sleeps. ``in_flight``: the requests in flight.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, spin: Spin, in_flight: Sized) -> None:
        self._loop = loop
        self._spin = spin
        self._in_flight = in_flight
        self._until_ns = 0
        #: Requests that were the only one since there were several.
        self._lone = 0
        self._turning = False

    def flushed(self) -> None:
        """Makes the front poll briefly for answers, if one to four requests are in flight. Call it after sending requests."""
        if count := len(self._in_flight):
            self._lone = 0
            if count <= _FEW:
                self._begin()

    def look(self, ready: Callable[[int], object], receive: Callable[[T], bool], worker: T) -> None:
        """Makes a front poll for a short time for the answer to the only request in flight.

        Either polls the lane of ``worker`` and then returns, or returns at once and makes the event loop poll afterwards.
        Args:
          ready: takes a timeout in ms, and returns a true value if the lane of the worker can be read.
          receive: reads from the lane. Returns whether the lane is open and ``worker`` has a request left to answer.
        """
        self._lone += 1
        if self._lone < _MANY:
            return self._begin()
        until_ns = self._spin.begin(now_ns := monotonic_ns())
        while now_ns < until_ns:
            if ready(0) and not (receive(worker) and len(self._in_flight) == 1):
                return None
            now_ns = self._spin.give_way()
        return None

    def _begin(self) -> None:
        self._until_ns = self._spin.begin(monotonic_ns())
        if self._until_ns and not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)

    def answered(self) -> None:
        """Notes how long the front has waited for the answers that it has just read.

        Call it while the answered requests are still in the instance's ``in_flight``.
        """
        if len(self._in_flight) <= _FEW:
            self._spin.end(monotonic_ns())

    def _turn(self) -> None:
        # The callback is what keeps the loop from sleeping: it looks at every descriptor between two of them.
        if 0 < len(self._in_flight) <= _FEW and self._spin.give_way() < self._until_ns:
            self._loop.call_soon(self._turn)
        else:
            self._turning = False

    def __repr__(self) -> str:
        return f"<BusyPoll {self._spin!r}{', turning' if self._turning else ''}>"
