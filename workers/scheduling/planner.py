"""What decides for one model version which requests run, when, and together: a ``DynamicBatcher``, ``SequenceBatcher``, or
``StepBatcher``.

    arrived ─▶ waits ─▶ take ─▶ runs ─▶ done
                 │        ├──▶ restore: it could not run, and waits again
                 │        └──▶ dropped: it never will
                 └─▶ cancelled, or its time is up: refused

A request that is lost may take others along, so whatever loses one returns the answers of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Protocol, TypeVar

from tensord.shm.errors import Cancelled, DeadlineExceeded, ServingError, Unavailable
from tensord.workers.scheduling.queue import RequestQueue, W, Waiting

P = TypeVar("P", bound=Waiting)


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


class QueuePlanner(Generic[W]):
    """What a planner is to the requests that wait in its queue, whatever it does with those that it takes out."""

    def __init__(self, queue: RequestQueue[W]) -> None:
        self._queue = queue
        self.arrived = queue.push

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

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


def earlier(a: int | None, b: int) -> int:
    """The first of two moments; None: never."""
    return b if a is None else min(a, b)
