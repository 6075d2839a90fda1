"""What crosses from ``daemon.check`` to a process that only tries to load a model, and back. Pure values."""

from __future__ import annotations

import msgspec

from shm.control_records import Load
from shm.record import Record


class CheckLoads(Record, frozen=True, tag="check"):
    """To a process that only tries what a worker would load (``workers.check``)."""

    #: ``config.options.Options`` as msgpack.
    options: msgspec.Raw
    #: Versions of one model.
    loads: tuple[Load, ...]


class LoadOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of JSON from it: a version that was tried."""

    version: int
    #: Why it does not load; "": it does.
    reason: str
