"""Answers leave in the order in which their requests were taken from the queue, whichever instance is done first.

Pure: what ``preserve_ordering`` asks for. An answer waits for those before it; an error takes its turn like any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
A = TypeVar("A")


class ResponseOrder(Generic[K, A]):
    """One per model version. ``K`` stands for a request, ``A`` for its answer."""

    def __init__(self) -> None:
        #: Those that were taken and not let go, in their order.
        self._turns: deque[K] = deque()
        #: Answers that wait for others.
        self._ready: dict[K, A] = {}

    def __len__(self) -> int:
        """Requests that were taken and not let go."""
        return len(self._turns)

    def taken(self, request: K) -> None:
        """It leaves the queue, to be run or refused: its turn is behind all that left before."""
        self._turns.append(request)

    def done(self, request: K, answer: A) -> list[tuple[K, A]]:
        """Its answer is ready. Returns the answers that may leave now, in their order."""
        self._ready[request] = answer
        leaving: list[tuple[K, A]] = []
        while self._turns and self._turns[0] in self._ready:
            first = self._turns.popleft()
            leaving.append((first, self._ready.pop(first)))
        return leaving

    def check_invariants(self) -> None:
        """For tests: who is ready waits for somebody who is not."""
        assert len(set(self._turns)) == len(self._turns)
        assert self._ready.keys() <= set(self._turns)
        assert not self._turns or self._turns[0] not in self._ready

    def __repr__(self) -> str:
        return f"<ResponseOrder {len(self._turns)} taken, {len(self._ready)} ready>"
