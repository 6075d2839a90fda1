"""Gives batches to the instances of models. An instance is a thread that runs batches of one model.

An instance gets a batch when the batch is due, the instance is free, and the resources that the instance needs are free. After
the run, the worker's event loop answers the requests of the batch. If ``ModelVersion.runs_ahead`` is True, an instance gets the
next batches while it still runs a batch. A batch that the instance has not begun is taken back if its request is cancelled.
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
from tensord.workers.scheduling.agenda import NEVER
from tensord.workers.scheduling.planner import RUN, WaitUntil


class InstanceRuns:
    """Gives batches to the instances of one worker's models. Each instance runs its batches in its own thread."""

    def __init__(
        self,
        limiter: RateLimiter,
        compiler: ShapeCompiler,
        responses: Responses,
        prepare: Callable[[Execution, Mapping[str, int]], None],
        take: Callable[[ModelVersion, int, int], list[Request]],
        finish: Callable[[ModelVersion, Execution], None],
        changed: Callable[[ModelVersion], None],
    ) -> None:
        """Prepares to run batches on the instances of all models of a worker.

        Args:
          prepare: reserves memory for an execution's outputs before the run; called with each output's size in bytes by name.
          take: takes a version's next batch from its queue; called with the time (CLOCK_MONOTONIC, ns) and the instance's index.
          finish: answers the requests of an execution that has run.
          changed: makes the worker's loop decide anew which batch of a version runs next.
        """
        self._limiter = limiter
        self._compiler = compiler
        self._responses = responses
        self._prepare = prepare
        self._take = take
        self._finish = finish
        self._changed = changed

    def fill(self, version: ModelVersion, now_ns: int) -> int:
        """Gives due batches to free instances. Returns when the next batch is due (CLOCK_MONOTONIC, ns), or ``NEVER``."""
        next_ns = NEVER
        for number, instance in enumerate(version.loaded.instances):
            while not instance.busy:
                decision = version.planner.decide(now_ns, number)
                if isinstance(decision, WaitUntil):
                    next_ns = min(next_ns, decision.when_ns)
                if decision is not RUN or not self._may_run(version, instance):
                    break
                self._run(version, number, self._take(version, now_ns, number), now_ns)
        if version.limited:
            self.withdraw(version, now_ns)
        return next_ns

    def _may_run(self, version: ModelVersion, instance: Instance) -> bool:
        if instance.needs and not self._limiter.may_run(instance):
            return False
        # A request whose time may run out, or which a newer one may replace, is not given ahead: only in the queue is it looked
        # after, and nobody knows how long the run before it takes.
        return not (instance.given and (version.planner.next_tick_ns or version.queue.replaceable))

    def withdraw(self, version: ModelVersion, now_ns: int) -> None:
        """Returns to the rate limiter the resources of each instance that is not busy and has no batch to run now."""
        for number, instance in enumerate(version.loaded.instances):
            due_ns = None if instance.busy else version.planner.due_ns(number)
            if instance.needs and not instance.busy and (due_ns is None or due_ns > now_ns):
                self._limiter.done(instance)

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
        execution.responder = self._responses.sender
        if executable is not None and executable.delivers and version.cache is None and version.jitted is not None:
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
        _count_ahead(version)

    def _done(self, version: ModelVersion, instance: Instance, number: int) -> Callable[[Execution], None]:
        def done(execution: Execution) -> None:
            version.executing -= 1
            _count_ahead(version)
            if instance.needs:
                # Else whoever waits would go next each time, whatever a turn of either counts.
                due_ns = version.planner.due_ns(number)
                self._limiter.done(instance, again=due_ns is not None and due_ns <= execution.computed_ns)
            for user in version.loaded.users:
                # What waits in the version that this one replaces may wait for the same thread.
                self._changed(user)
            in_order(version, execution, functools.partial(self._finish, version, execution))

        return done

    @staticmethod
    def take_back(version: ModelVersion, request: Request) -> bool:
        """Takes a request back from the instance that is to run it. Returns False if it runs already or no instance has it."""
        for instance in version.loaded.instances:
            for execution in instance.given:
                if request in execution.requests:
                    taken = instance.take_back(execution)
                    version.executing -= taken
                    _count_ahead(version)
                    return taken
        return False


def _count_ahead(version: ModelVersion) -> None:
    # The requests of these batches count as queued.
    if version.runs_ahead:
        version.queue.ahead = max(0, len(version.loaded.instances[0].given) - 1)


def in_order(version: ModelVersion, taken: object, answer: Callable[[], None]) -> None:
    """Calls ``answer``, which answers ``taken``: a request, or all requests of an execution.

    If ``version.order`` is None, calls ``answer`` at once, else once all requests that left the queue earlier are answered.
    """
    if version.order is None:
        answer()
    else:
        for _, leave in version.order.done(taken, answer):
            leave()
