"""The records between ``tensord.daemon.check`` and a process that tries to load models, to see whether a worker could."""

from __future__ import annotations

import msgspec

from tensord.shm.control_records import Footprint, Load
from tensord.shm.record import Record


class CheckLoads(Record, frozen=True, tag="check"):
    """Asks a checking process (``tensord.workers.check``) to load the model versions that a worker would load."""

    #: The daemon's ``tensord.config.options.Options`` as msgpack.
    options: msgspec.Raw
    #: Versions of models, in the order in which a worker would load them.
    loads: tuple[Load, ...]


class LoadStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="at"):
    """Tells, as a line of JSON, which step the checking process is at, in the words of ``tensord.shm.progress.Loading``."""

    at: str


class LoadOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="of"):
    """Tells, as a line of JSON, whether one model version could be loaded."""

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
