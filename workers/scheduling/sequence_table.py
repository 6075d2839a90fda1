"""Keeps the live sequences of one model version: which have a slot, which wait for a slot, and which are idle.

A request with START begins a sequence. If no slot is free, the sequence waits for a slot. A sequence with a slot ends when its
request with END has run, or when the sequence was idle for too long. The slot goes to the sequence that has waited longest.
The requests of a sequence run one at a time, in the order of their arrival. If a request is cancelled, expires or fails before
the request runs, the sequence ends, and all waiting requests of the sequence are refused.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from tensord.shm.errors import DeadlineExceeded, InvalidArgument, ServingError, Unavailable
from tensord.workers.scheduling.queue import Expiries, Shares
from tensord.workers.scheduling.sequence import Asked, LiveSequence, S, Slot, state_lost

if TYPE_CHECKING:
    from tensord.workers.models.sequence_register import RegisteredSequences

_FULL = "Exceeds maximum queue size"
#: Ids of lost sequences that are kept.
_MOST_LOST = 4096


#: Refuses all requests of a sequence of which one has waited for a slot as long as it wants to.
TIMED_OUT = "timeout of the corresponding sequence has been expired"


class Slots:
    """Allocates and frees slots for the sequences of one model version. Each instance of the model has equally many slots."""

    # Remembers only slots that were ever used, to save memory.
    def __init__(self, of_each: int, instances: int) -> None:
        self._instances = instances
        #: How many slots there are, and how many are free.
        self.count = self.free = of_each * instances
        #: Slots that were used and are free; from number ``_fresh`` on none ever was used.
        self._freed: list[Slot] = []
        self._fresh = 0

    def take(self) -> Slot:
        """Returns the lowest free slot, which is in use from now on. Call it only if ``free`` is not 0."""
        self.free -= 1
        # Whatever was used before is lower than what never was.
        if self._freed:
            return heapq.heappop(self._freed)
        number, instance = divmod(self._fresh, self._instances)
        self._fresh += 1
        return Slot(number, instance)

    def give_back(self, slot: Slot) -> None:
        self.free += 1
        heapq.heappush(self._freed, slot)

    def __repr__(self) -> str:
        return f"<Slots {self.free} of {self.count} free>"


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """The limits of one model version's sequences: slots, idle time, waiting requests."""

    #: Slots of each instance.
    slots: int = 1
    #: A sequence with a slot is forgotten after that time without a request.
    idle_ns: int = 1_000_000_000
    #: Requests that may wait, of all sequences.
    max_waiting: int = 1000
    #: Each request is a sequence of its own, which the model may have run again and again.
    iterative: bool = False


class SequenceTable(Generic[S]):
    """The live sequences of one model version. Some have a slot, and others wait for one in order."""

    def __init__(self, model: str, rules: SequenceRules, instances: int, events: RegisteredSequences) -> None:
        self.model = model
        self._rules = rules
        self._events = events
        #: Correlation id -> its sequence, if further requests may join it.
        self._live: dict[int | str, LiveSequence[S]] = {}
        self._slots = Slots(rules.slots, instances)
        #: Sequences that have a slot, and those that wait for one, in their order.
        self._holders: dict[Slot, LiveSequence[S]] = {}
        self._backlog: dict[LiveSequence[S], None] = {}
        #: Sequences with a slot and nothing to do -> since when; the first has been idle longest.
        self._idle: dict[LiveSequence[S], int] = {}
        self.expiries: Expiries[S] = Expiries()
        self._waiting = 0
        #: The owners whose requests wait, and their turns.
        self._shares = Shares()
        #: Ids whose state went with a run that failed -> since when; kept until a client was told, or the idle time is over.
        self._lost: dict[int | str, int] = {}
        #: Sequences that go on with parameters that are not the newest of main.
        self.holding = 0
        #: True if new sequences are refused, because the worker is to stop.
        self.stopping = False

    def __len__(self) -> int:
        return self._waiting

    @property
    def live(self) -> int:
        """The number of sequences that have a slot or wait for one."""
        return len(self._holders) + len(self._backlog)

    @property
    def backlog(self) -> int:
        """The number of sequences that wait for a slot."""
        return len(self._backlog)

    def with_slot(self, now_ns: int) -> int:
        """Returns how many sequences have a slot. Those that have been idle for too long at ``now_ns`` do not count."""
        silent = 0
        for since_ns in self._idle.values():
            if since_ns + self._rules.idle_ns > now_ns:
                break
            silent += 1
        return len(self._holders) - silent

    @property
    def free_slots(self) -> int:
        """The number of free slots of all instances."""
        return self._slots.free

    def find(self, correlation_id: int | str) -> LiveSequence[S] | None:
        """Returns the sequence that a request with this id and without START would continue; None: no sequence."""
        return self._live.get(correlation_id)

    # -------------------------------------------------------------------------------------------------------- admission

    def admit(self, request: S) -> LiveSequence[S]:
        """Queues a request in the sequence with the request's correlation id, and returns this sequence.

        If there is no such sequence, START begins one. Raises InvalidArgument: the request has more than one row, has
        no correlation id, or has no START and its sequence does not exist. Raises Unavailable: too many requests wait, the
        worker has too many sequences, a request with START comes while the worker stops, or the sequence's state was lost.
        """
        correlation_id, start, end = request.controls
        if request.rows > 1:
            raise InvalidArgument(
                f"inference request to model '{self.model}' must specify batch-size 1 due to requirements of sequence batcher"
            )
        if not correlation_id:
            raise InvalidArgument(
                f"inference request to model '{self.model}' must specify a non-zero or non-empty correlation ID"
            )
        if start and self.stopping:
            raise Unavailable("Server is stopping, scheduler for model has stopped accepting new inference requests")
        live = self._live.get(correlation_id)
        lost = self._lost.pop(correlation_id, None) if self._lost else None
        if live is None and not start:
            if lost is not None and request.arrived_ns <= lost + self._rules.idle_ns:
                raise state_lost(correlation_id, self.model)
            raise InvalidArgument(
                f"inference request for sequence {correlation_id} to model '{self.model}' must specify the START flag "
                "on the first request of the sequence"
            )
        most = self._rules.max_waiting
        if self._waiting >= most and not self._shares.below(request.owner, self._waiting, most):
            raise Unavailable(_FULL)
        if live is None:
            live = self._begin(correlation_id)
        self._idle.pop(live, None)
        live.waiting.append(request)
        request.live = live
        request.line = 0
        self._waiting += 1
        self._shares.enter(request.owner)
        self._watch(request)
        if end or self._rules.iterative:
            self._forget(live)
        return live

    def _begin(self, correlation_id: int | str) -> LiveSequence[S]:
        live: LiveSequence[S] = LiveSequence(correlation_id, self._events.waiting(correlation_id))
        self._live[correlation_id] = live
        if self._slots.free and not self._backlog:
            self._give_slot(live, self._slots.take())
        else:
            self._backlog[live] = None
        return live

    def _give_slot(self, live: LiveSequence[S], slot: Slot) -> None:
        live.slot = slot
        self._holders[slot] = live

    # ------------------------------------------------------------------------------------------- running without waiting

    def run_now(self, asked: Iterable[Asked]) -> list[LiveSequence[S]]:
        """Returns the sequences of the requests that the caller may run now, and marks these sequences as running.

        ``asked``: the correlation id, START and END of each request. Each request has one row. The caller may run the requests
        before the first request that must wait or is invalid. The result is empty if requests already wait in the table.
        """
        chosen: list[LiveSequence[S]] = []
        if self._waiting or self._lost or self._rules.iterative:
            return chosen
        live_by_id, idle = self._live, self._idle
        for correlation_id, start, end in asked:
            live = live_by_id.get(correlation_id)
            if live is None:
                if not start or (live := self._begin_now(correlation_id)) is None:
                    break
            elif live.running:
                break
            else:
                del idle[live]
            live.running = True
            chosen.append(live)
            if end:
                self._forget(live)
        return chosen

    def have_run(self, chosen: Iterable[LiveSequence[S]], now_ns: int) -> None:
        """Marks sequences as idle after their requests have run. ``chosen``: the sequences that ``run_now`` returned."""
        idle = self._idle
        for live in chosen:
            live.running = False
            if live.closed:
                self._free(live)
            else:
                idle[live] = now_ns

    def _begin_now(self, correlation_id: int | str) -> LiveSequence[S] | None:
        """Begins and returns a sequence whose first request the caller runs now. Returns None if no sequence can begin now."""
        if not correlation_id or self.stopping or not self._slots.free:
            return None
        try:
            live = self._begin(correlation_id)
        except Unavailable:
            return None
        live.begun = True
        self._events.begun(live.entry)
        return live

    # ---------------------------------------------------------------------------------------------------------- running

    def take(self, live: LiveSequence[S]) -> S:
        """Removes and returns the first waiting request of a sequence, to run it. ``live.ready`` must be True."""
        assert live.slot is not None
        request = live.waiting.popleft()
        request.line = -1
        request.slot = live.slot
        live.running = True
        self._waiting -= 1
        self._shares.leave(request.owner)
        if not live.begun:
            live.begun = True
            self._events.begun(live.entry)
        return request

    def done(self, request: S, now_ns: int) -> LiveSequence[S] | None:
        """Marks ``request`` as run. Returns the sequence whose next request can run, or None if no sequence became ready.

        If more requests wait in the sequence of ``request``, this sequence is returned. If the sequence of ``request`` has ended,
        a sequence that waited for a slot gets the slot and is returned.
        """
        live = request.live
        live.running = False
        if live.waiting:
            return live
        if live.closed:
            return self._free(live)
        self._idle[live] = now_ns
        return None

    def restore(self, request: S) -> LiveSequence[S] | None:
        """Queues a request again that could not run, at the front of its sequence. Returns the sequence.

        None: the sequence was cancelled. Then the request is not queued, and the caller has to call ``done`` for it.
        """
        live = request.live
        if live.cancelled:
            return None
        live.running = False
        live.waiting.appendleft(request)
        request.line = 0
        self._waiting += 1
        self._shares.enter(request.owner)
        self._watch(request)
        return live

    def _watch(self, request: S) -> None:
        if request.deadline_ns:
            self.expiries.add(request.deadline_ns, request, self._waiting)
        if request.timeout_ns and request.live.slot is None:
            self.expiries.add(request.arrived_ns + request.timeout_ns, request, self._waiting)

    def expired(self, now_ns: int) -> tuple[S, ServingError] | None:
        """Returns a request whose deadline has passed, or whose sequence has had no slot for too long, and its error.

        None: there is none. The caller ends the request's sequence.
        """
        while (request := self.expiries.take(now_ns)) is not None:
            if 0 < request.deadline_ns <= now_ns:
                return request, DeadlineExceeded()
            if request.live.slot is None:
                return request, Unavailable(TIMED_OUT)
        return None

    def _free(self, live: LiveSequence[S]) -> LiveSequence[S] | None:
        """Ends a sequence that has a slot. Returns the waiting sequence that gets the slot; None: no sequence waits."""
        slot = live.slot
        assert slot is not None
        del self._holders[slot]
        self._gone(live)
        if not self._backlog:
            self._slots.give_back(slot)
            return None
        first = next(iter(self._backlog))
        del self._backlog[first]
        self._give_slot(first, slot)
        return first

    def hold(self, live: LiveSequence[S], parameters: object | None) -> None:
        """Makes later requests of a sequence run with these parameters. None stands for the newest values of ``main``."""
        self.holding += (parameters is not None) - (live.parameters is not None)
        live.parameters = parameters

    def _gone(self, live: LiveSequence[S]) -> None:
        self.hold(live, None)
        self._forget(live)
        self._events.gone(live.entry)

    def _forget(self, live: LiveSequence[S]) -> None:
        live.closed = True
        if self._live.get(live.correlation_id) is live:
            del self._live[live.correlation_id]

    # ----------------------------------------------------------------------------------------------------------- ending

    def cancel(self, live: LiveSequence[S]) -> tuple[list[S], LiveSequence[S] | None]:
        """Ends a sequence, because one of its requests was cancelled, has failed or has expired.

        Returns the sequence's waiting requests, and the sequence that gets the slot now. The latter is None if no sequence waits
        for a slot, or if a request of the ended sequence is still running.
        """
        refused = list(live.waiting)
        live.waiting.clear()
        live.cancelled = True
        self._waiting -= len(refused)
        for request in refused:
            request.line = -1
            self._shares.leave(request.owner)
        self._idle.pop(live, None)
        if live.slot is None:
            del self._backlog[live]
            self._gone(live)
        elif not live.running:
            return refused, self._free(live)
        self._forget(live)
        return refused, None

    def note_lost(self, live: LiveSequence[S], now_ns: int) -> None:
        """Records that a sequence lost its state. The next request with the sequence's id fails, unless it has START."""
        if not live.closed:
            self._lost.pop(live.correlation_id, None)
            self._lost[live.correlation_id] = now_ns
        while len(self._lost) > _MOST_LOST or now_ns > self._rules.idle_ns + next(iter(self._lost.values()), now_ns):
            del self._lost[next(iter(self._lost))]

    def close(self, correlation_id: int | str) -> LiveSequence[S] | None:
        """Ends a sequence: at once if it is idle, otherwise after all its requests have run. Ignores an unknown id.

        Returns the waiting sequence that gets the slot of the ended sequence, or None if no sequence gets a slot now.
        """
        live = self._live.get(correlation_id)
        return None if live is None else self._close(live)

    def _close(self, live: LiveSequence[S]) -> LiveSequence[S] | None:
        self._forget(live)
        return self._free(live) if self._idle.pop(live, None) is not None else None

    def close_idle(self, now_ns: int | None = None) -> list[LiveSequence[S]]:
        """Ends each sequence that was idle for too long. Returns the waiting sequences that get the slots of ended sequences.

        If ``now_ns``, the current time, is None, this method ends each sequence that has no unanswered request.
        """
        ready: list[LiveSequence[S]] = []
        while self._idle:
            live, since_ns = next(iter(self._idle.items()))
            if now_ns is not None and since_ns + self._rules.idle_ns > now_ns:
                break
            if (moved := self._close(live)) is not None:
                ready.append(moved)
        return ready

    def forget_all(self) -> None:
        """Lets no further request join an existing sequence. Each sequence with unanswered requests ends after these requests.

        Call ``close_idle()`` next: it ends the sequences without unanswered requests.
        """
        for live in list(self._live.values()):
            self._forget(live)

    @property
    def next_tick_ns(self) -> int:
        """The earliest time in ns at which a request may expire or a sequence may get an idle sequence's slot; 0: never."""
        moments = self.expiries.earliest_ns, self.silent_ns(0) if self._idle and self._backlog else 0
        return min(filter(None, moments), default=0)

    def silent_ns(self, now_ns: int) -> int:
        """Returns the time in ns at which the first idle sequence reaches the limit for idle sequences.

        If no sequence is idle, returns ``now_ns`` plus the limit.
        """
        return next(iter(self._idle.values()), now_ns) + self._rules.idle_ns

    # ----------------------------------------------------------------------------------------------------------- looking

    def begun(self, instance: int) -> list[LiveSequence[S]]:
        """Returns the sequences on the model instance ``instance`` of which a request has already begun to run."""
        return [live for slot, live in self._holders.items() if slot.instance == instance and live.begun]

    def sequences(self) -> Iterable[LiveSequence[S]]:
        """Iterates over the sequences that have a slot, then over the sequences that wait for one, oldest first."""
        yield from self._holders.values()
        yield from self._backlog

    def records(self, now_ns: int, most: int) -> list[dict[str, str | float | None]]:
        """Describes at most ``most`` sequences for operators: id, slot, state, waiting requests, seconds without a request."""
        return [
            {
                "id": live.correlation_id,
                "slot": None if live.slot is None else live.slot.number,
                "begun": live.begun,
                "running": live.running,
                "waiting": len(live.waiting),
                "idle_s": round((now_ns - self._idle[live]) / 1e9, 1) if live in self._idle else None,
            }
            for live in itertools.islice(self.sequences(), most)
        ]

    def __repr__(self) -> str:
        return f"<SequenceTable {len(self._holders)} with slots, {len(self._backlog)} in the backlog>"
