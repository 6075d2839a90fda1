"""Serves calls from one model to another. Each call becomes a request in the queue of the called model.

A call is cancelled when all requests for which it was made are cancelled or answered. A call made for requests, to a model
that this worker is still loading, waits for the load. Calls can deadlock: each waits until another one has ended. Then the
newest fails.

A model may have started a thread that calls other models. The worker does not know whether the model waits for this thread. If
a deadlock depends on such a call, the newest of its calls that is at least 5 s old fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from tensord.shm.control_records import Reply
from tensord.shm.errors import Cancelled, Internal, InvalidArgument, NotFound, ServingError, Unavailable, Unsupported
from tensord.shm.operations import LoadModel, ModelReady, UnloadModel
from tensord.workers.calls.call import ModelCall
from tensord.workers.calls.caller import ModelPort
from tensord.workers.dispatch.ensembles import EnsembleRuns
from tensord.workers.dispatch.responses import Responses
from tensord.workers.models.instance import Instance
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import AgendaPart, ModelVersion
from tensord.workers.models.rate_limiter import RateLimiter
from tensord.workers.requests.prepared import validate_inner
from tensord.workers.requests.request import InnerRequest, Moments, Request, not_kept
from tensord.workers.requests.result import Response, Result
from tensord.workers.requests.submitter_link import SubmitterLink
from tensord.workers.scheduling.agenda import NEVER, Agenda

if TYPE_CHECKING:
    from tensord.workers.daemon_operations import DaemonOperations


#: How long a circle through a thread that a model started itself must have lasted before it counts.
_PATIENCE_NS = 5_000_000_000
#: The time between two searches while calls wait: a thread does not report when it begins to wait.
_LOOK_NS = 250_000_000

_Node = InnerRequest | Instance


def path(call: ModelCall) -> list[str]:
    """Returns the names of the models in a chain of calls, from the one that the client asked to the one that made ``call``."""
    names = [call.caller.port.name]
    request: Request | None = next(iter(call.requests), None)
    while isinstance(request, InnerRequest) and request.origin is not None:
        request = request.origin
        names.append(request.version.name)
    return names[::-1]


class CallCircles:
    """Finds calls between a worker's models that are deadlocked, because each waits for another one to end."""

    def __init__(self, calls: dict[ModelCall, InnerRequest], ensembles: EnsembleRuns, limiter: RateLimiter) -> None:
        """Stores the objects that tell ``find`` which requests and instances wait for each other.

        ``calls``: unfinished calls between models, oldest first. The caller updates this dict.
        ``ensembles``: knows the unfinished steps of ensembles' requests. ``limiter``: knows the instances that run now.
        """
        self._calls = calls
        self._ensembles = ensembles
        self._limiter = limiter
        #: True if the last search passed a call from a thread that a model started itself.
        self._by_thread = False

    def find(self, now_ns: int) -> tuple[ModelCall | None, int]:
        """Searches for deadlocks among calls from model to model. Returns the newest deadlocked call, and when to search again.

        A deadlock that depends on a thread that a model started counts only for calls that are at least 5 s old.
        The call is None if there is no deadlock. The time is in CLOCK_MONOTONIC ns, or ``NEVER`` if no search is needed until a
        call begins or ends.
        """
        again_ns = NEVER
        for call in reversed(self._calls):
            inner = self._calls[call]
            version = inner.version
            if not version.loaded.instances and version.loaded.ensemble is None:
                continue
            again_ns = now_ns + _LOOK_NS
            self._by_thread = False
            if not self._is_stuck(inner):
                continue
            if not self._by_thread or call.began_ns + _PATIENCE_NS <= now_ns:
                return call, again_ns
        return None, again_ns

    def _is_stuck(self, inner: InnerRequest) -> bool:
        """Returns whether a request is in a deadlock: nothing that it waits for can go on, and some of that waits for it."""
        visited: set[_Node] = set()
        left: list[_Node] = [inner]
        while left:
            found = tuple(self._waits_for(left.pop()))
            if not found:
                return False
            left += [other for other in found if other not in visited]
            visited.update(found)
        return inner in visited

    @staticmethod
    def is_within(version: ModelVersion, origin: Request | None) -> bool:
        """Returns True if ``origin``, or a request that led to ``origin``, is a request to ``version``, otherwise False."""
        while origin is not None:
            if origin.version is version:
                return True
            origin = origin.origin if isinstance(origin, InnerRequest) else None
        return False

    def _waits_for(self, node: _Node) -> Iterable[_Node]:
        return self._instance_waits_for(node) if isinstance(node, Instance) else self._request_waits_for(node)

    def _request_waits_for(self, inner: InnerRequest) -> Iterable[_Node]:
        version = inner.version
        if version.loaded.ensemble is not None:
            return self._ensembles.steps(inner) or ()
        instances = version.loaded.instances
        for instance in instances:
            if any(inner in execution.requests for execution in instance.given):
                return (instance,)
        sender = version.senders.get(inner)
        if sender is not None:
            # The model has returned: a coroutine may answer, which waits for calls that block the thread of its event loop.
            return [of for call, of in self._calls.items() if call.thread and call.thread == sender.thread]
        if version.sequences is not None:
            live = version.sequences.table.find(inner.own.sequence_id)
            if live is not None and live.slot is not None:
                instances = (instances[live.slot.instance],)
        found: list[_Node] = []
        for instance in instances:
            # Also an instance with room for more: a request whose time may run out is not given to a busy thread.
            if instance.given:
                found.append(instance)
                continue
            holders = self._limiter.running if instance.needs else ()
            if not holders:
                return ()
            found += holders
        return found

    def _instance_waits_for(self, instance: Instance) -> Iterable[_Node]:
        running = instance.running
        found: list[_Node] = [inner for call, inner in self._calls.items() if call.thread == instance.thread]
        if found or running is None:
            return found
        found += [inner for call, inner in self._calls.items() if call.is_awaited and call.caller.execution is running]
        if found:
            return found
        for request in running.requests:
            sender = request.version.senders.get(request)
            if sender is not None and sender.is_full and sender.is_waited_for:
                taker = self._taker(request)
                return () if taker is None else (taker,)
        version = running.requests[0].version if running.requests else None
        if version is None:
            return ()
        threads = [
            inner
            for call, inner in self._calls.items()
            if not call.requests
            and (call.caller.port.name, call.caller.port.version) == (version.name, version.version)
        ]
        self._by_thread |= bool(threads)
        return threads

    def _taker(self, request: Request) -> Instance | None:
        origin: Request | None = request
        while isinstance(origin, InnerRequest):
            for call, inner in self._calls.items():
                if inner is origin and not call.abandoned and call.requests:
                    version = call.requests[0].version
                    return next(
                        (each for each in version.loaded.instances if each.running is call.caller.execution), None
                    )
            origin = origin.origin
        return None


_log = logging.getLogger(__name__)
#: How deep calls may be nested.
MAX_DEPTH = 16


class Calls:
    """Runs the calls that models of one worker make to each other. Each call becomes a request in the worker's queue.

    Any thread may call ``begin``, ``cancel``, ``stop``, ``took``, ``abandon`` and ``ask``. Only the worker's loop may call the
    other methods.
    """

    def __init__(
        self,
        models: ModelTable,
        responses: Responses,
        ensembles: EnsembleRuns,
        limiter: RateLimiter,
        agenda: Agenda[AgendaPart],
        clock: Callable[[], int],
        post: Callable[[Callable[[], None]], None],
        enter: Callable[[ModelVersion, Request, int], None],
        withdraw: Callable[[Request], None],
        max_calls: int,
    ) -> None:
        """Stores the worker's objects and functions that calls between models use.

        Args:
          ensembles, limiter: tell which requests wait for each other, so that deadlocked calls are found.
          clock: returns the time of CLOCK_MONOTONIC in ns.
          post: asks the worker's loop to call a function. Any thread may call ``post``.
          enter: queues the request of a call. The last argument is the time in ns when the call was made.
          withdraw: cancels a request that ``enter`` has queued.
          max_calls: the most calls that one execution of a model may have in flight.
        """
        self._models = models
        self._responses = responses
        self._agenda = agenda
        self._clock = clock
        self._post = post
        self._enter = enter
        self._withdraw = withdraw
        self._max_calls = max_calls
        #: The calls that have not ended.
        self._open: dict[ModelCall, InnerRequest] = {}
        #: Calls that wait for a model which is being loaded here, or is to be, or until the daemon says that it is not.
        self._waiting: dict[ModelCall, None] = {}
        models.on_change = self._look_again
        #: Request -> the calls that are made for it, and have not ended.
        self.of: dict[Request, dict[ModelCall, None]] = {}
        #: The submitter of calls that are not made for a client's request.
        self._nobody: SubmitterLink[Request] = SubmitterLink(0, cast(Any, None))
        #: Asks the daemon to load and unload models; None: there is no daemon.
        self.daemon: DaemonOperations | None = None
        self._circles = CallCircles(self._open, ensembles, limiter)

    # ------------------------------------------------------------------------------------------------------- any thread

    def begin(self, call: ModelCall) -> None:
        self._post(lambda: self._begin(call))

    def cancel(self, call: ModelCall) -> None:
        self._post(lambda: self._end(call, Cancelled()))

    def stop(self, call: ModelCall) -> None:
        self._post(lambda: self._stop(call))

    def took(self, call: ModelCall) -> None:
        self._post(lambda: self._took(call))

    def abandon(self, call: ModelCall) -> None:
        self._post(lambda: self._abandon(call))

    def ask(self, operation: LoadModel | UnloadModel | ModelReady, port: ModelPort) -> bytes:
        if isinstance(operation, ModelReady) and self._models.vouches(operation.name, operation.version):
            return b"true"
        if self.daemon is None:
            raise Unsupported("there is no server that models could be loaded in")
        return self.daemon.ask(operation, port)

    # ---------------------------------------------------------------------------------------------------------- the loop

    def ended(self, requests: Sequence[Request]) -> None:
        """Ends the calls that models made for requests that are cancelled or answered.

        A call that also serves another request continues.
        """
        ended = set(requests)
        for call in {call: None for request in requests for call in self.of.get(request, ())}:
            if all(each.cancelled or each in ended or not each.is_open for each in call.requests):
                self._end(call, Cancelled())

    def settle(self, now_ns: int) -> None:
        """If calls between models are deadlocked, fails one of them with Internal. Schedules the next check."""
        # Searches only after a call has begun, was answered or has ended, and at intervals while calls wait.
        found, again_ns = self._circles.find(now_ns)
        self._agenda.put(self.settle, again_ns)
        if found is not None:
            names = " -> ".join((*path(found), found.prepared.model))
            why = "all that could run this request wait for such requests"
            found.refused = True
            self._end(found, Internal(f"model '{found.prepared.model}' waits for itself ({names}): {why}"))

    def _begin(self, call: ModelCall, said: Reply | None = None) -> None:
        """Begins a call. ``said``: the daemon's reply whether it serves the model, where this worker is to load it no more."""
        call.began_ns = now_ns = self._clock()
        try:
            inner = self._made(call, now_ns)
        except NotFound as error:
            # What a model calls while it is loaded itself may be loaded after it.
            coming = bool(call.requests) and self._models.is_coming(call.prepared.model, call.prepared.version)
            if not coming and (said is not None or self.daemon is None):
                call.refused = True
                call.answered(_not_here(call, error.with_traceback(None), said), True)
                return
            self._waiting[call] = None
            self._note(call)
            if not coming and self.daemon is not None:
                answered = partial(self._begin_again, call)
                self.daemon.is_ready(call.prepared.model, call.prepared.version, bool(call.requests), answered)
            return
        except ServingError as error:
            call.refused = True
            call.answered(error.with_traceback(None), True)
            return
        except Exception as error:  # a defect of ours must not cost the other requests
            _log.exception("a call of model '%s' could not be begun", call.caller.port.name)
            call.answered(Internal(f"the request failed with {type(error).__name__}"), True)
            return
        self._open[call] = inner
        self._note(call)
        for request in call.requests:
            # Nobody knows before which models will be called, in which version and with which parameters.
            not_kept(request)
        try:
            version = inner.version
            self._enter(version, inner, now_ns)
        except ServingError as error:
            call.refused = True
            self._end(call, error.with_traceback(None))
        self._agenda.wake(self.settle)

    def _look_again(self) -> None:
        if self._waiting:
            self._post(self._begin_waiting)

    def _begin_waiting(self) -> None:
        for call in [*self._waiting]:
            self._begin_again(call)

    def _begin_again(self, call: ModelCall, said: Reply | None = None) -> None:
        if call in self._waiting:
            self._close(call)
            self._begin(call, said)

    def _made(self, call: ModelCall, now_ns: int) -> InnerRequest:
        caller, prepared, requests = call.caller, call.prepared, call.requests
        # What takes several responses is left more easily: behind the last answer nothing would end it.
        if requests and all(each.cancelled or (call.streams and not each.is_open) for each in requests):
            raise Cancelled()
        if caller.in_flight >= self._max_calls:
            raise Unavailable(
                f"model '{caller.port.name}' has {caller.in_flight} calls under way, at most {self._max_calls} are taken "
                "(requests.max_calls)"
            )
        names = path(call)
        if len(names) > MAX_DEPTH:
            raise Internal(f"calls are nested {len(names)} deep ({' -> '.join(names)}), at most {MAX_DEPTH} are taken")
        try:
            version = self._models.find(prepared.model, prepared.version)
        except NotFound:
            raise NotFound(f"Model '{prepared.model}' is not ready.") from None
        if version.loaded.streams and not call.streams:
            raise InvalidArgument(call.hint)
        if version.sequences is not None:
            version = self._models.home(version, call.own.sequence_id, call.own.sequence_start)
        origin = next((each for each in requests if not each.cancelled), None)
        deadlines = [each.deadline_ns for each in requests]
        prepared = replace(prepared, version=version.version)
        own = replace(
            call.own,
            request_id=0 if origin is None else origin.request_id,
            prepared=prepared,
            strikes=max((each.own.strikes for each in requests), default=0),
            deadline_ns=max(deadlines) if deadlines and all(deadlines) else 0,
            received_ns=now_ns,
            trace=0 if call.timeline is None else call.timeline.level,
        )

        def responded(inner: Request, result: Result | None, moments: Moments | None, final: bool) -> None:
            self._responded(call, inner, result, final)

        submitter = self._nobody if origin is None else origin.submitter
        outputs = () if set(call.outputs) == version.signature.outputs.keys() else call.outputs
        inner = validate_inner(prepared, own, call.arrays, outputs, submitter, version, now_ns, responded, origin)
        if version.order is not None and self._circles.is_within(version, origin):
            raise Internal(
                f"model '{version.name}' waits for itself ({' -> '.join((*names, version.name))}): it answers in order"
            )
        return inner

    def _responded(self, call: ModelCall, request: Request, result: Result | None, final: bool) -> None:
        if call not in self._open:
            return
        self._agenda.wake(self.settle)
        if call.outputs and result is not None and not isinstance(result, ServingError):
            chosen = {name: array for name, array in result.items() if name in call.outputs}
            result = Response(chosen, result.parameters) if isinstance(result, Response) else chosen
        if final:
            if call.timeline is not None and request.timeline is not None:
                call.timeline.add(request.version.name, request.version.version, request.timeline, call.within)
            self._close(call)
        call.answered(result, final)
        if call.abandoned:
            self._took(call)

    def _took(self, call: ModelCall) -> None:
        inner = self._open.get(call)
        if inner is not None and inner.ahead:
            self._responses.took(inner)

    def _abandon(self, call: ModelCall) -> None:
        call.abandoned = True
        inner = self._open.get(call)
        while inner is not None and inner.ahead:
            self._responses.took(inner)

    def _stop(self, call: ModelCall) -> None:
        inner = self._open.get(call)
        if inner is not None and inner in inner.version.senders and inner.version.loaded.instances:
            inner.may_stop = True
        else:
            self._end(call, Cancelled())

    def _end(self, call: ModelCall, error: ServingError) -> None:
        """Answers ``call`` with an error and cancels its request. Does nothing if the call has ended."""
        inner = self._open.get(call)
        if inner is None and call not in self._waiting:
            return
        self._close(call)
        call.answered(error, True)
        if inner is not None:
            self._withdraw(inner)

    def _note(self, call: ModelCall) -> None:
        call.caller.in_flight += 1
        for request in call.requests:
            self.of.setdefault(request, {})[call] = None

    def _close(self, call: ModelCall) -> None:
        self._open.pop(call, None)
        self._waiting.pop(call, None)
        call.caller.in_flight -= 1
        self._agenda.wake(self.settle)
        for request in call.requests:
            calls = self.of[request]
            del calls[call]
            if not calls:
                del self.of[request]

    def __repr__(self) -> str:
        return f"<Calls {len(self._open)} under way>"


def _not_here(call: ModelCall, error: NotFound, said: Reply | None) -> ServingError:
    if said is not None and said.code == Unavailable.code:
        return Unavailable(said.message)
    if said is None or said.result != b"true":
        return error
    return NotFound(
        f"{error.message} Other workers have it, and calls stay in the worker of their caller, '{call.caller.port.name}'; "
        "models with the same parameter tensord_together are on one worker, and a model that is isolated is on its own."
    )
