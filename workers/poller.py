"""How the worker's loop waits for its next events: it looks for a moment before it sleeps (``shm.spin``).

``workers.fast_path`` waits in the same way outside of Python, where that could be built.
"""

from __future__ import annotations

import os
import select
import time

from shm.spin import Spin


class Poller:
    """Over an epoll. ``look_ns``: how long it looks; 0: it sleeps at once."""

    def __init__(self, epoll: select.epoll, look_ns: int) -> None:
        self._epoll = epoll
        self._spin = Spin(look_ns)
        self._ended_ns = 0

    def wait(self, timeout_ns: int) -> list[tuple[int, int]]:
        """Returns when something came, or the time is up: descriptors, and what epoll says of them."""
        if timeout_ns <= 0:
            return self._epoll.poll(0)
        now_ns = time.monotonic_ns()
        until_ns = self._spin.begin(now_ns, now_ns - self._ended_ns)
        events = self._look(min(until_ns, now_ns + timeout_ns)) if until_ns else []
        if not events:
            events = self._sleep(timeout_ns / 1e9)
        self._ended_ns = time.monotonic_ns()
        self._spin.end(self._ended_ns)
        return events

    def _look(self, until_ns: int) -> list[tuple[int, int]]:
        """Looks for events without sleeping; empty when none came in time."""
        poll = self._epoll.poll
        while time.monotonic_ns() < until_ns:
            events = poll(0)
            if events:
                return events
            os.sched_yield()
        return []

    def _sleep(self, timeout: float) -> list[tuple[int, int]]:
        if timeout < 0.05:
            # epoll counts in milliseconds, queue delays are often shorter; select counts in microseconds.
            select.select([self._epoll.fileno()], [], [], timeout)
            timeout = 0
        return self._epoll.poll(timeout)
