"""The instructions that ``tensord.daemon.models.lifecycle`` decides on and ``tensord.daemon.models.changes`` carries out."""

from __future__ import annotations

from dataclasses import dataclass

from tensord.shm.control_records import CancelLoad, Load, ModelGone, ModelState, Unload


@dataclass(frozen=True, slots=True)
class Send:
    """Sends a record to one worker."""

    worker: int
    record: Load | CancelLoad | Unload


@dataclass(frozen=True, slots=True)
class Publish:
    """Sends a record to every front."""

    state: ModelState | ModelGone


@dataclass(frozen=True, slots=True)
class Forget:
    """Forgets what was pushed into that version, which is loaded anew from its files, or serves no more."""

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Retry:
    """Calls ``retry`` for that version in so many seconds."""

    name: str
    version: int
    seconds: float
    #: The version's deaths when this was decided; another number by then makes it void.
    deaths: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Ends the operation that ``token`` stands for; ``error`` is "" or Triton's sentence."""

    token: int
    error: str = ""


Instruction = Send | Publish | Forget | Retry | Settled
