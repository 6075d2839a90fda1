"""The model versions of a worker by name and number. Belongs to the worker's loop.

A version that is loaded again replaces the one before it in one step: requests that came before finish on the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tensord.shm.errors import UNKNOWN_MODEL, InvalidArgument, NotFound
from tensord.workers.models.model_version import ModelVersion


class ModelTable:
    """Versions that take requests, and those that finish theirs."""

    def __init__(self) -> None:
        self._serving: dict[tuple[str, int], ModelVersion] = {}
        #: (name, 0) is the newest version: what a request without a version gets.
        self._found: dict[tuple[str, int], ModelVersion] = {}
        #: Those that only hold their model.
        self._passive: set[tuple[str, int]] = set()
        #: Versions that were loaded and that no request finds before their parameters are restored.
        self.held: dict[tuple[str, int], ModelVersion] = {}
        #: Versions that are not gone yet.
        self.draining: list[ModelVersion] = []
        #: How often anything came, went, or came into use: versions, and programs of theirs.
        self.changes = 0

    def __iter__(self) -> Iterator[ModelVersion]:
        yield from self._serving.values()

    def everyone(self) -> Iterator[ModelVersion]:
        """Iterates over all versions, those included that only finish their requests."""
        yield from self._serving.values()
        yield from self.draining

    def add(self, version: ModelVersion) -> None:
        """Adds a version, which requests find from now on; a version that it replaces drains."""
        old = self._serving.pop((version.name, version.version), None)
        if old is not None and version.loaded.taken_over:
            version.join_programs()
        self._serving[version.name, version.version] = version
        self._index(version.name)
        version.serve()
        if old is not None:
            version.statistics.succeed(old.statistics)
            self._drain(old, version.statistics.inherit)

    def remove(self, name: str, number: int, done: Callable[[], None]) -> None:
        """Removes a version, which no request finds any more; ``done`` is called once it has finished and is gone."""
        self.discard_held(name, number)
        version = self._serving.pop((name, number), None)
        for gone in (version, *self.draining):
            if gone is not None and (gone.name, gone.version) == (name, number):
                gone.end_sequences()
        if version is None:
            done()
            return
        self._index(name)
        self._drain(version, done)

    def hold(self, version: ModelVersion) -> None:
        """Keeps a version that no request finds before ``serve_held``; one that was held before ends."""
        self.discard_held(version.name, version.version)
        self.held[version.name, version.version] = version

    def serve_held(self, name: str, number: int) -> None:
        """Lets requests find a version that was held. Ignores any other."""
        version = self.held.pop((name, number), None)
        if version is not None:
            self.add(version)

    def discard_held(self, name: str, number: int) -> None:
        """Ends a version that is held, if there is such."""
        version = self.held.pop((name, number), None)
        if version is not None:
            self.discard(version)

    def serving(self, name: str, number: int) -> ModelVersion | None:
        """Returns a version, if it serves, or only holds its model; else None."""
        return self._serving.get((name, number))

    def discard(self, version: ModelVersion) -> None:
        """Ends a version that was never added."""
        self._drain(version, lambda: None)

    def find(self, name: str, number: int) -> ModelVersion:
        """Returns a version; ``number`` 0: the newest. Raises NotFound; InvalidArgument: it takes no requests."""
        version = self._found.get((name, number))
        if version is not None:
            return version
        if (name, number) in self._passive:
            raise InvalidArgument(f"model '{name}' has only passive instances, which take no requests")
        if (name, 0) in self._found:
            raise NotFound(f"{UNKNOWN_MODEL}'{name}' version {number} is not found")
        raise NotFound(f"{UNKNOWN_MODEL}'{name}' is not found")

    def serves(self, name: str, number: int) -> bool:
        """Returns whether a version takes requests here; for any thread."""
        return (name, number) in self._found

    def vouches(self, name: str, number: int) -> bool:
        """Returns whether a version takes requests here, and the model itself need not be asked; for any thread."""
        found = self._found.get((name, number))
        return found is not None and found.loaded.is_ready_calls is None

    def settle(self) -> None:
        """Moves draining versions on; called in each iteration while there are any."""
        self.draining = [version for version in self.draining if not version.settle()]

    def _drain(self, version: ModelVersion, done: Callable[[], None]) -> None:
        version.drain(done)
        self.draining.append(version)

    def home(self, version: ModelVersion, correlation_id: int | str, start: bool) -> ModelVersion:
        """Returns the load that a sequence's request goes to: one that began before a reload ends where it began.

        A START goes to the new load, and ends the old run of its sequence.
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

    def __repr__(self) -> str:
        return f"<ModelTable {sorted(self._serving)}, {len(self.draining)} draining>"
