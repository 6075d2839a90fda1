"""The whole daemon under some seeds; and that the simulation sees a fault, and tells it in few events."""

from __future__ import annotations

import re
import weakref
from typing import Any

import pytest

from tensord.daemon.submit.submitter import Submitter
from tests.generated import times
from tests.simulation import run
from tests.simulation.regions import PREFIX
from tests.simulation.run import shrunk, simulate
from tests.simulation.whole_run import WholeRun

STEPS = 3000
#: Who dies in the middle of a turn leaves sockets that only the kernel would close.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning"
)


@pytest.mark.parametrize("first", range(1000, 11_000, 1000))
def test_a_daemon_under_seeds(first: int) -> None:
    """
    1. A daemon starts. 2. Clients ask and change models, processes die and stop, as a seed says. 3. It stops.
    Result: each request has one right end, each change is answered, and nothing is left.
    """
    for seed in range(first, first + times(500, 6)):
        outcome = simulate(seed, STEPS)
        if outcome.fault:
            pytest.fail(str(shrunk(outcome, STEPS)))


@pytest.mark.parametrize("seed", [9, 910_004, 911_092])
def test_a_seed_is_one_run(seed: int) -> None:
    # Objects in shared memory have another name each time.
    stories = [re.sub(rf"{PREFIX}[-\w]+", "object", str(simulate(seed, STEPS))) for _ in range(2)]
    assert stories[0] == stories[1]


def test_a_fault_is_found_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    1. Fronts do not act upon a worker's fence. 2. Events are left out.
    Result: a request that has no end is found, and few events are left.
    """
    monkeypatch.setattr(Submitter, "fence", lambda *_: None)
    outcomes = (simulate(seed, STEPS) for seed in range(1, 20))
    outcome = next(outcome for outcome in outcomes if "that every request" in outcome.fault)
    told = shrunk(outcome, STEPS, most=12)
    assert told.kind == outcome.kind
    assert len(told.events) <= len(outcome.events) // 2
    assert "has ended (was killed by SIGKILL)" in str(told)


def test_a_run_is_gone_before_anybody_looks_for_what_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are objects here: as long as one is referred to, what it had open and mapped is not closed."""
    worlds: list[weakref.ref[WholeRun]] = []
    there: list[bool] = []
    begin, descriptors = WholeRun.__init__, run._descriptors

    def begun(world: WholeRun, *given: Any) -> None:
        worlds.append(weakref.ref(world))
        begin(world, *given)

    def looked() -> set[int]:
        there.append(worlds[-1]() is not None)
        return descriptors()

    monkeypatch.setattr(WholeRun, "__init__", begun)
    monkeypatch.setattr(run, "_descriptors", looked)
    assert simulate(1, STEPS).fault == ""
    assert there == [True, False]
