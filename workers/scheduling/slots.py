"""Gives out the slots in which one model version's sequences run, over all instances of the version.

Pure. There may be more slots than memory could list, so only those that were ever used are listed.
"""

from __future__ import annotations

import heapq

from tensord.workers.scheduling.sequence import Slot


class Slots:
    """Gives the sequences of one model version the slots in which they run, and takes the slots back."""

    def __init__(self, of_each: int, instances: int) -> None:
        """Makes ``of_each`` free slots for each of ``instances`` instances."""
        self._instances = instances
        #: How many slots there are, and how many are free.
        self.count = self.free = of_each * instances
        #: Slots that were used and are free; from number ``_fresh`` on none ever was used.
        self._freed: list[Slot] = []
        self._fresh = 0

    def take(self) -> Slot:
        """Marks the lowest free slot as used and returns it; the caller must know (``free``) that there is one."""
        self.free -= 1
        # Whatever was used before is lower than what never was.
        if self._freed:
            return heapq.heappop(self._freed)
        number, instance = divmod(self._fresh, self._instances)
        self._fresh += 1
        return Slot(number, instance)

    def give_back(self, slot: Slot) -> None:
        """Marks a slot that ``take`` returned as free again."""
        self.free += 1
        heapq.heappush(self._freed, slot)

    def check_invariants(self, taken: set[Slot]) -> None:
        """Asserts, for tests, that slots in use and slots given back are all that were ever used."""
        assert not taken & set(self._freed)
        assert all(slot.instance < self._instances for slot in taken)
        assert len(taken) + len(self._freed) == self._fresh <= self.count
        assert self.free == self.count - len(taken)

    def __repr__(self) -> str:
        return f"<Slots {self.free} of {self.count} free>"
