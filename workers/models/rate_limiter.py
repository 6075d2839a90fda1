"""Implements Triton's rate limiter on a worker: an instance runs only while the resources that it needs are free.

The operator configures how many units of a resource there are. A resource that the operator does not configure has as many
units as the most demanding instance needs. Free resources are offered first to the waiting instance with the fewest runs. A run
counts as many times as the instance's ``priority`` says. While an instance waits, others may run. After ``MAX_PASSED`` runs of
instances that began to wait later, no instance with more runs gets a resource that the waiting instance needs. Used by the
worker's loop only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tensord.workers.models.instance import Instance

#: How many instances may go before one that has waited longer.
MAX_PASSED = 16


@dataclass(slots=True)
class _Turns:
    #: The runs of an instance, each counted ``priority`` times.
    count: int
    #: How many others went before it since it began to wait.
    passed: int = 0


class RateLimiter:
    """The limited resources of one worker, and the instances that need some of them to run."""

    def __init__(self, given: Mapping[str, int]) -> None:
        """Begins without instances. ``given``: resource name -> how many units the operator has configured."""
        self._given = given
        self._limits: dict[str, int] = dict(given)
        self._turns: dict[Instance, _Turns] = {}
        #: Instances that wait, in the order in which they asked; and those that have what they need.
        self._waiting: dict[Instance, None] = {}
        self._running: dict[Instance, None] = {}
        self._used: dict[str, int] = {}
        #: True if an instance that waited may run now; cleared by the dispatcher.
        self.moved = False

    def add(self, instances: Iterable[Instance]) -> None:
        """Adds model instances. The caller must have checked that no instance needs more of a resource than the worker has."""
        for instance in instances:
            if instance.needs and instance not in self._turns:
                # One that comes later has not missed the turns of the others.
                self._turns[instance] = _Turns(min((turns.count for turns in self._turns.values()), default=0))
        self._set_limits()

    def remove(self, instances: Iterable[Instance]) -> None:
        """Removes instances. Gives the resources that were reserved for them to instances that wait for resources."""
        for instance in instances:
            if instance in self._turns:
                self.done(instance)
                del self._turns[instance]
        self._set_limits()

    def _set_limits(self) -> None:
        self._limits.clear()
        for instance in self._turns:
            for name, count in instance.needs.items():
                self._limits[name] = max(self._limits.get(name, 0), count)
        self._limits.update(self._given)

    def may_run(self, instance: Instance) -> bool:
        """Reserves the resources of ``instance`` until ``done`` is called. Returns False if ``instance`` must wait for them.

        When ``done`` has reserved resources for waiting instances, ``moved`` is True. Then call ``may_run`` again for each one.
        """
        if instance not in self._running:
            self._waiting[instance] = None
            self._grant()
        return instance in self._running

    def done(self, instance: Instance, again: bool = False) -> None:
        """Takes the resources from an instance after its run, and gives them to instances that wait for resources.

        If ``again`` is True, ``instance`` then waits for resources for its next run.
        If ``instance`` has no resources, this method only ends its wait for resources, and ignores ``again``.
        """
        if instance in self._running:
            del self._running[instance]
            for name, count in instance.needs.items():
                self._used[name] -= count
            if again:
                self._waiting[instance] = None
        else:
            self._waiting.pop(instance, None)
            self._turns[instance].passed = 0
        self.moved |= self._grant()

    def _grant(self) -> bool:
        """Gives resources to waiting instances. Returns whether any got some."""
        granted = False
        kept: set[str] = set()
        for instance in sorted(self._waiting, key=lambda waiting: self._turns[waiting].count):
            needs, turns = instance.needs, self._turns[instance]
            fits = all(self._used.get(name, 0) + count <= self._limits[name] for name, count in needs.items())
            if not fits or not kept.isdisjoint(needs):
                if turns.passed >= MAX_PASSED:
                    kept.update(needs)
                continue
            granted = True
            for earlier in self._waiting:
                if earlier is instance:
                    break
                self._turns[earlier].passed += 1
            del self._waiting[instance]
            self._running[instance] = None
            turns.count += max(1, instance.priority)
            turns.passed = 0
            for name, count in needs.items():
                self._used[name] = self._used.get(name, 0) + count
        return granted

    @property
    def running(self) -> list[Instance]:
        """The instances that run now."""
        return [instance for instance in self._turns if instance.busy]

    def __repr__(self) -> str:
        return f"<RateLimiter of {len(self._turns)} instances>"
