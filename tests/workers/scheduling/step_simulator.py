"""Simulates requests, slots and a device that steps them, at random: every request gets its responses in order, and one end.

The device computes when it is told to, and is read later, in its order. A request counts: its insertion may give 0, its steps the
numbers after that, until it has as many as it wants.
"""

from __future__ import annotations

import random
from collections import deque

from tensord.shm.errors import Cancelled, Unavailable
from tensord.workers.scheduling.queue import QueuePolicy, QueueRules, RequestQueue, Waiting
from tensord.workers.scheduling.step_batcher import AHEAD, EMITS, FINISHED, SlotAnswer, Step, StepBatcher, StepRules
from tests.invariants import check_invariants


class Counting(Waiting):
    """A request that wants so many numbers. ``early``: its insertion gives the first one."""

    def __init__(self, key: str, arrived_ns: int, wants: int, early: bool) -> None:
        super().__init__(key, 1, arrived_ns)
        self.wants = wants
        self.early = early
        self.got: list[int] = []
        #: How it ended: "final", "cancelled", "failed", "late".
        self.end = ""


class Device:
    """A device whose slots have a request and its next number each. ``knows``: it leaves finished requests alone."""

    def __init__(self, slots: int, knows: bool) -> None:
        self._slots: list[Counting | None] = [None] * slots
        self._next = [0] * slots
        self._knows = knows

    def insert(self, requests: list[Counting], slots: list[int]) -> list[tuple[int, int]]:
        """Puts requests into slots. Returns for each what the device says of it, and the number that goes with it."""
        says = []
        for request, slot in zip(requests, slots, strict=True):
            self._slots[slot], self._next[slot] = request, 0
            says.append(self._says(slot) if request.early else (0, 0))
        return says

    def step(self, masked: frozenset[int]) -> list[tuple[int, int]]:
        """Steps all slots that are not masked. Returns for each slot what ``insert`` returns for a request."""
        return [(0, 0) if slot in masked else self._says(slot) for slot in range(len(self._slots))]

    def _says(self, slot: int) -> tuple[int, int]:
        request = self._slots[slot]
        if request is None:
            return 0, 0
        number, wants = self._next[slot], request.wants
        self._next[slot] += 1
        finished = number >= wants - 1
        if finished and self._knows:
            self._slots[slot] = None
        return (EMITS if number < wants or not self._knows else 0) | (FINISHED if finished else 0), number


class Simulation:
    """One random run."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        slots = chance.choice((1, 2, 3, 8))
        self.rules = StepRules(slots, chance.choice((3, 100)), chance.randint(1, 4), chance.choice((1, 1, 2, 3)))
        policy = QueuePolicy(timeout_ns=chance.choice((0, 20)))
        queue: RequestQueue[Counting] = RequestQueue(QueueRules(1000, policy, levels=2, default_level=2))
        self.batcher: StepBatcher[Counting] = StepBatcher(self.rules, queue)
        self.knows = chance.random() < 0.7
        self.device = Device(slots, self.knows)
        self.requests: list[Counting] = []
        self.paused: set[Counting] = set()
        self.now_ns = 0
        #: Runs that were given to the device and not read: insertions, or steps.
        self.runs: deque[tuple[list[Counting] | Step[Counting], list[tuple[int, int]]]] = deque()

    def run(self) -> None:
        """Makes some hundred random events happen, and then goes on until every request has ended."""
        for _ in range(self.chance.randint(20, 150)):
            self.now_ns += 1
            self.chance.choices(
                (self.arrive, self.dispatch, self.read, self.cancel, self.pause, self.resume, self.fail, self.tick),
                (6, 6, 6, 1, 1, 1, 0.3, 1),
            )[0]()
            check_invariants(self.batcher)
        while self.paused:
            self.resume()
        while len(self.batcher) or self.batcher.lives:
            self.dispatch()
            self.read()
            check_invariants(self.batcher)
        self.check()

    def arrive(self) -> None:
        """Has a request arrive."""
        request = Counting(self.chance.choice("ab"), self.now_ns, self.chance.randint(0, 6), self.chance.random() < 0.7)
        request.priority = self.chance.randint(0, 2)
        self.requests.append(request)
        self.batcher.arrived(request)

    def dispatch(self) -> None:
        """Gives the device the insertions and steps that it can do."""
        room = self.rules.inserts_per_step
        while taken := self.batcher.take(self.now_ns):
            room -= len(taken)
            assert len(taken) <= self.rules.insert_rows
            assert len({request.key for request in taken}) == 1
            if self.chance.random() < 0.05:
                assert not self.batcher.restore(taken, self.now_ns)
                break
            self.runs.append((taken, self.device.insert(taken, [self.batcher.slot(request) for request in taken])))
        assert room >= 0
        while (step := self.batcher.step()) is not None:
            assert not self.paused.intersection(holder.request for holder in step.holders)
            self.runs.append((step, self.device.step(step.masked)))
        assert sum(isinstance(run, Step) for run, _ in self.runs) <= AHEAD

    def read(self) -> None:
        """Reads the oldest run of the device."""
        if not self.runs:
            return
        run, made = self.runs.popleft()
        says = [said for said, _ in made]
        if isinstance(run, Step):
            joined = [self.chance.random() < 0.5 for _ in says]
            answers, going = self.batcher.stepped(run, says, joined)
            assert all(joined[slot] for slot in going)
            with_slots = {holder.number: holder.request for holder in run.holders}
            answers += [SlotAnswer(with_slots[slot], slot, True, False) for slot in going]
        else:
            answers = self.batcher.inserted(run, says)
        for request, row, emits, final in answers:
            assert not request.end
            if emits:
                request.got.append(made[row][1])
            if final:
                self.end(request, "final")

    def cancel(self) -> None:
        """Has a client cancel its request."""
        there = [request for request in self.requests if not request.end]
        if there:
            request = self.chance.choice(there)
            with_slots = request in self.batcher.with_slots()
            answers = self.batcher.cancelled(request)
            assert [answered for answered, _ in answers] == ([] if with_slots else [request])
            assert all(isinstance(error, Cancelled) for _, error in answers)
            assert request not in self.batcher.with_slots()
            self.end(request, "cancelled")
            assert not self.batcher.cancelled(request)

    def pause(self) -> None:
        """Pauses a request, because its client is slow."""
        if with_slots := self.batcher.with_slots():
            request = self.chance.choice(with_slots)
            self.batcher.pause(request)
            self.paused.add(request)

    def resume(self) -> None:
        """Resumes a request, because its client has caught up."""
        if self.paused:
            request = self.paused.pop()
            self.batcher.resume(request)

    def fail(self) -> None:
        """Has the device lose everything."""
        with_slots = self.batcher.with_slots()
        assert self.batcher.failed() == with_slots
        for request in with_slots:
            self.end(request, "failed")
        self.runs.clear()
        self.device = Device(self.rules.slots, self.knows)

    def tick(self) -> None:
        """Lets time pass; requests whose timeout is over are refused."""
        for request, error in self.batcher.tick(self.now_ns):
            assert isinstance(error, Unavailable)
            assert not request.got
            self.end(request, "late")

    def end(self, request: Counting, how: str) -> None:
        """Notes how a request ended; nothing more may come for it."""
        assert not request.end
        request.end = how
        self.paused.discard(request)

    def check(self) -> None:
        """Checks that every request got the first numbers in order, and all of them unless it was ended early."""
        for request in self.requests:
            assert request.end
            assert request.got == list(range(len(request.got)))
            if request.end == "final":
                # One that counts only in its steps has one less than it may have steps.
                most = self.rules.max_steps + request.early
                wanted = request.wants if self.knows else max(1, request.wants)
                assert len(request.got) == min(wanted, most), (request.got, request.wants)
