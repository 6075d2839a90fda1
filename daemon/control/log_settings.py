"""Holds the log settings in force, which clients can change. The supervisor publishes changes to every process.

Clients can change the levels and the text format, but not the log file.
Source: Triton docs/protocol/extension_logging.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tensord.config.options import Log
from tensord.shm.operations import ChangeLog

#: The values of ``log_format``.
FORMATS = ("default", "ISO8601", "json")
#: The largest ``log_verbose_level``.
MAX_VERBOSE = (1 << 32) - 1
FILE_REFUSED = "log file location can not be updated through network protocol"


class LogSettings:
    """Holds the log settings that apply now. Calls the function ``publish`` with the new settings whenever they change."""

    def __init__(self, options: Log, publish: Callable[[Log], None]) -> None:
        self._current = options
        self._publish = publish

    def change(self, wanted: ChangeLog) -> bytes:
        """Applies the changes that a client wants, and returns all settings as JSON."""
        self.replace(msgspec.structs.replace(self._current, **wanted.changes()))
        return msgspec.json.encode(described(self._current))

    def replace(self, options: Log) -> None:
        """Replaces all log settings by ``options``."""
        if options != self._current:
            self._current = options
            self._publish(options)


def described(log: Log) -> dict[str, Any]:
    """Returns the log settings under the names and in the order of Triton's protocol."""
    return {
        "log_file": log.file,
        "log_info": log.info,
        "log_warning": log.warning,
        "log_error": log.error,
        "log_verbose_level": log.verbose,
        "log_format": log.format,
    }
