"""Names the log settings that clients can read and change, and the values that they may have.

Clients can change the levels and the text format, but not the log file.
Source: Triton docs/protocol/extension_logging.md.
"""

from __future__ import annotations

from typing import Any

from tensord.config.options import Log

#: The values of ``log_format``.
FORMATS = ("default", "ISO8601", "json")
#: The largest ``log_verbose_level``.
MAX_VERBOSE = (1 << 32) - 1
FILE_REFUSED = "log file location can not be updated through network protocol"


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
