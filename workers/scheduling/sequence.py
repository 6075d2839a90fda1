"""A sequence: requests of one correlation id that one slot of one instance runs, one after the other.

    WAITING ──a slot becomes free──▶ ACTIVE ──its id is forgotten──▶ ENDING ──its last request is done──▶ gone
       └──cancelled, or its time is up──▶ gone

Pure values; ``tensord.workers.scheduling.sequence_table`` owns and changes them.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar

from tensord.shm.errors import Unavailable
from tensord.workers.scheduling.queue import Waiting


class Controls(NamedTuple):
    """What a request says of its sequence."""

    #: A number or a text: 5 and "5" are two sequences. 0 and "" are none.
    correlation_id: int | str
    start: bool
    end: bool


#: What becomes ``Controls``, where that is made for every request.
Asked = tuple[int | str, bool, bool]


class Slot(NamedTuple):
    """Where a sequence runs. Lower numbers are given out first, over all instances."""

    number: int
    instance: int


class Sequenced(Waiting):
    """What the scheduler knows of a request to a model with sequences; the fields are not there for others."""

    __slots__ = ("controls", "live", "slot")

    def __init__(self, key: object, arrived_ns: int, controls: Controls) -> None:
        super().__init__(key, 1, arrived_ns)
        self.controls = controls
        #: The sequence that it joined.
        self.live: LiveSequence[Any]
        #: Once it was taken: where its sequence runs.
        self.slot: Slot


S = TypeVar("S", bound=Sequenced)


class SequenceState(enum.Enum):
    """Where a sequence is in its life."""

    #: In the backlog: nothing of it has run.
    WAITING = enum.auto()
    #: It has a slot, and further requests may join.
    ACTIVE = enum.auto()
    #: It has a slot until what is queued has run; its id may begin anew elsewhere.
    ENDING = enum.auto()


class LiveSequence(Generic[S]):
    """One sequence, from its admission until its slot is free."""

    __slots__ = ("begun", "cancelled", "closed", "correlation_id", "generation", "kept", "running", "slot", "waiting")

    def __init__(self, correlation_id: int | str, generation: int) -> None:
        self.correlation_id = correlation_id
        #: Tells sequences of one id apart; a later one has a higher number.
        self.generation = generation
        #: None: it waits for one.
        self.slot: Slot | None = None
        #: Its requests that were not taken, oldest first. What is taken leaves this list.
        self.waiting: deque[S] = deque()
        #: Whether one of its requests was taken and is not done. There is never a second one.
        self.running = False
        #: Whether any was ever taken: from then on the model may have state of it.
        self.begun = False
        #: Whether its id is forgotten: nothing joins it any more.
        self.closed = False
        #: Of a model whose state varies in size (``workers/models/free_state.py``): what its last step left.
        self.kept: Any = None
        #: Whether it lost requests that never ran: nothing more of it may run.
        self.cancelled = False

    @property
    def state(self) -> SequenceState:
        """Where it is in its life."""
        if self.slot is None:
            return SequenceState.WAITING
        return SequenceState.ENDING if self.closed else SequenceState.ACTIVE

    @property
    def ready(self) -> bool:
        """Whether its first waiting request may run."""
        return self.slot is not None and not self.running and bool(self.waiting)

    def __repr__(self) -> str:
        return f"<LiveSequence {self.correlation_id!r} {self.state.name}, {len(self.waiting)} waiting>"


def state_lost(correlation_id: int | str, model: str) -> Unavailable:
    """What a client of a sequence is told whose state went with a run that failed."""
    return Unavailable(
        f"sequence {correlation_id} of model '{model}' was lost after an execution error; start it again with the START flag"
    )
