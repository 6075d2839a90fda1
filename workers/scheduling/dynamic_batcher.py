"""Decides which waiting requests of one model version run together, and when.

Pure: ``due_ns`` and ``take`` read the queue and the time they are told. The driver (``workers.worker``) runs what is taken.

    enough rows for a preferred batch, or for the largest one   due at once
    otherwise                                                    due when the head has waited ``delay_ns``
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic

from workers.scheduling.queue import RequestQueue, W


@dataclass(frozen=True, slots=True)
class BatchRules:
    """How one model version batches."""

    #: Rows in one batch; 1 for a model without a batch dimension.
    max_rows: int = 1
    #: How long the head may wait for company.
    delay_ns: int = 0
    #: Ascending; a batch of such a size runs without waiting for more.
    preferred: tuple[int, ...] = ()
    #: False: every request runs alone.
    joins: bool = True


class DynamicBatcher(Generic[W]):
    """One per model version, over its queue."""

    def __init__(self, rules: BatchRules, queue: RequestQueue[W]) -> None:
        self._rules = rules
        self._queue = queue
        #: Key -> rows, where less than ``max_rows`` can run at once (executables of that shape are compiled up to there).
        self.limits: dict[Hashable, int] = {}

    def at_once(self, key: Hashable) -> int:
        """Up to how many rows of waiting requests of that key run as soon as they can, together. 0: they wait, or run alone."""
        return self._limit(key) if self._rules.joins and not self._rules.delay_ns else 0

    @property
    def delays(self) -> bool:
        """Whether a request may wait for others to join it, although nothing runs."""
        return self._rules.joins and self._rules.delay_ns > 0

    def due_ns(self, now_ns: int) -> int | None:
        """When the next batch should run: not after ``now_ns`` means now. None: nothing waits."""
        head = self._queue.head()
        return None if head is None else self._due_ns(head, now_ns)

    def _due_ns(self, head: W, now_ns: int) -> int:
        rules = self._rules
        if not rules.delay_ns or not rules.joins or now_ns - head.arrived_ns >= rules.delay_ns:
            return head.arrived_ns
        if self._full(self._queue.rows(head.key), self._limit(head.key)):
            return head.arrived_ns
        return head.arrived_ns + rules.delay_ns

    def take(self, now_ns: int) -> list[W]:
        """Removes the next batch from the queue; empty when nothing is due."""
        head = self._queue.head()
        if head is None or self._due_ns(head, now_ns) > now_ns:
            return []
        rules = self._rules
        if not rules.joins:
            return self._queue.take(head.key, 0)
        limit = self._limit(head.key)
        if rules.preferred and now_ns - head.arrived_ns < rules.delay_ns:
            rows = self._queue.rows(head.key)
            limit = min(limit, max((size for size in rules.preferred if size <= rows), default=limit))
        return self._queue.take(head.key, limit)

    def _limit(self, key: Hashable) -> int:
        return self.limits.get(key, self._rules.max_rows)

    def _full(self, rows: int, limit: int) -> bool:
        preferred = self._rules.preferred
        return rows >= limit or (bool(preferred) and rows >= preferred[0])

    def check_invariants(self) -> None:
        """For tests."""
        self._queue.check_invariants()
        assert all(0 < limit <= self._rules.max_rows for limit in self.limits.values())

    def __repr__(self) -> str:
        return f"<DynamicBatcher over {self._queue!r}>"
