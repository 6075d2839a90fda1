"""Decides which requests of a stepped model get a slot, and which take part in the next step of the model.

A stepped model computes all requests with a slot together, step by step. A request waits until it gets a slot, and then takes
part in steps. The slot is free again when the request is finished, is cancelled or has had the maximum number of steps.
If the model's state on the device is lost, all requests with a slot fail.

``tensord.workers.dispatch.stepping`` runs the steps. At most ``AHEAD`` steps run on the device or wait there at a time.
If a request has lost its slot before the results of a step are read, the step's result for this request is dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

from tensord.shm.errors import ServingError
from tensord.workers.scheduling.planner import QueuePlanner
from tensord.workers.scheduling.queue import RequestQueue, W

#: Steps on their way to the device, or on it.
AHEAD = 2
#: Result flags of an insertion or a step for a slot: its request gets an answer; its request is over.
EMITS, FINISHED = 1, 2


@dataclass(frozen=True, slots=True)
class StepRules:
    """The settings of a model version that runs its requests step by step, such as the most requests in a step."""

    #: Requests that take part in steps at a time.
    slots: int
    #: A request is over after so many steps at the latest.
    max_steps: int
    #: Requests that may get a slot between two steps; those that have one wait meanwhile.
    inserts_per_step: int = 4
    #: Requests that one call inserts.
    insert_rows: int = 1


@dataclass(slots=True, eq=False)
class SlotHolder(Generic[W]):
    """A request to a stepped model, its slot in the state that the device keeps, and how many steps it has taken."""

    request: W
    number: int
    #: Steps that it has taken part in, those on their way included.
    steps: int = 0
    #: True if its request is over.
    left: bool = False
    #: True if it takes part in no steps for now.
    paused: bool = False


class Step(NamedTuple, Generic[W]):
    """Says which requests take part in one step of a model, and which slots of the model's state the step must not change."""

    #: Requests that take part, and slots for which it is the last step.
    holders: Sequence[SlotHolder[W]]
    last: frozenset[int]
    #: Slots that must not be stepped although the device knows of a request there.
    masked: frozenset[int]
    #: True if another part of the same step comes behind it.
    goes_on: bool = False

    def parts(self, groups: Sequence[Sequence[SlotHolder[W]]]) -> list[Step[W]]:
        """Returns a step for each group of this step's requests. Run these steps one after the other in place of this step."""
        numbers = [frozenset([holder.number for holder in group]) for group in groups]
        whole = frozenset().union(*numbers)
        return [
            Step(group, self.last & own, self.masked | (whole - own), own is not numbers[-1])
            for group, own in zip(groups, numbers, strict=True)
        ]


class SlotAnswer(NamedTuple, Generic[W]):
    """Tells which row of a model step's outputs answers a request, and whether this answer is the request's last."""

    request: W
    #: The request's row of the outputs.
    row: int
    #: True if the answer has outputs.
    emits: bool
    final: bool


class StepBatcher(QueuePlanner[W]):
    """Plans which requests of a model version get a slot, and which requests take part in each step."""

    def __init__(self, rules: StepRules, queue: RequestQueue[W]) -> None:
        super().__init__(queue)
        self._rules = rules
        self._holders: dict[W, SlotHolder[W]] = {}
        #: Slot -> its request, if that takes part in the next step.
        self._running: dict[int, SlotHolder[W]] = {}
        #: A heap of free slots: lower ones are given out first.
        self._free = list(range(rules.slots))
        self._masked: frozenset[int] = frozenset()
        #: Requests that may get a slot before the next step.
        self._room = rules.inserts_per_step
        self._on_their_way = 0

    # ---------------------------------------------------------------------------------------------------------- waiting

    def cancelled(self, request: W) -> list[tuple[W, ServingError]]:
        refused = super().cancelled(request)
        if not refused:
            self._leave(request)
        return refused

    @property
    def lives(self) -> bool:
        """Returns whether a request occupies a slot of the batch, or a run's results have not been read from the device yet."""
        return bool(self._holders) or self._on_their_way > 0

    def due_ns(self, instance: int = 0) -> int | None:
        head = self._queue.head() if self._queue.size and self._free else None
        return None if head is None else head.since_ns

    def take(self, now_ns: int, instance: int = 0) -> list[W]:
        """Gives a slot in the model's state to each of the next waiting requests, and returns these requests.

        The caller inserts these requests together: at most ``insert_rows`` requests with the same batching key. The list is
        empty if no waiting request may get a slot before the model's next step.
        """
        head = self._queue.head() if self._queue.size and self._free and self._room else None
        if head is None:
            return []
        taken = self._queue.take(head.key, min(self._rules.insert_rows, len(self._free), self._room))
        self._room -= len(taken)
        for request in taken:
            number = heapq.heappop(self._free)
            self._holders[request] = self._running[number] = SlotHolder(request, number)
        self._masked -= {self._holders[request].number for request in taken}
        return taken

    def done(self, requests: Iterable[W], now_ns: int) -> None:
        for request in requests:
            self._leave(request)

    def dropped(self, request: W, now_ns: int) -> list[tuple[W, ServingError]]:
        self._leave(request)
        return []

    def restore(self, requests: list[W], now_ns: int) -> list[tuple[W, ServingError]]:
        self.done(requests, now_ns)
        return super().restore(requests, now_ns)

    # ------------------------------------------------------------------------------------------------------------ slots

    def slot(self, request: W) -> int:
        """Returns the number of a request's slot in the model's state on the device. The request must have a slot."""
        return self._holders[request].number

    def with_slots(self) -> list[W]:
        """Returns all requests that have a slot: a numbered place for one request in the model's state on the device."""
        return list(self._holders)

    def _leave(self, request: W, marked_free: bool = False) -> None:
        """Frees a request's slot, if it has one. ``marked_free``: whether steps leave the slot out already."""
        holder = self._holders.pop(request, None)
        if holder is None:
            return
        holder.left = True
        self._running.pop(holder.number, None)
        heapq.heappush(self._free, holder.number)
        # The device still steps the slot: later steps leave it out.
        if not marked_free:
            self._masked |= {holder.number}

    def pause(self, request: W) -> None:
        """Leaves a request out of steps until ``resume``, without freeing its slot. Ignores a request without a slot."""
        holder = self._holders.get(request)
        if holder is not None:
            holder.paused = True
            self._running.pop(holder.number, None)
            self._masked |= {holder.number}

    def resume(self, request: W) -> None:
        """Lets a paused request take part in steps again. Ignores any other request."""
        holder = self._holders.get(request)
        if holder is None or not holder.paused:
            return
        holder.paused = False
        if holder.steps < self._rules.max_steps:
            self._running[holder.number] = holder
            self._masked -= {holder.number}

    def step(self) -> Step[W] | None:
        """Begins and returns a step; None: no request takes part, or the results of too many earlier steps are not read yet."""
        if self._on_their_way >= AHEAD:
            return None
        self._room = self._rules.inserts_per_step
        if not self._running:
            return None
        holders, masked = list(self._running.values()), self._masked
        last: list[int] = []
        for holder in holders:
            holder.steps += 1
            if holder.steps == self._rules.max_steps:
                last.append(holder.number)
                del self._running[holder.number]
        self._masked |= frozenset(last)
        self._on_their_way += 1
        return Step(holders, frozenset(last), masked)

    # ------------------------------------------------------------------------------------------------------ what came of it

    def inserted(self, requests: Sequence[W], flags: Sequence[int]) -> list[SlotAnswer[W]]:
        """Returns the answers to send after requests were inserted into slots. Frees the slots of finished requests.

        ``flags``: what the device has returned for each request: EMITS (it has an output), FINISHED (it is over), both, or 0.
        """
        answers: list[SlotAnswer[W]] = []
        for row, (request, said) in enumerate(zip(requests, flags, strict=False)):
            if request in self._holders and said:
                answers.append(self._answer(request, row, said))
        return answers

    def stepped(
        self, step: Step[W], flags: Sequence[int], joined: Sequence[bool] = ()
    ) -> tuple[list[SlotAnswer[W]], list[int]]:
        """Returns a list of answers that are sent one by one, and a list of slots whose outputs are sent together.

        Frees the slots of the requests that are over.
        Args:
          step: a step that the device has finished. Each step is passed once, the oldest first.
          flags: for each slot, a sum of EMITS (the slot's request has an output) and FINISHED (the request is over), or 0.
          joined: for each slot, whether its output may be sent together with other outputs. Empty: False for all slots.
        """
        self._on_their_way -= not step.goes_on
        answers: list[SlotAnswer[W]] = []
        going: list[int] = []
        last, joined = step.last, joined or [False] * len(flags)
        for holder in step.holders:
            if holder.left:
                continue
            number = holder.number
            said = flags[number] | FINISHED if number in last else flags[number]
            if said == EMITS and joined[number]:
                going.append(number)
            elif said:
                answers.append(self._answer(holder.request, number, said))
        return answers, going

    def _answer(self, request: W, row: int, said: int) -> SlotAnswer[W]:
        over = said & FINISHED > 0
        if over:
            # After its last step it is masked already.
            self._leave(request, marked_free=True)
        return SlotAnswer(request, row, said & EMITS > 0, over)

    def failed(self) -> list[W]:
        """Frees all slots in the model's lost state. Returns the requests that had a slot. All these requests must fail."""
        lost = list(self._holders)
        self.done(lost, 0)
        # The device begins anew, and knows of nobody.
        self._masked, self._on_their_way = frozenset(), 0
        return lost

    def __repr__(self) -> str:
        return f"<StepBatcher {len(self._queue)} waiting, {len(self._holders)} of {self._rules.slots} slots taken>"
