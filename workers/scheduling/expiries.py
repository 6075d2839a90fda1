"""Finds requests of sequences that waited too long: beyond the client's deadline, or beyond the queue timeout without a slot.

Pure. A deadline of a request that no longer waits is removed when it is reached, or once there are many of that kind.
"""

from __future__ import annotations

import heapq
from typing import Generic

from tensord.shm.errors import DeadlineExceeded, ServingError, Unavailable
from tensord.workers.scheduling.sequence import S

#: Refuses all requests of a sequence of which one has waited for a slot as long as it wants to.
TIMED_OUT = "timeout of the corresponding sequence has been expired"


class Expiries(Generic[S]):
    """The deadlines and queue timeouts of all requests in one ``SequenceTable``; ``next`` finds the requests whose time is up."""

    def __init__(self) -> None:
        #: (when, number, request): the first is the earliest.
        self._moments: list[tuple[int, int, S]] = []
        self._number = 0

    def watch(self, request: S, waiting: int) -> None:
        """Adds a request's deadline and, if its sequence has no slot, its queue timeout.

        ``waiting``: how many requests of the table wait; where the entries far outnumber them, outdated ones are removed.
        """
        moments = [request.deadline_ns] if request.deadline_ns else []
        if request.timeout_ns and request.live.slot is None:
            moments.append(request.arrived_ns + request.timeout_ns)
        for moment in moments:
            self._number += 1
            heapq.heappush(self._moments, (moment, self._number, request))
        if len(self._moments) > 4 * waiting + 64:
            self._moments = [entry for entry in self._moments if entry[2].line >= 0]
            heapq.heapify(self._moments)

    def next(self, now_ns: int) -> tuple[S, ServingError] | None:
        """Removes and returns one request whose time is up, with its error; None: there is none.

        The caller has to cancel the request's sequence.
        """
        while self._moments and self._moments[0][0] <= now_ns:
            _, _, request = heapq.heappop(self._moments)
            if request.line < 0:
                continue
            if 0 < request.deadline_ns <= now_ns:
                return request, DeadlineExceeded()
            if request.live.slot is None:
                return request, Unavailable(TIMED_OUT)
        return None

    @property
    def earliest_ns(self) -> int | None:
        """The earliest time at which ``next`` may find a request, in ns; None while none has a deadline or a timeout."""
        # Requests that wait no more are let go of, with the memory that they are in, unless one that waits is before them.
        while self._moments and self._moments[0][2].line < 0:
            heapq.heappop(self._moments)
        return self._moments[0][0] if self._moments else None

    def __len__(self) -> int:
        return len(self._moments)

    def __repr__(self) -> str:
        return f"<Expiries {len(self)} moments>"
