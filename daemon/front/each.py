"""Calls several functions independently: an exception in one is logged, and the others are called as well."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

_log = logging.getLogger(__name__)


def call_each(calls: Iterable[Callable[[], object]], what: str) -> None:
    """Calls all functions in order. An exception is logged as a failure of ``what``, and the others are still called."""
    for call in calls:
        try:
            call()
        except Exception:
            _log.exception("%s failed", what)
