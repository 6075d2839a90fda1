"""The places of one model version's sequences, over all of its instances: which is free, and which is given out next.

Pure. There may be more of them than memory could list, so only those that were ever used are.
"""

from __future__ import annotations

import heapq

from tensord.workers.scheduling.sequence import Slot


class Slots:
    """One per table of sequences."""

    def __init__(self, of_each: int, instances: int) -> None:
        """``of_each``: instance."""
        self._instances = instances
        #: All there are, and those that nobody has.
        self.count = self.free = of_each * instances
        #: Those that were used and are free; from ``_fresh`` on none ever was.
        self._freed: list[Slot] = []
        self._fresh = 0

    def take(self) -> Slot:
        """The lowest free one."""
        self.free -= 1
        # Whatever was used before is lower than what never was.
        if self._freed:
            return heapq.heappop(self._freed)
        number, instance = divmod(self._fresh, self._instances)
        self._fresh += 1
        return Slot(number, instance)

    def give_back(self, slot: Slot) -> None:
        """Nobody has it any more."""
        self.free += 1
        heapq.heappush(self._freed, slot)

    def check_invariants(self, taken: set[Slot]) -> None:
        """For tests: those that are taken and those that were given back are all that were ever used."""
        assert not taken & set(self._freed)
        assert all(slot.instance < self._instances for slot in taken)
        assert len(taken) + len(self._freed) == self._fresh <= self.count
        assert self.free == self.count - len(taken)

    def __repr__(self) -> str:
        return f"<Slots {self.free} of {self.count} free>"
