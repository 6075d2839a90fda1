"""Ends sequences that got no request for too long, and answers waiting requests whose time is up.

    a request of a sequence ─▶ note: the earliest time at which a sequence may have to end ─▶ then ─▶ end: checks all models

So silent sequences cost nothing in other iterations of the loop. Sequences that run in C (``workers/dispatch/sequence_runs.py``)
do not update that time: requests only make it later than noted, and a check that comes too early does no harm.
"""

from __future__ import annotations

import functools

from tensord.shm.errors import ServingError, Unavailable
from tensord.shm.refusals import Refusal
from tensord.workers.dispatch.instance_runs import in_order
from tensord.workers.dispatch.outbox import Outbox
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import AgendaPart, ModelVersion
from tensord.workers.requests.request import Request
from tensord.workers.scheduling.agenda import NEVER, Agenda
from tensord.workers.scheduling.sequence_batcher import SequenceBatcher


class Expiry:
    """Ends sequences that got no request for too long, and answers requests that waited too long, on one worker.

    Only the thread of the worker's loop uses it.
    """

    def __init__(self, models: ModelTable, outbox: Outbox, agenda: Agenda[AgendaPart]) -> None:
        self._models = models
        self._outbox = outbox
        self._agenda = agenda
        #: When ``end`` has to be called next.
        self.next_ns = NEVER

    def note(self, sequences: SequenceBatcher[Request], now_ns: int) -> None:
        """Schedules ``end`` for the earliest time at which one of a model's sequences may have got no request for too long."""
        silent_ns = sequences.table.silent_ns(now_ns)
        if silent_ns < self.next_ns:
            self.next_ns = silent_ns
            self._agenda.put(self.end, silent_ns)

    def end(self, now_ns: int) -> None:
        """Ends the sequences of all models that got no request for too long; refuses their requests that waited too long.

        The loop then asks the model versions whose requests wait, because slots may have become free.
        """
        self.next_ns = NEVER
        self._agenda.put(self.end, NEVER)
        for version in self._models.everyone():
            if version.sequences is not None:
                self.refuse(version, version.planner.tick(now_ns), now_ns)
                self.note(version.sequences, now_ns)
                if len(version.planner):
                    self._agenda.wake(version)

    def refuse(self, version: ModelVersion, answers: list[tuple[Request, ServingError]], now_ns: int) -> None:
        """Answers requests with their errors, because they waited too long (Unavailable) or a newer request replaced them.

        If the model answers in order, each answer leaves after the answers to earlier requests.
        """
        for request, error in answers:
            if isinstance(error, Unavailable):
                version.statistics.failed(now_ns - request.arrived_ns)
                answer = functools.partial(self._outbox.refuse, request, Refusal.QUEUE_TIMEOUT, error, now_ns)
            else:
                answer = functools.partial(self._outbox.fail_all, [(request, error)], now_ns)
            if version.order is not None:
                version.order.taken(request)
            in_order(version, request, answer)

    def __repr__(self) -> str:
        return f"<Expiry at {self.next_ns}>"
