"""Holds the configuration in force, and applies those keys of a new configuration that can change while the daemon runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tensord.config import layers
from tensord.config.layers import ConfigurationError, Configured
from tensord.config.options import Log
from tensord.daemon.control import log_settings
from tensord.daemon.operator import start_checks
from tensord.shm.operations import ChangeLog

_log = logging.getLogger(__name__)
#: The source of a value that nobody has set, and of one that was changed while the daemon runs.
_DEFAULT, _CHANGED = "default", "changed while running"
#: The keys that a reload changes; everything else needs a restart.
_RELOADABLE = ("repository.paths", "repository.load", "repository.required", "log.")


class Configuration:
    """Holds the options that apply now.

    ``reread``: reads the whole configuration again, or raises ConfigurationError. ``publish_log``: called when log options have
    changed, to send them to all processes of the daemon.
    """

    def __init__(
        self, configured: Configured, reread: Callable[[], Configured], publish_log: Callable[[Log], None]
    ) -> None:
        self.options = configured.options
        #: The configuration as it was last accepted: at the start, or by a reload.
        self._accepted = configured
        #: Where the values in force came from.
        self._sources = dict(configured.sources)
        self._reread, self._publish_log = reread, publish_log
        #: True if the last reload, or the start, was successful; and when the last successful one was, in seconds since 1970.
        self.reloaded = True
        self.reloaded_at = time.time()

    async def read(self) -> Configured:
        """Reads and checks files, environment and flags, without applying them.

        Raises ConfigurationError if a value cannot be used.
        """
        new = await asyncio.to_thread(self._reread)
        start_checks.check(new.options)
        return new

    def take(self, new: Configured) -> int:
        """Applies the section ``log`` of ``new``, and ``paths``, ``load`` and ``required`` of its section ``repository``.

        Logs the changed keys that need a restart. Returns how many keys of the whole configuration have changed.
        """
        changed = layers.changed_keys(self.options, new.options)
        fixed = [key for key in changed if not _is_reloadable(key)]
        if fixed:
            _log.warning("reload: these keys need a restart: %s", ", ".join(fixed))
        given = new.options.repository
        repository = msgspec.structs.replace(
            self.options.repository, paths=given.paths, load=given.load, required=given.required
        )
        self.options = msgspec.structs.replace(self.options, repository=repository)
        self._accepted = new
        for key in layers.known_keys():
            if _is_reloadable(key) or key not in changed:
                self._sources.pop(key, None)
                if key in new.sources:
                    self._sources[key] = new.sources[key]
        self.reloaded, self.reloaded_at = True, time.time()
        self._take_log(new.options.log)
        return len(changed)

    def refused(self) -> None:
        """Notes that the last reload of the configuration was refused."""
        self.reloaded = False

    def change_log(self, wanted: ChangeLog) -> bytes:
        """Applies the log settings that a client wants changed. Returns all log settings as JSON."""
        self._take_log(msgspec.structs.replace(self.options.log, **wanted.changes()))
        return msgspec.json.encode(log_settings.described(self.options.log))

    def _take_log(self, new: Log) -> None:
        if new != self.options.log:
            self.options = msgspec.structs.replace(self.options, log=new)
            self._publish_log(new)

    async def described(self) -> dict[str, Any]:
        """Describes every key of the configuration: its present value (without secrets), and where the value came from.

        Returns ``keys``, a list of {key, value, source, next?, waits?}. If the configuration files have another value for the
        key, ``next`` is that value, and ``waits`` is the action that would apply it, "reload" or "restart". Also returns
        ``error``, a sentence if a reload would refuse the files, else "".
        """
        error, new = "", self._accepted
        try:
            new = await self.read()
        except (ConfigurationError, OSError) as refused:
            error = str(refused)
        rows: list[dict[str, Any]] = []
        for key in layers.known_keys():
            value = layers.value_of(self.options, key)
            shown = layers.shown_value_of(self.options, key)
            row = {"key": key, "value": shown, "source": self._sources.get(key, _DEFAULT)}
            if key.startswith("log.") and value != layers.value_of(self._accepted.options, key):
                row["source"] = _CHANGED
            if layers.value_of(new.options, key) != value:
                coming = layers.shown_value_of(new.options, key)
                row |= {"next": coming, "waits": "reload" if _is_reloadable(key) else "restart"}
            rows.append(row)
        return {"keys": rows, "error": error}


def _is_reloadable(key: str) -> bool:
    return key.startswith(_RELOADABLE)
