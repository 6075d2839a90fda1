"""Runs batches in the thread of the worker's loop: batches of jitted models with one instance, and of ensembles.

planner ─▶ executable there? ─yes─▶ its places, the run, the answers
                             └no──▶ parked until it is compiled
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tensord.shm.status_page import LOOP_SLOT, StatusPage
from tensord.workers.dispatch.ensembles import EnsembleRuns
from tensord.workers.dispatch.outbox import Outbox
from tensord.workers.dispatch.shape_compiler import ShapeCompiler
from tensord.workers.models.execution import Execution, run
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.programs.executable import Executable
from tensord.workers.programs.grouped_calls import GroupedCalls
from tensord.workers.programs.grouped_program import GroupedProgram
from tensord.workers.programs.run_errors import CheckDevice
from tensord.workers.requests.request import Request
from tensord.workers.scheduling.queue import shapes_of

#: Answers of several runs share a flush while so many requests wait: what fewer wait for leaves at once, so that the front is not
#: idle meanwhile.
_MANY = 4
#: And while what the runs have to do does not make up an iteration (``weight.share_of``). So many calls of programs do as well.
_CALLS = 32


class LoopRuns:
    """Runs batches of one worker's jitted models and ensembles in the thread of the worker's loop itself."""

    def __init__(
        self,
        outbox: Outbox,
        compiler: ShapeCompiler,
        ensembles: EnsembleRuns,
        page: StatusPage,
        clock: Callable[[], int],
        check: CheckDevice,
        take: Callable[[ModelVersion, int], list[Request]],
        finish: Callable[[ModelVersion, Execution], None],
    ) -> None:
        """
        Args:
          check: raises an error if the worker's device has failed.
          take: takes the next batch from a version's queue; gets the version and the time.
          finish: answers the requests of an execution that has run.
        """
        self._outbox = outbox
        self._compiler = compiler
        self._ensembles = ensembles
        self._page = page
        self._clock = clock
        self._check = check
        self._take = take
        self._finish = finish
        #: The work of the last program, as a part of an iteration (``weight.share_of``).
        self.share = 0.0

    def run(self, version: ModelVersion, now_ns: int, alone: bool) -> None:
        """Runs a version's next batch, and with ``alone`` further ones while many requests wait and the programs are short.

        The answers of these batches leave together, with one system call and one wake-up of the receiver.

        Args:
          alone: whether no other model has requests.
        """
        done = self._run(version, now_ns)
        while alone and done < 1 and len(version.planner) >= _MANY:
            done += self._run(version, self._clock()) + 1 / _CALLS

    def _run(self, version: ModelVersion, now_ns: int) -> float:
        """Runs a version's next batch. Returns the run's work as a fraction of a loop iteration; infinite: run no more now."""
        batch, model = self._take(version, now_ns), version.jitted
        if batch and version.loaded.ensemble is not None:
            self.share = 0.0
            return math.inf if self._ensembles.run(version, version.loaded.ensemble, batch, now_ns) else 0
        if not batch or model is None:
            return math.inf
        executable: Executable | GroupedProgram | None = None
        grouped = model.grouped
        if grouped is not None and not self._outbox.blocked and not model.executables.device.keeps(batch[0]):
            executable = _extend(version, grouped, batch)
        if executable is None:
            executable = model.find(batch)
        if executable is None:
            self._compiler.park(version, batch, model.wanted_by(batch))
            return 0
        execution = Execution(batch, now_ns, executable)
        # What is kept as an answer for others must not lie where a client can write to it.
        sizes = model.sizes(executable, batch) if version.cache is None else None
        if sizes is not None:
            self._outbox.prepare(execution, sizes)
        # Written before and cleared after, so that a batch that kills this process is known by its requests.
        self._page.begin(
            LOOP_SLOT, [(request.submitter.peer, request.request_id) for request in batch], version.page_key, now_ns
        )
        run(model, execution, self._check)
        self._page.end(LOOP_SLOT, execution.computed_ns)
        self._finish(version, execution)
        self.share = executable.share
        return executable.share if len(version.planner) >= _MANY else math.inf


def _extend(version: ModelVersion, grouped: GroupedCalls, batch: list[Request]) -> GroupedProgram | None:
    """Adds waiting requests that can share a program call with the first request to ``batch``.

    Returns the program for all of them; None: there is none, and nothing was added.
    """
    key = batch[0].key
    waiting = version.queue.rows(key)
    program = grouped.find(shapes_of(key), waiting + 1)
    if program is not None and waiting and program.rows > 1:
        batch += version.queue.take(key, program.rows - 1)
    return program
