"""The instructions that ``tensord.daemon.models.lifecycle`` decides on and ``tensord.daemon.models.changes`` carries out."""

from __future__ import annotations

from dataclasses import dataclass

from tensord.shm.control_records import CancelLoad, Load, ModelGone, ModelState, Unload


@dataclass(frozen=True, slots=True)
class Send:
    """Instruction to send a record to one worker process; ``worker``: its incarnation, the number that only this process has."""

    worker: int
    record: Load | CancelLoad | Unload


@dataclass(frozen=True, slots=True)
class Publish:
    """Instruction to send a model's state to every front process."""

    state: ModelState | ModelGone


@dataclass(frozen=True, slots=True)
class Forget:
    """Instruction to forget the parameters that clients pushed into a version, because it is loaded anew or stops serving."""

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Retry:
    """Instruction to call ``Lifecycle.retry`` after ``seconds`` for a version given up because workers died loading it."""

    name: str
    version: int
    seconds: float
    #: The version's deaths when this was decided; another number by then makes it void.
    deaths: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Instruction to end the wait for the load or unload with this token; ``error``: why it failed; "": it succeeded."""

    token: int
    error: str = ""


Instruction = Send | Publish | Forget | Retry | Settled
