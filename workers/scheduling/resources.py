"""Implements Triton's rate limiter: instances that need resources run only while these are free.

Pure. An instance asks before each run and gives its resources back after it. Of several that wait, the one with the fewest runs
goes first, where each run counts ``priority`` times. An instance whose resources are not free lets others go first, but not for
ever: after ``MAX_PASSED`` of them, no instance behind it gets the resources that it needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tensord.shm.errors import InvalidArgument

#: How many instances may go before one that has waited longer.
MAX_PASSED = 16

A = TypeVar("A", bound=Hashable)


@dataclass(slots=True)
class _Asker:
    needs: Mapping[str, int]
    priority: int
    #: Turns it had, each counted ``priority`` times.
    turns: int = 0
    #: How many others went before it since it began to wait.
    passed: int = 0


@dataclass(slots=True)
class Resources(Generic[A]):
    """The limited resources of one device, and the instances that need them to run; ``A`` is the type of an instance."""

    #: Name -> how many there are.
    limits: Mapping[str, int]
    _askers: dict[A, _Asker] = field(default_factory=dict)
    #: Instances that wait, in the order in which they asked.
    _waiting: dict[A, None] = field(default_factory=dict)
    _running: dict[A, None] = field(default_factory=dict)
    _used: dict[str, int] = field(default_factory=dict)

    def add(self, asker: A, needs: Mapping[str, int], priority: int = 0) -> None:
        """Adds an instance. ``priority``: as how many turns each of its runs counts; those with the fewest go first.

        Raises InvalidArgument: the instance needs more of a resource than the device has.
        """
        for name, count in needs.items():
            if count > self.limits.get(name, 0):
                raise InvalidArgument(
                    f'Resource count for "{name}" is limited to {self.limits.get(name, 0)} which will prevent scheduling of one '
                    f"or more model instances, the minimum required count is {count}"
                )
        # One that comes later has not missed the turns of the others.
        least = min((known.turns for known in self._askers.values()), default=0)
        self._askers[asker] = _Asker(needs, max(1, priority), least)

    def remove(self, asker: A) -> list[A]:
        """Removes an instance and frees its resources. Returns what ``give_back`` returns."""
        self._waiting.pop(asker, None)
        granted = self.give_back(asker)
        del self._askers[asker]
        return granted

    def ask(self, asker: A) -> bool:
        """Returns whether an instance that wants to run holds its resources now; False: it waits for them."""
        self._waiting[asker] = None
        return asker in self._grant()

    def runs(self, asker: A) -> bool:
        """Returns whether an instance holds the resources that it needs."""
        return asker in self._running

    def withdraw(self, asker: A) -> list[A]:
        """Ends an instance's wait, because it has nothing to run any more. Returns what ``give_back`` returns."""
        self._waiting.pop(asker, None)
        self._askers[asker].passed = 0
        return self._grant()

    def give_back(self, asker: A, again: bool = False) -> list[A]:
        """Frees an instance's resources. Returns the waiting instances that may run now, which hold their resources from now on.

        ``again``: ``asker`` asks for the resources again at once, for another run, so it may be among the returned ones.
        """
        if again:
            self._waiting[asker] = None
        if asker not in self._running:
            return self._grant()
        del self._running[asker]
        for name, count in self._askers[asker].needs.items():
            self._used[name] -= count
        return self._grant()

    def _grant(self) -> list[A]:
        granted: list[A] = []
        kept: set[str] = set()
        for asker in sorted(self._waiting, key=lambda waiting: self._askers[waiting].turns):
            known = self._askers[asker]
            if not kept.isdisjoint(known.needs) or not self._fits(known.needs):
                if known.passed >= MAX_PASSED:
                    kept.update(known.needs)
                continue
            granted.append(asker)
            self._run(asker, known)
        return granted

    def _fits(self, needs: Mapping[str, int]) -> bool:
        return all(self._used.get(name, 0) + count <= self.limits[name] for name, count in needs.items())

    def _run(self, asker: A, known: _Asker) -> None:
        for earlier in self._waiting:
            if earlier == asker:
                break
            self._askers[earlier].passed += 1
        del self._waiting[asker]
        self._running[asker] = None
        known.turns += known.priority
        known.passed = 0
        for name, count in known.needs.items():
            self._used[name] = self._used.get(name, 0) + count

    def check_invariants(self) -> None:
        """Asserts, for tests, that the counts of used resources are those of the running instances, and within the limits."""
        used = dict.fromkeys(self._used, 0)
        for asker in self._running:
            for name, count in self._askers[asker].needs.items():
                used[name] += count
        assert used == self._used
        assert all(count <= self.limits[name] for name, count in used.items())
        assert not self._waiting.keys() & self._running.keys()
