"""What crosses from ``tensord.daemon.check`` to a process that only tries to load a model, and back. Pure values."""

from __future__ import annotations

import msgspec

from tensord.shm.control_records import Footprint, Load
from tensord.shm.record import Record


class CheckLoads(Record, frozen=True, tag="check"):
    """To a process that only tries what a worker would load (``tensord.workers.check``)."""

    #: ``tensord.config.options.Options`` as msgpack.
    options: msgspec.Raw
    #: Versions of models, in the order in which a worker would load them.
    loads: tuple[Load, ...]


class LoadStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="at"):
    """One line of JSON from it: what it is at, as in ``tensord.shm.progress.Loading``."""

    at: str


class LoadOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="of"):
    """One line of JSON from it: a version that was tried."""

    name: str
    version: int
    #: Why it does not load; "": it does.
    reason: str
    #: The completed configuration as JSON, if it does.
    config: str = ""
    footprint: Footprint = Footprint()
    #: How much the process had printed by then.
    printed: int = 0


LoadLine = LoadStep | LoadOutcome
