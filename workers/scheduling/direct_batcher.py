"""Triton's strategy "direct": a sequence has a row of its instance's batches for itself, the one with the number of its slot.

Pure. A batch takes the next request of every slot that is ready and has the key of the one that is ready longest; there is one
batch in flight for an instance.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic

from tensord.workers.scheduling.sequence import LiveSequence, S


@dataclass(frozen=True, slots=True)
class DirectRules:
    """The rules by which a batch of few slots may wait for more of them."""

    slots: int = 1
    delay_ns: int = 0
    #: A batch of so many ready slots need not wait; 0: one of any size.
    enough: int = 0


class DirectBatcher(Generic[S]):
    """Makes one instance's batches of sequences that have a row of their own."""

    def __init__(self, rules: DirectRules) -> None:
        self._rules = rules
        self._delay_ns = rules.delay_ns if rules.enough else 0
        #: Sequences that may run, in the order in which they became ready.
        self._ready: dict[LiveSequence[S], None] = {}
        #: Key -> rows, where less than all slots can run at once.
        self._limits: dict[Hashable, int] = {}

    def ready(self, live: LiveSequence[S]) -> None:
        """Notes that the first waiting request of a sequence may run."""
        self._ready[live] = None

    def withdraw(self, live: LiveSequence[S]) -> None:
        """Notes that a sequence that was ready is not any more."""
        del self._ready[live]

    def limit(self, key: Hashable, rows: int) -> None:
        """Bounds the rows of a key that run at once from now on; 0: as many as of any other key."""
        if rows:
            self._limits[key] = rows
        else:
            self._limits.pop(key, None)

    def at_once(self, key: Hashable) -> int:
        """Implements ``Planner.at_once``."""
        return 0 if self._delay_ns else self._limits.get(key, self._rules.slots)

    def end_delays(self) -> None:
        """Stops delaying requests so that others can join them."""
        self._delay_ns = 0

    def due_ns(self) -> int | None:
        """Returns when the next batch should run, or None while no slot is ready."""
        if not self._ready:
            return None
        if not self._delay_ns:
            return next(iter(self._ready)).waiting[0].arrived_ns
        oldest_ns = min(live.waiting[0].arrived_ns for live in self._ready)
        return oldest_ns if len(self._ready) >= self._rules.enough else oldest_ns + self._delay_ns

    def take(self, now_ns: int) -> list[LiveSequence[S]]:
        """Removes and returns the sequences of the next batch, by their slots; empty when none is due."""
        due_ns = self.due_ns()
        if due_ns is None or (self._delay_ns and due_ns > now_ns):
            return []
        key = next(iter(self._ready)).waiting[0].key
        chosen = [live for live in self._ready if live.waiting[0].key == key]
        del chosen[self._limits.get(key, len(chosen)) :]
        for live in chosen:
            del self._ready[live]
        return sorted(chosen, key=_number)

    def check_invariants(self) -> None:
        """Asserts, for tests, that ready sequences have different slots."""
        assert all(live.ready for live in self._ready)
        assert len({live.slot for live in self._ready}) == len(self._ready) <= self._rules.slots

    def __repr__(self) -> str:
        return f"<DirectBatcher {len(self._ready)} of {self._rules.slots} slots ready>"


def _number(live: LiveSequence[S]) -> int:
    assert live.slot is not None
    return live.slot.number
