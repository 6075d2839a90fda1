"""Releases answers in the order in which their requests came, even if later requests finish first. Does no I/O.

Each answer or error waits until the answers to all earlier requests have been released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
A = TypeVar("A")


class ResponseOrder(Generic[K, A]):
    """Puts answers into the order in which their requests came. ``K`` is a request's type, and ``A`` is an answer's type."""

    def __init__(self) -> None:
        #: Requests that were taken and whose answers have not left, in their order.
        self._turns: deque[K] = deque()
        #: Appends a request that will be run or refused: its answer is due after those of all earlier ones.
        self.taken: Callable[[K], None] = self._turns.append
        #: Answers that wait for others.
        self._ready: dict[K, A] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def passes(self, request: K) -> bool:
        """Returns True and removes the request if its answer may be sent now and no other answers are stored.

        Otherwise returns False and changes nothing, and the caller must call ``done`` with the answer.
        """
        turns = self._turns
        if self._ready or not turns or turns[0] is not request:
            return False
        turns.popleft()
        return True

    def holds_up(self, request: K) -> bool:
        """Returns whether the answer to ``request`` must be sent next, and stored answers to later requests wait for it."""
        return bool(self._ready) and self._turns[0] is request

    def done(self, request: K, answer: A) -> list[tuple[K, A]]:
        """Stores a request's answer. Returns the (request, answer) pairs that may be sent now, in order of requests."""
        self._ready[request] = answer
        return self._leaving()

    def withdrawn(self, request: K) -> list[tuple[K, A]]:
        """Removes a request that gets no answer. Returns the (request, answer) pairs that may be sent now, in their order."""
        self._turns.remove(request)
        return self._leaving()

    def _leaving(self) -> list[tuple[K, A]]:
        leaving: list[tuple[K, A]] = []
        while self._turns and self._turns[0] in self._ready:
            first = self._turns.popleft()
            leaving.append((first, self._ready.pop(first)))
        return leaving

    def drop(self) -> list[A]:
        """Removes all requests and all stored answers. Returns these answers, so that the caller can free their resources."""
        dropped = list(self._ready.values())
        self._turns.clear()
        self._ready.clear()
        return dropped

    def __repr__(self) -> str:
        return f"<ResponseOrder {len(self._turns)} taken, {len(self._ready)} ready>"
