"""Tells the worker's event loop which parts, such as model versions, have work now. The event loop gets them from ``take``.

After ``wake(part)``, the next ``take`` returns ``part``. After ``put(part, when_ns)``, the first ``take`` from the time
``when_ns`` on returns ``part``. The time is forgotten at the next ``put`` for ``part``, and when ``take`` returns ``part``.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

P = TypeVar("P", bound=Hashable)
#: A due time that never comes.
NEVER = sys.maxsize


class Agenda(Generic[P]):
    """Tells the worker's loop which of its parts, such as model versions, have work now, and when others will have work."""

    __slots__ = ("_due", "_heap", "_number", "due_ns", "woken")

    def __init__(self) -> None:
        #: Parts that have work now, in the order in which they came to it.
        self.woken: dict[P, None] = {}
        #: Part -> its entry in the heap.
        self._due: dict[P, list[Any]] = {}
        #: [when, number, part]; the part is None in an outdated entry, which must not keep an unloaded model in memory.
        self._heap: list[list[Any]] = []
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
        former = self._due.get(part)
        if former is not None:
            if former[0] == when_ns:
                return
            self._forget(part)
        if when_ns != NEVER:
            self._number += 1
            entry = self._due[part] = [when_ns, self._number, part]
            heapq.heappush(self._heap, entry)
            self.due_ns = min(self.due_ns, when_ns)

    def take(self, now_ns: int) -> list[P]:
        """Removes and returns the parts that ``wake`` was called for, then the parts that ``put`` made due by ``now_ns``."""
        taken, self.woken = self.woken, {}
        if self._due:
            for part in self._due.keys() & taken:
                self._forget(part)
        while self.due_ns <= now_ns:
            part = self._heap[0][2]
            taken[part] = None
            self._forget(part)
        return list(taken)

    def _forget(self, part: P) -> None:
        self._due.pop(part)[2] = None
        # Behind the front outdated entries stay until they are the majority.
        if len(self._heap) > 4 * len(self._due) + 64:
            self._heap = list(self._due.values())
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][2] is None:
            heapq.heappop(self._heap)
        self.due_ns = self._heap[0][0] if self._heap else NEVER

    def __repr__(self) -> str:
        return f"<Agenda {len(self.woken)} have work, {len(self._due)} are due later>"
