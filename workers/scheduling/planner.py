"""Defines planners, which decide which requests of one model version run together, and when.

A planner is a ``DynamicBatcher``, ``SequenceBatcher`` or ``StepBatcher``. The worker's dispatcher calls the planner's methods.

    decide ─▶ Run         a batch is due: once an instance is free, the dispatcher calls ``take`` and runs the batch
           ─▶ Refuse      requests have waited too long: the dispatcher answers them with errors
           ─▶ WaitUntil   nothing is due before a given time
           ─▶ None        nothing is due before a request arrives or a run ends

    arrived ─▶ take ─▶ done      the request has run
       │         ├──▶ restore    the request could not run, and waits again
       │         └──▶ dropped    the request will never run
       ├───────────▶ cancelled   nobody waits for the request any more
       ├───────────▶ arrived     a newer request replaces the request
       └───────────▶ tick        the request has waited too long, and fails

If a request of a sequence fails before it has run, the later requests of the sequence fail, too. Each method that can make a
request fail returns all requests that fail, each with its error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from tensord.shm.errors import Cancelled, DeadlineExceeded, ServingError, Unavailable
from tensord.workers.scheduling.queue import Replacement, RequestQueue, Waiting

P = TypeVar("P", bound=Waiting)


class Run:
    """A planner's decision that a batch is due. The dispatcher then takes the batch from the planner and runs it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<Run>"


RUN = Run()


class WaitUntil(NamedTuple):
    """A planner's decision that it has nothing to do before ``when_ns``."""

    when_ns: int


class Refuse(NamedTuple, Generic[P]):
    """A planner's decision to answer requests with errors, because they have waited too long."""

    answers: list[tuple[P, ServingError]]


Decision = Run | WaitUntil | Refuse[P] | None


class Planner(ABC, Generic[P]):
    """Decides which requests to one model version run together, and when."""

    #: Queues a request. Returns a ``Replacement`` if the request replaces an older one. Raises InvalidArgument: the request fits
    #: no sequence; Unavailable: there is no room. Then nothing has changed.
    arrived: Callable[[P], Replacement[P] | None]

    @abstractmethod
    def __len__(self) -> int:
        """Returns how many requests wait."""

    @abstractmethod
    def cancelled(self, request: P) -> list[tuple[P, ServingError]]:
        """Cancels a waiting request and the waiting requests of its sequence. Returns each cancelled request with its error.

        A request that runs is not stopped. But if it has a slot of a stepped model, it loses the slot, and takes part in no
        further step. In both cases the list is empty.
        """

    @abstractmethod
    def tick(self, now_ns: int) -> list[tuple[P, ServingError]]:
        """Removes requests that have waited too long. Returns them, each with its error."""

    @property
    @abstractmethod
    def next_tick_ns(self) -> int:
        """The earliest time in ns at which ``tick`` may have something to do; 0: never."""

    @property
    def lives(self) -> bool:
        """True while a model that runs in steps has requests in its batch, or unread results on its device; else False."""
        return False

    def decide(self, now_ns: int, instance: int = 0) -> Decision[P]:
        """Returns the decision for a free instance; None: there is nothing to do before a request arrives or a run ends."""
        tick_ns = self.next_tick_ns
        if 0 < tick_ns <= now_ns:
            return Refuse(self.tick(now_ns))
        due_ns = self.due_ns(instance)
        if due_ns is not None and due_ns <= now_ns:
            return RUN
        if due_ns is None:
            return WaitUntil(tick_ns) if tick_ns else None
        return WaitUntil(min(due_ns, tick_ns or due_ns))

    @abstractmethod
    def due_ns(self, instance: int = 0) -> int | None:
        """Returns the time in ns at which the next batch of an instance should run; None: no request waits for the instance."""

    @abstractmethod
    def take(self, now_ns: int, instance: int = 0) -> list[P]:
        """Removes and returns the requests of a free instance's next batch; empty: no batch is due."""

    def done(self, requests: Iterable[P], now_ns: int) -> None:
        """Marks requests as run, successfully or not. Requests that waited for them may run afterwards."""

    def dropped(self, request: P, now_ns: int) -> list[tuple[P, ServingError]]:
        """Drops a request that ``take`` returned and that will never run.

        Returns requests that fail because of that, such as later requests of the same sequence, each with its error.
        """
        return []

    @abstractmethod
    def restore(self, requests: list[P], now_ns: int) -> list[tuple[P, ServingError]]:
        """Queues requests again that ``take`` returned but that could not run.

        Returns all requests that will not run, each with its error: requests of a cancelled sequence, and requests that a newer
        request replaces.
        """

    def limit(self, key: Hashable, rows: int) -> None:
        """Sets how many rows with this batching key may share a batch from now on; 0: as many as the rules allow."""

    def at_once(self, key: Hashable) -> Sequence[range]:
        """Returns ranges of numbers. If that many rows wait, ``take`` returns all of them as one batch, without delay.

        For example, [range(1, 5), range(8, 9)] means that 1, 2, 3, 4 or 8 waiting rows become one batch, but 5, 6 or 7 do not.
        Returns () if the planner delays requests, or never puts requests together.
        ``key``: the batching key of the waiting rows. Only rows with equal batching keys may share a batch.
        """
        return ()

    def end_delays(self) -> None:
        """Stops delaying requests for fuller batches, because no more requests will come."""

    def stop(self) -> None:
        """Prepares for the end of the worker. Requests are no longer delayed, and new sequences are refused."""
        self.end_delays()


class QueuePlanner(Planner[P]):
    """A planner whose requests wait in a ``RequestQueue``. It is the base class of two batchers."""

    def __init__(self, queue: RequestQueue[P]) -> None:
        self._queue = queue
        self.arrived = queue.push

    def __len__(self) -> int:
        return self._queue.size

    def cancelled(self, request: P) -> list[tuple[P, ServingError]]:
        return [(request, Cancelled())] if self._queue.remove(request) else []

    def tick(self, now_ns: int) -> list[tuple[P, ServingError]]:
        late = Unavailable("Request timeout expired")
        return [
            (request, DeadlineExceeded() if 0 < request.deadline_ns <= now_ns else late)
            for request in self._queue.expire(now_ns)
        ]

    @property
    def next_tick_ns(self) -> int:
        return self._queue.expiries.earliest_ns

    def restore(self, requests: list[P], now_ns: int) -> list[tuple[P, ServingError]]:
        return [(replacement.old, replacement.error) for replacement in self._queue.restore(requests)]
