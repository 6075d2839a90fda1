"""Parts of children that are written in C and are not there: said to the log, once for all children of a kind."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class MissingParts:
    """Of the children of one kind, which are of one installation."""

    def __init__(self) -> None:
        self._said: tuple[str, ...] = ()

    def say(self, missing: tuple[str, ...]) -> None:
        """What a child goes without, as it reported."""
        if missing and missing != self._said:
            self._said = missing
            _log.warning("parts of tensord that are written in C are off: %s", "; ".join(missing))
