"""Decides which requests of a stepped model have a slot, and which of them take part in the next step.

Pure: it knows neither the device nor the time. ``tensord.workers.dispatch.stepping`` runs what it decides and tells it what
came of that.

    request ─▶ waits ─▶ take: a slot ─▶ step ─▶ step ─▶ ... ─▶ finished, or its last step ─▶ gone, the slot is free
                 │                        └──▶ cancelled, or failed with all others ─▶ gone, the slot is free
                 └──▶ cancelled, or its time is up: refused

A step is given to the device before the one before it is read, so that the device never waits for us: ``AHEAD`` steps are on
their way. What a step says of a slot is for the request that took part in it: who has the slot by then hears nothing of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

from tensord.shm.errors import ServingError
from tensord.workers.scheduling.planner import Decision, QueuePlanner, decide
from tensord.workers.scheduling.queue import RequestQueue, W

#: Steps on their way to the device, or on it.
AHEAD = 2
#: What an insertion or a step says of a slot: there is something for its request, and it is over.
EMITS, FINISHED = 1, 2


@dataclass(frozen=True, slots=True)
class StepRules:
    """How one model version is stepped."""

    #: Requests that are stepped at a time.
    slots: int
    #: A request is over after so many steps at the latest.
    max_steps: int
    #: Requests that may get a slot between two steps: those that have one wait meanwhile.
    inserts_per_step: int = 4
    #: Requests that get theirs in one call.
    insert_rows: int = 1


class Seat(Generic[W]):
    """One request's stay in a slot."""

    __slots__ = ("left", "number", "paused", "request", "steps")

    def __init__(self, request: W, number: int) -> None:
        self.request = request
        self.number = number
        #: Those it takes part in, as far as they are on their way.
        self.steps = 0
        #: It is over.
        self.left = False
        #: It takes part in none for now.
        self.paused = False

    def __repr__(self) -> str:
        return f"<Seat {self.number}, {self.steps} steps>"


class Step(NamedTuple, Generic[W]):
    """One step of all slots."""

    #: Who takes part, and for whom of them it is the last.
    seats: Sequence[Seat[W]]
    last: frozenset[int]
    #: Slots that must not be stepped although the device knows of a request there.
    masked: frozenset[int]


class Answer(NamedTuple, Generic[W]):
    """What a request gets of a step, or of its insertion."""

    request: W
    #: The row of the outputs.
    row: int
    #: Whether there is anything for it besides that it is over.
    emits: bool
    final: bool


class StepBatcher(QueuePlanner[W]):
    """One per version of a stepped model, over its queue."""

    def __init__(self, rules: StepRules, queue: RequestQueue[W]) -> None:
        super().__init__(queue)
        self._rules = rules
        self._seats: dict[W, Seat[W]] = {}
        #: By slot: who takes part in the next step.
        self._running: dict[int, Seat[W]] = {}
        #: A heap: lower ones are given out first.
        self._free = list(range(rules.slots))
        self._masked: frozenset[int] = frozenset()
        #: Requests that may get a slot before the next step.
        self._room = rules.inserts_per_step
        self._on_their_way = 0

    # ---------------------------------------------------------------------------------------------------------- waiting

    def cancelled(self, request: W) -> list[tuple[W, ServingError]]:
        """Nobody waits for it any more. Returns its answer, if it waited; one that has a slot leaves it."""
        refused = super().cancelled(request)
        if not refused:
            self._leave(request)
        return refused

    @property
    def lives(self) -> bool:
        """Whether it must be asked although nothing waits."""
        return bool(self._seats) or self._on_their_way > 0

    def decide(self, now_ns: int, instance: int = 0) -> Decision[W]:
        """As ``Planner.decide``: a batch is requests that get their slots."""
        return decide(self, now_ns, instance)

    def due_ns(self, instance: int = 0) -> int | None:
        """When the next requests should get their slots, if need be after a step. None: nothing waits, or no slot is free."""
        head = self._queue.head() if self._free else None
        return None if head is None else head.arrived_ns

    def take(self, now_ns: int, instance: int = 0) -> list[W]:
        """Gives slots to the next requests, which one call inserts; none where no more may begin before a step."""
        head = self._queue.head() if self._free and self._room else None
        if head is None:
            return []
        taken = self._queue.take(head.key, min(self._rules.insert_rows, len(self._free), self._room))
        self._room -= len(taken)
        for request in taken:
            number = heapq.heappop(self._free)
            self._seats[request] = self._running[number] = Seat(request, number)
        self._masked -= {self._seats[request].number for request in taken}
        return taken

    def done(self, requests: Iterable[W], now_ns: int) -> None:
        """They are over, well or not: their slots are free."""
        for request in requests:
            self._leave(request)

    def dropped(self, request: W, now_ns: int) -> list[tuple[W, ServingError]]:
        """It will not be stepped any more: that concerns no other."""
        self._leave(request)
        return []

    def restore(self, requests: list[W], now_ns: int) -> list[tuple[W, ServingError]]:
        """They could not be inserted, and wait again."""
        self.done(requests, now_ns)
        return super().restore(requests, now_ns)

    def limit(self, key: Hashable, rows: int) -> None:
        """Every key has one program: there is nothing to limit."""

    def at_once(self, key: Hashable) -> int:
        """Each joins a slot of its own."""
        return 0

    def end_delays(self) -> None:
        """No more requests come: nobody waits for company here."""

    def stop(self) -> None:
        """The worker is to stop: whatever is there still runs."""

    # ------------------------------------------------------------------------------------------------------------ slots

    def slot(self, request: W) -> int:
        """The slot of a request that has one."""
        return self._seats[request].number

    def seated(self) -> list[W]:
        """Requests that have a slot."""
        return list(self._seats)

    def _leave(self, request: W, known: bool = False) -> bool:
        """Frees its slot. ``known``: the device knows that nobody is there any more."""
        seat = self._seats.pop(request, None)
        if seat is None:
            return False
        seat.left = True
        self._running.pop(seat.number, None)
        heapq.heappush(self._free, seat.number)
        if not known:
            self._masked |= {seat.number}
        return True

    def pause(self, request: W) -> None:
        """It keeps its slot and is not stepped until ``resume``. Ignores one that has none."""
        seat = self._seats.get(request)
        if seat is not None:
            seat.paused = True
            self._running.pop(seat.number, None)
            self._masked |= {seat.number}

    def resume(self, request: W) -> None:
        """It is stepped again."""
        seat = self._seats.get(request)
        if seat is None or not seat.paused:
            return
        seat.paused = False
        if seat.steps < self._rules.max_steps:
            self._running[seat.number] = seat
            self._masked -= {seat.number}

    def step(self) -> Step[W] | None:
        """The next step. None: there is nobody for one, or enough of them are on their way."""
        if self._on_their_way >= AHEAD:
            return None
        self._room = self._rules.inserts_per_step
        if not self._running:
            return None
        seats, masked = list(self._running.values()), self._masked
        last: list[int] = []
        for seat in seats:
            seat.steps += 1
            if seat.steps == self._rules.max_steps:
                last.append(seat.number)
                del self._running[seat.number]
        self._masked |= frozenset(last)
        self._on_their_way += 1
        return Step(seats, frozenset(last), masked)

    # ------------------------------------------------------------------------------------------------------ what came of it

    def inserted(self, requests: Sequence[W], says: Sequence[int]) -> list[Answer[W]]:
        """An insertion was read. ``says``: of each request, ``EMITS`` and ``FINISHED``. Returns what the requests get."""
        answers: list[Answer[W]] = []
        for row, (request, said) in enumerate(zip(requests, says, strict=False)):
            if request in self._seats and said:
                answers.append(self._answer(request, row, said))
        return answers

    def stepped(
        self, step: Step[W], says: Sequence[int], joined: Sequence[bool] = ()
    ) -> tuple[list[Answer[W]], list[int]]:
        """A step was read, in its turn. ``says``: of each slot, as above.

        Returns: what the requests get; and slots of those among ``joined`` that get something and go on.
        """
        self._on_their_way -= 1
        answers: list[Answer[W]] = []
        going: list[int] = []
        last, joined = step.last, joined or [False] * len(says)
        for seat in step.seats:
            if seat.left:
                continue
            number = seat.number
            said = says[number] | FINISHED if number in last else says[number]
            if said == EMITS and joined[number]:
                going.append(number)
            elif said:
                answers.append(self._answer(seat.request, number, said))
        return answers, going

    def _answer(self, request: W, row: int, said: int) -> Answer[W]:
        over = said & FINISHED > 0
        if over:
            # After its last step it is masked already.
            self._leave(request, known=True)
        return Answer(request, row, said & EMITS > 0, over)

    def failed(self) -> list[W]:
        """What the device kept is gone, and what is on its way with it. Returns the requests that had a slot: they are over."""
        lost = list(self._seats)
        self.done(lost, 0)
        # The device begins anew, and knows of nobody.
        self._masked, self._on_their_way = frozenset(), 0
        return lost

    def check_invariants(self) -> None:
        """For tests: each slot is free or one request's, and who is stepped has one."""
        self._queue.check_invariants()
        numbers = [seat.number for seat in self._seats.values()]
        assert sorted(numbers + self._free) == list(range(self._rules.slots))
        assert all(seat.request is request and not seat.left for request, seat in self._seats.items())
        assert all(self._seats[seat.request] is seat and not seat.paused for seat in self._running.values())
        assert all(seat.steps < self._rules.max_steps for seat in self._running.values())
        assert not self._masked & self._running.keys()
        assert 0 <= self._on_their_way <= AHEAD
        assert 0 <= self._room <= self._rules.inserts_per_step

    def __repr__(self) -> str:
        return f"<StepBatcher {len(self._queue)} waiting, {len(self._seats)} of {self._rules.slots} slots taken>"
