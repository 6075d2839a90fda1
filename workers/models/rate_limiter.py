"""Triton's rate limiter on a worker: an instance runs only while the resources that it needs are free.

How much there is of a resource the operator says; of others there is as much as the instance needs that needs most of it.
Belongs to the worker's loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tensord.workers.models.instance import Instance
from tensord.workers.scheduling.resources import Resources


class RateLimiter:
    """The resources of one worker, and the instances that need some."""

    def __init__(self, given: Mapping[str, int]) -> None:
        """``given``: resource -> the operator's limit."""
        self._given = given
        self._limits: dict[str, int] = dict(given)
        self._resources: Resources[Instance] = Resources(self._limits)
        self._known: dict[Instance, None] = {}
        #: Whether an instance that waited may run now; cleared by the dispatcher.
        self.moved = False

    def add(self, instances: Iterable[Instance]) -> None:
        """Adds instances that are not there yet. None of them needs more than the operator gives."""
        for instance in instances:
            if instance.needs and instance not in self._known:
                self._known[instance] = None
                self._set_limits()
                self._resources.add(instance, instance.needs, instance.priority)

    def remove(self, instances: Iterable[Instance]) -> None:
        """Removes instances."""
        for instance in instances:
            if instance in self._known:
                del self._known[instance]
                self.moved |= bool(self._resources.remove(instance))
        self._set_limits()

    def _set_limits(self) -> None:
        self._limits.clear()
        for instance in self._known:
            for name, count in instance.needs.items():
                self._limits[name] = max(self._limits.get(name, 0), count)
        self._limits.update(self._given)

    def may_run(self, instance: Instance) -> bool:
        """Returns whether an instance has its resources, until ``done``. If not, it waits for them."""
        return self._resources.runs(instance) or self._resources.ask(instance)

    def done(self, instance: Instance, again: bool = False) -> None:
        """Frees an instance's resources, or ends its wait. ``again``: it has run, and there is more to run."""
        self.moved |= bool(
            self._resources.give_back(instance, again)
            if self._resources.runs(instance)
            else self._resources.withdraw(instance)
        )

    @property
    def running(self) -> list[Instance]:
        """Instances that run now."""
        return [instance for instance in self._known if instance.busy]

    def __repr__(self) -> str:
        return f"<RateLimiter of {len(self._known)} instances>"
