"""How many entries the lists and objects of a request may have: each costs a step in the loop that serves everybody."""

from __future__ import annotations

from tensord.shm.errors import InvalidArgument

#: Inputs, outputs, raw tensors, parameters of a request or of a tensor, settings, values of one.
MAX_ENTRIES = 1024


def check_count(count: int, what: str) -> None:
    """Raises InvalidArgument: there are more than are taken."""
    if count > MAX_ENTRIES:
        raise InvalidArgument(f"{count} {what} are given, at most {MAX_ENTRIES} are allowed")
