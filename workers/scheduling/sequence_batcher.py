"""Decides which requests of sequences run together, on which instance of the model, and when.

A sequence gets a slot on one instance (``SequenceTable``), and all its requests run on this instance. Each instance has a
batcher for Triton's strategy "direct" or "oldest", which chooses the requests of the next batch: at most one request of each
sequence. ``tensord.workers.dispatch.dispatcher`` runs the batches, and answers requests that are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from tensord.shm.errors import Cancelled, ServingError
from tensord.workers.scheduling.dynamic_batcher import BatchRules, DynamicBatcher
from tensord.workers.scheduling.planner import Planner
from tensord.workers.scheduling.queue import QueueRules, RequestQueue
from tensord.workers.scheduling.sequence import Asked, LiveSequence, S, state_lost
from tensord.workers.scheduling.sequence_table import TIMED_OUT, SequenceRules, SequenceTable

if TYPE_CHECKING:
    from tensord.workers.models.sequence_register import RegisteredSequences

#: No bound here: the table of sequences bounds all requests that wait.
_UNBOUNDED = QueueRules(sys.maxsize)


@dataclass(frozen=True, slots=True)
class DirectRules:
    """Settings of Triton's sequence strategy "direct": the number of slots, and how long a batch waits for more requests."""

    slots: int = 1
    delay_ns: int = 0
    #: A batch of so many ready slots need not wait; 0: one of any size.
    enough: int = 0


class DirectBatcher(Generic[S]):
    """Makes one model instance's batches for Triton's strategy "direct", which gives each sequence a row of its own.

    A sequence is ready if its next request may run. A batch has the next request of the sequence that has been ready longest.
    The next request of another ready sequence can join the batch if both requests have the same batching key.
    """

    def __init__(self, rules: DirectRules) -> None:
        self._rules = rules
        self._delay_ns = rules.delay_ns if rules.enough else 0
        #: Sequences that may run, in the order in which they became ready.
        self._ready: dict[LiveSequence[S], None] = {}
        #: Key -> rows, where less than all slots can run at once.
        self._limits: dict[Hashable, int] = {}

    def ready(self, live: LiveSequence[S]) -> None:
        """Makes a sequence available to ``take``. Its first waiting request may run now."""
        self._ready[live] = None

    def withdraw(self, live: LiveSequence[S]) -> None:
        """Stops ``take`` from returning requests of the sequence ``live``, because the sequence ends."""
        del self._ready[live]

    def limit(self, key: Hashable, rows: int) -> None:
        """Limits each batch of requests with the batching key ``key`` to ``rows`` rows. If ``rows`` is 0, ends this limit."""
        if rows:
            self._limits[key] = rows
        else:
            self._limits.pop(key, None)

    def at_once(self, key: Hashable) -> Sequence[range]:
        return () if self._delay_ns else (range(1, self._limits.get(key, self._rules.slots) + 1),)

    def end_delays(self) -> None:
        """Stops delaying requests for fuller batches, because no more requests will come."""
        self._delay_ns = 0

    def due_ns(self) -> int | None:
        """Returns the time in ns at which the next batch should run; None: no sequence has a request that may run."""
        if not self._ready:
            return None
        if not self._delay_ns:
            return next(iter(self._ready)).waiting[0].arrived_ns
        oldest_ns = min(live.waiting[0].arrived_ns for live in self._ready)
        return oldest_ns if len(self._ready) >= self._rules.enough else oldest_ns + self._delay_ns

    def take(self, now_ns: int) -> list[S]:
        """Removes and returns the requests of the next batch, in the order of their slots; empty: no batch is due."""
        due_ns = self.due_ns()
        if due_ns is None or (self._delay_ns and due_ns > now_ns):
            return []
        key = next(iter(self._ready)).waiting[0].key
        chosen = [live for live in self._ready if live.waiting[0].key == key]
        del chosen[self._limits.get(key, len(chosen)) :]
        for live in chosen:
            del self._ready[live]
        return [live.waiting[0] for live in sorted(chosen, key=_number)]

    def __repr__(self) -> str:
        return f"<DirectBatcher {len(self._ready)} of {self._rules.slots} slots ready>"


def _number(live: LiveSequence[S]) -> int:
    assert live.slot is not None
    return live.slot.number


class OldestBatcher(DynamicBatcher[S]):
    """Makes one instance's batches for Triton's strategy "oldest": the requests that have waited longest run first.

    Requests are batched like requests to a model without sequences.
    """

    def __init__(self, rules: BatchRules) -> None:
        super().__init__(rules, RequestQueue(_UNBOUNDED))

    def ready(self, live: LiveSequence[S]) -> None:
        self._queue.push(live.waiting[0])

    def withdraw(self, live: LiveSequence[S]) -> None:
        self._queue.remove(live.waiting[0])


Strategy = DirectBatcher[S] | OldestBatcher[S]


class SequenceBatcher(Planner[S]):
    """Plans for one model version which requests of sequences run together, on which instance, and when."""

    def __init__(
        self,
        model: str,
        rules: SequenceRules,
        strategy: Callable[[], Strategy[S]],
        instances: int,
        events: RegisteredSequences,
        attach: Callable[[S], None] | None = None,
    ) -> None:
        """Makes a batcher without any sequence.

        Args:
          rules: the limits of the model's sequences.
          strategy: makes an object that chooses the next batch of one model instance.
          instances: the number of model instances.
          events: is told when a sequence begins or ends.
          attach: adds a sequence's state to a request's inputs before the request runs; None: inputs contain no state.
        """
        self.table: SequenceTable[S] = SequenceTable(model, rules, instances, events)
        self._attach = attach
        self._strategies = [strategy() for _ in range(instances)]

    def __len__(self) -> int:
        return len(self.table)

    # ---------------------------------------------------------------------------------------------------------- events

    def arrived(self, request: S) -> None:
        """Queues a request in the sequence with the request's correlation id. A request with START may begin this sequence.

        Raises InvalidArgument or Unavailable, and does not queue the request, in the cases that ``SequenceTable.admit`` names.
        """
        live = self.table.admit(request)
        if len(live.waiting) == 1:
            self._look(live)

    def cancelled(self, request: S) -> list[tuple[S, ServingError]]:
        return self._lose(request, Cancelled()) if request.line >= 0 else []

    def done(self, requests: Iterable[S], now_ns: int) -> None:
        for request in requests:
            self._look(self.table.done(request, now_ns))

    def restore(self, requests: Iterable[S], now_ns: int) -> list[tuple[S, ServingError]]:
        lost = [request for request in requests if not self._put_back(request, now_ns)]
        return [(request, _cancelled(request)) for request in lost]

    def dropped(self, request: S, now_ns: int) -> list[tuple[S, ServingError]]:
        answers = [] if request.live.cancelled else self._lose(request, _cancelled(request))
        self.done([request], now_ns)
        return answers

    def tick(self, now_ns: int) -> list[tuple[S, ServingError]]:
        """Ends sequences that were idle or waited too long. Returns the requests that will not run, each with its error."""
        for live in self.table.close_idle(now_ns):
            self._look(live)
        answers: list[tuple[S, ServingError]] = []
        while (found := self.table.expired(now_ns)) is not None:
            answers += self._lose(*found)
        return answers

    def _lose(self, request: S, error: ServingError) -> list[tuple[S, ServingError]]:
        """Ends a request's sequence because of ``error``. Returns all waiting requests of the sequence, each with an error."""
        live: LiveSequence[S] = request.live
        if live.ready and live.slot is not None:
            self._strategies[live.slot.instance].withdraw(live)
        refused, moved = self.table.cancel(live)
        self._look(moved)
        whole = error.message == TIMED_OUT
        return [(each, error if whole or each is request else _cancelled(each)) for each in refused]

    def _put_back(self, request: S, now_ns: int) -> bool:
        live = self.table.restore(request)
        if live is None:
            self.done([request], now_ns)
            return False
        self._look(live)
        return True

    def _look(self, live: LiveSequence[S] | None) -> None:
        if live is not None and live.ready and live.slot is not None:
            if self._attach is not None:
                self._attach(live.waiting[0])
            self._strategies[live.slot.instance].ready(live)

    # ------------------------------------------------------------------------------------------- running without waiting

    def run_now(self, asked: Iterable[Asked], now_ns: int) -> list[LiveSequence[S]]:
        """Chooses the requests in ``asked`` before the first one that cannot run now. Returns the chosen requests' sequences.

        ``asked``: the correlation id, START and END of each request. The caller runs the chosen requests, and then passes the
        returned sequences to ``SequenceTable.have_run``. ``now_ns``: the time of CLOCK_MONOTONIC.
        """
        self.table.close_idle(now_ns)
        return self.table.run_now(asked)

    def at_once(self, key: Hashable) -> Sequence[range]:
        return self._strategies[0].at_once(key)

    # ---------------------------------------------------------------------------------------------------------- batches

    @property
    def next_tick_ns(self) -> int:
        return self.table.next_tick_ns

    def due_ns(self, instance: int = 0) -> int | None:
        return self._strategies[instance].due_ns()

    def take(self, now_ns: int, instance: int = 0) -> list[S]:
        """Removes and returns the requests of a free instance's next batch; empty: no batch is due.

        The ``slot`` of each request is set. With Triton's strategy "direct" the requests are in the order of their slots.
        """
        return [self.table.take(request.live) for request in self._strategies[instance].take(now_ns)]

    def limit(self, key: Hashable, rows: int) -> None:
        for strategy in self._strategies:
            strategy.limit(key, rows)

    # -------------------------------------------------------------------------------------------------------------- end

    def end_delays(self) -> None:
        for strategy in self._strategies:
            strategy.end_delays()

    def stop(self) -> None:
        """Refuses new sequences from now on. Existing sequences continue."""
        self.table.stopping = True
        self.end_delays()

    def close(self, correlation_id: int | str) -> None:
        """Ends a sequence after its waiting requests have run. Later requests with the same id do not belong to it."""
        self._look(self.table.close(correlation_id))

    def close_client(self, client: int, correlation_id: int | str | None = None) -> None:
        """Ends each sequence whose newest request came on a client's lane, once the sequence's waiting requests have run.

        ``client``: the number of the lane. ``correlation_id``: the only sequence to end, or None to end each such sequence.
        """
        for live in [live for live in self.table.sequences() if live.client == client and not live.closed]:
            if correlation_id is None or live.correlation_id == correlation_id:
                self.close(live.correlation_id)

    def close_all(self) -> None:
        """Ends every sequence once its waiting requests have run."""
        self.table.forget_all()
        for live in self.table.close_idle():
            self._look(live)

    def lose(self, instance: int, now_ns: int) -> list[tuple[S, ServingError]]:
        """Ends all sequences that have begun on an instance, because their state is lost.

        Returns the waiting requests of these sequences, each with an error. If a sequence has neither a waiting nor a running
        request, the next request with the sequence's id fails, unless it has START. ``now_ns``: the time of CLOCK_MONOTONIC.
        """
        answers: list[tuple[S, ServingError]] = []
        for live in self.table.begun(instance):
            if live.ready:
                self._strategies[instance].withdraw(live)
            if not live.waiting and not live.running:
                self.table.note_lost(live, now_ns)
            refused, moved = self.table.cancel(live)
            self._look(moved)
            answers += [(request, state_lost(live.correlation_id, self.table.model)) for request in refused]
        return answers

    def __repr__(self) -> str:
        return f"<SequenceBatcher {len(self.table)} requests wait, {self.table!r}>"


def _cancelled(request: S) -> Cancelled:
    correlation_id = request.controls.correlation_id
    return Cancelled(f"sequence {correlation_id} was cancelled, because one of its requests was")
