"""Sequences that were lost with their worker: who goes on with one is told so, instead of that it was never begun."""

from __future__ import annotations

from tensord.shm.sequence_keys import Key


class LostSequences:
    """Of one front. Bounded: the earliest are forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        #: When each was lost (seconds); the earliest first.
        self._since: dict[Key, float] = {}

    def add(self, key: Key, now: float) -> None:
        """Its worker died."""
        self._since.pop(key, None)
        while len(self._since) >= self._most:
            del self._since[next(iter(self._since))]
        self._since[key] = now

    def holds(self, key: Key, idle: float, now: float) -> bool:
        """Whether it was lost. Not after it had been silent for so many seconds: then its worker would have forgotten it too."""
        since = self._since.get(key)
        if since is not None and now - since > idle:
            del self._since[key]
            return False
        return since is not None

    def forget(self, key: Key) -> None:
        """It lives again."""
        self._since.pop(key, None)

    def __len__(self) -> int:
        return len(self._since)

    def __repr__(self) -> str:
        return f"<LostSequences {len(self._since)}>"
