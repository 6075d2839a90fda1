"""The log settings in force, which clients can change. The supervisor owns them and publishes them to every process.

A client switches levels and the text format. It never names a file: where the log goes is the operator's alone.
Source: Triton docs/protocol/extension_logging.md; keys and texts as recorded against a real Triton.
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
    """Holds the log settings. ``publish`` is called with every value that comes into force."""

    def __init__(self, options: Log, publish: Callable[[Log], None]) -> None:
        self._current = options
        self._publish = publish

    def change(self, wanted: ChangeLog) -> bytes:
        """Applies the given settings, all of them checked by the front. Returns the settings then in force, as JSON."""
        given = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value is not None}
        self.replace(msgspec.structs.replace(self._current, **given))
        return msgspec.json.encode(described(self._current))

    def replace(self, options: Log) -> None:
        """Puts a whole value into force, as after a reload."""
        if options != self._current:
            self._current = options
            self._publish(options)


def described(log: Log) -> dict[str, Any]:
    """Returns the settings by the protocol's names, in its order."""
    return {
        "log_file": log.file,
        "log_info": log.info,
        "log_warning": log.warning,
        "log_error": log.error,
        "log_verbose_level": log.verbose,
        "log_format": log.format,
    }
