"""Drives a SequenceBatcher at random: arrivals, cancels, silence, results, a shape that cannot run yet, unload, a worker's end.

The naive model decides the same, and both must agree after every step. For long runs with many ids, without the naive
model (each sequence's requests are checked for their order, and the memory is shown):

    python -m tests.workers.scheduling.sequence_simulator --ids 100000 --steps 10000000
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable

import psutil

from tensord.shm.errors import ServingError
from tensord.workers.scheduling.dynamic_batcher import BatchRules
from tensord.workers.scheduling.sequence import Controls
from tensord.workers.scheduling.sequence_batcher import (
    DirectBatcher,
    DirectRules,
    OldestBatcher,
    SequenceBatcher,
    Strategy,
)
from tensord.workers.scheduling.sequence_table import SequenceRules
from tests.invariants import check_invariants
from tests.workers.scheduling.naive_sequences import NaiveSequences, Step, refusal


class Heard:
    """Receives the batcher's events about sequences, and checks that they come in order."""

    def __init__(self) -> None:
        self.live: dict[tuple[int | str, int], str] = {}
        self._numbers = itertools.count()

    def waiting(self, correlation_id: int | str) -> tuple[int | str, int]:
        entry = correlation_id, next(self._numbers)
        self.live[entry] = "waiting"
        return entry

    def begun(self, entry: tuple[int | str, int]) -> None:
        assert self.live[entry] == "waiting"
        self.live[entry] = "begun"

    def gone(self, entry: tuple[int | str, int]) -> None:
        del self.live[entry]


def batcher_of(
    slots: int, instances: int, direct: bool, max_rows: int, idle_ns: int, max_waiting: int, heard: Heard
) -> SequenceBatcher[Step]:
    """Returns a batcher as a model's configuration would ask for it."""
    strategy: Callable[[], Strategy[Step]] = (
        (lambda: DirectBatcher(DirectRules(slots))) if direct else (lambda: OldestBatcher(BatchRules(max_rows)))
    )
    return SequenceBatcher("m", SequenceRules(slots, idle_ns, max_waiting), strategy, instances, heard)


class Simulation:
    """Simulates one worker's life after another."""

    def __init__(self, seed: int) -> None:
        self._chance = chance = random.Random(seed)
        self._slots, self._instances = chance.randint(1, 3), chance.randint(1, 2)
        self._direct, self._max_rows = chance.random() < 0.5, chance.randint(1, 3)
        self._bounds = (chance.choice((3, 20)), chance.choice((4, 30)))
        self._now_ns = 1
        self._number = 0
        self._begin()

    def _begin(self) -> None:
        """Starts a worker, which knows nothing of what was before."""
        idle_ns, max_waiting = self._bounds
        self.heard = Heard()
        shape = (self._slots, self._instances)
        self.batcher = batcher_of(*shape, self._direct, self._max_rows, idle_ns, max_waiting, self.heard)
        self.naive = NaiveSequences(*shape, idle_ns, max_waiting, self._direct, self._max_rows)
        self._running: dict[int, list[Step]] = {}
        self._sent: list[Step] = []

    def step(self) -> None:
        """Makes one random event happen, with everything that it leads to."""
        chance = self._chance.random()
        self._now_ns += 1
        if chance < 0.15 and self._instances == 1 and not self._running and not len(self.batcher):
            self._come_together()
        elif chance < 0.45:
            self._arrive()
        elif chance < 0.65:
            self._take(self._chance.randrange(self._instances))
        elif chance < 0.85:
            self._end()
        elif chance < 0.90:
            self._cancel()
        elif chance < 0.985:
            self._now_ns += self._chance.choice((0, 2, 25))
            self._same(self.batcher.tick(self._now_ns), self.naive.tick(self._now_ns))
        elif chance < 0.995:
            self.batcher.close_all()
            self.naive.close_all()
        else:
            self._begin()
        self.compare()

    def _controls(self) -> Controls:
        roll = self._chance.random
        return Controls(self._chance.choice((0, 1, 2, 3, 4, "1", "a")), roll() < 0.5, roll() < 0.25)

    def _arrive(self) -> None:
        roll = self._chance.random
        self._number += 1
        timeout_ns = 15 if roll() < 0.1 else 0
        key = "k" if roll() < 0.8 else "other"
        step = Step(self._number, key, self._now_ns, self._controls(), timeout_ns)
        said, expected = refusal(self.batcher.arrived, step), self.naive.arrived(step)
        assert said == expected or (said and expected and expected in said), (said, expected)
        if said is None:
            self._sent.append(step)

    def _come_together(self) -> None:
        """Has requests arrive together while nothing waits: they run at once as far as they can."""
        asked = [self._controls() for _ in range(self._chance.randint(1, self.batcher.at_once("k")[-1][-1]))]
        chosen = self.batcher.run_now(asked, self._now_ns)
        self.naive.tick(self._now_ns)
        steps = [Step(self._number + n, "k", self._now_ns, controls) for n, controls in enumerate(asked, 1)]
        self._number += len(steps)
        for step in steps[: len(chosen)]:
            assert self.naive.arrived(step) is None
        taken = self.naive.take(0)
        assert sorted(step.number for step in taken) == [step.number for step in steps[: len(chosen)]]
        assert [live.slot for live in chosen] == [self.naive.of(step).slot for step in steps[: len(chosen)]]
        assert len(chosen) == len(steps) or not self.naive.may_run(steps[len(chosen)])
        self.batcher.table.have_run(chosen, self._now_ns)
        self.naive.done(steps[: len(chosen)], self._now_ns)

    def _take(self, instance: int) -> None:
        if instance in self._running:
            return
        due_ns = self.batcher.due_ns(instance)
        taken, expected = self.batcher.take(self._now_ns, instance), self.naive.take(instance)
        assert [step.number for step in taken] == [step.number for step in expected]
        assert (due_ns is None) == (not taken)
        if taken:
            assert [step.slot for step in taken] == [self.naive.of(step).slot for step in taken]
            self._running[instance] = taken

    def _end(self) -> None:
        """Ends an instance's batch: it has run, or could not run."""
        if not self._running:
            return
        batch = self._running.pop(self._chance.choice(list(self._running)))
        if self._chance.random() < 0.9:
            self.batcher.done(batch, self._now_ns)
            self.naive.done(batch, self._now_ns)
        else:
            self._same(self.batcher.restore(batch, self._now_ns), self.naive.restored(batch))

    def _cancel(self) -> None:
        if self._sent:
            step = self._chance.choice(self._sent)
            self._same(self.batcher.cancelled(step), self.naive.cancelled(step))

    @staticmethod
    def _same(answers: list[tuple[Step, ServingError]], expected: list[Step]) -> None:
        assert sorted(step.number for step, _ in answers) == sorted(step.number for step in expected)

    def compare(self) -> None:
        """Checks that both have decided the same so far."""
        slots, backlog = {}, []
        for live in self.batcher.table.sequences():
            picture = live.correlation_id, live.closed, [step.number for step in live.waiting]
            if live.slot is None:
                backlog.append(picture)
            else:
                slots[live.slot] = picture
        assert (slots, backlog) == self.naive.picture()
        assert len(self.heard.live) == len(slots) + len(backlog)


def simulate(seed: int, steps: int) -> None:
    """Runs a simulation. Raises AssertionError: the two disagree."""
    simulation = Simulation(seed)
    for _ in range(steps):
        simulation.step()
    check_invariants(simulation.batcher)


# ------------------------------------------------------------------------------------------------------------ long runs


class Churn:
    """Sends requests of many ids through one batcher; checks that the requests of each sequence run in their order."""

    def __init__(self, ids: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self._ids = ids
        self._heard = Heard()
        self._batcher = batcher_of(2000, 2, False, 64, 50_000, 4000, self._heard)
        self._sent: Counter[int] = Counter()
        self._now_ns = 0
        self.answered = self.refused = 0
        #: The entry of a sequence -> the number of the request that ran last.
        self._ran: dict[tuple[int | str, int], int] = {}

    def step(self) -> None:
        """Has one request arrive, and now and then runs a batch on each instance."""
        self._now_ns += 10
        # Most requests belong to few ids, so that there are long sequences among many short ones.
        number = int(self._ids * self._chance.random() ** 4) + 1
        controls = Controls(number, self._chance.random() < 0.5, self._chance.random() < 0.3)
        self._sent[0] += 1
        step = Step(self._sent[0], "k", self._now_ns, controls)
        try:
            self._batcher.arrived(step)
        except ServingError:
            self.refused += 1
        else:
            if self._chance.random() < 0.005:
                self.refused += len(self._batcher.cancelled(step))
        if self._sent[0] % 20 == 0:
            self._turn()

    def _turn(self) -> None:
        self.refused += len(self._batcher.tick(self._now_ns))
        for instance in (0, 1):
            batch = self._batcher.take(self._now_ns, instance)
            for step in batch:
                assert step.number > self._ran.get(step.live.entry, 0)
                self._ran[step.live.entry] = step.number
            self._batcher.done(batch, self._now_ns)
            self.answered += len(batch)
            for step in batch:
                if step.live.closed and not step.live.waiting:
                    del self._ran[step.live.entry]
        if self._sent[0] % 200_000 == 0:
            self._ran = {key: ran for key, ran in self._ran.items() if key in self._heard.live}

    def __str__(self) -> str:
        counts = f"{self._sent[0]} sent, {self.answered} answered, {self.refused} refused"
        return f"{counts}, {self._batcher.table.live} live, {len(self._batcher)} waiting"


def main() -> None:
    """Runs the long simulation; prints its speed and the memory in use after every tenth of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    churn = Churn(given.ids, given.seed)
    for part in range(10):
        began = time.monotonic()
        for _ in range(given.steps // 10):
            churn.step()
        rate = given.steps / 10 / (time.monotonic() - began)
        used = psutil.Process().memory_info().rss / 2**20
        print(f"{part + 1}/10: {churn}; {rate:.0f} steps/s, {used:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
