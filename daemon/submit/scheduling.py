"""Scheduling of a request, as it says itself: Triton's extensions of schedule policy and sequences."""

from __future__ import annotations

from typing import NamedTuple

from tensord.shm.messages import SequenceId

#: Parameters of a request that say it, by their names over either protocol.
KEYS = frozenset({"priority", "timeout", "sequence_id", "sequence_start", "sequence_end"})


class Scheduling(NamedTuple):
    """Says when a request is to be run, and in which sequence; in the order of ``tensord.shm.messages.RequestRecord``."""

    #: 1 is the most urgent; 0: the model's default.
    priority: int = 0
    #: How long it may wait in its queue; 0: as its model says.
    timeout_us: int = 0
    sequence_id: SequenceId = 0
    sequence_start: bool = False
    sequence_end: bool = False

    @property
    def goes_on(self) -> bool:
        """Returns whether it is one of the steps between the first and the last of a sequence."""
        return bool(self.sequence_id) and not self.sequence_start and not self.sequence_end


#: A request has this that says nothing of it.
UNSCHEDULED = Scheduling()
