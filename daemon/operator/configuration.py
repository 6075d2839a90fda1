"""The configuration in force, and the part of a new one that can be put into force while the daemon runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from tensord.config import layers, log
from tensord.config.options import Log, Options

_log = logging.getLogger(__name__)
#: The keys that a reload changes; everything else needs a restart.
_RELOADABLE = ("repository.paths", "repository.load", "repository.required", "log.")


class Configuration:
    """Holds the options in force. ``reread`` reads all layers again and raises ConfigurationError."""

    def __init__(self, options: Options, reread: Callable[[], Options]) -> None:
        self.options = options
        self._reread = reread

    async def read(self) -> Options:
        """Reads the files, the environment and the flags again. Raises ConfigurationError, OSError: they cannot be used."""
        new = await asyncio.to_thread(self._reread)
        log.check_writable(new.log)
        return new

    def take(self, new: Options) -> int:
        """Puts the repository's options into force. Returns how many keys changed; those that need a restart are logged."""
        changed = layers.changed_keys(self.options, new)
        fixed = [key for key in changed if not key.startswith(_RELOADABLE)]
        if fixed:
            _log.warning("reload: these keys need a restart: %s", ", ".join(fixed))
        repository = msgspec.structs.replace(
            self.options.repository, paths=new.repository.paths, load=new.repository.load
        )
        self.options = msgspec.structs.replace(self.options, repository=repository)
        return len(changed)

    def take_log(self, new: Log) -> None:
        """Puts the log's options into force."""
        self.options = msgspec.structs.replace(self.options, log=new)
