"""The records between ``tensord.daemon.check`` and a process that only tries to load a model. Pure values."""

from __future__ import annotations

import msgspec

from tensord.shm.control_records import Footprint, Load
from tensord.shm.record import Record


class CheckLoads(Record, frozen=True, tag="check"):
    """Asks a checking process (``tensord.workers.check``) to load what a worker would load."""

    #: The daemon's ``tensord.config.options.Options`` as msgpack.
    options: msgspec.Raw
    #: Versions of models, in the order in which a worker would load them.
    loads: tuple[Load, ...]


class LoadStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="at"):
    """Reports, as a line of JSON, the step that the checking process is at, worded as ``tensord.shm.progress.Loading``."""

    at: str


class LoadOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="of"):
    """Reports, as a line of JSON, one version that was tried."""

    name: str
    version: int
    #: The reason why it does not load; "" if it does.
    reason: str
    #: The completed configuration as JSON, if it does.
    config: str = ""
    footprint: Footprint = Footprint()
    #: How many bytes the process had printed by then.
    printed: int = 0


LoadLine = LoadStep | LoadOutcome
