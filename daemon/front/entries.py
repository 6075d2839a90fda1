"""Limits how many entries the lists and objects of a request may have, because each entry takes time on the event loop."""

from __future__ import annotations

from tensord.shm.errors import InvalidArgument

#: The most inputs, outputs, raw tensors, parameters of a request or of a tensor, settings, or values of one setting.
MAX_ENTRIES = 1024


def check_count(count: int, what: str) -> None:
    """Raises InvalidArgument if ``count`` exceeds ``MAX_ENTRIES``. ``what``: what the error calls the entries."""
    if count > MAX_ENTRIES:
        raise InvalidArgument(f"{count} {what} are given, at most {MAX_ENTRIES} are allowed")
