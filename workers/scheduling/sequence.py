"""Data types for sequences. A sequence is a series of requests with the same correlation id, which run one after the other.

A sequence waits until one of the model's slots is free, and then holds the slot until the sequence ends. The sequence ends when
its request with END has run, when it was idle for too long, or when one of its requests is cancelled, expires or fails.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from tensord.shm.errors import Unavailable
from tensord.workers.scheduling.queue import Waiting


class Controls(NamedTuple):
    """A request's correlation id, and its flags START and END."""

    #: A number or a text: 5 and "5" are two sequences. 0 and "" are none.
    correlation_id: int | str
    start: bool
    end: bool


#: The fields of ``Controls``, where making one for every request would cost too much.
Asked = tuple[int | str, bool, bool]


class Slot(NamedTuple):
    """A numbered place for a sequence on a model instance. A new sequence takes the free slot with the lowest ``number``."""

    number: int
    instance: int


class Sequenced(Waiting):
    """A request to a model with sequences, as the scheduler sees it: with its sequence and slot."""

    __slots__ = ("controls", "live", "slot")

    def __init__(self, key: object, arrived_ns: int, controls: Controls) -> None:
        super().__init__(key, 1, arrived_ns)
        self.controls = controls
        #: The sequence that the request joined.
        self.live: LiveSequence[Any]
        #: The slot of its sequence; set once the request was taken.
        self.slot: Slot


S = TypeVar("S", bound=Sequenced)


@dataclass(slots=True, eq=False, repr=False)
class LiveSequence(Generic[S]):
    """A sequence, from its first request until its last request has run and its slot is free again."""

    correlation_id: int | str
    #: What the worker's register of sequences has of it.
    entry: Any
    #: Its slot until what is queued has run; None while it waits for one.
    slot: Slot | None = None
    #: Its requests that were not taken, oldest first. What is taken leaves this list.
    waiting: deque[S] = field(default_factory=deque)
    #: True if one of its requests was taken and is not done; there is at most one.
    running: bool = False
    #: True if any of its requests was ever taken: from then on the model may have state of it.
    begun: bool = False
    #: True if its id is forgotten: nothing joins it any more, and the id may begin anew elsewhere.
    closed: bool = False
    #: The number of the client's lane that its last request came on; 0: a front's.
    client: int = 0
    #: State that its last step left, where the model's state varies in size (``workers/models/free_state.py``).
    kept: Any = None
    #: The parameters that it goes on with, although they are not the newest of main; None: they are.
    parameters: Any = None
    #: True if it lost requests that never ran: nothing more of it may run.
    cancelled: bool = False

    @property
    def ready(self) -> bool:
        """True while the first waiting request may run: the sequence has a slot, and none of its requests runs."""
        return self.slot is not None and not self.running and bool(self.waiting)

    def __repr__(self) -> str:
        return f"<LiveSequence {self.correlation_id!r} {self.slot}, {len(self.waiting)} waiting>"


def state_lost(correlation_id: int | str, model: str) -> Unavailable:
    """Returns the error for requests to a sequence whose state was lost in a run that failed."""
    return Unavailable(
        f"sequence {correlation_id} of model '{model}' was lost after an execution error; start it again with the START flag"
    )


class IterativeIds:
    """Generates correlation ids for requests to an iterative model, which may ask to run the same request again."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def first_round(self, controls: Controls) -> Controls:
        """Returns the sequence id and flags for a request's first run, given those that the client sent as ``controls``.

        The END flag is removed. If the client sent no sequence id, a new one and the START flag are added.
        """
        if not controls.correlation_id:
            return Controls(next(self._numbers), True, False)
        return controls._replace(end=False)
