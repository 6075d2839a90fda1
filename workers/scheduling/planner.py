"""What decides for one model version which requests run, when, and together: ``DynamicBatcher`` or ``SequenceBatcher``.

    arrived ─▶ waits ─▶ take ─▶ runs ─▶ done
                 │        ├──▶ restore: it could not run, and waits again
                 │        └──▶ dropped: it never will
                 └─▶ cancelled, or its time is up: refused

A request that is lost may take others along, so whatever loses one returns the answers of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Protocol, TypeVar

from shm.errors import ServingError
from workers.scheduling.queue import Waiting

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


def earlier(a: int | None, b: int) -> int:
    """The first of two moments; None: never."""
    return b if a is None else min(a, b)
