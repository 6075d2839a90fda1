"""The repositories as they were read last: one that cannot be read for a moment keeps its models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from tensord.config.options import Repository
from tensord.daemon.models import repository
from tensord.daemon.models.repository import FoundModel

_log = logging.getLogger(__name__)


class Repositories:
    """One per daemon."""

    def __init__(self) -> None:
        #: What the last scan found.
        self._found: dict[str, FoundModel] = {}
        #: Those that cannot be read, and may be so, with the reason. No model can have such a name.
        self.unreadable: dict[str, str] = {}
        #: Folders that are no models, as the log has told.
        self._others: dict[Path, str] = {}

    async def scan(self, options: Repository) -> dict[str, FoundModel]:
        """What lies in the folders that ``options`` names. Raises InvalidArgument: one cannot be read, and has to be."""
        paths, kept = [Path(path) for path in options.paths], dict[str, FoundModel]()
        if options.exit_on_error is False:
            unreadable = await asyncio.to_thread(repository.unreadable, paths)
            # Clients are told the name alone.
            self.unreadable = {f"repository '{path.name}'": f"'{path}': {why}" for path, why in unreadable.items()}
            for path, reason in unreadable.items():
                stay = {name: model for name, model in self._found.items() if model.path.parent == path}
                and_so = f"; {len(stay)} models of it stay as they are" if stay else ""
                _log.error("model repository '%s' cannot be read: %s%s; a reload looks again", path, reason, and_so)
                kept |= stay
            paths = [path for path in paths if path not in unreadable]
        found = await asyncio.to_thread(repository.scan, paths, self._found.keys())
        self._tell_others(await asyncio.to_thread(repository.others, paths), found)
        self._found = dict(sorted({**kept, **found}.items()))
        return dict(self._found)

    def _tell_others(self, others: Mapping[Path, str], found: Mapping[str, FoundModel]) -> None:
        """One line about each folder that is no model, when it comes and when what is said of it changes."""
        others = {path: why for path, why in others.items() if path.name not in found}
        for path, why in others.items():
            if self._others.get(path) != why:
                _log.warning("'%s' is no model: %s", path, why)
        self._others = dict(others)

    def __repr__(self) -> str:
        return f"<Repositories {len(self._found)} models, {len(self.unreadable)} cannot be read>"
