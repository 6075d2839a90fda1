"""Calls for many, each apart: what one of them meets is logged, and the others are called as well."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

_log = logging.getLogger(__name__)


def call_each(calls: Iterable[Callable[[], object]], what: str) -> None:
    """Calls all of them in order. ``what`` one of them is, for the log."""
    for call in calls:
        try:
            call()
        except Exception:
            _log.exception("%s failed", what)
