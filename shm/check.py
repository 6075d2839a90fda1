"""The records (messages) between ``tensord.daemon.check`` and a process that tries whether models can be loaded."""

from __future__ import annotations

import msgspec

from tensord.shm.control_records import Footprint, Load
from tensord.shm.record import Record


class CheckLoads(Record, frozen=True, tag="check"):
    """Asks a checking process (``tensord.workers.check``) to load model versions one by one, as a worker would, and to report."""

    #: The daemon's ``tensord.config.options.Options`` as msgpack.
    options: msgspec.Raw
    #: Versions of models, in the order in which a worker would load them.
    loads: tuple[Load, ...]


class LoadStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="at"):
    """A line of JSON in which a checking process (``tensord.workers.check``) says what it does, such as ``loading digits``."""

    at: str


class LoadOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="of"):
    """A line of JSON in which a checking process (``tensord.workers.check``) says whether one model version could be loaded."""

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
