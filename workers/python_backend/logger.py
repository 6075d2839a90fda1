"""How a model writes into the worker's log: part of ``triton_python_backend_utils`` (see ``interface``)."""

from __future__ import annotations

import enum
import logging

_log = logging.getLogger("model")


class Logger:
    """Four levels, each switched by the daemon's log settings."""

    class LogLevel(enum.Enum):
        """Also names of ``Logger`` itself: ``Logger.INFO``."""

        INFO = enum.auto()
        WARNING = enum.auto()
        ERROR = enum.auto()
        VERBOSE = enum.auto()

    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: LogLevel = LogLevel.INFO) -> None:
        """Raises TypeError: the level is none of the four."""
        if not isinstance(message, str):
            raise TypeError(f"message is {message!r}, expected a str")
        if not isinstance(level, Logger.LogLevel):
            raise TypeError(f"level is {level!r}, expected Logger.INFO, Logger.WARNING, Logger.ERROR or Logger.VERBOSE")
        _log.log(_LEVELS[level], "%s", message)

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, Logger.VERBOSE)


_LEVELS = {
    Logger.INFO: logging.INFO,
    Logger.WARNING: logging.WARNING,
    Logger.ERROR: logging.ERROR,
    Logger.VERBOSE: logging.DEBUG,
}
