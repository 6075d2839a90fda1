"""Waits for the next events of a worker's loop: polls for a short time before it sleeps (``tensord.shm.spin``)."""

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
    """The result of ``Poller.wait``: events of epoll, datagrams that came in, and datagrams that could not be sent yet."""

    #: File descriptor and its epoll event mask.
    events: list[tuple[int, int]]
    #: File descriptor of a lane and a datagram that was received on it, which Python has to handle.
    datagrams: list[tuple[int, Datagram]]
    #: File descriptor of a lane and a datagram of answers that its socket did not take yet.
    unsent: list[tuple[int, bytes]]


class Poller:
    """Waits for events on an epoll file descriptor. ``look_ns``: how many ns it polls before it sleeps; 0: it sleeps at once.

    The methods about lanes and requests do nothing here. The subclass ``FastPath`` answers requests while it waits.
    """

    def __init__(self, epoll: select.epoll, look_ns: int) -> None:
        self._epoll = epoll
        self._spin = Spin(look_ns)
        self._ended_ns = 0
        #: Counts events since the last idle wait that C could have answered if no request had waited in the worker.
        self.missed = 0

    def open(self, submitter: SubmitterLink[Request]) -> None:
        """Lets ``wait`` answer requests from the submitter's lane. The lane's socket must be in the poller's epoll already."""

    def close_lane(self, submitter: SubmitterLink[Request]) -> None:
        """Unregisters a submitter's lane that has ended."""

    def learn(self, version: ModelVersion, execution: Execution) -> None:
        """Lets ``wait`` answer later requests that differ from the requests of ``execution`` only in their tensor data."""

    def forget(self, submitter: SubmitterLink[Request], number: int) -> None:
        """Forgets the prepared part that ``submitter`` sent with this number, because the submitter sends a new one."""

    def forget_all(self, submitter: SubmitterLink[Request]) -> None:
        """Forgets all prepared requests of a submitter. ``wait`` does not answer them until ``learn`` is called for them."""

    def forget_gone(self) -> None:
        """Forgets everything that ``learn`` has stored. ``wait`` answers no requests until ``learn`` is called again."""

    @property
    def lane_requests(self) -> int:
        """Returns how many requests from clients' lanes ``wait`` has answered without handing them to the worker's loop."""
        return 0

    def let_pass(self, most: int, joins: bool) -> None:
        """Lets ``self.wait`` answer the next ``most`` requests from clients' lanes. Later requests go to the worker's loop.

        ``joins``: True if each request for which a client has sent a trace context must also go to the worker's loop.
        """

    def close(self) -> None:
        """Frees all data that ``wait`` needs. The caller must not call ``wait`` again."""

    def wait(self, timeout_ns: int, idle: bool, sleeps: bool = False) -> Woken:
        """Waits until there is an event or the time is up. Returns what arrived.

        Args:
          timeout_ns: how long to wait at most; 0 or less: not at all.
          idle: whether the worker has nothing else to run. If so, this method may answer requests itself.
          sleeps: whether to sleep at once, without polling before.
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
        """Polls epoll until events come or CLOCK_MONOTONIC reaches ``until_ns``. Returns the events: (descriptor, mask)."""
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
