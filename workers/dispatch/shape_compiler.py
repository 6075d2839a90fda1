"""Shapes that no bucket covers are compiled beside everything else, while their requests are parked. Belongs to the loop.

batch without an executable ─▶ parked ─▶ compiler's thread ─▶ adopted ─▶ its requests wait again, ahead of later ones
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable

from tensord.shm.errors import Internal, Unavailable
from tensord.shm.refusals import Refusal
from tensord.shm.status_page import StatusPage
from tensord.workers.dispatch.outbox import Outbox
from tensord.workers.models.free_state import Unfit
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.models.statistics import Failure
from tensord.workers.programs.executable import Executable, Wanted
from tensord.workers.programs.executables import Executables
from tensord.workers.programs.run_errors import CheckDevice, compile_error
from tensord.workers.programs.series import Series
from tensord.workers.programs.series_program import SeriesProgram
from tensord.workers.requests.request import Request
from tensord.workers.threads.work_thread import WorkThread

_log = logging.getLogger(__name__)
#: On the status page: the compiler's place.
COMPILER_DESK = 1


class ShapeCompiler:
    """One per worker."""

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
        """``max_shapes``: of one version, at a time. ``restore``: queues requests again that could not run."""
        self._models = models
        self._thread = thread
        self._page = page
        self._outbox = outbox
        self._max_shapes = max_shapes
        self._clock = clock
        self._check = check
        self._restore = restore

    def park(self, version: ModelVersion, batch: list[Request], wanted: Wanted) -> None:
        """Has a shape compiled; its requests wait and everything else goes on."""
        model = version.jitted
        if model is None:
            return
        if isinstance(refused := batch[0].key, Unfit):
            now_ns = self._clock()
            self._outbox.fail_all([(request, refused.error) for request in batch], now_ns, Failure.OTHER)
            version.planner.done(batch, now_ns)
            return
        # Ragged requests of one key make batches of many shapes: those of other shapes do not wait for this one.
        key = wanted if model.ragged else batch[0].key
        if key in version.compiling:
            version.compiling[key] += batch
            return
        if len(version.compiling) >= self._max_shapes:
            self._refuse(version, batch)
            return
        # Those of that key which still queue join, so that none of them asks for the same again.
        version.compiling[key] = batch + version.queue.take(key, version.queue.rows(key))
        _log.info("compiling model '%s' version %d for %s", version.name, version.version, wanted)
        running = [(request.submitter.peer, request.request_id) for request in batch]
        self._thread.do(
            lambda: self._compile(version, model.executables, wanted, running), self._compiled(version, key)
        )

    def _refuse(self, version: ModelVersion, batch: list[Request]) -> None:
        now_ns, count = self._clock(), len(version.compiling)
        error = Unavailable(f"{count} other shapes of model '{version.name}' are being compiled")
        for request in batch:
            self._outbox.fail_all(version.planner.dropped(request, now_ns), now_ns)
            self._outbox.refuse(request, Refusal.COMPILING, error, now_ns)

    def _compile(
        self, version: ModelVersion, executables: Executables, wanted: Wanted, running: list[tuple[int, int]]
    ) -> Executable:
        """In the compiler's thread. A compilation may kill the process as well as an execution may."""
        self._page.begin(COMPILER_DESK, running, version.page_key, self._clock())
        try:
            return executables.compile(wanted)
        except Exception:
            self._check()
            raise
        finally:
            self._page.end(COMPILER_DESK)

    def _compiled(self, version: ModelVersion, key: Hashable) -> Callable[[Executable | Exception], None]:
        def compiled(outcome: Executable | Exception) -> None:
            requests = version.compiling.pop(key)
            if isinstance(outcome, Exception) or version.jitted is None:
                failed = outcome if isinstance(outcome, Exception) else Internal("no executable")
                error = compile_error(failed, requests, version.version)
                now_ns = self._clock()
                version.planner.done(requests, now_ns)
                self._outbox.fail_all([(request, error) for request in requests], now_ns, Failure.BACKEND)
                # The next ones of their sequences may run now.
                self._restore(version, [])
                return
            executables = version.jitted.executables
            for changed in (*executables.add(outcome), outcome.wanted):
                # Batches of a shape grow only as far as an executable for them is ready.
                version.planner.limit(changed.shapes, executables.limit(changed.shapes))
            self._models.changes += 1
            self._restore(version, requests)

        return compiled

    def compile_series(self, version: ModelVersion, series: Series) -> None:
        """Has the program compiled that a series wishes for; its requests are run one by one meanwhile."""
        wish = series.take_wish()
        if wish is not None and version.jitted is not None:
            placement = version.jitted.executables.placement(wish.shapes)
            self._thread.do(lambda: series.compile(wish, placement), functools.partial(self._adopt, version, series))

    def _adopt(self, version: ModelVersion, series: Series, outcome: SeriesProgram | Exception | None) -> None:
        if isinstance(outcome, Exception):
            # Its requests go on being run one by one; it is not wished for again.
            _log.error("compiling a series for model '%s' failed", version.name, exc_info=outcome)
        elif outcome is not None:
            series.add(outcome)
            self._models.changes += 1
