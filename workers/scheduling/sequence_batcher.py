"""Decides which requests of sequences run together, on which instance, and when.

    request ─▶ table: its sequence, a slot ─▶ the batcher of that slot's instance, once it may run ─▶ taken ─▶ done

Pure. ``tensord.workers.dispatch.dispatcher`` asks, runs what is taken, and answers what is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Generic, Protocol

from tensord.shm.errors import Cancelled, ServingError
from tensord.workers.scheduling.expiries import TIMED_OUT
from tensord.workers.scheduling.planner import Decision, decide
from tensord.workers.scheduling.sequence import Asked, LiveSequence, S, state_lost
from tensord.workers.scheduling.sequence_table import SequenceRules, SequenceTable

if TYPE_CHECKING:
    from tensord.workers.models.sequence_register import RegisteredSequences


class Strategy(Protocol[S]):
    """Makes batches of the ready sequences of one instance: ``DirectBatcher`` or ``OldestBatcher``."""

    def ready(self, live: LiveSequence[S]) -> None:
        """Notes that the first waiting request of a sequence may run."""

    def withdraw(self, live: LiveSequence[S]) -> None:
        """Notes that a sequence that was ready is not any more."""

    def limit(self, key: Hashable, rows: int) -> None:
        """Bounds the rows of a key that run at once from now on; 0: as many as of any other key."""

    def at_once(self, key: Hashable) -> int:
        """Implements ``Planner.at_once``."""

    def end_delays(self) -> None:
        """Stops delaying requests so that others can join them."""

    def due_ns(self) -> int | None:
        """Returns when the next batch should run, or None while no sequence is ready."""

    def take(self, now_ns: int) -> list[LiveSequence[S]]:
        """Removes and returns the sequences of the next batch; empty when none is due."""

    def check_invariants(self) -> None:
        """Asserts its invariants, for tests."""


class SequenceBatcher(Generic[S]):
    """Plans the requests of one model version with sequences."""

    def __init__(
        self,
        model: str,
        rules: SequenceRules,
        strategy: Callable[[], Strategy[S]],
        instances: int,
        events: RegisteredSequences,
        attach: Callable[[S], None] | None = None,
    ) -> None:
        """Makes a strategy for each instance. ``attach``: called with each request before it may run."""
        self.table: SequenceTable[S] = SequenceTable(model, rules, instances, events)
        self._attach = attach
        self._strategies = [strategy() for _ in range(instances)]

    def __len__(self) -> int:
        """Returns how many requests wait."""
        return len(self.table)

    # ---------------------------------------------------------------------------------------------------------- events

    def arrived(self, request: S) -> None:
        """Admits a request. Raises InvalidArgument, Unavailable: why not; then nothing has changed."""
        live = self.table.admit(request)
        if len(live.waiting) == 1:
            self._look(live)

    def cancelled(self, request: S) -> list[tuple[S, ServingError]]:
        """Cancels a request. Returns the answers of all that do not run now: none where it did not wait."""
        return self._lose(request, Cancelled("the request was cancelled")) if request.line >= 0 else []

    def done(self, requests: Iterable[S], now_ns: int) -> None:
        """Notes that requests have run, well or not."""
        for request in requests:
            self._look(self.table.done(request, now_ns))

    def restore(self, requests: Iterable[S], now_ns: int) -> list[tuple[S, ServingError]]:
        """Queues taken requests again, to run once more. Returns the answers of those whose sequences are gone."""
        lost = [request for request in requests if not self._put_back(request, now_ns)]
        return [(request, _cancelled(request)) for request in lost]

    def dropped(self, request: S, now_ns: int) -> list[tuple[S, ServingError]]:
        """Notes that a taken request will never run. Returns the answers of all that wait behind it."""
        answers = [] if request.live.cancelled else self._lose(request, _cancelled(request))
        self.done([request], now_ns)
        return answers

    def tick(self, now_ns: int) -> list[tuple[S, ServingError]]:
        """Ends silent sequences and expired requests. Returns the answers of these, and of all that wait behind them."""
        for live in self.table.close_idle(now_ns):
            self._look(live)
        answers: list[tuple[S, ServingError]] = []
        while (found := self.table.expiries.next(now_ns)) is not None:
            answers += self._lose(*found)
        return answers

    def _lose(self, request: S, error: ServingError) -> list[tuple[S, ServingError]]:
        """Ends the sequence of a request. Returns the answers of its waiting requests."""
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
        """Gives a sequence to its instance's strategy, if it has become ready."""
        if live is not None and live.ready and live.slot is not None:
            if self._attach is not None:
                self._attach(live.waiting[0])
            self._strategies[live.slot.instance].ready(live)

    # ------------------------------------------------------------------------------------------- running without waiting

    def run_now(self, asked: Iterable[Asked], now_ns: int) -> list[LiveSequence[S]]:
        """Begins requests of the first instance that came together, one row each, if no others wait.

        They need not arrive, be taken and be done one by one.

        Returns the sequences of the first ones, which run now; ``have_run`` is to be called when they have. The others have not
        arrived: one of a sequence that runs, or one that has to wait, or is to be refused.
        """
        self.table.close_idle(now_ns)
        return self.table.run_now(asked)

    def have_run(self, chosen: Iterable[LiveSequence[S]], now_ns: int) -> None:
        """Notes that sequences that ``run_now`` began have run, well or not."""
        self.table.have_run(chosen, now_ns)

    def at_once(self, key: Hashable) -> int:
        """Implements ``Planner.at_once``."""
        return self._strategies[0].at_once(key)

    # ---------------------------------------------------------------------------------------------------------- batches

    @property
    def next_tick_ns(self) -> int:
        """When ``tick`` is worth a call, perhaps too early; 0: never."""
        return self.table.next_tick_ns

    @property
    def lives(self) -> bool:
        """Returns False: while no request waits, only silent sequences need a call (``silent_ns`` of its table)."""
        return False

    def decide(self, now_ns: int, instance: int = 0) -> Decision[S]:
        """Implements ``Planner.decide``."""
        return decide(self, now_ns, instance)

    def due_ns(self, instance: int = 0) -> int | None:
        """Returns when an instance's next batch should run, or None while none of its sequences is ready."""
        return self._strategies[instance].due_ns()

    def take(self, now_ns: int, instance: int = 0) -> list[S]:
        """Removes and returns the next batch of a free instance; empty when none is due.

        Each request has its slot; batches of strategy "direct" are in the order of slots.
        """
        return [self.table.take(live) for live in self._strategies[instance].take(now_ns)]

    def limit(self, key: Hashable, rows: int) -> None:
        """Bounds the rows of a key that run at once from now on; 0: as many as of any other key."""
        for strategy in self._strategies:
            strategy.limit(key, rows)

    # -------------------------------------------------------------------------------------------------------------- end

    def end_delays(self) -> None:
        """Stops delaying requests, because no others will come to join them."""
        for strategy in self._strategies:
            strategy.end_delays()

    def stop(self) -> None:
        """Refuses new sequences from now on; those that live may go on."""
        self.table.stopping = True
        self.end_delays()

    def close(self, correlation_id: int | str) -> None:
        """Forgets the id of a sequence that goes on elsewhere; its waiting requests still run."""
        self._look(self.table.close(correlation_id))

    def close_client(self, client: int) -> None:
        """Ends the sequences whose last request came on that client's lane, which is gone; what waits of them still runs."""
        for live in [live for live in self.table.sequences() if live.client == client and not live.closed]:
            self.close(live.correlation_id)

    def close_all(self) -> None:
        """Ends every sequence once its waiting requests have run, because nobody will send more."""
        self.table.forget_all()
        for live in self.table.close_idle():
            self._look(live)

    def lose(self, instance: int, now_ns: int) -> list[tuple[S, ServingError]]:
        """Ends an instance's sequences that have begun, because their state is gone; each client is told so once.

        Returns the answers of all of them that wait; where nothing waits, the next request is told.
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

    def check_invariants(self) -> None:
        """Asserts, for tests, that each ready sequence is with its instance, and nowhere else."""
        self.table.check_invariants()
        for strategy in self._strategies:
            strategy.check_invariants()

    def __repr__(self) -> str:
        return f"<SequenceBatcher {len(self.table)} requests wait, {self.table!r}>"


def _cancelled(request: S) -> Cancelled:
    correlation_id = request.controls.correlation_id
    return Cancelled(f"sequence {correlation_id} was cancelled, because one of its requests was")
