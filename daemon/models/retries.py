"""Timers for the next attempts to load versions that were given up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from tensord.daemon.models.instructions import Retry

_log = logging.getLogger(__name__)


class Retries:
    """Keeps one timer for each version that was given up (workers died loading it) and is to be loaded again."""

    def __init__(self, due: Callable[[Retry], None]) -> None:
        """Stores ``due``, which is called with a version's Retry instruction when it is time to load the version again."""
        self._due = due
        self._timers: dict[tuple[str, int], asyncio.TimerHandle] = {}

    def later(self, retry: Retry, reason: str) -> None:
        """Starts the timer for a version's next load, and cancels its earlier timer. ``reason``: why the version was given up."""
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
        """Yields each version that has a timer: model name, version number, and seconds until its next load."""
        now = asyncio.get_running_loop().time()
        for (name, version), timer in self._timers.items():
            yield name, version, max(0.0, timer.when() - now)

    def close(self) -> None:
        """Cancels the timers of all versions."""
        for timer in self._timers.values():
            timer.cancel()

    def __repr__(self) -> str:
        return f"<Retries {len(self._timers)}>"
