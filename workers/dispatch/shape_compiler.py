"""Compiles programs for input shapes that no bucket covers, in a thread. Requests of such a shape wait for the shape's program.

The requests wait outside the queue. Once their program is compiled, they go back into the queue, ahead of later requests. If
the program is small and the model has no batch dimension, the thread also compiles programs that run several of these requests
in one call. It does so only when no request waits for a program. Everything except the compilation runs in the worker's event
loop.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Hashable

from tensord.shm.common.derivatives import of_model
from tensord.shm.errors import Unavailable
from tensord.shm.refusals import Refusal
from tensord.shm.status_page import StatusPage
from tensord.workers.dispatch.outbox import Outbox
from tensord.workers.models.author_error import describe_exception
from tensord.workers.models.free_state import Unfit
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.models.statistics import Failure
from tensord.workers.programs.executable import Executable, Wanted
from tensord.workers.programs.executables import Executables
from tensord.workers.programs.grouped_calls import GroupedCalls, GroupedProgram
from tensord.workers.programs.run_errors import CheckDevice, compile_error
from tensord.workers.requests.request import Request
from tensord.workers.scheduling.queue import ParkedRequests, Replacement, in_turns
from tensord.workers.threads.work_thread import WorkThread

_log = logging.getLogger(__name__)
#: The compiler's place on the status page.
COMPILER_SLOT = 1


class ShapeCompiler:
    """Compiles programs for input shapes that no bucket covers, in a thread. Requests of such a shape wait for the program."""

    def __init__(
        self,
        thread: WorkThread,
        page: StatusPage,
        outbox: Outbox,
        max_shapes: int,
        clock: Callable[[], int],
        check: CheckDevice,
        restore: Callable[[ModelVersion, list[Request]], None],
        models: ModelTable,
    ) -> None:
        """Starts with nothing to compile.

        Args:
          thread: the thread that compiles programs.
          page: the worker's status page, on which running compilations are written.
          outbox: sends an error to each request for which no program can be compiled.
          max_shapes: how many programs for new shapes of one model version may be unfinished at a time.
          clock: returns the time of CLOCK_MONOTONIC in ns.
          check: raises an error if the worker's device has failed.
          restore: puts requests of a model version back into the version's queue.
          models: the worker's models. ``models.changes`` is increased when a program was compiled.
        """
        self._models = models
        self._thread = thread
        self._page = page
        self._outbox = outbox
        self._max_shapes = max_shapes
        self._clock = clock
        self._check = check
        self._restore = restore
        #: How many programs are being compiled, or wait for that.
        self._under_way = 0
        #: Programs for one request from which programs for several requests are still to be compiled.
        self._grouped: deque[tuple[ModelVersion, GroupedCalls, Executable]] = deque()

    def park(self, version: ModelVersion, batch: list[Request], wanted: Wanted) -> None:
        """Makes the requests in ``batch`` wait for a program. If it is not being compiled yet, has a thread compile it.

        ``wanted``: the batch size and the input shapes of the program. When its compilation begins, queued requests with the
        same batching key begin to wait, too, unless the model has ragged inputs. If too many other programs of ``version`` are
        still to be compiled, this method compiles nothing, and answers the requests in ``batch`` with Unavailable. If their key
        is an ``Unfit``, answers them with its error.
        """
        model = version.jitted
        assert model is not None
        if isinstance(refused := batch[0].key, Unfit):
            now_ns = self._clock()
            self._outbox.fail_all([(request, refused.error) for request in batch], now_ns, Failure.OTHER)
            version.planner.done(batch, now_ns)
            return
        # Ragged requests of one key make batches of many shapes: those of other shapes do not wait for this one.
        key = wanted if model.ragged else batch[0].key
        if key in version.compiling:
            self._replaced(version.compiling[key].extend(batch))
            return
        if len(version.compiling) >= self._max_shapes:
            self._refuse(version, batch)
            return
        # Those of that key which still queue join, so that none of them asks for the same again.
        parked = version.compiling[key] = ParkedRequests(version.loaded.queue_rules)
        self._replaced(parked.extend(batch + version.queue.take(key, version.queue.rows(key))))
        self._under_way += 1
        _log.info("compiling model '%s' version %d for %s", version.name, version.version, wanted)
        waiting = [(request.submitter.peer, request.request_id) for request in batch]
        self._thread.do(
            lambda: self._compile(version, model.executables, wanted, waiting), self._compiled(version, key)
        )

    def _replaced(self, replacements: list[Replacement[Request]]) -> None:
        self._outbox.fail_all([(each.old, each.error) for each in replacements], self._clock())

    def _refuse(self, version: ModelVersion, batch: list[Request]) -> None:
        now_ns, count = self._clock(), len(version.compiling)
        error = Unavailable(f"{count} other shapes of model '{version.name}' are being compiled")
        for request in batch:
            self._outbox.fail_all(version.planner.dropped(request, now_ns), now_ns)
            self._outbox.refuse(request, Refusal.COMPILING, error, now_ns)

    def _compile(
        self, version: ModelVersion, executables: Executables, wanted: Wanted, waiting: list[tuple[int, int]]
    ) -> Executable:
        self._page.begin(COMPILER_SLOT, waiting, version.page_key, self._clock())
        try:
            return executables.compile(wanted)
        except Exception:
            self._check()
            raise
        finally:
            self._page.end(COMPILER_SLOT, self._clock())

    def _compiled(self, version: ModelVersion, key: Hashable) -> Callable[[Executable | Exception], None]:
        def compiled(outcome: Executable | Exception) -> None:
            self._under_way -= 1
            requests = in_turns(version.compiling.pop(key).requests)
            if isinstance(outcome, Exception):
                # What JAX says of a derivative is about the function's rules and shapes; what a model's code says is its own.
                said = describe_exception(outcome) if of_model(version.name)[1] else type(outcome).__name__
                error = compile_error(outcome, requests, version.version, said)
                now_ns = self._clock()
                version.planner.done(requests, now_ns)
                self._outbox.fail_all([(request, error) for request in requests], now_ns, Failure.BACKEND)
                # The next ones of their sequences may run now.
                self._restore(version, [])
                self._next_grouped()
                return
            assert version.jitted is not None
            executables, grouped = version.jitted.executables, version.jitted.grouped
            gone = executables.add(outcome)
            for changed in (*gone, outcome.wanted):
                # Batches of a shape grow only as far as an executable for them is ready.
                version.planner.limit(changed.shapes, executables.limit(changed.shapes))
            self._models.changes += 1
            self._restore(version, requests)
            if grouped is not None:
                for forgotten in gone:
                    grouped.forget(forgotten.shapes)
                if grouped.wants(outcome):
                    self._grouped.append((version, grouped, outcome))
            self._next_grouped()

        return compiled

    def _next_grouped(self) -> None:
        """If nothing is being compiled, starts to compile programs that run several requests of one shape in one call."""
        if self._under_way or not self._grouped:
            return
        version, grouped, single = self._grouped.popleft()
        self._under_way += 1
        self._thread.do(lambda: grouped.compile(single), functools.partial(self._adopt, version, grouped, single))

    def _adopt(
        self,
        version: ModelVersion,
        grouped: GroupedCalls,
        single: Executable,
        outcome: list[GroupedProgram] | Exception,
    ) -> None:
        self._under_way -= 1
        if isinstance(outcome, Exception):
            # Its requests go on being run one by one.
            _log.error("compiling grouped calls for model '%s' failed", version.name, exc_info=outcome)
        elif outcome:
            grouped.add(single, outcome)
            self._models.changes += 1
        self._next_grouped()
