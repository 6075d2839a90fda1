"""Room for inputs in a front's request arena, and who waits for it.

Whoever comes first is served first: nobody gets room while others wait.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from shm.arena import Arena, Lease
from shm.errors import ServingError, Unavailable

_log = logging.getLogger(__name__)

OnLease = Callable[[Lease | ServingError], None]


class ArenaSpace:
    """One per front. ``wait_seconds``: how long somebody waits at most."""

    def __init__(self, arena: Arena, wait_seconds: float) -> None:
        self._arena = arena
        self._wait_seconds = wait_seconds
        #: In order of arrival, with the time they give up.
        self._waiting: deque[tuple[float, int, OnLease]] = deque()

    def loan(self, byte_size: int) -> Lease | None:
        """None: there is none now, or others wait already.

        Raises: InvalidArgument: it could never fit.  Unavailable: the host has no memory.
        """
        return None if self._waiting else self._arena.loan(byte_size)

    def wait(self, byte_size: int, on_lease: OnLease, now: float) -> None:
        """Calls back with a lease, or with Unavailable when there was none for too long."""
        self._waiting.append((now + self._wait_seconds, byte_size, on_lease))

    def give_back(self, lease: Lease) -> None:
        """Serves who waits."""
        lease.release()
        while self._waiting:
            _, byte_size, on_lease = self._waiting[0]
            granted = self._arena.loan(byte_size)
            if granted is None:
                return
            self._waiting.popleft()
            _tell(on_lease, granted)

    def expire(self, now: float) -> bool:
        """Ends what waited too long. Returns whether somebody still waits."""
        while self._waiting and self._waiting[0][0] <= now:
            _, byte_size, on_lease = self._waiting.popleft()
            _tell(
                on_lease,
                Unavailable(
                    f"{self._arena.describe_full(byte_size)}, and none came free within {self._wait_seconds:g} s"
                ),
            )
        return bool(self._waiting)

    def __repr__(self) -> str:
        return f"<ArenaSpace {self._arena!r}, {len(self._waiting)} wait>"


def _tell(on_lease: OnLease, given: Lease | ServingError) -> None:
    """One's defect is no reason for the others to wait."""
    try:
        on_lease(given)
    except Exception:
        _log.exception("room for a request came, and could not be used")
        if isinstance(given, Lease):
            given.release()
