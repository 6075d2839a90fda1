"""Follows the repositories (control mode poll): loads what has changed again, and unloads what is gone.

A folder that is being written is left alone until two looks in a row have found it alike. Nothing waits for a load: what changes
again, or goes, while it is loaded is seen meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tensord.config.options import Repository
from tensord.daemon.models.changes import Models
from tensord.daemon.models.repository import FoundModel
from tensord.shm.errors import ServingError

_log = logging.getLogger(__name__)


class State(NamedTuple):
    """The state of a folder; it has to change before the folder is acted upon again."""

    fingerprint: str
    chosen: tuple[int, ...]
    error: str

    @classmethod
    def of(cls, model: FoundModel) -> State:
        return cls(model.fingerprint, model.chosen, model.error)


class Changes:
    """Decides what has changed from one look at the repositories to the next. Pure."""

    def __init__(self, found: Mapping[str, FoundModel]) -> None:
        """Takes the models that were acted upon already."""
        self._acted = {name: State.of(model) for name, model in found.items()}
        self._seen: dict[str, State] = dict(self._acted)

    def look(self, found: Mapping[str, FoundModel]) -> tuple[list[FoundModel], list[str]]:
        """Returns models to load and names to unload, by what lies in the repositories now."""
        states = {name: State.of(model) for name, model in found.items()}
        quiet = {name for name in states.keys() | self._seen.keys() if states.get(name) == self._seen.get(name)}
        quiet |= self._acted.keys() - states.keys() - self._seen.keys()
        self._seen = states
        changed = [found[name] for name in sorted(quiet & states.keys()) if self._acted.get(name) != states[name]]
        gone = sorted((quiet & self._acted.keys()) - states.keys())
        self._acted |= {model.name: states[model.name] for model in changed}
        for name in gone:
            del self._acted[name]
        return changed, gone


class Polling:
    """Looks at the repositories again and again, as a task of a daemon in that mode."""

    def __init__(self, models: Models, options: Callable[[], Repository], found: Mapping[str, FoundModel]) -> None:
        """Takes as ``found`` the models that the start has begun to load."""
        self._models = models
        self._options = options
        self._changes = Changes(found)

    async def run(self) -> None:
        """Looks every ``repository.poll_interval`` seconds until it is cancelled."""
        async with asyncio.TaskGroup() as under_way:
            while True:
                await asyncio.sleep(self._options().poll_interval)
                try:
                    found = await self._models.scan(self._options())
                except ServingError as error:
                    _log.error("polling: %s; what is served stays as it is", error)
                    continue
                changed, gone = self._changes.look(found)
                for name in gone:
                    _log.info("model '%s' is in no repository any more", name)
                if changed or gone:
                    under_way.create_task(self._models.follow(found, changed, gone))
