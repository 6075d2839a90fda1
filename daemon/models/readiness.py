"""Decides whether the daemon is ready, and sends the decision to the fronts.

The daemon is not ready before each model in the option ``repository.required`` has been served once. If the option names no
model, the same holds for the models that the daemon had to load at its start. While the daemon is drained, it is not ready.
A model that failed to load, or that has no usable device, may be excepted. A table in docs/operations.md has all cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tensord.daemon.models.lifecycle import Lifecycle
from tensord.daemon.models.versions import IndexState
from tensord.shm.control_records import Loading, Readiness

#: The most names in a sentence; further models are only counted.
_MAX_NAMES = 20
#: The reason for a model that is being loaded.
_LOADING = "loading"


@dataclass(frozen=True, slots=True)
class Standing:
    """The readiness of one model that should be served."""

    name: str
    #: The versions that answer requests now.
    served: tuple[int, ...]
    #: The versions that are not served, and why; "": none.
    reason: str
    #: True if it failed: waiting alone does not help.
    failed: bool
    #: True if it failed for a device that other models do not need.
    stranded: bool = False

    @property
    def loads(self) -> bool:
        """Returns whether a running load is the only reason why the model is not served."""
        return self.reason == _LOADING


def standings(
    wanted: Collection[str], required: Iterable[str], refused: Mapping[str, str], lifecycle: Lifecycle
) -> list[Standing]:
    """Returns the readiness of each model in ``wanted`` or ``required``, sorted by name.

    ``wanted``: the models that somebody has asked to load. ``required``: the models without which the daemon is not ready.
    ``refused``: maps a model to the reason for which it was refused before a worker was asked to load it.
    ``lifecycle``: has the states of the models.
    """
    return [
        _standing(name, refused.get(name, ""), lifecycle)
        if name in wanted
        else Standing(name, (), "it is required, and nobody has asked for it", failed=False)
        for name in sorted({*wanted, *required})
    ]


def _standing(name: str, refused: str, lifecycle: Lifecycle) -> Standing:
    model = lifecycle.models.get(name)
    versions = model.versions if model is not None else {}
    served = tuple(sorted(number for number, version in versions.items() if version.ready))
    if refused:
        return Standing(name, served, refused, failed=True)
    chosen = model.chosen if model is not None else ()
    missing = [(number, versions[number]) for number in chosen if number not in served and number in versions]
    failed = [(n, v) for n, v in missing if v.state is IndexState.UNAVAILABLE]
    if failed:
        reason = "; ".join(f"version {number}: {version.reason}" for number, version in failed)
        stranded = all(version.stranded for _, version in missing)
        return Standing(name, served, reason, failed=len(failed) == len(missing), stranded=stranded)
    if missing or not served:
        waits = any(version.state is IndexState.READY for _, version in missing)
        return Standing(name, served, "its workers are being replaced" if waits else _LOADING, failed=False)
    return Standing(name, served, "", failed=False)


def readiness(standing: Iterable[Standing], strict: bool, counted: Collection[str]) -> Readiness:
    """Returns the daemon's readiness. The daemon is ready if every model in ``counted`` is served, with two exceptions.

    If ``strict`` is False, a model whose load has failed need not be served. If at least one model is served, a model without a
    usable device need not be served. The daemon is not ready if no model has a usable device.
    ``standing``: the readiness of each model that should be served.
    """
    every = list(standing)
    unserved = [model for model in every if not model.served]
    holding = [model for model in unserved if model.name in counted and (strict or not model.failed)]
    if every and all(model.stranded for model in every):
        holding = unserved
    elif len(unserved) < len(every):
        holding = [model for model in holding if not model.stranded]
    # Models that hold readiness up are named first.
    names = [model.name for model in holding]
    names += [model.name for model in unserved if model not in holding]
    return Readiness(not holding, len(every), len(unserved), tuple(names[:_MAX_NAMES]))


class ReadinessCheck:
    """Publishes the daemon's ``Readiness`` to the fronts whenever it has changed."""

    def __init__(self, standings: Callable[[], Iterable[Standing]], publish: Callable[[Readiness], None]) -> None:
        """Stores two functions. ``standings`` returns the readiness of each model. ``publish`` sends the daemon's readiness."""
        self._standings = standings
        self._publish = publish
        #: The readiness that was published last; nothing is published before it is known what is wanted.
        self.readiness = Readiness()
        self._begun = False
        #: True if the daemon is being drained, and why processes that die cannot be replaced ("": they can).
        self.draining = False
        self.outdated = ""
        #: Names that were wanted when the daemon started, and still are.
        self._first: set[str] = set()
        #: Names of ``repository.required``: if there are any, only they count.
        self._required: frozenset[str] = frozenset()
        #: Names of models that have served, and are wanted or required still.
        self.served: set[str] = set()
        #: Incarnation of a worker -> what it loads now.
        self._loading: dict[int, Loading] = {}

    def begin(self, wanted: Iterable[str], required: Iterable[str]) -> None:
        """Sets the names of the models that must have served before the daemon becomes ready.

        These are the names in ``required``. If ``required`` is empty, these are the names that the first call had in ``wanted``.
        """
        if not self._begun:
            self._first = set(wanted)
        self._required = frozenset(required)
        self._begun = True

    def loads(self, worker: int, at: Loading | None) -> None:
        """Stores what a worker loads now, or None if it loads nothing. ``worker``: the number of the worker process."""
        if at is None:
            self._loading.pop(worker, None)
        else:
            self._loading[worker] = at

    def check(self, strict: bool) -> None:
        """Publishes the readiness if it has changed.

        ``strict``: whether a model that failed to load makes the daemon not ready.
        """
        standings = list(self._standings())
        names = {model.name for model in standings}
        self._first &= names
        self.served = (self.served | {model.name for model in standings if model.served}) & names
        counted = (self._required or self._first) - self.served
        found = readiness(standings, strict, counted)
        if found.unserved and self._loading:
            found = msgspec.structs.replace(found, at=str(next(iter(self._loading.values()))))
        found = msgspec.structs.replace(found, outdated=self.outdated)
        if self.draining:
            found = msgspec.structs.replace(found, ready=False, draining=True)
        if self._begun and found != self.readiness:
            self.readiness = found
            self._publish(found)


class ServedBefore:
    """Keeps the names of the models that this daemon has served in a file, which is read at a start after a crash."""

    def __init__(self, folder: Path | None) -> None:
        """Reads the names of served models from served.json in ``folder``. If ``folder`` is None, nothing is read or written."""
        self._path = None if folder is None else folder / "served.json"
        #: The names of the models that the daemon before had served; empty: it did not crash, or had never been ready.
        self.names: frozenset[str] = frozenset()
        self._wanted: Set[str] = self.names
        #: Held while the file changes; nothing is written after ``forget``.
        self._lock = threading.Lock()
        self._forgotten = False
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):
                self.names = frozenset(map(str, json.loads(self._path.read_bytes())))

    def note(self, names: Set[str]) -> None:
        """Writes ``names``, the names of all models that have been served, to served.json if they have changed."""
        if self._path is not None and names != self._wanted:
            self._wanted = frozenset(names)
            asyncio.get_running_loop().run_in_executor(None, self._write, self._path)

    def _write(self, path: Path) -> None:
        with self._lock, contextlib.suppress(OSError):
            if not self._forgotten:
                new = path.with_suffix(".new")
                new.write_text(json.dumps(sorted(self._wanted)))
                os.replace(new, path)

    def forget(self) -> None:
        """Removes served.json. Call it when the daemon stops normally, because only a start after a crash needs the file."""
        with self._lock, contextlib.suppress(OSError):
            self._forgotten = True
            if self._path is not None:
                self._path.unlink()

    def __repr__(self) -> str:
        return f"<ServedBefore {len(self.names)} models>"
