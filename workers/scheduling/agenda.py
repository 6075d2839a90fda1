"""Tells a loop which parts to ask in an iteration: one heap of due times, and one list of parts that have work.

    put(part, when)   ─▶ heap ─the time has come─▶ take ─▶ the loop asks the part, which says when it is due next
    wake(part)        ─▶ list ─────at once───────▶

A part is whatever the loop knows how to ask. One that is in neither is not asked, so models without requests cost nothing. A part
has one due time: another one replaces it, and entries of the heap that do not hold any more are passed over. Pure.
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
    """Due times and pending work of a loop's parts; each loop has one."""

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
        """Has a part asked in the next iteration, which begins at once."""
        self.woken[part] = None

    def put(self, part: P, when_ns: int) -> None:
        """Sets a part's due time; ``NEVER``: it is asked only once it is woken."""
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
        """Removes and returns the parts to ask: those that have work, then those whose time has come, the earliest first.

        None of them is due any more, until it says when.
        """
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
        """Removes stale entries: from the front of the heap, and all of them where they are the majority."""
        heap, due = self._heap, self._due
        if len(heap) > 4 * len(due) + 64:
            self._heap = heap = [entry for entry in heap if due.get(entry[2]) == entry[0]]
            heapq.heapify(heap)
        while heap and due.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        self.due_ns = heap[0][0] if heap else NEVER

    def check_invariants(self) -> None:
        """Asserts, for tests, that every due time is in the heap, and that the first one is known."""
        entries = {(when_ns, part) for when_ns, _, part in self._heap}
        assert all((when_ns, part) in entries for part, when_ns in self._due.items())
        assert self.due_ns == min(self._due.values(), default=NEVER)

    def __repr__(self) -> str:
        return f"<Agenda {len(self.woken)} have work, {len(self._due)} are due later>"
