"""Implements Triton's two strategies for batches of sequences.

"direct"    each sequence has a fixed row in its instance's batches, by the number of its slot
"oldest"    requests of all sequences that have a slot share batches, longest-waiting first

Pure. ``tensord.workers.scheduling.sequence_batcher`` has one of them for each instance; at most one request of each sequence is
ready there at a time. ``DirectBatcher`` says what their methods do.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic

from tensord.workers.scheduling.dynamic_batcher import BatchRules, DynamicBatcher
from tensord.workers.scheduling.queue import QueueRules, RequestQueue
from tensord.workers.scheduling.sequence import LiveSequence, S

#: No bound here: the table of sequences bounds all requests that wait.
_UNBOUNDED = QueueRules(sys.maxsize)


@dataclass(frozen=True, slots=True)
class DirectRules:
    """How long a batch of an instance may wait for requests of more of its slots, and how many slots are enough not to wait."""

    slots: int = 1
    delay_ns: int = 0
    #: A batch of so many ready slots need not wait; 0: one of any size.
    enough: int = 0


class DirectBatcher(Generic[S]):
    """Makes the batches of one instance for Triton's strategy "direct": each sequence has a fixed row, the number of its slot.

    A batch takes the next request of every ready slot whose key equals that of the slot that has been ready longest; an instance
    has one batch in flight.
    """

    def __init__(self, rules: DirectRules) -> None:
        self._rules = rules
        self._delay_ns = rules.delay_ns if rules.enough else 0
        #: Sequences that may run, in the order in which they became ready.
        self._ready: dict[LiveSequence[S], None] = {}
        #: Key -> rows, where less than all slots can run at once.
        self._limits: dict[Hashable, int] = {}

    def ready(self, live: LiveSequence[S]) -> None:
        """Adds a sequence, whose first waiting request may run now, to those of which ``take`` makes batches."""
        self._ready[live] = None

    def withdraw(self, live: LiveSequence[S]) -> None:
        """Removes a sequence from those of which ``take`` makes batches: its first waiting request may no longer run."""
        del self._ready[live]

    def limit(self, key: Hashable, rows: int) -> None:
        """Sets how many rows of requests with this batching key may share a batch from now on; 0: as many as the rules allow."""
        if rows:
            self._limits[key] = rows
        else:
            self._limits.pop(key, None)

    def at_once(self, key: Hashable) -> Sequence[range]:
        """Returns which numbers of rows with this batching key are a batch as they are; empty: they are delayed."""
        return () if self._delay_ns else (range(1, self._limits.get(key, self._rules.slots) + 1),)

    def end_delays(self) -> None:
        """Stops delaying requests for fuller batches."""
        self._delay_ns = 0

    def due_ns(self) -> int | None:
        """Returns when the next batch should run, or None while no sequence has a request that may run."""
        if not self._ready:
            return None
        if not self._delay_ns:
            return next(iter(self._ready)).waiting[0].arrived_ns
        oldest_ns = min(live.waiting[0].arrived_ns for live in self._ready)
        return oldest_ns if len(self._ready) >= self._rules.enough else oldest_ns + self._delay_ns

    def take(self, now_ns: int) -> list[S]:
        """Removes and returns the requests of the next batch, in the order of their slots; empty if no batch is due."""
        due_ns = self.due_ns()
        if due_ns is None or (self._delay_ns and due_ns > now_ns):
            return []
        key = next(iter(self._ready)).waiting[0].key
        chosen = [live for live in self._ready if live.waiting[0].key == key]
        del chosen[self._limits.get(key, len(chosen)) :]
        for live in chosen:
            del self._ready[live]
        return [live.waiting[0] for live in sorted(chosen, key=_number)]

    def check_invariants(self) -> None:
        """Asserts, for tests, that ready sequences have different slots."""
        assert all(live.ready for live in self._ready)
        assert len({live.slot for live in self._ready}) == len(self._ready) <= self._rules.slots

    def __repr__(self) -> str:
        return f"<DirectBatcher {len(self._ready)} of {self._rules.slots} slots ready>"


def _number(live: LiveSequence[S]) -> int:
    assert live.slot is not None
    return live.slot.number


class OldestBatcher(DynamicBatcher[S]):
    """Makes one instance's batches for Triton's strategy "oldest": of those requests of its sequences that have waited longest.

    They are batched like those of a model without sequences.
    """

    def __init__(self, rules: BatchRules) -> None:
        super().__init__(rules, RequestQueue(_UNBOUNDED))

    def ready(self, live: LiveSequence[S]) -> None:
        self._queue.push(live.waiting[0])

    def withdraw(self, live: LiveSequence[S]) -> None:
        self._queue.remove(live.waiting[0])

    def check_invariants(self) -> None:
        """Asserts, for tests, that each sequence has at most one request in this batcher's queue."""
        super().check_invariants()
        requests = self._queue.requests()
        assert len({request.live for request in requests}) == len(requests)
        assert all(request.live.ready and request.live.waiting[0] is request for request in requests)


Strategy = DirectBatcher[S] | OldestBatcher[S]
