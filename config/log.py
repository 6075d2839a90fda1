"""Sets up the log of a process: one line for each message, with the format and the levels that the options choose.

    default    I1121 10:20:30.123456 4711 worker-0] text      the format of a Triton server, times in UTC
    ISO8601    2026-11-21T10:20:30.123Z INFO worker-0: text
    json       {"time": ..., "level": ..., "process": ..., "logger": ..., "message": ..., "traceback"?: ..., "trace_id"?: ...}

A JSON object lacks the keys marked "?" if there is no value. In a line of the access log, the object also has "request".
In systemd's journal, all lines begin with a syslog priority, and the formats default and ISO8601 are ``<6>worker-0: text``.
A line about a traced request contains the trace id. Control characters in a message are escaped, so that nobody forges lines.
In the formats default and ISO8601, a traceback follows its message in further lines, which all begin with blanks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from typing import Any, TextIO

from tensord.config.options import Log
from tensord.shm.seldom import Seldom

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
#: syslog's numbers (sd-daemon(3)), which journald reads at the beginning of a line.
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
#: Loggers whose debug messages the first verbose level shows ("model": Triton Python models); libraries' come with the second.
_OURS = ("tensord", "model")
#: Loggers that report every selector they open, every program they compile.
_TALKATIVE = ("asyncio", "jax")
#: Returns the id of the trace that the code works for which writes a line; "": of none. A worker has one.
_find_trace: Callable[[], str] = str


def name_traces(find: Callable[[], str]) -> None:
    """Sets ``find``, the function that log lines get their trace ids from.

    ``find()`` returns the trace ids of the requests that the calling code works on, or "" if none of them is traced.
    """
    global _find_trace
    _find_trace = find


def configure(options: Log, name: str, environment: Mapping[str, str] | None = None) -> None:
    """Sets up the log of this process. A second call changes the log to new options.

    ``name``: the process's name in each line, such as "worker-1". ``environment``: the environment variables, by default
    ``os.environ``. If JOURNAL_STREAM is among them, lines on standard error are written for systemd's journal.
    """
    journal = not options.file and "JOURNAL_STREAM" in (os.environ if environment is None else environment)
    handler = LogFile(options.file) if options.file else _StandardError(sys.stderr)
    handler.setFormatter(
        JsonFormatter(name, journal) if options.format == "json" else TextFormatter(name, options, journal)
    )
    handler.addFilter(_LevelFilter(options))
    handler.addFilter(_note_trace)
    root = logging.getLogger()
    for former in root.handlers:
        if isinstance(former, LogFile):
            former.close()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if options.verbose > 1 else logging.INFO)
    for package in _OURS:
        logging.getLogger(package).setLevel(logging.DEBUG if options.verbose else logging.NOTSET)
    for package in _TALKATIVE:
        logging.getLogger(package).setLevel(logging.WARNING)
    logging.captureWarnings(True)


def check_writable(options: Log) -> None:
    """Creates the log file if it does not exist, and checks that it can be written.

    Raises OSError if the file cannot be written. The error's ``strerror`` is a sentence with the option, the path and the reason.
    """
    try:
        if options.file:
            os.close(os.open(options.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640))
    except OSError as error:
        said = f"log.file: '{options.file}' cannot be written: {error.strerror}"
        raise OSError(error.errno, said) from None


class LogFile(WatchedFileHandler):
    """Appends lines to the log file, which all processes share. If log rotation has moved the file, a new one is opened.

    Lines that cannot be written to the file go to standard error. A message there says why, at most once a minute.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self._seldom = Seldom()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        if self.stream is not None:
            # A line that was not written would come again with the next one, and now goes elsewhere.
            with contextlib.suppress(OSError):
                self.stream.close()
            self.stream = None
        with contextlib.suppress(OSError):
            if self._seldom.is_due():
                reason = f"log file {self.baseFilename} cannot be written: {error.strerror}"
                said = logging.LogRecord(__name__, logging.ERROR, __file__, 0, reason, None, None)
                sys.stderr.write(self.format(said) + "\n")
            sys.stderr.write(self.format(record) + "\n")


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes log lines to standard error. A failure to write is ignored."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _LevelFilter(logging.Filter):
    """Drops log lines of levels that the options turn off. Each level has its own option."""

    def __init__(self, options: Log) -> None:
        super().__init__()
        self._on = {logging.INFO: options.info, logging.WARNING: options.warning, logging.ERROR: options.error}

    def filter(self, record: logging.LogRecord) -> bool:
        return self._on.get(record.levelno, True)


def _note_trace(record: logging.LogRecord) -> bool:
    """Adds the current trace id to a log record that has none. Always returns True, so that no record is dropped."""
    if not hasattr(record, "trace_id"):
        record.trace_id = _find_trace()
    return True


class TextFormatter(logging.Formatter):
    """Formats log messages as text. Lines for systemd's journal begin with a syslog priority. Other lines contain the time."""

    def __init__(self, name: str, options: Log, journal: bool) -> None:
        super().__init__()
        self._name = name
        self._iso = options.format == "ISO8601"
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        lines = _escaped(_message(self, record), keep_lines=True)
        if self._journal:
            # Every line needs its own priority, or the journal gives it the default.
            priority = _PRIORITIES.get(record.levelno, 6)
            return "\n".join(f"<{priority}>{self._name}: {line}" for line in lines.split("\n"))
        if self._iso:
            return f"{_time(record)} {record.levelname} {self._name}: {lines}"
        letter = "V" if record.levelno <= logging.DEBUG else record.levelname[0]
        time = datetime.fromtimestamp(record.created, UTC).strftime("%m%d %H:%M:%S.%f")
        return f"{letter}{time} {record.process} {self._name}] {lines}"


class JsonFormatter(logging.Formatter):
    """Formats each log message as one line of JSON. A line for systemd's journal begins with a syslog priority, as ``<6>``."""

    def __init__(self, name: str, journal: bool = False) -> None:
        super().__init__()
        self._name = name
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._name,
            "logger": record.name,
            "message": _escaped(record.getMessage(), keep_lines=False),
        }
        if request := getattr(record, "request", None):
            line |= {"message": "request", "request": request}
        if trace_id := getattr(record, "trace_id", ""):
            line["trace_id"] = trace_id
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = self.formatException(record.exc_info)
        priority = f"<{_PRIORITIES.get(record.levelno, 6)}>" if self._journal else ""
        return priority + json.dumps(line, ensure_ascii=False)


def _message(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = _escaped(record.getMessage(), keep_lines=False)
    # Those of the access log say it themselves.
    if (trace_id := getattr(record, "trace_id", "")) and not hasattr(record, "request"):
        text += f" trace_id={trace_id}"
    if record.exc_info and record.exc_info[0] is not None:
        # An exception's text may have a line end, and behind it what a client wrote to look like a message.
        text += f"\n{formatter.formatException(record.exc_info)}".replace("\n", "\n  ")
    return text


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _escaped(text: str, *, keep_lines: bool) -> str:
    r"""Replaces control characters by escapes such as ``\x1b``. If ``keep_lines`` is true, line ends are kept."""
    return _CONTROL.sub(lambda found: found[0] if keep_lines and found[0] == "\n" else f"\\x{ord(found[0]):02x}", text)
