"""Timers for the next tries of versions that were given up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from tensord.daemon.models.instructions import Retry

_log = logging.getLogger(__name__)


class Retries:
    """Keeps one timer for each version that was given up."""

    def __init__(self, due: Callable[[Retry], None]) -> None:
        """Takes ``due``, which is called when the time for a try has come."""
        self._due = due
        self._timers: dict[tuple[str, int], asyncio.TimerHandle] = {}

    def later(self, retry: Retry, reason: str) -> None:
        """Starts the timer of a try, in place of an earlier one of that version. ``reason``: why the version is given up."""
        key = (retry.name, retry.version)

        def due() -> None:
            del self._timers[key]
            self._due(retry)

        if (former := self._timers.pop(key, None)) is not None:
            former.cancel()
        self._timers[key] = asyncio.get_running_loop().call_later(retry.seconds, due)
        _log.error(
            "model '%s' version %d is given up for now: %s; it is tried again in %g s", *key, reason, retry.seconds
        )

    def __iter__(self) -> Iterator[tuple[str, int, float]]:
        """Yields name, version, and in how many seconds the next try is due."""
        now = asyncio.get_running_loop().time()
        for (name, version), timer in self._timers.items():
            yield name, version, max(0.0, timer.when() - now)

    def close(self) -> None:
        """Cancels all tries."""
        for timer in self._timers.values():
            timer.cancel()

    def __repr__(self) -> str:
        return f"<Retries {len(self._timers)}>"
