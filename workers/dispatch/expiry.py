"""Requests whose time is up while they wait, and sequences that were silent for too long. Both end here.

    a request of a sequence ─▶ note: nobody is silent too long before that ─▶ the moment comes ─▶ end: all models are looked after

So silent sequences cost no turn of the loop anything. Those that begin and end outside of Python
(``workers/dispatch/sequence_runs.py``) only put the moment off: it is never too late, and being early costs one look.
"""

from __future__ import annotations

import functools
import sys

from tensord.shm.errors import Unavailable
from tensord.shm.refusals import Refusal
from tensord.workers.dispatch.instance_turns import in_turn
from tensord.workers.dispatch.outbox import Outbox
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion


class Expiry:
    """One per worker; belongs to its loop."""

    def __init__(self, models: ModelTable, outbox: Outbox) -> None:
        self._models = models
        self._outbox = outbox
        #: When ``end`` is to be called.
        self.next_ns = sys.maxsize

    def note(self, version: ModelVersion, now_ns: int) -> None:
        """A request has come, which may be of a sequence."""
        if version.sequences is not None:
            self.next_ns = min(self.next_ns, version.sequences.table.silent_ns(now_ns))

    def end(self, now_ns: int) -> None:
        """Ends the sequences that were silent too long."""
        self.next_ns = sys.maxsize
        for version in self._models.everyone():
            if version.sequences is not None:
                self.tick(version, now_ns)
                self.note(version, now_ns)

    def tick(self, version: ModelVersion, now_ns: int) -> None:
        """Refuses what waited too long for that version."""
        for request, error in version.planner.tick(now_ns):
            if isinstance(error, Unavailable):
                version.statistics.failed(now_ns - request.arrived_ns)
                answer = functools.partial(self._outbox.refuse, request, Refusal.QUEUE_TIMEOUT, error, now_ns)
            else:
                answer = functools.partial(self._outbox.fail_all, [(request, error)], now_ns)
            if version.order is not None:
                version.order.taken(request)
            in_turn(version, request, answer)

    def __repr__(self) -> str:
        return f"<Expiry at {self.next_ns}>"
