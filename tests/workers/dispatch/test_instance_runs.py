"""Tests what the threads of models are given, and when: one batch after the other, or some ahead where that changes nothing."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensord.workers.models.instance import Instance
from tensord.workers.models.model_version import VersionState
from tests.repositories import write_model
from tests.workers.dispatch.test_dispatcher import Bench

#: Notes each request that it begins, and holds those with a negative number until there is a file "open".
HELD = """
    from pathlib import Path
    import time
    import numpy as np

    host = True
    inputs = {"x": "FP32[n]"}
    outputs = {"y": "FP32[n]"}

    def create(path, config, device):
        folder = Path(path).parent
        def apply(params, inputs):
            number = int(inputs["x"][0])
            with (folder / "begun").open("a") as file:
                file.write(f"{number} ")
            while number < 0 and not (folder / "open").exists():
                time.sleep(0.001)
            RESULT {"y": np.zeros(100, np.float32)}
        return apply, None
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    write_model(tmp_path, "yields", HELD.replace("RESULT", "yield"))
    write_model(tmp_path, "returns", HELD.replace("RESULT", "return"))
    write_model(tmp_path, "two", HELD.replace("RESULT", "return"))
    made = Bench(tmp_path)
    yield made
    made.close()


def begun(bench: Bench, model: str) -> list[int]:
    file = bench.folder / model / "begun"
    return list(map(int, file.read_text().split())) if file.exists() else []


def until(bench: Bench, condition: Callable[[], object]) -> None:
    """Does what is due until the condition holds, as the worker's loop does."""
    while not condition():
        select.select([bench.inbox.fileno()], [], [], 0.001)
        bench.inbox.drain()
        bench.turn()
        bench.models.settle()


def instance_of(bench: Bench, model: str) -> Instance:
    (instance,) = bench.load(model).loaded.instances
    return instance


def release(bench: Bench, model: str) -> None:
    """Lets the requests that are held go on, and waits until all are answered."""
    (bench.folder / model / "open").touch()
    until(bench, lambda: not bench.submitter.in_flight)


models = pytest.mark.parametrize("model", ["yields", "returns"])


@models
def test_some_are_given_ahead(bench: Bench, model: str) -> None:
    """The thread goes on with them while the loop does nothing at all."""
    instance = instance_of(bench, model)
    asked = [bench.submit(model, value) for value in (2, 3, 4, 5)]
    bench.turn()
    assert (len(instance.given), instance.busy, len(bench.models.find(model, 1).planner)) == (3, True, 1)
    while begun(bench, model)[-1:] != [4]:
        time.sleep(0.001)
    until(bench, lambda: not bench.submitter.in_flight)
    assert begun(bench, model) == [2, 3, 4, 5]
    assert list(dict.fromkeys(number for number, _ in bench.sent())) == asked


@models
def test_what_was_given_ahead_counts_as_pending(bench: Bench, model: str) -> None:
    instance_of(bench, model)
    for value in (-1, 2, 3, 4):
        bench.submit(model, value)
    bench.turn()
    assert bench.models.find(model, 1).pending == 3
    release(bench, model)
    assert bench.models.find(model, 1).pending == 0


def test_several_instances_share_what_waits(bench: Bench) -> None:
    """A request that was given to one instance ahead of time could not run where another is free."""
    version = bench.load("two", 'name: "two" backend: "jax" instance_group { name: "g" count: 2 kind: KIND_CPU }')
    for _ in range(3):
        bench.submit("two", 1)
        bench.turn()
        until(bench, lambda: not bench.submitter.in_flight)
    assert [instance.depth for instance in version.loaded.instances] == [1, 1]


TWO = 'name: "two" backend: "jax" instance_group {{ name: "g" count: {} kind: KIND_CPU }}'


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (1, 3, 2), (3, 1, 2, 1)])
def test_versions_that_share_an_instance_answer_all_they_have(
    bench: Bench, counts: tuple[int, ...], whole: bool
) -> None:
    """Requests that came before another number of instances are answered too, by the instances that are left."""
    version = bench.load("two", TWO.format(counts[0]))
    versions = [version]
    for count in counts[1:]:
        for value in (-1, 2, 3, 4, 5, 6, 7, 8):
            bench.submit("two", value)
        bench.turn()
        version = bench.regroup(version, TWO.format(count))
        versions.append(version)
        # Nothing waits for an instance any more where the newest version has the only one to itself.
        for value in (9, 10):
            bench.submit("two", value)
        bench.turn()
    if whole:
        bench.load("two", TWO.format(2))
    release(bench, "two")
    until(bench, lambda: not bench.models.draining)
    assert all(code == "" for _, code in bench.sent())
    assert [each.state for each in versions[:-1]] == [VersionState.CLOSED] * (len(counts) - 1)
    assert versions[-1].state is (VersionState.CLOSED if whole else VersionState.SERVING)
    used = [] if whole else list(version.loaded.instances)
    every = {instance for each in versions for instance in each.loaded.instances}
    assert {instance for instance in every if not instance.closing} == set(used)


@models
def test_what_was_given_ahead_and_is_cancelled_is_answered_at_once_and_does_not_run(bench: Bench, model: str) -> None:
    """However long the run before it takes; the one behind it moves up, and one that runs already goes on."""
    instance = instance_of(bench, model)
    held, ahead, last, waits = (bench.submit(model, value) for value in (-1, 2, 3, 4))
    bench.turn()
    until(bench, lambda: begun(bench, model))
    bench.dispatcher.cancel(bench.submitter, ahead)
    bench.dispatcher.cancel(bench.submitter, held)
    assert bench.sent() == [(ahead, "CANCELLED")]
    assert ahead not in bench.submitter.in_flight
    bench.turn()
    assert (len(instance.given), len(bench.models.find(model, 1).planner)) == (3, 0)
    release(bench, model)
    assert begun(bench, model) == [-1, 3, 4]
    codes = {number: code for number, code in bench.sent() if number != held}
    assert codes == {last: "", waits: ""}


@models
def test_nothing_of_a_submitter_that_is_gone_runs(bench: Bench, model: str) -> None:
    instance = instance_of(bench, model)
    for value in (-1, 2, 3, 4):
        bench.submit(model, value)
    bench.turn()
    until(bench, lambda: begun(bench, model))
    bench.dispatcher.drop(bench.submitter)
    assert len(instance.given) == 1
    release(bench, model)
    until(bench, lambda: not instance.given)
    assert begun(bench, model) == [-1]


def test_what_waits_behind_another_run_counts_as_waiting(bench: Bench) -> None:
    """A run counts as waiting until its thread begins with it, not until it is given to the thread."""
    version = bench.load("yields")
    before = version.statistics.queue_ns
    bench.submit("yields", -1)
    bench.submit("yields", 2)
    bench.turn()
    began_ns = time.monotonic_ns()
    time.sleep(0.05)
    held_ns = time.monotonic_ns() - began_ns
    (bench.folder / "yields" / "open").touch()
    until(bench, lambda: not bench.submitter.in_flight)
    assert version.statistics.queue_ns - before >= held_ns


def test_whose_time_may_be_up_is_not_given_ahead(bench: Bench) -> None:
    """It is refused in time, however long the run before it takes."""
    bench.load("yields")
    held = bench.submit("yields", -1)
    bench.turn()
    until(bench, lambda: begun(bench, "yields"))
    late = bench.submit("yields", 2, deadline_ns=time.monotonic_ns() + 20_000_000)
    until(bench, lambda: late not in bench.submitter.in_flight)
    assert [sent for sent in bench.sent() if sent[0] == late] == [(late, "DEADLINE_EXCEEDED")]
    assert held in bench.submitter.in_flight
    (bench.folder / "yields" / "open").touch()
    until(bench, lambda: not bench.submitter.in_flight)
    assert begun(bench, "yields") == [-1]
