"""One loaded model version and everything that waits for it. Belongs to the worker's loop.

SERVING ──unload──▶ DRAINING: takes no request, finishes those it has ──▶ CLOSED: its instances have ended
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping

from shm.arrays import Array
from shm.figures import VersionFigures
from workers.models.host_model import shapes_key
from workers.models.instance import Instance
from workers.models.loader import LoadedModel
from workers.models.statistics import ModelStatistics
from workers.requests.familiar import Familiar
from workers.requests.request import Request
from workers.requests.response_cache import ResponseCache
from workers.scheduling.dynamic_batcher import DynamicBatcher
from workers.scheduling.queue import RequestQueue


class VersionState(enum.Enum):
    """Where a version is in its life."""

    #: Takes requests.
    SERVING = enum.auto()
    #: Unloaded or replaced: finishes what it has.
    DRAINING = enum.auto()
    #: Ending its instances, or ended.
    CLOSED = enum.auto()


class ModelVersion:
    """Queue, batcher, statistics and the requests that wait for a shape to be compiled."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.name = loaded.name
        self.version = loaded.version
        self.signature = loaded.signature
        self.repeatable = loaded.repeatable
        self.jitted = loaded.jitted
        self.state = VersionState.SERVING
        self.queue: RequestQueue[Request] = RequestQueue(loaded.queue_rules)
        self.batcher = DynamicBatcher(loaded.batch_rules, self.queue)
        self.statistics = ModelStatistics(loaded.name, loaded.version)
        self.familiar = Familiar()
        #: The worker's, where it is used for this model.
        self.cache: ResponseCache | None = None
        #: Batches given to instances and not done.
        self.executing = 0
        #: Shapes being compiled, with the requests that wait for them.
        self.compiling: dict[Hashable, list[Request]] = {}
        self._on_closed: list[Callable[[], object]] = []
        self._open_instances = len(loaded.instances)

    def key(self, arrays: Mapping[str, Array]) -> Hashable:
        """What requests must have in common to run together."""
        if self.jitted is not None:
            return self.jitted.key(arrays)
        return shapes_key(arrays, self.signature.batches)

    def use(self, cache: ResponseCache) -> None:
        """Its answers may be given again."""
        self.cache = cache
        self.when_closed(lambda: cache.forget(self))

    @property
    def free_instance(self) -> Instance | None:
        for instance in self.loaded.instances:
            if not instance.busy:
                return instance
        return None

    @property
    def pending(self) -> int:
        """Requests that wait for their turn, or for their shape to be compiled."""
        return len(self.queue) + sum(map(len, self.compiling.values()))

    def figures(self) -> VersionFigures:
        """For metrics."""
        statistics = self.statistics
        cached = self.cache is not None
        return VersionFigures(self.name, self.version, statistics.began_ns, self.pending, statistics.counts(), cached)

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(len(self.queue) or self.executing or self.compiling)

    def drain(self, on_closed: Callable[[], None]) -> None:
        """No new requests; ``on_closed`` is called once the last one is done and the instances have ended."""
        self.when_closed(on_closed)
        if self.state is VersionState.SERVING:
            self.state = VersionState.DRAINING
            self.batcher.end_delays()

    def when_closed(self, call: Callable[[], object]) -> None:
        """Calls it at the end of this version's life."""
        self._on_closed.append(call)

    def settle(self) -> bool:
        """Closes a drained version. True: nothing is left to do for it."""
        if self.state is VersionState.DRAINING and not self.busy:
            self.state = VersionState.CLOSED
            for instance in self.loaded.instances:
                instance.close(self._instance_closed)
            if not self._open_instances:
                self._closed()
        return self.state is VersionState.CLOSED and not self._open_instances

    def _instance_closed(self) -> None:
        self._open_instances -= 1
        if not self._open_instances:
            self._closed()

    def _closed(self) -> None:
        self.loaded.imports.forget()
        waiting, self._on_closed = self._on_closed, []
        for call in waiting:
            call()

    def __repr__(self) -> str:
        return f"<ModelVersion {self.name}:{self.version} {self.state.name} {self.queue!r}>"
