"""The books of ``tensord.daemon.models.lifecycle``: a model's versions, and which operations wait for each other."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from tensord.config.model_config import with_gpus_of
from tensord.daemon.models.repository import FoundModel
from tensord.shm.control_records import Load, Loaded, ModelState


class VersionState(enum.Enum):
    """The states of Triton's repository index."""

    #: Known to the repository, never asked for.
    UNKNOWN = "UNKNOWN"
    #: Workers are loading it, and none serves it yet.
    LOADING = "LOADING"
    #: Requests for it are taken.
    READY = "READY"
    #: No new requests; those in the workers' queues are being finished.
    UNLOADING = "UNLOADING"
    #: It failed to load, was given up until its next try, or was unloaded; the reason says which.
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True)
class Version:
    """One version of one model. All sets hold worker incarnations."""

    load: Load
    state: VersionState = VersionState.UNKNOWN
    reason: str = ""
    #: Serves there, with what the worker said about it.
    ready: dict[int, Loaded] = field(default_factory=dict)
    #: Loads there that are not answered yet.
    loading: dict[int, int] = field(default_factory=dict)
    #: Has what an earlier Load brought, while the answer to a newer one is awaited.
    held: set[int] = field(default_factory=set)
    #: Should get a Load once that worker loads nothing else.
    postponed: set[int] = field(default_factory=set)
    unloading: set[int] = field(default_factory=set)
    #: A joining worker gets it.
    wanted: bool = False
    #: If it is one of these devices'; empty: whichever it is.
    devices: tuple[str, ...] = ()
    #: Of an ensemble: what has to be ready in a worker before it is loaded there, as in ``FoundModel``.
    members: tuple[tuple[str, int], ...] = ()
    #: A worker died with its Load unanswered, so it is loaded alone from now on: then a death is its own.
    suspect: bool = False
    #: Workers that died while it alone was loading.
    deaths: int = 0
    #: Too many died, and this is how: only the tries that ``Retry`` asks for load it, until one is answered. "": not given up.
    given_up: str = ""
    #: A try is due, and no worker was free for it.
    due: bool = False
    #: The last answer about it, kept while no worker serves it.
    described: Loaded | None = None

    @property
    def stranded(self) -> bool:
        """Given up for want of a device, not for what it did (``Lifecycle.stranded``)."""
        return bool(self.given_up) and not self.deaths

    @property
    def in_use(self) -> bool:
        """Whether it serves, or is on its way to or from there."""
        return self.state not in (VersionState.UNKNOWN, VersionState.UNAVAILABLE) or bool(self.loading)

    def belongs(self, device: str) -> bool:
        """Whether the worker of that device loads it."""
        return not self.devices or device in self.devices

    def told(self, number: int) -> ModelState:
        """What fronts have to know of it, being version ``number``."""
        described = self.described if self.state is VersionState.READY else None
        if described is None:
            return ModelState(self.load.name, number, self.state.value, self.reason)
        return ModelState(
            self.load.name,
            number,
            self.state.value,
            self.reason,
            tuple(sorted(self.ready)),
            described.metadata,
            with_gpus_of(described.config, (each.config for each in self.ready.values())),
            described.repeatable,
            described.sticky,
            described.streams,
            described.joins,
            devices=self.devices,
            judges=described.judges,
        )


@dataclass(slots=True)
class Operation:
    """A load (with the model as found) or an unload (without)."""

    #: Of whoever waits for it: also of those whose own load it has overtaken.
    tokens: tuple[int, ...]
    found: FoundModel | None
    #: Load also what serves already from the same files.
    again: bool = False

    def overtaken_by(self, later: Operation) -> bool:
        """Whether nobody wants what it loads, because of what was asked for after it."""
        if self.found is None:
            return False
        new = later.found
        return new is None or (new.fingerprint, new.devices) != (self.found.fingerprint, self.found.devices)


@dataclass(slots=True)
class Model:
    """One name: its versions and the operations that wait for each other."""

    versions: dict[int, Version] = field(default_factory=dict)
    waiting: deque[Operation] = field(default_factory=deque)
    running: Operation | None = None
    #: Versions the running load brings, and what went wrong with each.
    bringing: dict[int, str] = field(default_factory=dict)
    fingerprint: str = ""
    #: How often it was loaded again from the same files.
    repeated: int = 0
    #: Versions that the last load asked for.
    chosen: tuple[int, ...] = ()


def has_members(models: Mapping[str, Model], version: Version, worker: int) -> bool:
    """Whether everything that an ensemble is made of is ready in that worker."""
    return all(any(worker in one.ready for one in _named(models, *member)) for member in version.members)


def awaits(models: Mapping[str, Model], version: Version) -> bool:
    """Whether a worker owes an answer to its Load, or is to get it as soon as others have answered."""
    return bool(version.loading) or any(
        all(
            any(worker in (*one.ready, *one.loading, *one.postponed) for one in _named(models, *member))
            for member in version.members
        )
        for worker in version.postponed
    )


def _named(models: Mapping[str, Model], name: str, number: int) -> list[Version]:
    """A version, or with -1 all of that name."""
    versions = models[name].versions if name in models else {}
    return [version for n, version in versions.items() if number in (-1, n)]
