"""Polls the repositories (control mode "poll"): loads models again whose files have changed, and unloads those that are gone.

A folder that is being written is left alone until two polls in a row have found it the same. Polling does not wait for loads: a
change during a load is noticed by the next polls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from tensord.config.options import Repository
from tensord.daemon.models.changes import Models
from tensord.daemon.models.repository import FoundModel
from tensord.shm.errors import ServingError

_log = logging.getLogger(__name__)


def _state(model: FoundModel) -> tuple[str, tuple[int, ...], str]:
    """Returns what polls compare to find a changed model: its fingerprint, versions and error."""
    return model.fingerprint, model.chosen, model.error


class Changes:
    """Compares polls of the repositories and decides which models have changed since they were loaded. Sans-I/O."""

    def __init__(self, found: Mapping[str, FoundModel]) -> None:
        """Stores the models that the repositories hold at the daemon's start. ``look`` returns only what changes after that."""
        self._acted = {name: _state(model) for name, model in found.items()}
        self._seen = dict(self._acted)

    def look(self, found: Mapping[str, FoundModel]) -> tuple[list[FoundModel], list[str]]:
        """Compares the models ``found`` with those of the previous poll. Returns the models to load, and the names to unload."""
        states = {name: _state(model) for name, model in found.items()}
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
    """Loads models whose folders have changed, and unloads models whose folders are gone."""

    def __init__(self, models: Models, options: Callable[[], Repository], found: Mapping[str, FoundModel]) -> None:
        """Stores the models ``found``, which are already being loaded. ``options``: returns the options that apply now."""
        self._models = models
        self._options = options
        self._changes = Changes(found)

    async def run(self) -> None:
        """Polls the repositories every ``repository.poll_interval`` seconds. Never returns."""
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
