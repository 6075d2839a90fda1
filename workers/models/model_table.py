"""Finds the model versions of a worker by name and version number. Used by the worker's loop only.

A version may be loaded again. Earlier requests, and sequences that are live then, finish on the previously loaded model.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator

from tensord.shm.errors import UNKNOWN_MODEL, InvalidArgument, NotFound
from tensord.workers.models.model_version import ModelVersion


class ModelTable:
    """The model versions of a worker: those that serve, are held (no requests yet) or drain (only their last requests)."""

    def __init__(self) -> None:
        self._serving: dict[tuple[str, int], ModelVersion] = {}
        #: (name, 0) is the newest version: what a request without a version gets.
        self._found: dict[tuple[str, int], ModelVersion] = {}
        #: The versions that only hold their model.
        self._passive: set[tuple[str, int]] = set()
        #: Versions that were loaded, and that no request finds before the supervisor has them served.
        self.held: dict[tuple[str, int], ModelVersion] = {}
        #: Versions that are being loaded -> how many loads of them are not over.
        self.coming: Counter[tuple[str, int]] = Counter()
        #: Called when what is found, or is coming, has changed.
        self.on_change: Callable[[], None] = lambda: None
        #: Versions that are not gone yet.
        self.draining: list[ModelVersion] = []
        #: How often anything came, went, or came into use: versions, and programs of theirs.
        self.changes = 0

    def __iter__(self) -> Iterator[ModelVersion]:
        yield from self._serving.values()

    def everyone(self) -> Iterator[ModelVersion]:
        """Iterates over all versions that serve or drain."""
        yield from self._serving.values()
        yield from self.draining

    def add(self, version: ModelVersion) -> None:
        """Makes a model version, and the models that compute its derivatives, available to requests.

        If an earlier load of the version is served, replaces it. It ends once its requests and live sequences have ended.
        """
        old = self._take(version.name, version.version)
        if old is not None and version.loaded.taken_over:
            version.join_programs()
        former = {} if old is None else {each.name: each for each in old.family}
        for each in version.family:
            self._serving[each.name, each.version] = each
        for name in dict.fromkeys((*former, *(each.name for each in version.family))):
            self._index(name)
        for each in version.family:
            each.serve()
            if each.name in former:
                each.statistics.succeed(former[each.name].statistics)
                former[each.name].when_closed(each.statistics.inherit)
        if old is not None:
            self.discard(old)

    def remove(self, name: str, number: int, done: Callable[[], None]) -> None:
        """Removes version ``number`` of the model ``name``. The version gets no new requests.

        Also removes the models that compute derivatives of this model's function, such as ``M.pull_back`` for a model ``M``.
        ``done``: called when all requests and instances of the removed models have ended; at once if the version is not served.
        """
        self.discard_held(name, number)
        version = self._take(name, number)
        for gone in (version, *self.draining):
            if gone is not None and (gone.name, gone.version) == (name, number):
                gone.end_sequences()
        if version is None:
            # Calls may wait for one that was held.
            self.on_change()
            done()
            return
        for each in version.family:
            self._index(each.name)
        self.discard(version, done)

    def _take(self, name: str, number: int) -> ModelVersion | None:
        version = self._serving.get((name, number))
        for each in () if version is None else version.family:
            self._serving.pop((each.name, each.version), None)
        return version

    def hold(self, version: ModelVersion) -> None:
        """Stores a loaded version, which gets no requests until ``serve_held`` is called."""
        self.held[version.name, version.version] = version

    def serve_held(self, name: str, number: int) -> None:
        """Lets the model version ``name``, ``number`` get requests. Does nothing if ``hold`` was not called for this version."""
        version = self.held.pop((name, number), None)
        if version is not None:
            self.add(version)

    def discard_held(self, name: str, number: int) -> None:
        """Unloads version ``number`` of the model ``name`` if it was loaded but gets no requests yet. Otherwise does nothing."""
        version = self.held.pop((name, number), None)
        if version is not None:
            self.discard(version)

    def serving(self, name: str, number: int) -> ModelVersion | None:
        """Returns version ``number`` of the model ``name``, or None if this version was never added or was removed.

        Unlike ``find``, also returns a version that takes no requests.
        """
        return self._serving.get((name, number))

    def find(self, name: str, number: int) -> ModelVersion:
        """Returns version ``number`` of the model ``name``; 0: the newest. Raises NotFound: there is none.

        Raises InvalidArgument: the model takes no requests, because all its instances are passive.
        """
        version = self._found.get((name, number))
        if version is not None:
            return version
        if (name, number) in self._passive:
            raise InvalidArgument(f"model '{name}' has only passive instances, which take no requests")
        if (name, 0) in self._found:
            raise NotFound(f"{UNKNOWN_MODEL}'{name}' version {number} is not found")
        raise NotFound(f"{UNKNOWN_MODEL}'{name}' is not found")

    def is_coming(self, name: str, number: int) -> bool:
        """Returns whether version ``number`` (0: any) is being loaded, or is loaded and does not get requests yet."""
        return any(model == name and number in (0, version) for model, version in (*self.coming, *self.held))

    def load_ended(self, name: str, number: int) -> None:
        """Records that one load of version ``number`` of the model ``name`` has ended, whether it succeeded or failed."""
        self.coming[name, number] -= 1
        self.coming = +self.coming
        self.on_change()

    def vouches(self, name: str, number: int) -> bool:
        """Returns whether a model version is served and has no ``is_ready`` function, so that it is surely ready. Thread-safe."""
        found = self._found.get((name, number))
        return found is not None and found.loaded.is_ready_calls is None

    def settle(self) -> bool:
        """Closes removed and replaced versions without requests or live sequences. Returns whether any closed completely."""
        drained = len(self.draining)
        self.draining = [version for version in self.draining if not version.settle()]
        return len(self.draining) < drained

    def discard(self, version: ModelVersion, done: Callable[[], None] = lambda: None) -> None:
        """Ends a loaded version that requests do not find. ``done``: called when it and its derivatives have ended."""
        left = set(version.family)

        def ended(one: ModelVersion) -> None:
            left.discard(one)
            if not left:
                done()

        for each in version.family:
            each.drain(functools.partial(ended, each))
        self.draining += [each for each in version.family if each not in self.draining]

    def home(self, version: ModelVersion, correlation_id: int | str, start: bool) -> ModelVersion:
        """Returns the object that runs a request of a sequence: ``version``, or one that ``version`` has replaced.

        If ``start`` is False, returns the replaced object on which the sequence is live, or ``version`` if there is none.
        If ``start`` is True, returns ``version``, and ends a live sequence with this correlation id on a replaced object.
        """
        for old in self.draining:
            if old.sequences is None or (old.name, old.version) != (version.name, version.version):
                continue
            if old.sequences.table.find(correlation_id) is not None:
                if not start:
                    return old
                old.sequences.close(correlation_id)
                # Another sequence may run in its place.
                self.changes += 1
        return version

    def _index(self, name: str) -> None:
        self.changes += 1
        self._found = {key: version for key, version in self._found.items() if key[0] != name}
        versions = {key: version for key, version in self._serving.items() if key[0] == name}
        if versions:
            versions[name, 0] = versions[max(versions)]
        # Those that take no requests are looked for where none was found.
        self._found.update({key: version for key, version in versions.items() if not version.loaded.is_passive})
        self._passive = {key for key in self._passive if key[0] != name}
        self._passive |= {key for key, version in versions.items() if version.loaded.is_passive}
        self.on_change()

    def __repr__(self) -> str:
        return f"<ModelTable {sorted(self._serving)}, {len(self.draining)} draining>"
