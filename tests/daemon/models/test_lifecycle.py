"""The life of versions: tables for what clients see, and random histories that must keep the books balanced."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tensord.daemon.models.lifecycle import (
    FIRST_RETRY,
    MAX_RETRY,
    Forget,
    Instruction,
    Lifecycle,
    Outdate,
    Publish,
    Retry,
    Send,
    Settled,
)
from tensord.daemon.models.repository import FoundModel
from tensord.shm.control_records import CancelLoad, Load, Loaded, ModelGone, ModelState, Unload
from tests.generated import examples
from tests.invariants import check_invariants


def found(name: str, *chosen: int, fingerprint: str = "f", devices: tuple[str, ...] = ()) -> FoundModel:
    return FoundModel(name, Path("/models", name), b"", chosen, chosen, fingerprint, devices=devices)


def entries(lifecycle: Lifecycle) -> list[dict[str, str | int]]:
    return lifecycle.index({}, {}, ready=False, detailed=False)


def states(out: list[Instruction]) -> list[tuple[int, str, tuple[int, ...]]]:
    return [
        (i.state.version, i.state.state, i.state.workers)
        for i in out
        if isinstance(i, Publish) and isinstance(i.state, ModelState)
    ]


def sent(out: list[Instruction]) -> list[tuple[int, str, int]]:
    return [(i.worker, type(i.record).__name__, i.record.version) for i in out if isinstance(i, Send)]


def settled(out: list[Instruction]) -> list[tuple[int, str]]:
    return [(i.token, i.error) for i in out if isinstance(i, Settled)]


def forgotten(out: list[Instruction]) -> list[int]:
    return [i.version for i in out if isinstance(i, Forget)]


def outdated(out: list[Instruction]) -> list[int]:
    return [i.version for i in out if isinstance(i, Outdate)]


def retries(out: list[Instruction]) -> list[tuple[str, float]]:
    return [(i.name, i.seconds) for i in out if isinstance(i, Retry)]


def ready(lifecycle: Lifecycle, *workers: int) -> None:
    for worker in workers:
        lifecycle.worker_joined(worker, f"cpu:{worker}")


def of(*workers: int) -> Lifecycle:
    """Makes a lifecycle with these workers."""
    lifecycle = Lifecycle()
    ready(lifecycle, *workers)
    return lifecycle


def serving(*workers: int, **more: bytes) -> Lifecycle:
    """Makes a lifecycle with these workers, on all of which version 1 of model ``m`` serves, as load 1 has wanted."""
    lifecycle = of(*workers)
    lifecycle.load(found("m", 1), 1)
    for worker in workers:
        lifecycle.loaded(worker, Loaded("m", 1, **more))
    return lifecycle


def test_load_on_two_workers() -> None:
    lifecycle = of(1, 2)
    out = lifecycle.load(found("m", 3), 7)
    assert states(out) == [(3, "LOADING", ())]
    assert sent(out) == [(1, "Load", 3), (2, "Load", 3)]
    out = lifecycle.loaded(2, Loaded("m", 3, metadata=b"{}"))
    assert states(out) == [(3, "READY", (2,))]
    assert settled(out) == []
    out = lifecycle.loaded(1, Loaded("m", 3, metadata=b"{}"))
    assert states(out) == [(3, "READY", (1, 2))]
    assert settled(out) == [(7, "")]
    assert entries(lifecycle) == [{"name": "m", "version": "3", "state": "READY"}]


def test_load_waits_for_the_first_worker() -> None:
    lifecycle = Lifecycle()
    assert settled(lifecycle.load(found("m", 1), 7)) == []
    assert sent(lifecycle.worker_joined(1, "cpu:1")) == [(1, "Load", 1)]
    assert settled(lifecycle.loaded(1, Loaded("m", 1))) == [(7, "")]


def test_a_model_is_loaded_where_it_belongs_and_leaves_where_it_no_longer_does() -> None:
    lifecycle = serving(0, 1)
    out = lifecycle.load(found("m", 1, fingerprint="g", devices=("cpu:1",)), 2)
    assert (states(out), sent(out)) == ([], [(1, "Load", 1)])
    # Both serve as they were until the new one is ready.
    out = lifecycle.loaded(1, Loaded("m", 1))
    assert (states(out), sent(out), settled(out)) == ([(1, "READY", (1,))], [(0, "Unload", 1)], [(2, "")])
    assert lifecycle.unloaded(0, "m", 1) == []
    assert lifecycle.worker_joined(2, "cpu:2") == []
    lifecycle.worker_left(1)
    assert sent(lifecycle.worker_joined(3, "cpu:1")) == [(3, "Load", 1)]


def test_fronts_know_the_devices_of_what_serves_whenever_they_start() -> None:
    lifecycle = serving(0, 1)
    lifecycle.load(found("m", 1, fingerprint="g", devices=("cpu:1",)), 2)
    assert [state.devices for state in lifecycle.states()] == [()]
    lifecycle.loaded(1, Loaded("m", 1))
    assert [state.devices for state in lifecycle.states()] == [("cpu:1",)]


def test_fronts_hear_that_nobody_awaits_what_was_tried_again() -> None:
    """1. Of two workers that are to try a version in turn, each alone, the first fails to load it. 2. The other has not begun."""
    lifecycle = of(1)
    lifecycle.load(found("m", 1, 2), 1)
    lifecycle.worker_left(1)
    lifecycle.stranded(())
    ready(lifecycle, 2, 3)
    told = [each for each in lifecycle.loaded(3, Loaded("m", 2, reason="no")) if isinstance(each, Publish)]
    assert [each.state for each in told] == [state for state in lifecycle.states() if state.version == 2]


def test_unchanged_models_are_not_loaded_again() -> None:
    lifecycle = serving(1)
    assert lifecycle.load(found("m", 1), 2) == [Settled(2)]
    # But where somebody asks for it, who may know why.
    assert sent(lifecycle.load(found("m", 1), 2, again=True)) == [(1, "Load", 1)]
    assert settled(lifecycle.loaded(1, Loaded("m", 1))) == [(2, "")]
    # Changed: loaded beside, serving all the while.
    out = lifecycle.load(found("m", 1, fingerprint="g"), 3)
    assert (states(out), sent(out)) == ([], [(1, "Load", 1)])
    assert settled(lifecycle.loaded(1, Loaded("m", 1))) == [(3, "")]


def test_what_was_pushed_is_forgotten_with_each_load_of_the_files_and_stays_where_a_worker_is_replaced() -> None:
    lifecycle = of(1)
    assert forgotten(lifecycle.load(found("m", 1), 1)) == [1]
    lifecycle.loaded(1, Loaded("m", 1))
    assert forgotten(lifecycle.load(found("m", 1), 2)) == []
    assert forgotten(lifecycle.worker_left(1)) == []
    assert forgotten(lifecycle.worker_joined(2, "cpu:1")) == []
    assert forgotten(lifecycle.loaded(2, Loaded("m", 1))) == []
    # What serves goes on with it until the load has succeeded, and if it fails.
    for reason in ("no such file", ""):
        out = lifecycle.load(found("m", 1), 3, again=True)
        assert (forgotten(out), outdated(out)) == ([], [1])
        assert isinstance(out[0], Outdate), "before any worker is sent the Load"
        out = lifecycle.loaded(2, Loaded("m", 1, reason=reason))
        assert forgotten(out) == ([] if reason else [1])
    # Not served any more: nothing is left that they belong to.
    lifecycle.load(found("m", 1), 3, again=True)
    lifecycle.worker_left(2)
    lifecycle.worker_joined(2, "cpu:1")
    assert forgotten(lifecycle.loaded(2, Loaded("m", 1, reason="no such file"))) == [1]
    lifecycle.load(found("m", 1), 3, again=True)
    lifecycle.loaded(2, Loaded("m", 1))
    # Another version takes its place.
    assert forgotten(lifecycle.load(found("m", 2, fingerprint="g"), 4)) == [2]
    assert forgotten(lifecycle.loaded(2, Loaded("m", 2))) == [1]


def test_a_new_version_is_ready_before_the_old_one_goes() -> None:
    lifecycle = serving(1)
    assert sent(lifecycle.load(found("m", 2, fingerprint="g"), 2)) == [(1, "Load", 2)]
    assert lifecycle.is_ready("m", 1)
    out = lifecycle.loaded(1, Loaded("m", 2))
    assert states(out) == [(2, "READY", (1,)), (1, "UNLOADING", ())]
    assert (sent(out), settled(out)) == ([(1, "Unload", 1)], [])
    out = lifecycle.unloaded(1, "m", 1)
    assert states(out) == [(1, "UNAVAILABLE", ())]
    assert settled(out) == [(2, "")]
    assert lifecycle.ready_models() == {"m": [2]}


def test_a_new_version_that_fails_leaves_the_old_one() -> None:
    lifecycle = serving(1)
    lifecycle.load(found("m", 2, fingerprint="g"), 2)
    out = lifecycle.loaded(1, Loaded("m", 2, reason="no"))
    assert settled(out) == [(2, "load failed for model 'm': version 2 is at UNAVAILABLE state: no;\n")]
    assert lifecycle.ready_models() == {"m": [1]}
    # The next load tries again, although no file changed.
    assert sent(lifecycle.load(found("m", 2, fingerprint="g"), 3)) == [(1, "Load", 2)]


def test_a_reload_that_fails_leaves_what_serves() -> None:
    lifecycle = serving(1)
    lifecycle.load(found("m", 1, fingerprint="g"), 2)
    out = lifecycle.loaded(1, Loaded("m", 1, reason="no"))
    assert settled(out)[0][1].startswith("load failed for model 'm'")
    assert lifecycle.is_ready("m", 1)


def test_ready_where_it_is_ready() -> None:
    """One device has no room: the others serve, and whoever asked is told."""
    lifecycle = of(1, 2)
    lifecycle.load(found("m", 1), 1)
    lifecycle.loaded(1, Loaded("m", 1, reason="no room"))
    assert not lifecycle.is_ready("m")
    out = lifecycle.loaded(2, Loaded("m", 1))
    assert states(out) == [(1, "READY", (2,))]
    assert "no room" in settled(out)[0][1]


def test_unload_and_load_follow_each_other() -> None:
    lifecycle = of(1)
    lifecycle.load(found("m", 1), 1)
    assert settled(lifecycle.loaded(1, Loaded("m", 1))) == [(1, "")]
    assert states(lifecycle.unload("m", 2)) == [(1, "UNLOADING", ())]
    assert lifecycle.load(found("m", 1), 3) == []
    assert entries(lifecycle)[0]["state"] == "UNLOADING"
    out = lifecycle.unloaded(1, "m", 1)
    assert settled(out) == [(2, "")]
    assert states(out) == [(1, "UNAVAILABLE", ()), (1, "LOADING", ())]
    assert settled(lifecycle.loaded(1, Loaded("m", 1))) == [(3, "")]


def test_a_load_that_is_unloaded_is_given_up() -> None:
    """At once for clients; a load that follows begins when the workers have ended what they were at, however they answer."""
    for answer in (Loaded("m", 1, reason="given up", cancelled=True), Loaded("m", 1)):
        lifecycle = of(1, 2)
        lifecycle.load(found("m", 1), 1)
        out = lifecycle.unload("m", 2)
        assert sent(out) == [(1, "CancelLoad", 1), (2, "CancelLoad", 1)]
        assert states(out) == [(1, "UNAVAILABLE", ())]
        ((token, error),) = settled(out)
        assert token == 1
        assert "version 1 is at UNAVAILABLE state: it was unloaded before it was ready" in error
        assert entries(lifecycle) == [{"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}]
        assert lifecycle.load(found("m", 1), 3) == []
        # A worker that comes meanwhile is not sent what nobody wants.
        assert lifecycle.worker_joined(3, "cpu:3") == []
        out = lifecycle.loaded(1, answer)
        assert sent(out) == ([] if answer.reason else [(1, "Unload", 1)])
        out = lifecycle.loaded(2, Loaded("m", 1, reason="given up", cancelled=True))
        if not answer.reason:
            assert out == []
            out = lifecycle.unloaded(1, "m", 1)
        assert settled(out) == [(2, "")]
        assert sent(out) == [(1, "Load", 1), (2, "Load", 1), (3, "Load", 1)]
        check_invariants(lifecycle)


def test_a_load_of_something_else_gives_the_one_before_it_up() -> None:
    """Requests go on waiting, and who waits for the first one gets what comes of the last one, which begins at once."""
    lifecycle = of(1)
    lifecycle.load(found("m", 1), 1)
    assert lifecycle.load(found("m", 1), 2) == []
    out = lifecycle.load(found("m", 1, 2, fingerprint="g"), 3)
    assert sent(out) == [(1, "CancelLoad", 1), (1, "Load", 1), (1, "Load", 2)]
    assert (1, "UNAVAILABLE", ()) not in states(out)
    assert settled(out) == []
    assert lifecycle.loaded(1, Loaded("m", 1, reason="given up", cancelled=True)) == []
    assert states(lifecycle.loaded(1, Loaded("m", 1))) == [(1, "READY", (1,))]
    assert settled(lifecycle.loaded(1, Loaded("m", 2))) == [(1, ""), (2, ""), (3, "")]
    check_invariants(lifecycle)


def test_what_serves_goes_on_while_its_replacement_is_given_up() -> None:
    lifecycle = serving(1)
    lifecycle.load(found("m", 1, fingerprint="g"), 2)
    out = lifecycle.load(found("m", 1, fingerprint="f"), 3)
    assert sent(out) == [(1, "CancelLoad", 1), (1, "Load", 1)]
    lifecycle.loaded(1, Loaded("m", 1, reason="given up", cancelled=True))
    assert lifecycle.ready_models() == {"m": [1]}
    # Gone altogether: also what the worker still loads.
    out = lifecycle.unload("m", 4)
    assert sent(out) == [(1, "CancelLoad", 1), (1, "Unload", 1)]
    assert [token for token, _ in settled(out)] == [2, 3]
    lifecycle.loaded(1, Loaded("m", 1, reason="given up", cancelled=True))
    assert settled(lifecycle.unloaded(1, "m", 1)) == [(4, "")]
    check_invariants(lifecycle)


def test_unload_of_the_unknown_and_the_failed() -> None:
    lifecycle = of(1)
    assert lifecycle.unload("nope", 1) == [Settled(1)]
    lifecycle.load(found("m", 1), 2)
    lifecycle.loaded(1, Loaded("m", 1, reason="no"))
    assert lifecycle.unload("m", 3) == [Forget("m", 1), Settled(3)]
    lifecycle.known = {"m"}
    assert entries(lifecycle) == [{"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "no"}]


def test_the_last_worker_dies() -> None:
    """Requests wait: the version is READY, without workers, described as before."""
    lifecycle = serving(1, metadata=b"{}")
    (instruction,) = lifecycle.worker_left(1)
    assert isinstance(instruction, Publish)
    assert (instruction.state.state, instruction.state.workers, instruction.state.metadata) == ("READY", (), b"{}")
    assert sent(lifecycle.worker_joined(2, "cpu:2")) == [(2, "Load", 1)]
    assert states(lifecycle.loaded(2, Loaded("m", 1))) == [(1, "READY", (2,))]


def test_a_replacement_that_cannot_load() -> None:
    lifecycle = serving(1)
    lifecycle.worker_left(1)
    lifecycle.worker_joined(2, "cpu:2")
    assert states(lifecycle.loaded(2, Loaded("m", 1, reason="gone"))) == [(1, "UNAVAILABLE", ())]


def test_who_killed_the_worker() -> None:
    """Two die with a worker; alone, one of them is innocent and the other is given up."""
    lifecycle = of(1)
    lifecycle.load(found("bad", 1), 1)
    lifecycle.load(found("good", 1), 2)
    lifecycle.worker_left(1)
    assert [(i.worker, i.record.name) for i in lifecycle.worker_joined(2, "cpu:2") if isinstance(i, Send)] == [
        (2, "bad")
    ]
    lifecycle.worker_left(2)
    assert [i.record.name for i in lifecycle.worker_joined(3, "cpu:3") if isinstance(i, Send)] == ["bad"]
    out = lifecycle.worker_left(3, "was killed by SIGSEGV")
    reason = "2 worker processes died while loading it, the last one was killed by SIGSEGV"
    assert settled(out) == [(1, f"load failed for model 'bad': version 1 is at UNAVAILABLE state: {reason};\n")]
    assert retries(out) == [("bad", FIRST_RETRY)]
    assert [i.record.name for i in lifecycle.worker_joined(4, "cpu:4") if isinstance(i, Send)] == ["good"]
    assert settled(lifecycle.loaded(4, Loaded("good", 1))) == [(2, "")]


@pytest.mark.parametrize("served", [False, True])
def test_what_workers_lacked_is_loaded_while_another_version_is(served: bool) -> None:
    """Else it would be loaded there no more where the load of the other version fails. Where that succeeds it is replaced."""
    for reason in ("", "no memory"):
        lifecycle = of(1)
        lifecycle.load(found("m", 1), 1)
        lifecycle.loaded(1, Loaded("m", 1, reason="" if served else "lacks what was pushed"))
        ready(lifecycle, 2)
        lifecycle.loaded(2, Loaded("m", 1, reason="lacks what was pushed"))
        lifecycle.load(dataclasses.replace(found("m", 2, fingerprint="g"), versions=(1, 2)), 2)
        lacking = [2] if served else [1, 2]
        assert sent(lifecycle.fill("m", 1)) == [(worker, "Load", 1) for worker in lacking]
        for worker in lacking:
            lifecycle.loaded(worker, Loaded("m", 1))
        assert lifecycle.ready_models() == {"m": [1]}
        check_invariants(lifecycle)
        out = [i for worker in (1, 2) for i in lifecycle.loaded(worker, Loaded("m", 2, reason=reason))]
        assert lifecycle.ready_models() == {"m": [1 if reason else 2]}
        for worker in (1, 2):
            out += lifecycle.unloaded(worker, "m", 1)
        assert [token for token, _ in settled(out)] == [2]
        check_invariants(lifecycle)


@pytest.mark.parametrize("reason", ["", "no memory"])
@pytest.mark.parametrize("served", [False, True])
def test_what_workers_lacked_is_loaded_while_the_load_that_failed_there_runs(served: bool, reason: str) -> None:
    """The load waits for another worker, or another version. It ends with what these workers answer last."""
    lifecycle = of(1, 2)
    lifecycle.load(found("m", 1, 2), 1)
    lifecycle.loaded(1, Loaded("m", 1, reason="" if served else "lacks what was pushed"))
    lifecycle.loaded(2, Loaded("m", 1, reason="lacks what was pushed"))
    lacking = [2] if served else [1, 2]
    assert sent(lifecycle.fill("m", 1)) == [(worker, "Load", 1) for worker in lacking]
    for worker in (1, 2):
        assert not settled(lifecycle.loaded(worker, Loaded("m", 2)))
    out = [i for worker in lacking for i in lifecycle.loaded(worker, Loaded("m", 1, reason=reason))]
    assert [(token, reason in error, bool(error)) for token, error in settled(out)] == [(1, True, bool(reason))]
    check_invariants(lifecycle)


def test_an_ensemble_is_not_awaited_whose_models_have_gone() -> None:
    """1. A worker loads it. 2. Its model is unloaded. 3. The worker dies, and another one comes, which has nothing to load."""
    lifecycle = serving(1)
    lifecycle.load(dataclasses.replace(found("e", 1), members=(("m", 1),)), 2)
    lifecycle.unload("m", 3)
    lifecycle.unloaded(1, "m", 1)
    assert not settled(lifecycle.worker_left(1))
    ((token, error),) = settled(lifecycle.worker_joined(2, "cpu:2"))
    assert token == 2
    assert "a model that it is made of is not there any more" in error
    check_invariants(lifecycle)


def test_an_ensemble_leaves_a_worker_with_its_model_and_comes_back_with_it() -> None:
    """
    1. A reload of an ensemble's model fails on one of two workers. Result: fronts send the ensemble's requests to the other
    one alone, and the worker unloads the ensemble first. Whoever calls it there does not wait for a load that nobody sends.
    2. The model is loaded from its former files. Result: the ensemble is loaded there, too.
    """
    lifecycle = serving(1, 2)
    lifecycle.load(dataclasses.replace(found("e", 1), members=(("m", 1),)), 2)
    for worker in (1, 2):
        lifecycle.loaded(worker, Loaded("e", 1))
    lifecycle.load(found("m", 1, fingerprint="g"), 3)
    lifecycle.loaded(1, Loaded("m", 1))
    out = lifecycle.loaded(2, Loaded("m", 1, reason="no memory"))
    assert [(i.worker, i.record) for i in out if isinstance(i, Send)] == [(2, Unload("e", 1)), (2, Unload("m", 1))]
    assert states(out) == [(1, "READY", (1,))] * 2
    assert not lifecycle.is_postponed(2, "e", 1)
    check_invariants(lifecycle)
    for name in ("e", "m"):
        lifecycle.unloaded(2, name, 1)
    lifecycle.load(found("m", 1), 4)
    assert not lifecycle.is_postponed(1, "e", 1)
    assert lifecycle.is_postponed(2, "e", 1)
    assert sent(lifecycle.loaded(2, Loaded("m", 1))) == [(2, "Load", 1)]
    assert states(lifecycle.loaded(2, Loaded("e", 1))) == [(1, "READY", (1, 2))]


@pytest.mark.parametrize("served", [False, True])
def test_an_ensemble_whose_model_leaves_a_worker_that_loads_it_does_not_serve_there(served: bool) -> None:
    """
    1. An ensemble is loaded, or loaded again, while its model is loaded again. 2. On one of two workers the model fails, and
    leaves it; then the worker answers that it has the ensemble. Result: the ensemble serves on the other worker alone.
    """
    lifecycle = serving(1, 2)
    ensemble = dataclasses.replace(found("e", 1), members=(("m", 1),))
    if served:
        lifecycle.load(ensemble, 2)
        for worker in (1, 2):
            lifecycle.loaded(worker, Loaded("e", 1))
    lifecycle.load(found("m", 1, fingerprint="g"), 3)
    lifecycle.load(ensemble, 4, again=True)
    lifecycle.loaded(1, Loaded("m", 1))
    lifecycle.loaded(2, Loaded("m", 1, reason="no memory"))
    check_invariants(lifecycle)
    assert sent(lifecycle.loaded(2, Loaded("e", 1))) == [(2, "Unload", 1)]
    out = lifecycle.loaded(1, Loaded("e", 1))
    assert (states(out), settled(out)) == ([(1, "READY", (1,))], [(4, "")])
    check_invariants(lifecycle)
    for name in ("e", "m"):
        lifecycle.unloaded(2, name, 1)
    lifecycle.load(found("m", 1, fingerprint="h"), 5)
    assert sent(lifecycle.loaded(2, Loaded("m", 1))) == [(2, "Load", 1)]


def test_an_ensemble_whose_model_leaves_the_only_worker_that_loads_it_fails() -> None:
    lifecycle = serving(1, 2)
    lifecycle.load(found("m", 1, fingerprint="g"), 2)
    lifecycle.load(dataclasses.replace(found("e", 1, devices=("cpu:2",)), members=(("m", 1),)), 3)
    lifecycle.loaded(1, Loaded("m", 1))
    lifecycle.loaded(2, Loaded("m", 1, reason="no memory"))
    out = lifecycle.loaded(2, Loaded("e", 1))
    assert [(token, "is not there any more" in error) for token, error in settled(out)] == [(3, True)]
    check_invariants(lifecycle)


@pytest.mark.parametrize("joins", [False, True])
def test_an_ensemble_whose_model_leaves_its_last_worker_is_not_waited_for(joins: bool) -> None:
    """
    1. An ensemble is on one worker alone, as one with sequences is. 2. A reload of its model fails there, and not elsewhere.
    Result: requests are told so. It comes back with the model: to this worker, or to one in its place.
    """
    lifecycle = serving(1, 2)
    lifecycle.load(dataclasses.replace(found("e", 1, devices=("cpu:2",)), members=(("m", 1),)), 2)
    lifecycle.loaded(2, Loaded("e", 1))
    lifecycle.load(found("m", 1, fingerprint="g"), 3)
    lifecycle.loaded(1, Loaded("m", 1))
    out = lifecycle.loaded(2, Loaded("m", 1, reason="no memory"))
    told = [i.state for i in out if isinstance(i, Publish) and isinstance(i.state, ModelState) and i.state.name == "e"]
    assert [(state.state, state.awaited) for state in told] == [("UNAVAILABLE", True)]
    assert "has left its last worker" in told[0].reason
    check_invariants(lifecycle)
    for name in ("e", "m"):
        lifecycle.unloaded(2, name, 1)
    if joins:
        lifecycle.worker_left(2)
        lifecycle.worker_joined(3, "cpu:2")
    else:
        lifecycle.load(found("m", 1, fingerprint="h"), 4)
        lifecycle.loaded(1, Loaded("m", 1))
    worker = 3 if joins else 2
    assert sent(lifecycle.loaded(worker, Loaded("m", 1)))[0] == (worker, "Load", 1)
    assert (1, "READY", (worker,)) in states(lifecycle.loaded(worker, Loaded("e", 1)))
    check_invariants(lifecycle)


def test_an_ensemble_that_lacks_a_model_on_one_worker_is_reloaded_on_the_others() -> None:
    """One of these fails to: it serves what the ensemble was no longer, as a worker of any model would. It waits for none."""
    lifecycle = serving(1, 2, 3)
    ensemble = dataclasses.replace(found("e", 1), members=(("m", 1),))
    lifecycle.load(ensemble, 2)
    lifecycle.load(found("m", 1, fingerprint="g"), 3)
    for worker in (1, 2, 3):
        lifecycle.loaded(worker, Loaded("e", 1))
    for worker, reason in ((1, ""), (2, "no memory"), (3, "")):
        lifecycle.loaded(worker, Loaded("m", 1, reason=reason))
    lifecycle.load(dataclasses.replace(ensemble, fingerprint="g"), 4)
    lifecycle.loaded(1, Loaded("e", 1))
    out = lifecycle.loaded(3, Loaded("e", 1, reason="no memory"))
    assert (sent(out), states(out)) == ([(3, "Unload", 1)], [(1, "READY", (1,))])
    check_invariants(lifecycle)


def test_an_ensemble_that_lacks_a_model_on_one_worker_fails_with_the_last_of_the_others() -> None:
    """1. The other worker dies. 2. The one in its place fails to load the ensemble: requests are told, and wait for nothing."""
    lifecycle = serving(1, 2)
    lifecycle.load(dataclasses.replace(found("e", 1), members=(("m", 1),)), 2)
    for worker in (1, 2):
        lifecycle.loaded(worker, Loaded("e", 1))
    lifecycle.load(found("m", 1, fingerprint="g"), 3)
    for worker, reason in ((1, ""), (2, "no memory")):
        lifecycle.loaded(worker, Loaded("m", 1, reason=reason))
    lifecycle.worker_left(1)
    ready(lifecycle, 3)
    lifecycle.loaded(3, Loaded("m", 1))
    out = lifecycle.loaded(3, Loaded("e", 1, reason="no memory"))
    assert [
        (i.state.state, i.state.reason) for i in out if isinstance(i, Publish) and isinstance(i.state, ModelState)
    ] == [("UNAVAILABLE", "no memory")]
    check_invariants(lifecycle)


def test_an_ensemble_waits_no_longer_for_a_model_that_was_given_up() -> None:
    """
    1. A worker dies as it loads an ensemble. 2. Two die of its model. 3. Another one comes, on which the model is not tried yet.
    Result: the ensemble, and one of which it is a part, are given up like the model, and are to come back with it.
    """
    lifecycle = serving(1)
    for token, name, member in ((2, "e", "m"), (3, "outer", "e")):
        lifecycle.load(dataclasses.replace(found(name, 1), members=((member, 1),)), token)
    lifecycle.worker_left(1)
    for worker in (2, 3):
        lifecycle.worker_joined(worker, "cpu:0")
        lifecycle.worker_left(worker)
    ended = settled(lifecycle.worker_joined(4, "cpu:0"))
    assert [token for token, _ in ended] == [2, 3]
    assert "model 'm': 2 worker processes died while loading it" in ended[0][1]
    assert all(lifecycle.models[name].versions[1].awaited for name in ("m", "e", "outer"))
    check_invariants(lifecycle)


def test_any_number_of_ensembles_end_with_a_model_that_does_not_load() -> None:
    """Each is made of the one before it, and they are looked at in the other order."""
    lifecycle, count = of(1), sys.getrecursionlimit() + 100
    lifecycle.load(found("e0", 1), 0)
    for number in range(1, count):
        lifecycle.load(dataclasses.replace(found(f"e{number}", 1), members=((f"e{number - 1}", 1),)), number)
    lifecycle.models = dict(reversed(lifecycle.models.items()))
    ended = settled(lifecycle.loaded(1, Loaded("e0", 1, reason="no")))
    assert [token for token, _ in ended] == [*list(range(1, count)), 0]
    check_invariants(lifecycle)


def test_what_serves_elsewhere_and_was_given_up_is_listed_as_ready() -> None:
    lifecycle = of(1, 2)
    lifecycle.load(found("m", 1), 1)
    lifecycle.loaded(1, Loaded("m", 1))
    lifecycle.worker_left(2)
    ready(lifecycle, 3)
    assert retries(lifecycle.worker_left(3)) == [("m", FIRST_RETRY)]
    expected = [{"name": "m", "version": "1", "state": "READY"}]
    assert lifecycle.index({}, {("m", 1): FIRST_RETRY}, ready=False, detailed=False) == expected


def test_a_load_that_two_workers_died_of_has_not_failed_where_another_brings_it() -> None:
    """
    1. Two of three workers die while they load a model, so it is given up for now; the third still loads it.
    2. Another worker joins, and the third one answers that it serves.
    Result: the load goes on with the other worker, and ends without an error.
    """
    lifecycle = of(1, 2, 3)
    lifecycle.load(found("m", 1), 1)
    out = [*lifecycle.worker_left(2), *lifecycle.worker_left(3)]
    assert (settled(out), retries(out)) == ([], [("m", FIRST_RETRY)])
    ready(lifecycle, 4)
    out = lifecycle.loaded(1, Loaded("m", 1))
    assert (settled(out), sent(out)) == ([], [(4, "Load", 1)])
    assert settled(lifecycle.loaded(4, Loaded("m", 1))) == [(1, "")]
    check_invariants(lifecycle)


@pytest.mark.parametrize("first", [1, 2])
def test_a_load_that_fails_on_one_worker_leaves_no_earlier_content_there(first: int) -> None:
    """Whichever answers first: requests are answered from one load, and what was pushed into the other is gone with it."""
    lifecycle = serving(1, 2)
    lifecycle.load(found("m", 1, fingerprint="g"), 2)
    answers = {1: Loaded("m", 1), 2: Loaded("m", 1, reason="no memory")}
    out = [*lifecycle.loaded(first, answers[first]), *lifecycle.loaded(3 - first, answers[3 - first])]
    assert states(out)[-1] == (1, "READY", (1,))
    assert sent(out) == [(2, "Unload", 1)]
    assert forgotten(out) == [1]
    assert settled(out) == [(2, "load failed for model 'm': version 1 is at UNAVAILABLE state: no memory;\n")]
    # Where it has failed everywhere, or nobody has the newer content any more, what was there goes on.
    lifecycle.load(found("m", 1, fingerprint="h"), 3)
    out = [*lifecycle.loaded(1, Loaded("m", 1, reason="no")), *lifecycle.loaded(2, Loaded("m", 1, reason="no"))]
    assert (sent(out), forgotten(out)) == ([], [])
    assert states(lifecycle.worker_joined(3, "cpu:3")) == []
    check_invariants(lifecycle)


@pytest.mark.parametrize("given_up", [True, False])
def test_two_loads_in_a_row_that_fail_do_not_leave_two_contents(given_up: bool) -> None:
    """
    1. The first is answered by one worker, before or after the second overtakes it; the other worker gives it up.
    2. The second fails everywhere. Result: requests are answered from the newest content that a worker has, and described by it.
    """
    lifecycle = serving(1, 2, metadata=b"f")
    lifecycle.load(found("m", 1, fingerprint="g"), 2)
    first = Loaded("m", 1, metadata=b"g")
    if given_up:
        lifecycle.load(found("m", 1, fingerprint="h"), 3)
        lifecycle.loaded(1, first)
    else:
        lifecycle.loaded(1, first)
        lifecycle.load(found("m", 1, fingerprint="h"), 3)
    lifecycle.loaded(2, Loaded("m", 1, reason="given up", cancelled=True))
    failed = Loaded("m", 1, reason="no")
    out = [*lifecycle.loaded(1, failed), *lifecycle.loaded(2, failed)]
    assert sent(out) == [(2, "Unload", 1)]
    assert [(i.state.workers, i.state.metadata) for i in out if isinstance(i, Publish)] == [((1,), b"g")]  # type: ignore[union-attr]
    assert [token for token, _ in settled(out)] == [2, 3]
    check_invariants(lifecycle)


def test_what_was_given_up_is_tried_again_later_and_later() -> None:
    """On one worker alone, whatever dies meanwhile; where it loads after all, everywhere, and what it replaces goes."""
    lifecycle = of(1, 2)
    lifecycle.load(found("m", 1), 1)
    lifecycle.loaded(1, Loaded("m", 1))
    lifecycle.loaded(2, Loaded("m", 1))
    lifecycle.load(found("m", 2, fingerprint="g"), 2)
    lifecycle.worker_left(1)
    out = lifecycle.worker_left(2)
    assert settled(out)[0][0] == 2
    waits, worker = retries(out), 2
    while waits[-1][1] < MAX_RETRY or len(waits) < 9:
        worker += 1
        # A replacement gets what serves, and is not killed by what does not.
        assert sent(lifecycle.worker_joined(worker, f"cpu:{worker}")) == [(worker, "Load", 1)]
        lifecycle.loaded(worker, Loaded("m", 1))
        assert sent(lifecycle.retry("m", 2, deaths=0)) == []
        assert sent(lifecycle.retry("m", 2, deaths=len(waits) + 1)) == [(worker, "Load", 2)]
        out = lifecycle.worker_left(worker)
        waits += retries(out)
        assert not settled(out)
    assert [seconds for _, seconds in waits] == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    # It is due while no worker is there: the next one is asked.
    assert lifecycle.retry("m", 2, deaths=10) == []
    assert sent(lifecycle.worker_joined(20, "cpu:20")) == [(20, "Load", 1)]
    assert sent(lifecycle.loaded(20, Loaded("m", 1))) == [(20, "Load", 2)]
    ready(lifecycle, 21)
    lifecycle.loaded(21, Loaded("m", 1))
    out = lifecycle.loaded(20, Loaded("m", 2))
    assert sent(out) == [(21, "Load", 2), (20, "Unload", 1), (21, "Unload", 1)]
    assert states(out) == [(2, "READY", (20,)), (1, "UNLOADING", ())]
    check_invariants(lifecycle)


def test_a_try_that_fails_with_a_reason_is_the_last() -> None:
    lifecycle = Lifecycle()
    for worker in (1, 2):
        ready(lifecycle, worker)
        if worker == 1:
            lifecycle.load(found("m", 1), 1)
        out = lifecycle.worker_left(worker)
    assert retries(out) == [("m", FIRST_RETRY)]
    ready(lifecycle, 3)
    assert sent(lifecycle.retry("m", 1, deaths=2)) == [(3, "Load", 1)]
    assert states(lifecycle.loaded(3, Loaded("m", 1, reason="no"))) == [(1, "UNAVAILABLE", ())]
    assert lifecycle.retry("m", 1, deaths=2) == []
    assert lifecycle.worker_joined(4, "cpu:4") == []


def test_what_serves_on_one_worker_only_does_not_wait_for_a_try() -> None:
    """Version 1 is loaded again; one worker dies of it twice, and then the one that still serves it."""
    lifecycle = serving(1)
    for worker in (2, 3):
        assert sent(lifecycle.worker_joined(worker, f"cpu:{worker}")) == [(worker, "Load", 1)]
        lifecycle.worker_left(worker)
    assert lifecycle.is_ready("m")
    assert sent(lifecycle.worker_joined(4, "cpu:4")) == []
    assert states(lifecycle.worker_left(1))[-1] == (1, "UNAVAILABLE", ())
    assert sent(lifecycle.retry("m", 1, deaths=2)) == [(4, "Load", 1)]
    assert states(lifecycle.loaded(4, Loaded("m", 1))) == [(1, "READY", (4,))]


def test_what_is_not_in_the_repository_any_more_is_forgotten() -> None:
    lifecycle = of(1)
    lifecycle.known = {"m"}
    lifecycle.load(found("m", 1), 1)
    lifecycle.loaded(1, Loaded("m", 1))
    lifecycle.load(found("m", 2, fingerprint="g"), 2)
    lifecycle.loaded(1, Loaded("m", 2, reason="no"))
    assert [entry["state"] for entry in entries(lifecycle)] == ["READY", "UNAVAILABLE"]
    out = lifecycle.load(found("m", 1), 3)
    assert Publish(ModelGone("m", 2)) in out
    lifecycle.loaded(1, Loaded("m", 1))
    assert entries(lifecycle) == [{"name": "m", "version": "1", "state": "READY"}]
    # What serves stays until it is unloaded, in a repository or not.
    assert lifecycle.forget("m", ()) == []
    lifecycle.known = set()
    assert entries(lifecycle) == [{"name": "m", "version": "1", "state": "READY"}]
    lifecycle.unload("m", 4)
    lifecycle.unloaded(1, "m", 1)
    assert entries(lifecycle) == []
    assert lifecycle.forget("m", ()) == [Publish(ModelGone("m", 1)), Forget("m", 1)]
    assert lifecycle.models == {}


def test_stale_answers_change_nothing() -> None:
    lifecycle = of(1)
    assert lifecycle.loaded(1, Loaded("m", 1)) == []
    assert lifecycle.unloaded(1, "m", 1) == []
    lifecycle.load(found("m", 1), 1)
    assert lifecycle.loaded(9, Loaded("m", 1)) == []
    lifecycle.worker_left(1)
    assert lifecycle.loaded(1, Loaded("m", 1)) == []


def test_a_version_that_is_given_up_and_serves_stays_until_it_is_replaced() -> None:
    """
    1. Version 2 serves on one worker; two others die while they load it, so it is given up for now.
    2. Another version is loaded in its place.
    Result: version 2 is not tried again, and goes when the other one is ready.
    """
    lifecycle = of(1, 2, 3)
    lifecycle.load(found("m", 2), 1)
    lifecycle.loaded(1, Loaded("m", 2))
    lifecycle.worker_left(2)
    out = lifecycle.worker_left(3)
    assert ([token for token, _ in settled(out)], retries(out)) == ([1], [("m", FIRST_RETRY)])
    out = lifecycle.load(found("m", 1, fingerprint="g"), 2)
    check_invariants(lifecycle)
    assert sent(out) == [(1, "Load", 1)]
    assert lifecycle.retry("m", 2, 2) == []
    out = lifecycle.loaded(1, Loaded("m", 1))
    assert sent(out) == [(1, "Unload", 2)]
    assert settled(lifecycle.unloaded(1, "m", 2)) == [(2, "")]
    assert lifecycle.ready_models() == {"m": [1]}


class Histories(RuleBasedStateMachine):
    """Runs loads, unloads, answers, deaths and births in any order: counts stay right, and every operation ends."""

    @initialize()
    def begin(self) -> None:
        self.lifecycle = Lifecycle()
        self.token = 0
        self.next_worker = 0
        #: What each living worker owes, in the order it was sent.
        self.owed: dict[int, list[Load | CancelLoad | Unload]] = {}
        #: What each living worker has.
        self.has: dict[int, set[tuple[str, int]]] = {}
        self.devices: dict[int, str] = {}
        self.open: set[int] = set()
        self.retries: list[Retry] = []
        #: Load or unload -> its model.
        self.asked: dict[int, str] = {}
        #: What fronts were told of each version last.
        self.told: dict[tuple[str, int], ModelState] = {}

    def take(self, out: list[Instruction]) -> None:
        for instruction in out:
            match instruction:
                case Send(worker, record):
                    self.owed[worker].append(record)
                case Settled(token):
                    self.open.remove(token)
                    self.is_done(self.asked[token])
                case Retry():
                    self.retries.append(instruction)
                case Publish(ModelState() as state):
                    self.told[state.name, state.version] = state
                    for worker in state.workers:
                        assert (state.name, state.version) in self.has[worker]
                case Publish(gone):
                    self.told.pop((gone.name, gone.version), None)

    def is_done(self, name: str) -> None:
        """Checks, where a load or unload is answered and no other follows, that what is to serve serves, and all else leaves."""
        model = self.lifecycle.models.get(name)
        for number, version in model.versions.items() if model is not None and model.running is None else ():
            has = {worker for worker, keys in self.has.items() if (name, number) in keys}
            assert version.ready.keys() <= has <= version.ready.keys() | version.unloading

    @rule(name=st.sampled_from("ab"), chosen=st.sets(st.integers(1, 3), min_size=1), fingerprint=st.sampled_from("xyz"))
    def load(self, name: str, chosen: set[int], fingerprint: str) -> None:
        self.token += 1
        self.open.add(self.token)
        self.asked[self.token] = name
        devices = {"x": (), "y": ("cpu:0",), "z": ("cpu:1",)}[fingerprint]
        self.take(
            self.lifecycle.load(found(name, *sorted(chosen), fingerprint=fingerprint, devices=devices), self.token)
        )

    @rule(name=st.sampled_from("abc"))
    def unload(self, name: str) -> None:
        self.token += 1
        self.open.add(self.token)
        self.asked[self.token] = name
        self.take(self.lifecycle.unload(name, self.token))

    @rule(device=st.sampled_from(("cpu:0", "cpu:1")))
    def join(self, device: str) -> None:
        self.next_worker += 1
        self.owed[self.next_worker] = []
        self.has[self.next_worker] = set()
        self.devices[self.next_worker] = device
        self.take(self.lifecycle.worker_joined(self.next_worker, device))

    @rule(choice=st.integers(0, 100))
    def die(self, choice: int) -> None:
        if self.owed:
            worker = sorted(self.owed)[choice % len(self.owed)]
            del self.owed[worker], self.has[worker], self.devices[worker]
            self.take(self.lifecycle.worker_left(worker))

    @rule(choice=st.integers(0, 100))
    def dismiss(self, choice: int) -> None:
        if self.owed:
            worker = sorted(self.owed)[choice % len(self.owed)]
            blamed = self.blamed()
            del self.owed[worker], self.has[worker], self.devices[worker]
            self.take(self.lifecycle.worker_left(worker, dismissed=True))
            assert self.blamed() <= blamed

    def blamed(self) -> int:
        """Returns how many deaths are counted against versions."""
        return sum(version.deaths for model in self.lifecycle.models.values() for version in model.versions.values())

    @rule(more=st.sets(st.sampled_from(("cpu:0", "cpu:1"))))
    def strand(self, more: set[str]) -> None:
        self.take(self.lifecycle.stranded({*self.devices.values(), *more}))

    @rule(choice=st.integers(0, 100))
    def retry(self, choice: int) -> None:
        if self.retries:
            due = self.retries.pop(choice % len(self.retries))
            self.take(self.lifecycle.retry(due.name, due.version, due.deaths))

    @rule(name=st.sampled_from("ab"), present=st.sets(st.integers(1, 3)))
    def forget(self, name: str, present: set[int]) -> None:
        self.take(self.lifecycle.forget(name, present))

    @rule(choice=st.integers(0, 100), fails=st.booleans())
    def answer(self, choice: int, fails: bool) -> None:
        busy = [worker for worker, records in sorted(self.owed.items()) if records]
        if not busy:
            return
        worker = busy[choice % len(busy)]
        record = self.owed[worker].pop(0)
        key = (record.name, record.version)
        if isinstance(record, CancelLoad):
            return  # it came too late, or the Load before it will fail, or not
        if isinstance(record, Unload):
            self.has[worker].discard(key)
            self.take(self.lifecycle.unloaded(worker, *key))
            return
        version = self.lifecycle.version(*key)
        if not fails and version is not None and version.is_wanted(worker, self.devices[worker]):
            self.has[worker].add(key)
        self.take(self.lifecycle.loaded(worker, Loaded(*key, reason="failed" if fails else "")))

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "lifecycle"):
            check_invariants(self.lifecycle)

    @invariant()
    def fronts_know_it(self) -> None:
        """Checks that a front that was there all the time knows what a new one is told."""
        if hasattr(self, "lifecycle"):
            known = {(state.name, state.version): state for state in self.lifecycle.states()}
            for key, told in self.told.items():
                assert told == known[key]
            assert all(state.state == "UNKNOWN" for key, state in known.items() if key not in self.told)

    def teardown(self) -> None:
        """Checks that everything ends once each device has a living worker, and workers have what is READY there."""
        if not hasattr(self, "lifecycle"):
            return
        self.join("cpu:0")
        self.join("cpu:1")
        while any(self.owed.values()) or self.retries:
            self.retry(0)
            self.answer(0, False)
            check_invariants(self.lifecycle)
        everything = [version for model in self.lifecycle.models.values() for version in model.versions.values()]
        assert not any(version.given_up for version in everything)
        assert not self.open
        for name, versions in self.lifecycle.ready_models().items():
            for version in versions:
                holders = {w for w, keys in self.has.items() if (name, version) in keys}
                state = next(s for s in self.lifecycle.states() if (s.name, s.version) == (name, version))
                assert set(state.workers) == holders
        everywhere = {key for keys in self.has.values() for key in keys}
        assert all(self.lifecycle.is_ready(*key) for key in everywhere)


Histories.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
