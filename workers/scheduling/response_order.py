"""Answers leave in the order in which requests were taken from the queue, whichever instance is done first.

Pure. ``preserve_ordering`` asks for it. An answer waits for those before it; an error takes its turn like any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
A = TypeVar("A")


class ResponseOrder(Generic[K, A]):
    """Orders the answers of one model version. ``K`` stands for a request, ``A`` for its answer."""

    def __init__(self) -> None:
        #: Requests that were taken and whose answers have not left, in their order.
        self._turns: deque[K] = deque()
        #: Answers that wait for others.
        self._ready: dict[K, A] = {}

    def __len__(self) -> int:
        """Returns how many requests were taken whose answers have not left."""
        return len(self._turns)

    def taken(self, request: K) -> None:
        """Notes that a request leaves the queue, to be run or refused: its turn is behind all that left before."""
        self._turns.append(request)

    def done(self, request: K, answer: A) -> list[tuple[K, A]]:
        """Takes a request's answer. Returns the answers that may leave now, in their order."""
        self._ready[request] = answer
        leaving: list[tuple[K, A]] = []
        while self._turns and self._turns[0] in self._ready:
            first = self._turns.popleft()
            leaving.append((first, self._ready.pop(first)))
        return leaving

    def check_invariants(self) -> None:
        """Asserts, for tests, that each answer that is held waits for one that is not ready."""
        assert len(set(self._turns)) == len(self._turns)
        assert self._ready.keys() <= set(self._turns)
        assert not self._turns or self._turns[0] not in self._ready

    def __repr__(self) -> str:
        return f"<ResponseOrder {len(self._turns)} taken, {len(self._ready)} ready>"
