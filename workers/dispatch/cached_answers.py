"""Answers requests from the response cache, if their model has one and an equal request was answered before.

Only the thread of the worker's event loop calls these functions.

If the cache has no answer to a request, the request is run, and its answer is stored before it is sent. Errors are not stored.
An answer is not stored if the model called another model to compute it.
A stored answer of an ensemble is no longer used once any model has been loaded or unloaded. Until then, it is used for
requests that choose the same parameter sets for the ensemble's models as the request that was run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tensord.shm.errors import ServingError
from tensord.shm.messages import TELLING_PARAMETER
from tensord.workers.dispatch.ensembles import members_of, told_by
from tensord.workers.dispatch.outbox import Outbox
from tensord.workers.models.execution import Execution, chosen_by
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.models.statistics import Failure
from tensord.workers.parameters.parameter_set import ParameterSet
from tensord.workers.regions.region_table import check_intact
from tensord.workers.requests.request import Request, named
from tensord.workers.requests.response_cache import Insertion, Question, ResponseCache, private
from tensord.workers.scheduling.ensemble_graph import EnsembleGraph

_log = logging.getLogger(__name__)


class CachedAnswers:
    """Answers a worker's requests from the worker's response cache, and adds new answers to the cache."""

    def __init__(self, models: ModelTable, outbox: Outbox, clock: Callable[[], int]) -> None:
        self._models = models
        self._outbox = outbox
        self._clock = clock

    def answer(self, version: ModelVersion, request: Request, cache: ResponseCache) -> bool:
        """Answers a request from the cache. Returns False, without an answer, if the cache has no answer to the request.

        If the request's parameter set or region no longer exists, sends an error as the answer and returns True.
        """
        began_ns = self._clock()
        if request.regions:
            try:
                # Copied, because a client could change its region during the comparison.
                request.keep({name: private(array) for name, array in request.arrays.items()})
                check_intact(request.regions)
            except ServingError as error:
                self._outbox.fail(request, error.with_traceback(None))
                return True
        wanted = tuple(request.outputs) if version.loaded.sees_outputs else ()
        try:
            parameters = self._parameters_of(version, request)
        except ServingError as error:
            if version.loaded.ensemble is not None:
                # One of its models is gone: the step says so.
                request.asked = None
                return False
            self._outbox.fail(request, error.with_traceback(None))
            return True
        question = Question.of(version, wanted, request.arrays, parameters)
        found = cache.find(question)
        if found is None:
            request.asked = question, self._clock() - began_ns
            return False
        if version.loaded.ensemble is not None and request.prepared.parameters.get(TELLING_PARAMETER) is True:
            for member, chosen in self._chosen(version.loaded.ensemble, request):
                request.told = told_by(request.told, member.name, False, chosen.said())
        if isinstance(self._outbox.answer(request, found, began_ns), ServingError):
            version.statistics.failed(self._clock() - request.arrived_ns, Failure.OTHER)
        else:
            version.statistics.found(request, began_ns, self._clock())
        return True

    def keep(self, version: ModelVersion, execution: Execution, cache: ResponseCache) -> None:
        """Stores the answers of a run in ``cache``, except errors and answers for which a model called another model.

        An answer is not stored if the model ran with other parameter values than those in use when the cache was searched for
        the request. An ensemble's answer is not stored if, since that search, any model was loaded or unloaded, or a parameter
        set that the request uses got new values.
        """
        for request, result in zip(execution.requests, execution.results, strict=True):
            if isinstance(result, ServingError):
                continue
            if request.asked is None:
                continue  # its model called others
            question, looked_ns = request.asked
            began_ns = self._clock()
            if not self._still_holds(question, version, request, execution.parameters_of(request)):
                continue  # other parameters were put into use while it waited, or an ensemble's models changed
            try:
                kept = cache.insert(question, result)
            except Exception as error:  # no memory, or an array no one expected: it is answered nevertheless
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

    def _parameters_of(self, version: ModelVersion, request: Request) -> tuple[object, ...]:
        graph = version.loaded.ensemble
        if graph is not None:
            # Every load and unload counts, so no other one can have been there in between.
            return self._models.changes, *[chosen.stamp for _, chosen in self._chosen(graph, request)]
        return () if version.sets is None else (chosen_by(version.sets, [request]).stamp,)

    def _chosen(self, graph: EnsembleGraph, request: Request) -> list[tuple[ModelVersion, ParameterSet]]:
        """Returns the models of an ensemble that have parameters, each with the parameter set that ``request`` uses in it."""
        name = request.own.parameter_set
        found: list[tuple[ModelVersion, ParameterSet]] = []
        for member in members_of(self._models, graph, request.outputs):
            if member.sets is not None:
                # Where a model has no such set it is another step's.
                found.append((member, (member.sets.newest(name) if name else None) or member.sets.main))
        return found

    def _still_holds(
        self, question: Question, version: ModelVersion, request: Request, ran: ParameterSet | None
    ) -> bool:
        if ran is not None:
            return question.parameters == (ran.stamp,)
        if version.loaded.ensemble is None:
            return True
        try:
            return question.parameters == self._parameters_of(version, request)
        except ServingError:
            return False  # a model has gone
