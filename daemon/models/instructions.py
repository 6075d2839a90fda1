"""Plain values: ``tensord.daemon.models.lifecycle`` decides on them, ``tensord.daemon.models.changes`` carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from tensord.shm.control_records import CancelLoad, Load, ModelGone, ModelState, Unload


@dataclass(frozen=True, slots=True)
class Send:
    """A record for one worker."""

    worker: int
    record: Load | CancelLoad | Unload


@dataclass(frozen=True, slots=True)
class Publish:
    """A record for every front."""

    state: ModelState | ModelGone


@dataclass(frozen=True, slots=True)
class Retry:
    """Call ``retry`` for that version in so many seconds."""

    name: str
    version: int
    seconds: float
    #: Of the version; another one by then makes this void.
    deaths: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The operation that ``token`` stands for is over; ``error`` is "" or Triton's sentence."""

    token: int
    error: str = ""


Instruction = Send | Publish | Retry | Settled
