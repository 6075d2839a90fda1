"""Counts the requests that a front refuses because memory, time or a worker is lacking, or because a client made a mistake.

The log gets the counts once a minute or less often.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tensord.shm.errors import ServingError
from tensord.shm.refusals import Refusal, RefusalLog

#: The reasons for which fronts refuse, in the order of their shared counters (``tensord.daemon.control.shared_counters``).
OF_FRONTS = (
    Refusal.REQUEST_ROOM,
    Refusal.BODIES,
    Refusal.IN_FLIGHT,
    Refusal.NO_WORKER,
    Refusal.NO_ANSWER,
    Refusal.ANSWERS_HELD,
    Refusal.DRAINING,
)

T = TypeVar("T")


class Refusals:
    """Counts the requests that one front refuses. Logs the counts once a minute or less often, when ``look`` is called."""

    def __init__(self, count: Callable[[Refusal], None]) -> None:
        """Starts with no request counted. ``count``: called for every request that is refused."""
        self._count = count
        self._log = RefusalLog("refused with 503")
        #: The log's lines about requests that were refused as their clients' mistakes.
        self._mistakes = RefusalLog("refused as mistakes of clients")

    def note(self, model: str, refusal: Refusal) -> None:
        """Counts a request that was refused for the reason ``refusal``.

        ``model``: the name of the model, or "" if the front does not know it.
        """
        self._count(refusal)
        self._log.note(model, refusal.value, time.monotonic_ns())

    def mistaken(self, model: str, code: str, message: str) -> None:
        """Counts a request to ``model`` that failed by a client's mistake. The count goes to the log, but into no metric.

        ``code``: the HTTP status in digits, or the name of the gRPC status. ``message``: the text of the error.
        """
        self._mistakes.note(model, code, time.monotonic_ns(), message)

    def of_room(self, model: str, on_room: Callable[[T | ServingError], None]) -> Callable[[T | ServingError], None]:
        """Returns a function that passes its argument to ``on_room``, and counts an error as a refused request to ``model``.

        ``on_room``: called with the memory for a request's tensors, or with a ServingError if the request gets no memory.
        """

        def given_room(given: T | ServingError) -> None:
            if isinstance(given, ServingError):
                self.note(model, Refusal.REQUEST_ROOM)
            on_room(given)

        return given_room

    def look(self) -> None:
        """Logs the counts of refused requests that are due. Call it about every second."""
        for log in (self._log, self._mistakes):
            log.settle(time.monotonic_ns())

    def close(self) -> None:
        """Logs the counts of refused requests that were not logged yet."""
        for log in (self._log, self._mistakes):
            if (due_ns := log.due_ns) is not None:
                log.settle(due_ns)
