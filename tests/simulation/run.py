"""Runs a daemon under a seed, and, where that fails, again with fewer events, as long as it fails.

plan: ask, cancel, load, unload, push, kill, stop ... ─▶ the daemon's processes take turns ─▶ each answer is judged
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.events import Event, plan
from tests.simulation.region_clients import mappings
from tests.simulation.scheduler import Process
from tests.simulation.whole_run import WholeRun


@dataclass
class Outcome:
    """What came of a run."""

    seed: int
    turns: int
    #: What is wrong; "": nothing.
    fault: str
    #: What happened, in words.
    story: list[str]
    events: list[Event]
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        """Returns the fault without its numbers, to be compared with others."""
        return re.sub(r"\d+", "N", self.fault)[:60]

    def __str__(self) -> str:
        end = f"seed {self.seed}, after {self.turns} turns: {self.fault or 'nothing is wrong'}"
        return "\n".join((*self.story, end))


def simulate(seed: int, turns: int, events: Sequence[Event] | None = None) -> Outcome:
    """Runs a daemon for so many turns, with the events of the seed or others."""
    # What a client gives back when its garbage is collected would come at another time in each run.
    gc.disable()
    # What was there before is no garbage of this run: nobody looks at it when that is collected.
    gc.freeze()
    try:
        with _silence():
            return _simulated(seed, turns, events)
    finally:
        gc.unfreeze()
        gc.enable()


def _simulated(seed: int, turns: int, events: Sequence[Event] | None) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    world = WholeRun(seed, folder)
    before = _descriptors()
    try:
        happened = world.run(plan(seed) if events is None else events, turns)
    finally:
        shutil.rmtree(folder)
    scheduler, counts, objects = world.scheduler, world.counts, world.clients.regions.prefix
    scheduler.on_death = _nothing
    del world  # what its processes had open is closed with them
    logging.disable()
    gc.collect()  # what was under way where a run failed is cancelled now
    logging.disable(logging.NOTSET)
    left = _descriptors() - before
    if left and not (scheduler.fault or scheduler.cut_short):
        scheduler.defect(f"{len(left)} descriptors are left: {_kinds(left)}")
    if (mapped := mappings(objects)) and not (scheduler.fault or scheduler.cut_short):
        scheduler.defect(f"{len(mapped)} mappings of regions are left: {mapped[0]}")
    for fd in left:
        # Who dies in the middle of a turn leaves what only the kernel would close.
        os.close(fd)
    return Outcome(seed, scheduler.step, scheduler.fault, list(scheduler.story), happened, counts)


def shrunk(outcome: Outcome, turns: int, most: int = 200) -> Outcome:
    """Leaves out events as long as what is left fails in the same way, in at most so many runs."""
    best, size, runs = outcome, max(1, len(outcome.events) // 2), 0
    while size and runs < most:
        at = 0
        while at < len(best.events) and runs < most:
            left = best.events[:at] + best.events[at + size :]
            runs += 1
            tried = simulate(outcome.seed, turns, left)
            if tried.kind == outcome.kind:
                best = tried
            else:
                at += size
        size //= 2
    return best


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Has nobody complain of what a dead process leaves in this one, where the kernel would take it: coroutines, sockets."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook


def _nothing(process: Process) -> None:
    pass


def _descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.fstat(int(name))
            found.add(int(name))
    return found


def _kinds(fds: set[int]) -> Counter[str]:
    return Counter(f"{os.readlink(f'/proc/self/fd/{fd}')} of {os.fstat(fd).st_size} bytes" for fd in fds)
