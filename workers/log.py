"""The worker's log: lines on standard error, which the supervisor's standard error is too."""

from __future__ import annotations

import json
import logging
import sys
import time

from config.options import Log


class _Json(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up(name: str, options: Log) -> None:
    """Directs everything that is logged or warned of to standard error, as the options say."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Json(name) if options.format == "json" else logging.Formatter(f"%(levelname)s {name} %(name)s: %(message)s")
    )
    wanted = {logging.INFO: options.info, logging.WARNING: options.warning, logging.ERROR: options.error}
    handler.addFilter(lambda record: wanted.get(record.levelno, record.levelno > logging.ERROR or options.verbose > 0))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.DEBUG if options.verbose > 1 else logging.INFO)
    logging.getLogger("jax").setLevel(logging.WARNING)
    logging.captureWarnings(True)
