"""Keeps a front's process awake while the answers of a few requests are about to come.

A process that sleeps on an idle processor takes tens of microseconds to wake up, and the process that wakes it pays as well. With
a few requests in flight every answer would find the front asleep. So its loop keeps running for a moment after each flush, and
gives the processor away in each iteration. With many requests in flight there is always something to do; with slow models polling
does not pay, which ``tensord.shm.spin`` finds out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from time import monotonic_ns
from typing import TypeVar

from tensord.shm.spin import Spin

#: Four connections gain from it; sixteen keep a front busy by themselves.
_FEW = 4
#: So many requests, one after the other, are one client's that waits for each.
_MANY = 16

T = TypeVar("T")


class BusyPoll:
    """Keeps a front's event loop awake while answers are about to come, because waking up costs more than polling.

    Args:
      spin: decides how long polling pays.
      in_flight: the requests in flight.
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
        """Called after requests were sent: keeps the event loop awake for a moment, or until all requests are answered.

        Does nothing if many requests are in flight.
        """
        if count := len(self._in_flight):
            self._lone = 0
            if count <= _FEW:
                self._begin()

    def look(self, ready: Callable[[int], object], receive: Callable[[T], bool], worker: T) -> None:
        """Polls for a moment for the answer to the only request in flight, which was sent just now.

        If other requests were in flight lately, keeps the loop awake instead: a request or a connection may come meanwhile.

        Args:
          ready: returns whether an answer comes within so many milliseconds (``SubmitterLane.ready``).
          receive: receives answers from ``worker``; returns False if the answer has come, or can come no more.
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
        """Reports to ``spin`` that answers have arrived, so that it learns how long polling pays.

        Call it before their requests are removed from ``in_flight``.
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
