"""What decides for one model version which requests run, when, and together: a ``DynamicBatcher``, ``SequenceBatcher``, or
``StepBatcher``. ``decide`` says it; ``tensord.workers.dispatch.dispatcher`` carries it out.

    decide ─▶ Run         a batch is due: take it, once there is somebody to run it
           ─▶ Refuse      requests waited too long: answer them
           ─▶ WaitUntil   nothing is due before that
           ─▶ None        nothing is due before something happens: a request, the end of a run

    arrived ─▶ waits ─▶ take ─▶ runs ─▶ done
                 │        ├──▶ restore: it could not run, and waits again
                 │        └──▶ dropped: it never will
                 └─▶ cancelled, or its time is up: refused

A request that is lost may take others along, so whatever loses one returns the answers of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from tensord.shm.errors import Cancelled, DeadlineExceeded, ServingError, Unavailable
from tensord.workers.scheduling.queue import RequestQueue, W, Waiting

P = TypeVar("P", bound=Waiting)


class Run(NamedTuple):
    """A batch is to be taken and run."""

    #: Since when it could have been: whose request has waited longest goes first.
    since_ns: int


class WaitUntil(NamedTuple):
    """Nothing is due before that."""

    when_ns: int


class Refuse(NamedTuple, Generic[P]):
    """Requests waited too long; each with its answer."""

    answers: list[tuple[P, ServingError]]


class Planner(Protocol[P]):
    """One per model version."""

    def __len__(self) -> int:
        """Requests that wait."""

    @property
    def arrived(self) -> Callable[[P], None]:
        """Takes a request in. Raises InvalidArgument, Unavailable: why it may not wait; then nothing has changed."""

    def cancelled(self, request: P) -> list[tuple[P, ServingError]]:
        """Nobody waits for it any more; one that runs goes on. Returns the answers of all that will not run."""

    def tick(self, now_ns: int) -> list[tuple[P, ServingError]]:
        """Time has passed. Returns the answers of those that waited too long."""

    @property
    def next_tick_ns(self) -> int:
        """When ``tick`` is worth a call; 0: never. May be early."""

    @property
    def lives(self) -> bool:
        """Whether it must be asked although nothing waits."""

    def decide(self, now_ns: int, instance: int = 0) -> Decision[P]:
        """What is to be done now for an instance that is free."""

    def due_ns(self, instance: int = 0) -> int | None:
        """When an instance's next batch should run. None: nothing waits for it."""

    def take(self, now_ns: int, instance: int = 0) -> list[P]:
        """Removes the next batch of a free instance; empty when none is due."""

    def done(self, requests: Iterable[P], now_ns: int) -> None:
        """What was taken has run, well or not."""

    def dropped(self, request: P, now_ns: int) -> list[tuple[P, ServingError]]:
        """What was taken will never run. Returns the answers of others that will not run for that."""

    def restore(self, requests: list[P], now_ns: int) -> list[tuple[P, ServingError]]:
        """What was taken could not run, and waits again. Returns the answers of those that will not run."""

    def limit(self, key: Hashable, rows: int) -> None:
        """At most so many rows of that key run at once from now on; 0: as many as of any other."""

    def at_once(self, key: Hashable) -> int:
        """Up to how many rows of waiting requests of that key run as soon as they can, together. 0: they wait, or run alone."""

    def end_delays(self) -> None:
        """No more requests come: what waits for company waits in vain."""

    def stop(self) -> None:
        """The worker is to stop: what may be refused for that is refused."""


Decision = Run | WaitUntil | Refuse[P] | None


def decide(planner: Planner[P], now_ns: int, instance: int) -> Decision[P]:
    """As ``Planner.decide``, by what a planner says of its requests' times."""
    tick_ns = planner.next_tick_ns
    if 0 < tick_ns <= now_ns:
        return Refuse(planner.tick(now_ns))
    due_ns = planner.due_ns(instance)
    if due_ns is not None and due_ns <= now_ns:
        return Run(due_ns)
    if due_ns is None:
        return WaitUntil(tick_ns) if tick_ns else None
    return WaitUntil(min(due_ns, tick_ns or due_ns))


class QueuePlanner(Generic[W]):
    """What a planner is to the requests that wait in its queue, whatever it does with those that it takes out."""

    def __init__(self, queue: RequestQueue[W]) -> None:
        self._queue = queue
        self.arrived = queue.push

    def __len__(self) -> int:
        """Requests that wait."""
        return self._queue.size

    def cancelled(self, request: W) -> list[tuple[W, ServingError]]:
        """Nobody waits for it any more. Returns its answer, if it waited."""
        return [(request, Cancelled("the request was cancelled"))] if self._queue.remove(request) else []

    def tick(self, now_ns: int) -> list[tuple[W, ServingError]]:
        """Time has passed. Returns the answers of those that waited too long."""
        return [
            (
                request,
                DeadlineExceeded() if 0 < request.deadline_ns <= now_ns else Unavailable("Request timeout expired"),
            )
            for request in self._queue.expire(now_ns)
        ]

    @property
    def next_tick_ns(self) -> int:
        """When ``tick`` is worth a call; 0: never. May be early."""
        return self._queue.next_expiry_ns

    def restore(self, requests: list[W], now_ns: int) -> list[tuple[W, ServingError]]:
        """What was taken could not run, and waits again."""
        self._queue.restore(requests)
        return []
