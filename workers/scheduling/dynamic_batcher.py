"""Decides which waiting requests of one model version run together in a batch, and when.

Only requests with equal batching keys share a batch. A batch consists of the first requests in the queue that have one key.

If there is no delay (``delay_ns`` is 0), a batch is due as soon as a request waits. If there is a delay, the requests of a key
wait for more requests with that key. A batch of these requests is then due:

    at once, if the first of them together have exactly a preferred number of rows
    at once, if at least the largest preferred number of rows waits
    when the oldest of them has waited ``delay_ns``, in all other cases

In the first two cases, and if there is no delay, the batch has the largest preferred number of rows that the first requests
have exactly. If they have none exactly, and in the third case, as many requests as fit run together.

If no number of rows is preferred, the largest number of rows in a batch counts as the preferred number.

Keys do not wait for each other: a full batch runs even if an older request with another key still waits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tensord.workers.scheduling.planner import RUN, Decision, QueuePlanner, Refuse, WaitUntil
from tensord.workers.scheduling.queue import RequestQueue, W, shapes_of


@dataclass(frozen=True, slots=True)
class BatchRules:
    """The limits of the batches of one model version: rows, preferred sizes, and how long requests may wait for others."""

    #: Rows in one batch; 1 for a model without a batch dimension.
    max_rows: int = 1
    #: How long the oldest request may wait for company.
    delay_ns: int = 0
    #: Ascending sizes of batches that run without waiting for more. Empty: the largest one.
    preferred: tuple[int, ...] = ()
    #: False: every request runs alone.
    joins: bool = True


class Company(NamedTuple):
    """When waiting requests run as a batch: once they have ``full`` rows in total, or the oldest has waited ``delay_ns``."""

    #: How long the oldest request may wait.
    delay_ns: int
    #: The number of rows that do not wait for more, and run without what is more.
    full: int
    #: Rows that run together once the oldest request has waited so long.
    most: int


class DynamicBatcher(QueuePlanner[W]):
    """Makes batches of the requests in one queue. Delays requests to fill batches, as ``BatchRules`` allow."""

    def __init__(self, rules: BatchRules, queue: RequestQueue[W]) -> None:
        super().__init__(queue)
        self._rules = rules
        self._preferred = frozenset(rules.preferred)
        #: True if a request may wait for others to join it, although nothing runs.
        self.delays = rules.joins and rules.delay_ns > 0
        #: True if batches that are not delayed end at preferred sizes.
        self._cuts = rules.joins and not rules.delay_ns and bool(rules.preferred)
        #: Key -> rows, where less than ``max_rows`` can run at once (executables of that shape are compiled up to there).
        self._limits: dict[Hashable, int] = {}
        #: Where there is a delay: key -> when its next batch is due; ``_look`` updates it for keys that have changed.
        self._due: dict[Hashable, int] = {}
        self._changed: dict[Hashable, None] = {}
        if self.delays:
            queue.changed = self._changed

    def at_once(self, key: Hashable) -> Sequence[range]:
        if not self._rules.joins or self._rules.delay_ns:
            return ()
        limit = self._limit(key)
        # Between two preferred sizes what is more than the smaller one stays.
        smallest, *larger = [min(size, limit) for size in self._rules.preferred or (limit,)]
        return [range(1, smallest + 1), *(range(size, size + 1) for size in larger)]

    def company(self, key: Hashable) -> Company | None:
        """Returns the waiting time and the number of rows at which waiting requests run as one batch.

        ``key``: the requests' batching key. Returns None if requests are not delayed, or if several batch sizes are preferred.
        """
        preferred, limit = self._rules.preferred, self._limit(key)
        if not self.delays or len(preferred) > 1:
            return None
        return Company(self._rules.delay_ns, min([*preferred, limit]), limit)

    def end_delays(self) -> None:
        self.delays = False
        self._queue.changed = None

    def limit(self, key: Hashable, rows: int) -> None:
        if rows:
            self._limits[key] = rows
        else:
            self._limits.pop(key, None)
        if self.delays:
            self._changed[key] = None

    def decide(self, now_ns: int, instance: int = 0) -> Decision[W]:
        # As ``Planner.decide``, which asks three others for what is at hand here.
        expires_ns = self._queue.expiries.earliest_ns
        if 0 < expires_ns <= now_ns:
            return Refuse(self.tick(now_ns))
        due_ns = self.due_ns()
        if due_ns is None:
            return None
        if due_ns <= now_ns:
            return RUN
        return WaitUntil(min(due_ns, expires_ns or due_ns))

    def due_ns(self, instance: int = 0) -> int | None:
        if self.delays:
            self._look()
            return min(self._due.values(), default=None)
        head = self._queue.head()
        return None if head is None else head.since_ns

    def take(self, now_ns: int, instance: int = 0) -> list[W]:
        if self.delays:
            return self._take_due(now_ns)
        head = self._queue.head()
        if head is None:
            return []
        rows = self._limit(head.key) if self._rules.joins else 0
        return self._queue.take(head.key, (self._ready_rows(head.key) or rows) if self._cuts else rows)

    def _take_due(self, now_ns: int) -> list[W]:
        self._look()
        due = [key for key, due_ns in self._due.items() if due_ns <= now_ns]
        if not due:
            return []
        key = due[0] if len(due) == 1 else min(due, key=self._urgency)
        waited = now_ns - self._queue.oldest_ns(key) >= self._rules.delay_ns
        return self._queue.take(key, self._limit(key) if waited else self._ready_rows(key))

    def _look(self) -> None:
        while self._changed:
            key, _ = self._changed.popitem()
            if not self._queue.rows(key):
                self._due.pop(key, None)
                continue
            oldest_ns = self._queue.oldest_ns(key)
            self._due[key] = oldest_ns if self._ready_rows(key) else oldest_ns + self._rules.delay_ns

    def _ready_rows(self, key: Hashable) -> int:
        limit, preferred = self._limit(key), self._rules.preferred
        largest = min(preferred[-1], limit) if preferred else limit
        if self._queue.rows(key) < (preferred[0] if preferred and preferred[0] < largest else largest):
            return 0
        rows = best = 0
        for request in self._queue.waiting(key):
            if rows and rows + request.rows > largest:
                return best or rows
            rows += request.rows
            if rows >= largest:
                return rows
            if rows in self._preferred:
                best = rows
        return best

    def _urgency(self, key: Hashable) -> tuple[int, int]:
        first = next(self._queue.waiting(key))
        return first.line, first.sequence

    def _limit(self, key: Hashable) -> int:
        return self._limits.get(shapes_of(key), self._rules.max_rows) if self._limits else self._rules.max_rows

    def __repr__(self) -> str:
        return f"<DynamicBatcher over {self._queue!r}>"
