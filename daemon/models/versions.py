"""The state that ``tensord.daemon.models.lifecycle`` keeps of each model: its versions, and the queued loads and unloads."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from tensord.config.model_config import with_gpus_of
from tensord.daemon.models.repository import FoundModel
from tensord.shm.control_records import Load, Loaded, ModelState, VersionTraits
from tensord.shm.errors import Unavailable


class IndexState(enum.Enum):
    """Names the states of a model version in Triton's repository index."""

    #: The repository has it, and nobody ever asked for it.
    UNKNOWN = "UNKNOWN"
    #: Workers are loading it, and none serves it yet.
    LOADING = "LOADING"
    #: Requests for it are taken.
    READY = "READY"
    #: New requests are refused; those in the workers' queues are being finished.
    UNLOADING = "UNLOADING"
    #: It failed to load, was given up until its next try, or was unloaded; the reason says which.
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True)
class VersionEntry:
    """The state of one model version on all workers. The fields name a worker by the number of its process."""

    load: Load
    state: IndexState = IndexState.UNKNOWN
    reason: str = ""
    #: Workers that serve it, with what each said about it.
    ready: dict[int, Loaded] = field(default_factory=dict)
    #: Counts the loads of it, and the number of the load that brought what each worker in ``ready`` serves.
    number: int = 0
    brought: dict[int, int] = field(default_factory=dict)
    #: Workers that load it -> the numbers of the loads they have not answered yet, which they do in this order.
    loading: dict[int, list[int]] = field(default_factory=dict)
    #: Workers that have what an earlier Load brought, while the answer to a newer one is awaited.
    held: set[int] = field(default_factory=set)
    #: Workers that get a Load once they load nothing else.
    postponed: set[int] = field(default_factory=set)
    #: Workers that were told to unload it, and have not said yet that they have.
    unloading: set[int] = field(default_factory=set)
    #: True if a joining worker gets it.
    wanted: bool = False
    #: The devices whose workers load it; empty: all.
    devices: tuple[str, ...] = ()
    #: The models that have to be ready in a worker before an ensemble is loaded there, as in ``FoundModel``.
    members: tuple[tuple[str, int], ...] = ()
    #: The rate limiter's resources that its instances need, as in ``FoundModel``.
    resources: Mapping[str, str | None] = field(default_factory=dict)
    #: True if a worker died with its Load unanswered: it is loaded alone from now on, so that a death is its own.
    suspect: bool = False
    #: The number of workers that died while it alone was loading.
    deaths: int = 0
    #: Why it was given up, after too many deaths or without a device; "": it is not. Only the tries that ``Retry`` asks for
    #: load it, and workers that join with its device, until one is answered. Of an ensemble: which model of it was given up,
    #: and why.
    given_up: str = ""
    #: True if a try is due, and no worker was free for it.
    due: bool = False
    #: True if what serves may have parameters of clients that what is loaded, or was to be loaded, does not get.
    outdated: bool = False
    #: The last answer about it, kept while no worker serves it, and the devices of the load that it came from.
    described: Loaded | None = None
    served_devices: tuple[str, ...] = ()

    @property
    def stranded(self) -> bool:
        """Returns whether the daemon gave the version up because no device is usable for it."""
        return bool(self.given_up) and not self.deaths

    @property
    def awaited(self) -> bool:
        """Returns whether the version serves nothing now, but will be loaded again without a client's request."""
        return bool(self.given_up) and self.state in (IndexState.UNLOADING, IndexState.UNAVAILABLE)

    @property
    def in_use(self) -> bool:
        """Returns whether the version serves, is being loaded or is being unloaded."""
        return self.state not in (IndexState.UNKNOWN, IndexState.UNAVAILABLE) or bool(self.loading)

    @property
    def earlier(self) -> set[int]:
        """Returns the numbers of the worker processes that serve the version from an earlier load than another worker."""
        newest = max((self.brought[worker] for worker in self.ready), default=0)
        return {worker for worker in self.ready if self.brought[worker] < newest}

    def belongs(self, device: str) -> bool:
        """Returns whether the worker on ``device`` has to load the version."""
        return not self.devices or device in self.devices

    def is_wanted(self, worker: int, device: str) -> bool:
        """Returns whether a worker that has loaded the version is to serve it. ``worker``: its number. ``device``: its device."""
        return self.wanted and (worker in self.ready or self.belongs(device))

    def state_record(self) -> ModelState:
        """Returns the record that tells fronts the state of this model version."""
        described = self.described if self.state is IndexState.READY else None
        told = self.load.name, self.load.version, self.state.value, self.reason
        if described is None:
            return ModelState(*told, awaited=self.awaited)
        traits = {name: getattr(described, name) for name in VersionTraits.__struct_fields__}
        traits["config"] = with_gpus_of(described.config, (each.config for each in self.ready.values()))
        return ModelState(*told, tuple(sorted(self.ready)), self.served_devices, **traits)


@dataclass(slots=True)
class Operation:
    """A load or unload of a model that somebody has asked for. ``found``: the model's files to load, or None for an unload."""

    #: The tokens of all who wait for it, also of those whose own load it has overtaken.
    tokens: tuple[int, ...]
    found: FoundModel | None
    #: Why what is unloaded will be loaded again by itself, as in ``VersionEntry.given_up``.
    given_up: str = ""
    #: True: what serves already from the same files is loaded as well.
    again: bool = False

    def overtaken_by(self, later: Operation) -> bool:
        """Returns True if this operation is a load, and ``later`` is an unload or loads other files or on other devices."""
        if self.found is None:
            return False
        new = later.found
        return new is None or (new.fingerprint, new.devices) != (self.found.fingerprint, self.found.devices)


@dataclass(slots=True)
class ModelEntry:
    """Holds a model's versions, the load or unload that is in progress for the model, and the waiting loads and unloads."""

    versions: dict[int, VersionEntry] = field(default_factory=dict)
    waiting: deque[Operation] = field(default_factory=deque)
    running: Operation | None = None
    #: Versions that the running load brings, and what went wrong with each.
    bringing: dict[int, str] = field(default_factory=dict)
    fingerprint: str = ""
    #: Counts how often it was loaded again from the same files.
    repeated: int = 0
    #: Versions that the last load asked for.
    chosen: tuple[int, ...] = ()


def has_members(models: Mapping[str, ModelEntry], version: VersionEntry, worker: int) -> bool:
    """Returns whether a worker serves every member of an ensemble. Returns True for any other model.

    ``worker``: the number of the worker process.
    """
    return all(any(worker in one.ready for one in named(models, *member)) for member in version.members)


def awaits(models: Mapping[str, ModelEntry], version: VersionEntry) -> bool:
    """Returns whether any worker loads ``version`` or will load it. ``models``: all models, by name."""
    return bool(version.loading) or any(
        all(
            any(worker in (*one.ready, *one.loading, *one.postponed) for one in named(models, *member))
            for member in version.members
        )
        for worker in version.postponed
    )


def member_given_up(models: Mapping[str, ModelEntry], version: VersionEntry) -> str:
    """Returns which model of the ensemble ``version`` the daemon cannot load now but will try to load later, and why.

    Returns "" if all models of the ensemble serve, or if a missing model will not be loaded later. ``models``: all, by name.
    """
    found = ""
    for name, number in version.members:
        versions = named(models, name, number)
        if any(each.state is IndexState.READY for each in versions):
            continue
        if not (given_up := [each.given_up for each in versions if each.awaited]):
            return ""
        found = found or f"model '{name}': {given_up[-1]}"
    return found


def check_given_up(models: Mapping[str, ModelEntry], name: str, number: int, device: str | None = None) -> None:
    """Raises Unavailable, with the reason, if a model is not loaded before its next try. ``number``: a version, or 0 for any.

    ``device``: only versions count that the workers on this device have to load; None: all versions count.
    """
    found = [v for v in named(models, name, number or -1) if device is None or v.belongs(device)]
    if reasons := [version.given_up for version in found if version.given_up]:
        of = f"'{name}'{f' version {number}' if number else ''}"
        raise Unavailable(f"model {of} cannot be served now: {'; '.join(reasons)}")


def named(models: Mapping[str, ModelEntry], name: str, number: int) -> list[VersionEntry]:
    """Returns the entries of a model's versions, newest last. If ``number`` is not -1, returns only that version, if there."""
    versions = models[name].versions if name in models else {}
    return [version for n, version in sorted(versions.items()) if number in (-1, n)]
