"""Keeps the values that clients pushed into parameter sets, for workers that start later.

    Content       the values of one push, and the client that pushed them
    PushedSet     the newest content of a parameter set, and the content before the newest

The values take at most ``PushedSets.limit`` bytes of memory. To stay within the limit, values are dropped: first the values
before the newest, beginning with the oldest, and then the values of the last push.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensord.shm.operations import MAIN_SET, FileSource, Peer

#: Memory of so many bytes is given back beside the loop.
_LARGE = 16 << 20
#: A model's name and a version.
VersionKey = tuple[str, int]


@dataclass(slots=True, eq=False)
class Content:
    """The values that one push brought into a parameter set, or the values from the model's files if ``number`` is 0."""

    number: int
    #: Bytes in safetensors' layout; 0 for what the repository holds.
    byte_size: int = 0
    #: Sealed memory that is owned here; -1: none.
    memory: int = -1
    #: The file beside the model that it came from, and what that was like then; None: it came otherwise.
    file: FileSource | None = None
    fingerprint: str = ""
    #: When it was pushed (seconds since the epoch), and by whom; 0: it is the repository's.
    pushed_at: float = 0.0
    pushed_by: Peer | None = None
    #: How many workers have died, not for others' doing, while they were given these parameters again and nothing else.
    deaths: int = 0

    def close(self) -> None:
        """Closes the memory of the pushed values. May be called again."""
        memory, self.memory = self.memory, -1
        if memory >= 0 and self.byte_size >= _LARGE:
            asyncio.get_running_loop().run_in_executor(None, os.close, memory)
        elif memory >= 0:
            os.close(memory)

    def describe(self) -> dict[str, Any]:
        """Returns the push as values for JSON. "kept" is where the values are: "memory", "file", "repository" or "none"."""
        if self.pushed_by is None:
            return {"number": self.number, "kept": "repository"}
        return {
            "number": self.number,
            "kept": "memory" if self.memory >= 0 else "file" if self.file is not None else "none",
            "byte_size": self.byte_size,
            "pushed_at": self.pushed_at,
            "pushed_by": words_of(self.pushed_by),
        }


def words_of(peer: Peer) -> str:
    """Returns a text that names a client: its user and process if it is on a Unix socket, else its address."""
    if peer.kind == "unix":
        return f"uid {peer.uid}, process {peer.pid}" if peer.pid else f"uid {peer.uid}"
    return peer.address or peer.kind


@dataclass(slots=True, eq=False)
class PushedSet:
    """Holds the newest values of a model version's parameter set, and the values that the last push has replaced."""

    newest: Content
    #: The content that it held before; None: nothing that could be put into use again.
    former: Content | None = None
    #: The highest number that it ever had.
    highest: int = 0
    #: True if a load of the version has begun since the last push: what serves has this set, and what is loaded begins without.
    outdated: bool = False


@dataclass(slots=True)
class PushedSets:
    """All parameter sets into which clients have pushed. ``limit``: the most bytes of memory for the values of all sets."""

    limit: int
    byte_size: int = 0
    _sets: dict[VersionKey, dict[str, PushedSet]] = field(default_factory=dict)

    def of(self, key: VersionKey) -> Mapping[str, PushedSet]:
        """Returns the parameter sets of a model version into which clients have pushed, by the name of the set."""
        return self._sets.get(key, {})

    def to_restore(self, key: VersionKey) -> dict[str, PushedSet]:
        """Returns the parameter sets that a worker must be given when it loads the version, by the name of the set."""
        return {name: found for name, found in self.of(key).items() if not found.outdated}

    def outdate(self, key: VersionKey) -> None:
        """Marks all pushed parameter sets of a model version as outdated. Later loads of the version do not get them."""
        for found in self.of(key).values():
            found.outdated = True

    def find(self, key: VersionKey, name: str) -> PushedSet | None:
        """Returns the parameter set ``name`` of a model version, or None if no client has pushed into it."""
        return self.of(key).get(name)

    def __iter__(self) -> Iterator[tuple[VersionKey, str, PushedSet]]:
        return ((key, name, found) for key, sets in self._sets.items() for name, found in sets.items())

    def by_version(self) -> dict[VersionKey, tuple[int, int]]:
        """Returns, for each model version, into how many parameter sets clients pushed, and a push number.

        The push number is the number of the push that brought the present values of ``main``, or 0 if no push brought them.
        """
        return {
            key: (len(sets), sets[MAIN_SET].newest.number if MAIN_SET in sets else 0)
            for key, sets in self._sets.items()
        }

    def put(self, key: VersionKey, name: str, content: Content) -> None:
        """Records that a client pushed ``content`` as the newest values of the parameter set ``name`` of a model version.

        The values that the set had become its ``former`` values. If the values of all sets now take more than ``limit`` bytes
        of memory, frees former values, those pushed earliest first. If that is not enough, closes the memory of ``content``.
        """
        sets = self._sets.setdefault(key, {})
        there = sets.get(name)
        if there is None:
            former = Content(0) if name == MAIN_SET else None
            there = sets[name] = PushedSet(content, former)
        else:
            if there.former is not None and there.former is not content:
                self._drop(there.former)
            there.former, there.newest = there.newest, content
        there.highest, there.outdated = max(there.highest, content.number), False
        self._take(content)

    def revert(self, key: VersionKey, name: str) -> None:
        """Puts the former values of a parameter set in force again, and drops the newest values.

        The set must have former values.
        """
        there = self._sets[key][name]
        assert there.former is not None
        self._drop(there.newest)
        there.newest, there.former = there.former, None

    def _take(self, content: Content) -> None:
        if content.memory < 0:
            return
        self.byte_size += content.byte_size
        formers = [found.former for _, _, found in self if found.former is not None and found.former.memory >= 0]
        for former in sorted(formers, key=lambda former: former.pushed_at):
            if self.byte_size <= self.limit:
                break
            self._drop(former)
        if self.byte_size > self.limit:
            self._drop(content)

    def _drop(self, content: Content) -> None:
        if content.memory >= 0:
            self.byte_size -= content.byte_size
            content.close()

    def drop(self, key: VersionKey, name: str) -> bool:
        """Removes a parameter set of a model version. Returns False if there was no such set."""
        sets = self._sets.get(key, {})
        found = sets.pop(name, None)
        if found is None:
            return False
        if not sets:
            del self._sets[key]
        self._drop(found.newest)
        if found.former is not None:
            self._drop(found.former)
        return True

    def forget(self, key: VersionKey, outdated: bool = False) -> list[str]:
        """Removes a model version's parameter sets and returns their names. ``outdated``: True to remove only outdated sets."""
        names = [name for name, found in self.of(key).items() if found.outdated or not outdated]
        for name in names:
            self.drop(key, name)
        return names

    def close(self) -> None:
        """Removes all parameter sets of all models. May be called again."""
        for key in list(self._sets):
            self.forget(key)
