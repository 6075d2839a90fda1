"""Log lines on standard error: text for people, JSON for collectors, priorities for the journal.

Whatever a message contains, it is one line: control characters are escaped, so no client can write a line of its own.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

from config.options import Log

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
#: syslog's numbers (sd-daemon(3)): what journald reads at the beginning of a line.
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


def configure(options: Log, name: str, environment: Mapping[str, str] | None = None) -> None:
    """Sets the process's log up; again after a reload. ``name`` is the process: "supervisor", "http-0"."""
    journal = "JOURNAL_STREAM" in (os.environ if environment is None else environment)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(name) if options.format == "json" else TextFormatter(name, journal))
    handler.addFilter(_LevelFilter(options))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if options.verbose else logging.INFO)
    # It reports every selector it opens.
    logging.getLogger("asyncio").setLevel(logging.WARNING)


class _LevelFilter(logging.Filter):
    """Triton's switches: each level by itself."""

    def __init__(self, options: Log) -> None:
        super().__init__()
        self._on = {logging.INFO: options.info, logging.WARNING: options.warning, logging.ERROR: options.error}

    def filter(self, record: logging.LogRecord) -> bool:
        return self._on.get(record.levelno, True)


class TextFormatter(logging.Formatter):
    """``2026-11-21T10:20:30.123Z INFO supervisor: text``; under the journal, which has the time, ``<6>supervisor: text``."""

    def __init__(self, name: str, journal: bool) -> None:
        super().__init__()
        self._name = name
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        text = _message(self, record)
        if not self._journal:
            return f"{_time(record)} {record.levelname} {self._name}: {_escaped(text, keep_lines=True)}"
        # Every line needs its own priority, or the journal gives it the default.
        priority = _PRIORITIES.get(record.levelno, 6)
        lines = _escaped(text, keep_lines=True).split("\n")
        return "\n".join(f"<{priority}>{self._name}: {line}" for line in lines)


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, process, message."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(
            {
                "time": _time(record),
                "level": record.levelname.lower(),
                "process": self._name,
                "message": _message(self, record),
            },
            ensure_ascii=False,
        )


def _message(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = _escaped(record.getMessage(), keep_lines=False)
    if record.exc_info and record.exc_info[0] is not None:
        text += "\n" + formatter.formatException(record.exc_info)
    return text


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _escaped(text: str, *, keep_lines: bool) -> str:
    """Our own tracebacks keep their lines; messages, which may quote a client, do not."""
    return _CONTROL.sub(lambda found: found[0] if keep_lines and found[0] == "\n" else f"\\x{ord(found[0]):02x}", text)
