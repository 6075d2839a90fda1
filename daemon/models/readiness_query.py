"""Models that say of themselves whether they are ready, by ``is_ready()`` of a Triton Python model.

Every worker that serves such a model is asked, and all of them have to say so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from tensord.daemon.models.lifecycle import Lifecycle
from tensord.daemon.models.versions import VersionState
from tensord.shm import descriptors
from tensord.shm.errors import ServingError
from tensord.shm.operations import ModelReady

#: A worker answers within five seconds, unless its loop does not turn.
_SECONDS = 10.0
_REASON = "the model's is_ready() does not say that it is"


class Worker(Protocol):
    """A worker, as it is asked."""

    @property
    def incarnation(self) -> int:
        """As in ``Version.ready``."""

    async def call(self, operation: ModelReady) -> tuple[bytes, list[int]]:
        """The result, and descriptors that are the caller's."""


class ReadinessQuery:
    """Asks the workers whether their models say that they are ready. Belongs to the supervisor's loop."""

    def __init__(self, lifecycle: Lifecycle, workers: Callable[[], Sequence[Worker]]) -> None:
        """``workers``: those that are ready for calls."""
        self._lifecycle = lifecycle
        self._workers = workers

    async def is_ready(self, name: str, number: int = 0) -> bool:
        """Returns whether a version (0: the newest) serves and its model says that it is ready."""
        versions = self._lifecycle.models[name].versions if self._lifecycle.is_ready(name, number) else {}
        ready = [n for n, version in versions.items() if version.state is VersionState.READY]
        if not ready:
            return False
        number = number or max(ready)
        version = versions[number]
        if version.described is None or not version.described.judges:
            return True
        asked = [worker for worker in self._workers() if worker.incarnation in version.ready]
        answers = await asyncio.gather(*(self._ask(worker, name, number) for worker in asked))
        return bool(answers) and all(answers)

    async def listed(self, index: list[dict[str, str | int]], ready: bool) -> list[dict[str, str | int]]:
        """The repository index with what models say of themselves. ``ready``: only what is."""
        served = [entry for entry in index if entry.get("state") == VersionState.READY.value]
        answers = await asyncio.gather(*(self.is_ready(str(e["name"]), int(e["version"])) for e in served))
        for entry, answer in zip(served, answers, strict=True):
            if not answer:
                entry["state"], entry["reason"] = VersionState.UNAVAILABLE.value, _REASON
        return [entry for entry in index if not ready or entry["state"] == VersionState.READY.value]

    async def _ask(self, worker: Worker, name: str, number: int) -> bool:
        try:
            async with asyncio.timeout(_SECONDS):
                result, fds = await worker.call(ModelReady(name, number))
        except (ServingError, TimeoutError):
            return False
        descriptors.close(fds)
        return result == b"true"
