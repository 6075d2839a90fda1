"""What the threads of models are given, and when: one batch after the other, or some ahead where runs are short."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensord.workers.models.instance import Instance
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
    """Turns without an end, as the worker's loop does."""
    while not condition():
        select.select([bench.inbox.fileno()], [], [], 0.001)
        bench.inbox.drain()
        bench.turn()


def after_a_short_run(bench: Bench, model: str) -> Instance:
    """Loads it, and lets it run until it was quick; a machine that has much to do is not, now and then."""
    (instance,) = bench.load(model).loaded.instances
    while instance.depth == 1:
        bench.submit(model, 1)
        bench.turn()
        until(bench, lambda: not bench.submitter.in_flight)
    bench.sent()
    (bench.folder / model / "begun").unlink()
    return instance


@pytest.mark.parametrize("model", ["yields", "returns"])
def test_after_a_short_run_others_are_given_ahead(bench: Bench, model: str) -> None:
    """The thread goes on with them while the loop does not turn at all."""
    instance = after_a_short_run(bench, model)
    asked = [bench.submit(model, value) for value in (2, 3, 4, 5)]
    bench.turn()
    assert (len(instance.given), instance.busy, len(bench.models.find(model, 1).planner)) == (3, True, 1)
    while begun(bench, model)[-1:] != [4]:
        time.sleep(0.001)
    until(bench, lambda: not bench.submitter.in_flight)
    assert begun(bench, model) == [2, 3, 4, 5]
    assert list(dict.fromkeys(number for number, _ in bench.sent())) == asked


def test_after_a_long_run_nothing_is_given_ahead(bench: Bench) -> None:
    instance = after_a_short_run(bench, "returns")
    bench.submit("returns", -1)
    bench.turn()
    time.sleep(0.01)
    (bench.folder / "returns" / "open").touch()
    until(bench, lambda: not bench.submitter.in_flight)
    assert instance.depth == 1
    bench.submit("returns", 2)
    bench.submit("returns", 3)
    bench.turn()
    assert len(instance.given) == 1
    until(bench, lambda: not bench.submitter.in_flight)


def test_several_instances_share_what_waits(bench: Bench) -> None:
    """What was given to one ahead could not run where another is free."""
    version = bench.load("two", 'name: "two" backend: "jax" instance_group { name: "g" count: 2 kind: KIND_CPU }')
    for _ in range(3):
        bench.submit("two", 1)
        bench.turn()
        until(bench, lambda: not bench.submitter.in_flight)
    assert [instance.depth for instance in version.loaded.instances] == [1, 1]


def test_what_was_given_ahead_and_is_cancelled_does_not_run(bench: Bench) -> None:
    after_a_short_run(bench, "yields")
    held, ahead = bench.submit("yields", -1), bench.submit("yields", 2)
    bench.turn()
    bench.dispatcher.cancel(bench.submitter, ahead)
    (bench.folder / "yields" / "open").touch()
    until(bench, lambda: not bench.submitter.in_flight)
    assert begun(bench, "yields") == [-1]
    assert [sent for sent in bench.sent() if sent[0] == ahead] == [(ahead, "CANCELLED")]
    assert held not in bench.submitter.in_flight


def test_what_waits_behind_another_run_counts_as_waiting(bench: Bench) -> None:
    """Until its thread begins with it, not until it is given to the thread."""
    version = bench.models.find("yields", 1) if after_a_short_run(bench, "yields") else None
    assert version is not None
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
    """It is refused in time, although the run before it is longer than the one before that."""
    after_a_short_run(bench, "yields")
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
