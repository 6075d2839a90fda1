"""Implements Triton's rate limiter on a worker: an instance runs only while the resources that it needs are free.

The operator's configuration says how much there is of a resource; of any other resource there is as much as the most demanding
instance needs. Used by the worker's loop only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tensord.workers.models.instance import Instance
from tensord.workers.scheduling.resources import Resources


class RateLimiter:
    """The limited resources of one worker, and the instances that need some of them to run."""

    def __init__(self, given: Mapping[str, int]) -> None:
        """``given``: resource -> how much there is, from the operator's configuration."""
        self._given = given
        self._limits: dict[str, int] = dict(given)
        self._resources: Resources[Instance] = Resources(self._limits)
        self._known: dict[Instance, None] = {}
        #: Whether an instance that waited may run now; cleared by the dispatcher.
        self.moved = False

    def add(self, instances: Iterable[Instance]) -> None:
        """Adds those instances that need resources and were not added before.

        The caller must have checked that none needs more than the operator has configured.
        """
        for instance in instances:
            if instance.needs and instance not in self._known:
                self._known[instance] = None
                self._set_limits()
                self._resources.add(instance, instance.needs, instance.priority)

    def remove(self, instances: Iterable[Instance]) -> None:
        """Removes instances and frees their resources."""
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
        """Reserves the resources that an instance needs, until ``done``; returns False if they are not all free.

        Then the instance waits for them: call this again once ``moved`` is True (resources became free).
        """
        return self._resources.runs(instance) or self._resources.ask(instance)

    def done(self, instance: Instance, again: bool = False) -> None:
        """Frees an instance's resources, or ends its wait for them.

        ``again``: the instance has run, and asks at once for another run.
        """
        self.moved |= bool(
            self._resources.give_back(instance, again)
            if self._resources.runs(instance)
            else self._resources.withdraw(instance)
        )

    @property
    def running(self) -> list[Instance]:
        """The instances that are running now."""
        return [instance for instance in self._known if instance.busy]

    def __repr__(self) -> str:
        return f"<RateLimiter of {len(self._known)} instances>"
