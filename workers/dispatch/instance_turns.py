"""Batches for the threads of models that have some: each free instance gets what is due, if it has the resources it needs.

planner ─▶ instance free, resources there ─▶ its thread runs the batch ─▶ done on the loop, in turn where answers keep an order
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from tensord.workers.dispatch.responses import Responses
from tensord.workers.dispatch.shape_compiler import ShapeCompiler
from tensord.workers.models.execution import Execution
from tensord.workers.models.instance import Instance
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.models.rate_limiter import RateLimiter
from tensord.workers.programs.executable import Executable
from tensord.workers.requests.request import Request

#: After a run that took less an instance is given so many batches at once: with one at a time its thread waits for the loop after
#: each, and the loop, woken by each, for Python's lock.
_SHORT_NS = 5_000_000
_DEPTH = 3


class InstanceTurns:
    """One per worker; belongs to its loop."""

    def __init__(
        self,
        limiter: RateLimiter,
        compiler: ShapeCompiler,
        responses: Responses,
        prepare: Callable[[Execution, Mapping[str, int]], None],
        take: Callable[[ModelVersion, int, int], list[Request]],
        finish: Callable[[ModelVersion, Execution], None],
    ) -> None:
        """
        Args:
          prepare: finds places for outputs of those sizes before the run.
          take: the next batch of a version for the instance of that number.
          finish: answers what has run.
        """
        self._limiter = limiter
        self._compiler = compiler
        self._responses = responses
        self._prepare = prepare
        self._take = take
        self._finish = finish

    def fill(self, version: ModelVersion, now_ns: int) -> int | None:
        """Gives batches to free instances. Returns when the next batch is due, None while an instance must become free first."""
        next_ns: int | None = None
        for number, instance in enumerate(version.loaded.instances):
            while not instance.busy:
                due_ns = version.planner.due_ns(number)
                if due_ns is None or due_ns > now_ns:
                    if due_ns is not None:
                        next_ns = due_ns if next_ns is None else min(next_ns, due_ns)
                    break
                if instance.needs and not self._limiter.may_run(instance):
                    break
                # Whose time may be up waits here, where that is seen: the run before it may take longer than the last one.
                if instance.given and version.planner.next_tick_ns:
                    break
                self._run(version, number, self._take(version, now_ns, number), now_ns)
        return now_ns if version.limited and self.withdraw(version, now_ns) else next_ns

    def withdraw(self, version: ModelVersion, now_ns: int) -> bool:
        """Of instances without work: they wait for no resources, and have none. True: others may run now."""
        for number, instance in enumerate(version.loaded.instances):
            due_ns = None if instance.busy else version.planner.due_ns(number)
            if instance.needs and not instance.busy and (due_ns is None or due_ns > now_ns):
                self._limiter.done(instance)
        return self._limiter.take_moved()

    def _run(self, version: ModelVersion, number: int, batch: list[Request], now_ns: int) -> None:
        instance = version.loaded.instances[number]
        executable: Executable | None = None
        if not batch:
            return
        if version.jitted is not None and (executable := version.jitted.find(batch)) is None:
            self._compiler.park(version, batch, version.jitted.wanted_by(batch))
            return
        version.executing += 1
        execution = Execution(batch, now_ns, executable)
        execution.responder = self._responses
        if (
            executable is not None
            and executable.device is not None
            and version.cache is None
            and version.jitted is not None
        ):
            # What leaves a GPU does so in that thread, too: the loop would wait for it.
            sizes = version.jitted.sizes(executable, batch)
            if sizes is not None:
                self._prepare(execution, sizes)
        if version.loaded.streams:
            execution.by_senders = True
            self._responses.open(batch, now_ns)
        if version.order is not None:
            version.order.taken(execution)
        instance.run(execution, self._done(version, instance, number))

    def _done(self, version: ModelVersion, instance: Instance, number: int) -> Callable[[Execution], None]:
        def done(execution: Execution) -> None:
            short = execution.computed_ns - execution.began_ns < _SHORT_NS
            instance.depth = _DEPTH if short and version.runs_ahead else 1
            version.executing -= 1
            if instance.needs:
                # Else whoever waits would go next each time, whatever a turn of either counts.
                due_ns = version.planner.due_ns(number)
                self._limiter.done(instance, again=due_ns is not None and due_ns <= execution.computed_ns)
            in_turn(version, execution, functools.partial(self._finish, version, execution))

        return done


def in_turn(version: ModelVersion, taken: object, answer: Callable[[], None]) -> None:
    """Answers when those have left that were taken before, if the model wants that."""
    if version.order is None:
        answer()
    else:
        for _, leave in version.order.done(taken, answer):
            leave()
