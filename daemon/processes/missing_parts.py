"""What children go without: said to the log, once for all children of a kind."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


#: Of ``ChildReady.missing`` and ``ChildReady.jax_lacks``.
IN_C = "parts of tensord that are written in C are off"
OF_JAX = "this JAX lacks interfaces that are not public"


class MissingParts:
    """Of the children of one kind, which are of one installation."""

    def __init__(self, what: str = IN_C) -> None:
        """``what``: begins the line in the log."""
        self._what = what
        self._said: tuple[str, ...] = ()

    def say(self, missing: tuple[str, ...]) -> None:
        """What a child goes without, as it reported."""
        if missing and missing != self._said:
            self._said = missing
            _log.warning("%s: %s", self._what, "; ".join(missing))
