"""Decides what ``SequenceBatcher`` decides by looking at everything each time: slow, but easy to believe."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from tensord.shm.errors import ServingError
from tensord.workers.scheduling.sequence import Controls, Sequenced, Slot

#: A sequence: its id, whether it is closed, and the numbers of its waiting requests.
Picture = tuple[int | str, bool, list[int]]


class Step(Sequenced):
    """One request of the simulation."""

    __slots__ = ("number",)

    def __init__(self, number: int, key: str, arrived_ns: int, controls: Controls, timeout_ns: int = 0) -> None:
        super().__init__(key, arrived_ns, controls)
        self.number = number
        self.timeout_ns = timeout_ns


@dataclass(eq=False)
class Run:
    """A sequence of the simulation."""

    correlation_id: int | str
    slot: Slot | None = None
    waiting: list[Step] = field(default_factory=list)
    running: Step | None = None
    closed: bool = False
    cancelled: bool = False
    #: When its first waiting request became ready, as a number that grows.
    ready: int = 0
    idle_ns: int = -1
    #: Of those that fell silent at the same time: which was first.
    silent: int = 0


class NaiveSequences:
    """Follows the rules of docs/sequences.md, word by word."""

    def __init__(self, slots: int, instances: int, idle_ns: int, max_waiting: int, direct: bool, max_rows: int) -> None:
        self.places = [Slot(number, instance) for number in range(slots) for instance in range(instances)]
        self.idle_ns = idle_ns
        self.max_waiting = max_waiting
        self.direct = direct
        self.max_rows = max_rows
        #: In the order of their admission.
        self.runs: list[Run] = []
        self._clock = itertools.count(1)

    def waiting(self) -> int:
        """Returns how many requests wait."""
        return sum(len(run.waiting) for run in self.runs)

    def arrived(self, step: Step) -> str | None:
        """Takes a request. Returns part of the error if it is refused, else None."""
        correlation_id, start, end = step.controls
        if not correlation_id:
            return "non-zero or non-empty correlation ID"
        run = next((run for run in self.runs if run.correlation_id == correlation_id and not run.closed), None)
        if run is None and not start:
            return "must specify the START flag"
        if self.waiting() >= self.max_waiting:
            return "maximum queue size"
        if run is None:
            run = Run(correlation_id)
            self.runs.append(run)
        run.waiting.append(step)
        run.idle_ns = -1
        run.closed = end
        self._settle()
        return None

    def may_run(self, step: Step) -> bool:
        """Returns whether a request would run at once if it arrived now."""
        correlation_id, start, _ = step.controls
        run = next((run for run in self.runs if run.correlation_id == correlation_id and not run.closed), None)
        if run is not None:
            return run.running is None and not run.waiting and run.slot is not None
        return bool(correlation_id) and start and len([run for run in self.runs if run.slot]) < len(self.places)

    def _settle(self) -> None:
        """Gives free slots, the lowest first, to the sequences that wait longest; notes which are ready now."""
        self.runs = [run for run in self.runs if run.waiting or run.running or not run.closed]
        for run in self.runs:
            if run.slot is None:
                taken = [other.slot for other in self.runs]
                free = [place for place in self.places if place not in taken]
                if not free:
                    break
                run.slot = free[0]
        for run in self.runs:
            if not (run.slot is not None and run.waiting and not run.running):
                run.ready = 0
            elif not run.ready:
                run.ready = next(self._clock)

    def take(self, instance: int) -> list[Step]:
        """Returns the next batch of a free instance."""
        ready = [run for run in self.runs if run.ready and run.slot is not None and run.slot.instance == instance]
        ready.sort(key=lambda run: run.ready)
        batch = [run for run in ready if run.waiting[0].key == ready[0].waiting[0].key]
        if self.direct:
            batch.sort(key=lambda run: run.slot or Slot(0, 0))
        else:
            batch = batch[: self.max_rows]
        for run in batch:
            run.running = run.waiting.pop(0)
        self._settle()
        return [run.running for run in batch if run.running is not None]

    def done(self, steps: list[Step], now_ns: int) -> None:
        """Notes that these requests have run."""
        for step in steps:
            run = self.of(step)
            run.running = None
            if not run.waiting and not run.closed:
                run.idle_ns, run.silent = now_ns, next(self._clock)
            self._settle()

    def restored(self, steps: list[Step]) -> list[Step]:
        """Takes back requests that could not run. Returns those that never will."""
        lost: list[Step] = []
        for step in steps:
            run = self.of(step)
            run.running = None
            if run.cancelled:
                lost.append(step)
            else:
                run.waiting.insert(0, step)
            self._settle()
        return lost

    def cancelled(self, step: Step) -> list[Step]:
        """Removes a request whose client has gone. Returns all requests that are refused then."""
        run = next((run for run in self.runs if step in run.waiting), None)
        if run is None:
            return []
        refused, run.waiting = run.waiting, []
        run.closed = run.cancelled = True
        self._settle()
        return refused

    def tick(self, now_ns: int) -> list[Step]:
        """Notes that time has passed. Returns the requests that are refused then."""
        self._close([run for run in self.runs if 0 <= run.idle_ns <= now_ns - self.idle_ns])
        refused: list[Step] = []
        for run in [run for run in self.runs if run.slot is None]:
            if any(step.timeout_ns and step.arrived_ns + step.timeout_ns <= now_ns for step in run.waiting):
                refused += run.waiting
                run.waiting, run.closed = [], True
        self._settle()
        return refused

    def close_all(self) -> None:
        """Closes all sequences, because the model is unloaded."""
        for run in self.runs:
            run.closed = run.closed or run.idle_ns < 0
        self._close([run for run in self.runs if run.idle_ns >= 0])

    def _close(self, runs: list[Run]) -> None:
        """Closes sequences one after the other, the one that was idle longest first."""
        for run in sorted(runs, key=lambda run: run.silent):
            run.closed = True
            self._settle()

    def of(self, step: Step) -> Run:
        """Returns the sequence of a running request."""
        return next(run for run in self.runs if run.running is step)

    def picture(self) -> tuple[dict[Slot, Picture], list[Picture]]:
        """Returns the state to compare: which sequence has which slot, and the backlog."""
        slots: dict[Slot, Picture] = {}
        backlog: list[Picture] = []
        for run in self.runs:
            picture = run.correlation_id, run.closed, [step.number for step in run.waiting]
            if run.slot is None:
                backlog.append(picture)
            else:
                slots[run.slot] = picture
        return slots, backlog


def refusal(call: Callable[[Step], None], step: Step) -> str | None:
    """Calls a function with a request; returns the message of the ServingError that it raises, else None."""
    try:
        call(step)
    except ServingError as error:
        return error.message
    return None
