"""Implements Triton's strategy "oldest": requests of all sequences that have a slot share batches, longest-waiting first.

Pure. At most one request of each sequence is queued here at a time; they are batched like those of a model without sequences
(``tensord.workers.scheduling.dynamic_batcher``).
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Generic

from tensord.workers.scheduling.dynamic_batcher import BatchRules, DynamicBatcher
from tensord.workers.scheduling.queue import QueueRules, RequestQueue
from tensord.workers.scheduling.sequence import LiveSequence, S

#: No bound here: the table of sequences bounds all requests that wait.
_UNBOUNDED = QueueRules(sys.maxsize)


class OldestBatcher(Generic[S]):
    """Makes one instance's batches for Triton's strategy "oldest": of the oldest requests of its sequences that may run now."""

    def __init__(self, rules: BatchRules) -> None:
        self._queue: RequestQueue[S] = RequestQueue(_UNBOUNDED)
        self._batcher = DynamicBatcher(rules, self._queue)

    def ready(self, live: LiveSequence[S]) -> None:
        """Adds a sequence, whose first waiting request may run now, to those of which ``take`` makes batches."""
        self._queue.push(live.waiting[0])

    def withdraw(self, live: LiveSequence[S]) -> None:
        """Removes a sequence from those of which ``take`` makes batches: its first waiting request may no longer run."""
        self._queue.remove(live.waiting[0])

    def limit(self, key: Hashable, rows: int) -> None:
        """Sets how many rows of requests with this batching key may share a batch from now on; 0: as many as the rules allow."""
        self._batcher.limit(key, rows)

    def at_once(self, key: Hashable) -> int:
        """Returns how many rows with this batching key may share a batch without a delay; 0: they are delayed, or never share."""
        return self._batcher.at_once(key)

    def end_delays(self) -> None:
        """Stops delaying requests for fuller batches."""
        self._batcher.end_delays()

    def due_ns(self) -> int | None:
        """Returns when the next batch should run, or None while no sequence has a request that may run."""
        return self._batcher.due_ns()

    def take(self, now_ns: int) -> list[LiveSequence[S]]:
        """Removes and returns the sequences of the next batch, the one with the oldest request first; empty if none is due."""
        return [request.live for request in self._batcher.take(now_ns)]

    def check_invariants(self) -> None:
        """Asserts, for tests, that each sequence has at most one request in this batcher's queue."""
        self._batcher.check_invariants()
        requests = self._queue.requests()
        assert len({request.live for request in requests}) == len(requests)
        assert all(request.live.ready and request.live.waiting[0] is request for request in requests)

    def __repr__(self) -> str:
        return f"<OldestBatcher over {self._batcher!r}>"
