"""Ends requests whose time is up while they wait, and sequences that were silent for too long.

    a request of a sequence ─▶ note: nobody is silent too long before that ─▶ the moment comes ─▶ end: all models are looked after

So silent sequences cost no iteration of the loop anything. Those that begin and end outside of Python
(``workers/dispatch/sequence_runs.py``) only put the moment off: it is never too late, and being early costs one look.
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
    """Ends what has expired on one worker; belongs to its loop."""

    def __init__(self, models: ModelTable, outbox: Outbox, agenda: Agenda[AgendaPart]) -> None:
        self._models = models
        self._outbox = outbox
        self._agenda = agenda
        #: When ``end`` is due.
        self.next_ns = NEVER

    def note(self, sequences: SequenceBatcher[Request], now_ns: int) -> None:
        """Notes that a request of a sequence has come, so that the sequence's end is looked for in time."""
        silent_ns = sequences.table.silent_ns(now_ns)
        if silent_ns < self.next_ns:
            self.next_ns = silent_ns
            self._agenda.put(self.end, silent_ns)

    def end(self, now_ns: int) -> None:
        """Ends the sequences that were silent too long; whoever waited for one of their slots is asked again."""
        self.next_ns = NEVER
        self._agenda.put(self.end, NEVER)
        for version in self._models.everyone():
            if version.sequences is not None:
                self.refuse(version, version.planner.tick(now_ns), now_ns)
                self.note(version.sequences, now_ns)
                if len(version.planner):
                    self._agenda.wake(version)

    def refuse(self, version: ModelVersion, answers: list[tuple[Request, ServingError]], now_ns: int) -> None:
        """Answers requests that waited for that version, too long or until newer ones replaced them, when it is their turn."""
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
