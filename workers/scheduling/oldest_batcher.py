"""Triton's strategy "oldest": the requests of all sequences with a slot share batches, whichever waits longest first.

Pure. At most one request of a sequence is in here at a time; they are batched as those of a model without sequences are
(``tensord.workers.scheduling.dynamic_batcher``).
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Generic

from tensord.workers.scheduling.dynamic_batcher import BatchRules, DynamicBatcher
from tensord.workers.scheduling.queue import QueueRules, RequestQueue
from tensord.workers.scheduling.sequence import LiveSequence, S

#: The bound is on all that wait, in the table of sequences.
_UNBOUNDED = QueueRules(sys.maxsize)


class OldestBatcher(Generic[S]):
    """One for each instance."""

    def __init__(self, rules: BatchRules) -> None:
        self._queue: RequestQueue[S] = RequestQueue(_UNBOUNDED)
        self._batcher = DynamicBatcher(rules, self._queue)

    def ready(self, live: LiveSequence[S]) -> None:
        """The first waiting request of that sequence may run."""
        self._queue.push(live.waiting[0])

    def withdraw(self, live: LiveSequence[S]) -> None:
        """It may not any more."""
        self._queue.remove(live.waiting[0])

    def limit(self, key: Hashable, rows: int) -> None:
        """As ``DynamicBatcher.limit``."""
        self._batcher.limit(key, rows)

    def at_once(self, key: Hashable) -> int:
        """As ``Planner.at_once``."""
        return self._batcher.at_once(key)

    def end_delays(self) -> None:
        """Nothing waits for company any more."""
        self._batcher.end_delays()

    def due_ns(self) -> int | None:
        """When the next batch should run. None: nothing is ready."""
        return self._batcher.due_ns()

    def take(self, now_ns: int) -> list[LiveSequence[S]]:
        """The sequences of the next batch, the oldest request first; empty when none is due."""
        return [request.live for request in self._batcher.take(now_ns)]

    def check_invariants(self) -> None:
        """For tests: one request of a sequence."""
        self._batcher.check_invariants()
        requests = self._queue.requests()
        assert len({request.live for request in requests}) == len(requests)
        assert all(request.live.ready and request.live.waiting[0] is request for request in requests)

    def __repr__(self) -> str:
        return f"<OldestBatcher over {self._batcher!r}>"
