"""Describes how a request asks to be run: priority, timeout, sequence, ``tensord_replace`` and ``parameter_set``."""

from __future__ import annotations

from typing import NamedTuple

from tensord.shm.messages import Content, PreparedRequest, RequestRecord, SequenceId

#: Parameters of a request that say it, by their names over either protocol.
KEYS = frozenset(
    {"priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "tensord_replace", "parameter_set"}
)


class Scheduling(NamedTuple):
    """Holds when a request is to be run, in which sequence, which waiting request it replaces, and with which parameter set."""

    #: 1 is the most urgent; 0: the model's default.
    priority: int = 0
    #: How long it may wait in its queue; 0: as its model says.
    timeout_us: int = 0
    sequence_id: SequenceId = 0
    sequence_start: bool = False
    sequence_end: bool = False
    #: While it waits the next request of that key takes its place; "": it has no key.
    replace_key: str = ""
    #: The parameter set that it is computed with; "": the model's main set.
    parameter_set: str = ""

    @property
    def goes_on(self) -> bool:
        """Returns whether the request is in the middle of a sequence: neither its first request nor its last."""
        return bool(self.sequence_id) and not self.sequence_start and not self.sequence_end

    def record(
        self,
        request_id: int,
        prepared: int | PreparedRequest,
        contents: tuple[Content, ...],
        client_id: str,
        deadline_ns: int,
        received_ns: int,
        trace: int = 0,
    ) -> RequestRecord:
        """Returns the record (message to a worker) of a request with this scheduling; the arguments are fields of the record.

        ``prepared``: the constant part of the request, or the number that the worker knows it by.
        """
        return RequestRecord(
            request_id,
            prepared,
            contents,
            client_id,
            deadline_ns,
            received_ns,
            self.priority,
            self.timeout_us,
            self.sequence_id,
            self.sequence_start,
            self.sequence_end,
            trace,
            replace_key=self.replace_key,
            parameter_set=self.parameter_set,
        )


#: A request has this that says nothing of it.
UNSCHEDULED = Scheduling()
