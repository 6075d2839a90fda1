"""Finds deadlocks of calls between models, by following what each call, instance and request waits for.

    a call or a step ─▶ the instance that runs it, or all that could ─▶ the calls that these wait for ─▶ ...
                                                                    └▶ the model that does not take their responses

An instance waits for the call that blocks its thread; while it executes a coroutine, for any call that is awaited. A call from a
thread that the model started itself does not show what ``execute`` waits for: an instance of the model may wait for that thread,
so a circle through such a call counts only when it has lasted for 5 s.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from tensord.workers.calls.call import ModelCall
from tensord.workers.dispatch.ensembles import EnsembleRuns
from tensord.workers.models.instance import Instance
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.models.rate_limiter import RateLimiter
from tensord.workers.requests.inner_request import InnerRequest
from tensord.workers.requests.request import Request
from tensord.workers.scheduling.agenda import NEVER

#: How long a circle through a thread that a model started itself must have lasted before it counts.
_PATIENCE_NS = 5_000_000_000
#: The time between two searches while calls wait: a thread does not report when it begins to wait.
_LOOK_NS = 250_000_000

_Node = InnerRequest | Instance
N = TypeVar("N", bound=Hashable)


def path(call: ModelCall) -> list[str]:
    """Returns the names of the models in the chain of calls from the client's request to the model that makes this call."""
    names = [call.caller.port.name]
    request: Request | None = next(iter(call.requests), None)
    while isinstance(request, InnerRequest) and request.origin is not None:
        request = request.origin
        names.append(request.version.name)
    return names[::-1]


class CallCircles:
    """Finds deadlocked calls between a worker's models: every instance that could run such a call waits until it has ended."""

    def __init__(self, calls: dict[ModelCall, InnerRequest], ensembles: EnsembleRuns, limiter: RateLimiter) -> None:
        """``calls``: each call that has not ended, with the request made for it, oldest first; the caller keeps it up to date."""
        self._calls = calls
        self._ensembles = ensembles
        self._limiter = limiter
        #: Whether the last search passed a call from a thread that a model started itself.
        self._by_thread = False

    def find(self, now_ns: int) -> tuple[ModelCall | None, int]:
        """Returns the latest call that is deadlocked (waits for its own end; None: there is none), and when to search again.

        That is a time in ns; ``NEVER``: a search is not needed before a call begins, is answered or ends.
        """
        again_ns = NEVER
        for call in reversed(self._calls):
            inner = self._calls[call]
            version = inner.version
            if not version.loaded.instances and version.loaded.ensemble is None:
                continue
            again_ns = now_ns + _LOOK_NS
            self._by_thread = False
            start: _Node = inner
            if not is_stuck(start, self._waits_for):
                continue
            if not self._by_thread or call.began_ns + _PATIENCE_NS <= now_ns:
                return call, again_ns
        return None, again_ns

    @staticmethod
    def is_within(version: ModelVersion, origin: Request | None) -> bool:
        """Returns whether a request, or any request that it was made for in turn, is a request to that model version."""
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
        """Returns the instance whose model made the call that a request belongs to, and so receives its responses.

        None: a client or a model's own thread receives them.
        """
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


def is_stuck(node: N, waits_for: Callable[[N], Iterable[N]]) -> bool:
    """Returns whether a node is deadlocked: no node that it waits for, directly or through others, can go on by itself.

    Args:
      waits_for: returns the nodes of which any one would let the given node go on; empty: it can go on by itself.
    """
    visited, left = {node}, [node]
    while left:
        found = tuple(waits_for(left.pop()))
        if not found:
            return False
        left += [other for other in found if other not in visited]
        visited.update(found)
    return True
