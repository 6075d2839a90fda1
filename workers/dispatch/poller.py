"""Waits for the next events of a worker's loop: polls for a moment before it sleeps (``tensord.shm.spin``).

``tensord.workers.dispatch.fast_path`` waits in the same way outside of Python, where that could be built.
"""

from __future__ import annotations

import select
import time
from typing import NamedTuple

from tensord.shm.spin import Spin
from tensord.workers.models.execution import Execution
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.requests.request import Request
from tensord.workers.requests.submitter_link import SubmitterLink

#: A datagram of a lane that was received already: content, descriptors in it, ``recvmsg``'s flags that say what is missing.
Datagram = tuple[bytes, list[int], int]


class Woken(NamedTuple):
    """The result of a wait."""

    #: Descriptor and what epoll says of it.
    events: list[tuple[int, int]]
    #: What is Python's affair, with the lane's descriptor.
    datagrams: list[tuple[int, Datagram]]
    #: Answers that a lane would not take yet, as a datagram for each lane.
    unsent: list[tuple[int, bytes]]


class Poller:
    """Waits on an epoll. ``look_ns``: how long it polls; 0: it sleeps at once.

    The methods about lanes and requests are for pollers that serve while they wait.
    """

    def __init__(self, epoll: select.epoll, look_ns: int) -> None:
        self._epoll = epoll
        self._spin = Spin(look_ns)
        self._ended_ns = 0
        #: Counts what came, in a row, that would have been served while it waited if nothing had waited in the worker.
        self.missed = 0

    def open(self, submitter: SubmitterLink[Request]) -> None:
        """Adds a lane whose descriptor is in the epoll."""

    def close_lane(self, submitter: SubmitterLink[Request]) -> None:
        """Removes a lane that is gone."""

    def learn(self, version: ModelVersion, execution: Execution) -> None:
        """Learns answered requests, so that the next ones like them may be answered while it waits."""

    def forget(self, submitter: SubmitterLink[Request], number: int) -> None:
        """Forgets a number of a submitter, which stands for another prepared request from now on."""

    def forget_all(self, submitter: SubmitterLink[Request]) -> None:
        """Has everything of a submitter learned anew, although no table has changed."""

    @property
    def lane_requests(self) -> int:
        """The number of requests of clients' lanes that were served while it waited, ever."""
        return 0

    def close(self) -> None:
        """Releases everything that it has learned."""

    def wait(self, timeout_ns: int, idle: bool, sleeps: bool = False) -> Woken:
        """Returns when something came, or the time is up.

        Args:
          idle: nothing waits in the worker: it may serve meanwhile.
          sleeps: at once, without looking for events before.
        """
        if timeout_ns <= 0:
            return Woken(self._epoll.poll(0), [], [])
        now_ns = time.monotonic_ns()
        until_ns = self._spin.begin(now_ns, now_ns - self._ended_ns)
        events = self._look(min(until_ns, now_ns + timeout_ns)) if until_ns and not sleeps else []
        if not events:
            events = self._sleep(timeout_ns / 1e9)
        self._ended_ns = time.monotonic_ns()
        self._spin.end(self._ended_ns)
        return Woken(events, [], [])

    def _look(self, until_ns: int) -> list[tuple[int, int]]:
        """Looks for events without sleeping; empty when none came in time."""
        poll = self._epoll.poll
        now_ns = time.monotonic_ns()
        while now_ns < until_ns:
            events = poll(0)
            if events:
                return events
            now_ns = self._spin.give_way()
        return []

    def _sleep(self, timeout: float) -> list[tuple[int, int]]:
        if timeout < 0.05:
            # epoll counts in milliseconds, queue delays are often shorter; select counts in microseconds.
            select.select([self._epoll.fileno()], [], [], timeout)
            timeout = 0
        return self._epoll.poll(timeout)
