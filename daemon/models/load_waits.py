"""Loads that wait for others: a model that is being loaded may have another one loaded, and none may wait for itself. Pure."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from tensord.shm.errors import InvalidArgument


class LoadWaits:
    """One for the daemon."""

    def __init__(self) -> None:
        #: (who waits, for whom) -> on how many workers.
        self._waits: Counter[tuple[str, str]] = Counter()

    @contextlib.contextmanager
    def waiting(self, model: str, other: str) -> Iterator[None]:
        """While a load of ``model`` waits for one of ``other``. "": it is no load that waits.

        Raises InvalidArgument: the other one would wait for this one.
        """
        if not model:
            yield
            return
        way = self._way(other, model)
        if way:
            raise InvalidArgument(f"model '{model}' waits for itself: {' -> '.join((model, *way))}")
        self._waits[model, other] += 1
        try:
            yield
        finally:
            self._waits[model, other] -= 1
            self._waits += Counter()  # without those that are nought

    def waiters(self, name: str) -> set[str]:
        """The models that wait for that one, directly or by way of others."""
        return {model for model, _ in self._waits if model != name and self._way(model, name)}

    def _way(self, start: str, end: str) -> list[str]:
        """From one to the other, by who waits for whom; empty: there is none."""
        ways = [[start]]
        seen = {start}
        while ways:
            way = ways.pop()
            if way[-1] == end:
                return way
            for model, other in self._waits:
                if model == way[-1] and other not in seen:
                    seen.add(other)
                    ways.append([*way, other])
        return []

    def __repr__(self) -> str:
        return f"<LoadWaits {sorted(self._waits)}>"
