"""Releases answers in the order in which their requests were taken from the queue, whichever instance is done first.

Pure. A model asks for this order by ``preserve_ordering``. An answer waits for all answers before it; so does an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
A = TypeVar("A")


class ResponseOrder(Generic[K, A]):
    """Holds back answers (``A``) of one model version until the answers to earlier requests (``K``) may be sent."""

    def __init__(self) -> None:
        #: Requests that were taken and whose answers have not left, in their order.
        self._turns: deque[K] = deque()
        #: Answers that wait for others.
        self._ready: dict[K, A] = {}

    def __len__(self) -> int:
        """Returns how many of the requests passed to ``taken`` have answers that ``done`` has not returned yet."""
        return len(self._turns)

    def taken(self, request: K) -> None:
        """Appends a request that leaves the queue, to be run or refused: its answer is due after those of all earlier ones."""
        self._turns.append(request)

    def done(self, request: K, answer: A) -> list[tuple[K, A]]:
        """Stores a request's answer. Returns the requests whose answers may be sent now, each with its answer, in their order."""
        self._ready[request] = answer
        leaving: list[tuple[K, A]] = []
        while self._turns and self._turns[0] in self._ready:
            first = self._turns.popleft()
            leaving.append((first, self._ready.pop(first)))
        return leaving

    def check_invariants(self) -> None:
        """Asserts, for tests, that each stored answer waits for an earlier one that is not ready."""
        assert len(set(self._turns)) == len(self._turns)
        assert self._ready.keys() <= set(self._turns)
        assert not self._turns or self._turns[0] not in self._ready

    def __repr__(self) -> str:
        return f"<ResponseOrder {len(self._turns)} taken, {len(self._ready)} ready>"
