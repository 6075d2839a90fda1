"""Answers requests from the response cache, if their model has one and an equal request was answered before.

Only the thread of the worker's loop calls these functions.

    request ─▶ its inputs, where a client could still write to them, are copied ─▶ known: answered at once
                                                                             └▶ not known: queued, run, kept, answered

An answer is stored before it is sent, so a client that repeats an answered request always gets it. Errors are not stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from tensord.shm.errors import ServingError
from tensord.workers.dispatch.outbox import Outbox
from tensord.workers.models.execution import Execution
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.models.statistics import Failure
from tensord.workers.regions.region_table import check_intact
from tensord.workers.requests.request import Request, named
from tensord.workers.requests.response_cache import Insertion, Question, ResponseCache

_log = logging.getLogger(__name__)


class CachedAnswers:
    """Answers requests from the response cache of a worker, and stores answers there."""

    def __init__(self, outbox: Outbox, clock: Callable[[], int]) -> None:
        self._outbox = outbox
        self._clock = clock

    def answer(self, version: ModelVersion, request: Request, cache: ResponseCache) -> bool:
        """Answers a request from the cache, or with an error if its parameter set or a region's memory is gone.

        Returns whether the request was answered; False: there is no cached answer, and the request must be run.

        Copies inputs that lie in a client's region first, so that the client cannot change them while they are compared.
        """
        began_ns = self._clock()
        if request.regions:
            try:
                request.keep({name: np.array(array) for name, array in request.arrays.items()})
                check_intact(request.regions)
            except ServingError as error:
                self._outbox.fail(request, error.with_traceback(None))
                return True
        wanted = tuple(request.outputs) if version.loaded.sees_outputs else ()
        stamp, sets = None, version.sets
        if sets is not None:
            try:
                stamp = sets.chosen_by([request]).stamp
            except ServingError as error:
                self._outbox.fail(request, error.with_traceback(None))
                return True
        question = Question.of(version, wanted, request.arrays, stamp)
        found = cache.find(question)
        if found is None:
            request.asked = question, self._clock() - began_ns
            return False
        if isinstance(self._outbox.answer(request, found, began_ns), ServingError):
            version.statistics.failed(self._clock() - request.arrived_ns, Failure.OTHER)
        else:
            version.statistics.found(request, began_ns, self._clock())
        return True

    def keep(self, version: ModelVersion, execution: Execution, cache: ResponseCache) -> None:
        """Stores the results of an execution in the response cache, for later requests with the same inputs.

        Leaves out errors, and results if parameters were replaced since the request came. A failure to store is only logged.
        """
        for request, result in zip(execution.requests, execution.results, strict=True):
            if isinstance(result, ServingError):
                continue
            question, looked_ns = request.asked
            began_ns = self._clock()
            ran = execution.parameters_of(request)
            if ran is not None and question.parameters is not ran.stamp:
                continue  # other parameters were put into use while it waited
            try:
                kept = cache.insert(question, result)
            except (
                Exception
            ) as error:  # no memory, or an array no one expected: what is not kept is answered nevertheless
                _log.error("%san answer of model '%s' is not kept: %r", named(request.client_id), version.name, error)
                continue
            if kept is Insertion.TOO_LARGE:
                _log.warning(
                    "%san answer of model '%s' is too large for the response cache, which holds %d bytes on this worker",
                    named(request.client_id),
                    version.name,
                    cache.max_byte_size,
                )
            if kept is not Insertion.KNOWN:
                version.statistics.cache_miss.add(looked_ns + self._clock() - began_ns)
