"""Holds requests that wait for a program of their shapes, whether taken from their queue or just arrived. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

from tensord.shm.errors import Unavailable
from tensord.workers.scheduling.queue import QueueRules, Replacement, W


class ParkedRequests(Generic[W]):
    """Holds, in order, requests of equal shapes that wait until a program for these shapes is compiled.

    Of requests with the same replace key (set by clients: a newer one makes older ones obsolete) it holds only the newest.
    """

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        #: In the order in which they are queued again.
        self.requests: list[W] = []
        #: Replace key -> where the request of that key is.
        self._at: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: W) -> Replacement[W] | None:
        """Appends a request that has just arrived, or puts it into the place of the one with the same replace key.

        Returns: the discarded request and the newer one, if there were two of one replace key; ``request`` itself is discarded
        where the other one arrived later. Else None.
        Raises: Unavailable: as many requests are held as may wait in the queue.
        """
        at = self._at.get(request.replace_key)
        if at is not None:
            return self._replace(at, request)
        if len(self.requests) >= self._rules.max_size:
            raise Unavailable("Exceeds maximum queue size")
        self._append(request)
        return None

    def extend(self, batch: Iterable[W]) -> list[Replacement[W]]:
        """Adds requests taken from the queue, however many. Returns those that newer ones of the same replace key replaced."""
        replacements: list[Replacement[W]] = []
        for request in batch:
            at = self._at.get(request.replace_key)
            if at is None:
                self._append(request)
            else:
                replacements.append(self._replace(at, request))
        return replacements

    def _append(self, request: W) -> None:
        if request.replace_key or self._rules.replaces:
            self._at[request.replace_key] = len(self.requests)
        self.requests.append(request)

    def _replace(self, at: int, request: W) -> Replacement[W]:
        former = self.requests[at]
        if request.arrived_ns < former.arrived_ns:
            return Replacement(request, former)
        request.since_ns = former.since_ns
        self.requests[at] = request
        return Replacement(former, request)

    def __repr__(self) -> str:
        return f"<ParkedRequests {len(self.requests)}>"
