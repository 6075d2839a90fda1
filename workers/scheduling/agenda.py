"""Tells the worker's event loop which parts, such as model versions, have work now. The event loop gets them from ``take``.

After ``wake(part)``, the next ``take`` returns ``part``. After ``put(part, when_ns)``, the first ``take`` from the time
``when_ns`` on returns ``part``. The time is forgotten at the next ``put`` for ``part``, and when ``take`` returns ``part``.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Hashable
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)
#: A due time that never comes.
NEVER = sys.maxsize


class Agenda(Generic[P]):
    """Tells the worker's loop which of its parts, such as model versions, have work now, and when others will have work."""

    __slots__ = ("_due", "_heap", "_number", "due_ns", "woken")

    def __init__(self) -> None:
        #: Parts that have work now, in the order in which they came to it.
        self.woken: dict[P, None] = {}
        self._due: dict[P, int] = {}
        #: (when, number, part); an entry holds while ``_due`` says the same.
        self._heap: list[tuple[int, int, P]] = []
        self._number = 0
        #: When the first part in the heap is due.
        self.due_ns = NEVER

    def wake(self, part: P) -> None:
        """Makes the next ``take`` return ``part``. The worker's event loop does not wait for events before this ``take``."""
        self.woken[part] = None

    def put(self, part: P, when_ns: int) -> None:
        """Makes ``take`` return ``part`` at the time ``when_ns``, and no longer at the time of an earlier call for ``part``.

        If ``when_ns`` is ``NEVER``, ``take`` returns ``part`` only after ``wake(part)``.
        """
        former_ns = self._due.get(part, NEVER)
        if former_ns == when_ns:
            return
        if when_ns == NEVER:
            del self._due[part]
        else:
            self._due[part] = when_ns
            self._number += 1
            heapq.heappush(self._heap, (when_ns, self._number, part))
            if when_ns < self.due_ns:
                self.due_ns = when_ns
        if former_ns != NEVER:
            self._clean()

    def take(self, now_ns: int) -> list[P]:
        """Removes and returns the parts that ``wake`` was called for, then the parts that ``put`` made due by ``now_ns``."""
        taken, self.woken = self.woken, {}
        if self._due and not self._due.keys().isdisjoint(taken):
            for part in taken:
                self._due.pop(part, None)
            self._clean()
        while self.due_ns <= now_ns:
            _, _, part = heapq.heappop(self._heap)
            del self._due[part]
            taken[part] = None
            self._clean()
        return list(taken)

    def _clean(self) -> None:
        """Sets ``due_ns`` to the earliest time in ``_due``. Removes outdated entries from the front of ``_heap``.

        If most entries of ``_heap`` are outdated, removes all of these.
        """
        heap, due = self._heap, self._due
        # Behind the front outdated entries stay until they are the majority.
        if len(heap) > 4 * len(due) + 64:
            self._heap = heap = [entry for entry in heap if due.get(entry[2]) == entry[0]]
            heapq.heapify(heap)
        while heap and due.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        self.due_ns = heap[0][0] if heap else NEVER

    def check_invariants(self) -> None:
        """Asserts, for tests, that the attributes of this agenda agree with each other."""
        entries = {(when_ns, part) for when_ns, _, part in self._heap}
        assert all((when_ns, part) in entries for part, when_ns in self._due.items())
        assert self.due_ns == min(self._due.values(), default=NEVER)

    def __repr__(self) -> str:
        return f"<Agenda {len(self.woken)} have work, {len(self._due)} are due later>"
