"""A planner decides which requests of one model version run together, and when.

It is a ``DynamicBatcher``, ``SequenceBatcher`` or ``StepBatcher``; ``tensord.workers.dispatch.dispatcher`` carries it out.

    decide ─▶ Run         a batch is due: take it, once there is somebody to run it
           ─▶ Refuse      requests waited too long: answer them
           ─▶ WaitUntil   nothing is due before that
           ─▶ None        nothing is due before something happens: a request, the end of a run

    arrived ─▶ waits ─▶ take ─▶ runs ─▶ done
                 │        ├──▶ restore: it could not run, and waits again
                 │        └──▶ dropped: it never will
                 └─▶ cancelled, replaced, or its time is up: refused

A request that is lost may take others along, so whatever loses one returns the answers of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from tensord.shm.errors import ServingError
from tensord.workers.scheduling.queue import Replacement, Waiting

P = TypeVar("P", bound=Waiting)


class Run(NamedTuple):
    """The decision that a batch is to be taken and run."""

    #: Since when the batch could have run: the version whose request has waited longest goes first.
    since_ns: int


class WaitUntil(NamedTuple):
    """The decision that nothing is due before a moment."""

    when_ns: int


class Refuse(NamedTuple, Generic[P]):
    """The decision to answer requests that waited too long with an error."""

    answers: list[tuple[P, ServingError]]


class Planner(Protocol[P]):
    """The interface of a model version's planner to the dispatcher."""

    def __len__(self) -> int:
        """Returns how many requests wait."""

    @property
    def arrived(self) -> Callable[[P], Replacement[P] | None]:
        """Queues a request. Returns whom it replaces, if any: that one is to be answered.

        Raises: InvalidArgument, Unavailable: why it may not wait; then nothing has changed.
        """

    def cancelled(self, request: P) -> list[tuple[P, ServingError]]:
        """Cancels a request; one that runs goes on. Returns the answers of all that will not run."""

    def tick(self, now_ns: int) -> list[tuple[P, ServingError]]:
        """Removes requests that waited too long. Returns their answers."""

    @property
    def next_tick_ns(self) -> int:
        """When ``tick`` is worth a call, perhaps too early; 0: never."""

    @property
    def lives(self) -> bool:
        """True while the planner must be asked although no request waits."""

    def decide(self, now_ns: int, instance: int = 0) -> Decision[P]:
        """Returns what is to be done now for an instance that is free."""

    def due_ns(self, instance: int = 0) -> int | None:
        """Returns when an instance's next batch should run, or None while no request waits for it."""

    def take(self, now_ns: int, instance: int = 0) -> list[P]:
        """Removes and returns the next batch of a free instance; empty when none is due."""

    def done(self, requests: Iterable[P], now_ns: int) -> None:
        """Notes that requests have run, well or not."""

    def dropped(self, request: P, now_ns: int) -> list[tuple[P, ServingError]]:
        """Notes that a taken request will never run. Returns the answers of others that will not run for that."""

    def restore(self, requests: list[P], now_ns: int) -> list[tuple[P, ServingError]]:
        """Queues taken requests again that could not run. Returns the answers of those that will not run."""

    def limit(self, key: Hashable, rows: int) -> None:
        """Bounds the rows of a key that run at once from now on; 0: as many as of any other key."""

    def at_once(self, key: Hashable) -> int:
        """Returns how many rows of a key may run together without a delay. 0: its requests wait, or run alone."""

    def end_delays(self) -> None:
        """Stops delaying requests, because no others will come to join them."""

    def stop(self) -> None:
        """Prepares for the worker's stop: refuses what may be refused for that."""


Decision = Run | WaitUntil | Refuse[P] | None


def decide(planner: Planner[P], now_ns: int, instance: int) -> Decision[P]:
    """Implements ``Planner.decide`` by a planner's due time and next expiry."""
    tick_ns = planner.next_tick_ns
    if 0 < tick_ns <= now_ns:
        return Refuse(planner.tick(now_ns))
    due_ns = planner.due_ns(instance)
    if due_ns is not None and due_ns <= now_ns:
        return Run(due_ns)
    if due_ns is None:
        return WaitUntil(tick_ns) if tick_ns else None
    return WaitUntil(min(due_ns, tick_ns or due_ns))
