"""The order of things inside the worker, turn by turn, with real models and without a process around them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from tensord.config.model_config import empty, parse_pbtxt
from tensord.config.options import Arenas, ExecutablesOptions, Options, RegionsOptions
from tensord.shm.control_records import Load
from tensord.shm.cuda_regions import Driver
from tensord.shm.errors import InvalidArgument
from tensord.shm.figures import SlowReason
from tensord.shm.status_page import StatusPage
from tensord.workers.dispatch.dispatcher import Dispatcher
from tensord.workers.loading.loader import Loader
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.models.statistics import Failure
from tensord.workers.regions.region_table import RegionPolicy, RegionTable
from tensord.workers.requests.submitter_link import SubmitterLink
from tensord.workers.threads.cancellation import Cancellation
from tensord.workers.threads.inbox import Inbox
from tensord.workers.threads.work_thread import WorkThread
from tests.records import Tensor, WholeRequest
from tests.repositories import applying, scale_model, write_model
from tests.workers.dispatch.test_outbox import ALane
from tests.workers.loading.targets import target

OPTIONS = Options(
    arenas=Arenas(byte_size=1 << 20, max_byte_size=1 << 20, inline_byte_size=64, wait=600),
    executables=ExecutablesOptions(max_unexpected_shapes=2),
)


class ACompiler:
    """Compiles when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def do(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.jobs.append((job, done))

    def work(self) -> None:
        job, done = self.jobs.pop(0)
        try:
            outcome = job()
        except Exception as error:
            outcome = error
        done(outcome)


class Bench:
    """A dispatcher with one submitter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inbox, self.page = Inbox(), StatusPage.create()
        self.models, self.regions = ModelTable(), RegionTable(RegionPolicy(RegionsOptions()), Driver(), None)
        self.compiler = ACompiler()
        self.dispatcher = Dispatcher(
            OPTIONS, self.models, self.regions, self.page, cast(WorkThread, self.compiler), time.monotonic_ns
        )
        self.loader = Loader(target(50, 2, 1 << 30), self.inbox, self.page)
        self.lane = ALane()
        self.submitter = SubmitterLink(7, cast(Any, self.lane))
        self._number = 0

    def load(self, name: str, config: str = "") -> ModelVersion:
        path = self.folder / name
        message = parse_pbtxt(config, name) if config else empty(name)
        record = Load(name, 1, str(path), str(path / "1"), message.SerializeToString(), content="as it is")
        version = ModelVersion(self.loader.load(record))
        self.models.add(version)
        return version

    def regroup(self, version: ModelVersion, config: str) -> ModelVersion:
        """Loads a version again with a configuration that has another number of instances."""
        known = version.loaded.record
        assert known is not None
        record = msgspec.structs.replace(known, config=parse_pbtxt(config, version.name).SerializeToString())
        loaded = self.loader.regrouped(record, version.loaded, Cancellation())
        assert loaded is not None
        again = ModelVersion(loaded)
        self.models.add(again)
        return again

    def submit(self, model: str, *values: float, **fields: Any) -> int:
        self._number += 1
        content = np.array(values, np.float32).tobytes()
        shape = (1, 4) if model.startswith("scale") else (len(values),)
        request = WholeRequest(self._number, model, 0, (Tensor("x", "FP32", shape, content),), **fields)
        self.dispatcher.submit(self.submitter, request.record, time.monotonic_ns())
        return self._number

    def turn(self) -> int | None:
        next_ns = self.dispatcher.run_due(time.monotonic_ns())
        self.dispatcher.count()
        return next_ns

    def sent(self) -> list[tuple[int, str]]:
        """Returns (request id, code) of each answer since the last call."""
        sent = [(completion.request_id, completion.code) for completion in self.lane.sent]
        self.lane.sent.clear()
        return sent

    def close(self) -> None:
        self.dispatcher.drop(self.submitter)
        assert all(not version.busy for version in self.models) or self.compiler.jobs
        self.inbox.close()
        self.page.close()
        self.lane.arena.close()


ANY = applying(
    """
    if inputs["x"].shape[0] == 3:
        raise ValueError("three is not for me")
    return {"y": inputs["x"] * 2}
    """,
    "x FP32[n]",
    "y FP32[n]",
)


REPLACING = 'parameters { key: "replace_waiting" value { string_value: "true" } }'


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    scale_model(tmp_path, "scale")
    scale_model(tmp_path, "scale_b")
    write_model(tmp_path, "any", ANY)
    made = Bench(tmp_path)
    yield made
    made.close()


def test_what_waits_runs_together(bench: Bench) -> None:
    version = bench.load("scale")
    assert bench.turn() is None
    for _ in range(3):
        bench.submit("scale", 1, 2, 3, 4)
    bench.turn()
    assert bench.sent() == [(1, ""), (2, ""), (3, "")]
    assert version.statistics.execution_count == 1
    assert bench.submitter.in_flight == {}
    assert bench.turn() is None


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 9, 17])
def test_what_waits_without_a_batch_dimension_shares_calls_once_a_program_for_that_is_made(
    bench: Bench, count: int
) -> None:
    """Each request gets its own answer, before, and however many wait together."""
    version = bench.load("any")
    bench.submit("any", 1, 2)
    bench.turn()
    bench.compiler.work()
    bench.turn()
    for _ in range(3):
        bench.lane.sent.clear()
        executed = version.statistics.execution_count
        numbers = [bench.submit("any", i, 10 * i) for i in range(count)]
        while bench.turn() is not None:
            pass
        given = {answer.request_id: cast(bytes, answer.outputs[0].place) for answer in bench.lane.sent}
        assert [np.frombuffer(given[n], np.float32).tolist() for n in numbers] == [
            [2 * i, 20 * i] for i in range(count)
        ]
        assert version.statistics.execution_count == executed + count
        assert len(bench.submitter.in_flight) == 0
        # The first time round they went one by one.
        for _ in range(len(bench.compiler.jobs)):
            bench.compiler.work()


def test_a_program_for_several_requests_is_compiled_when_none_waits_for_one(bench: Bench) -> None:
    version = bench.load("any")
    assert version.jitted is not None
    grouped = version.jitted.grouped
    assert grouped is not None
    for length in (2, 4):
        bench.submit("any", *range(length))
        bench.turn()
    found = []
    while bench.compiler.jobs:
        bench.compiler.work()
        found.append([grouped.find(((length,),), 4) is not None for length in (2, 4)])
    assert found == [[False, False], [False, False], [True, False], [True, True]], (
        "both for one request, and then one after the other"
    )
    assert version.jitted.executables.unexpected == {((2,),), ((4,),)}


def test_models_take_turns_however_old_the_requests_of_one_are(bench: Bench) -> None:
    bench.load("scale")
    bench.load("scale_b")
    now = time.monotonic_ns()
    for i in range(20):
        bench.submit("scale", 1, 2, 3, 4, received_ns=now + 2 * i)
    bench.submit("scale_b", 1, 2, 3, 4, received_ns=now + 50)
    assert bench.turn() is not None
    assert [request_id for request_id, _ in bench.sent()] == list(range(1, 9))
    bench.turn()
    assert bench.sent() == [(21, "")]
    bench.turn()
    bench.turn()
    assert [request_id for request_id, _ in bench.sent()] == list(range(9, 21))


def test_an_id_in_flight_is_not_taken_twice(bench: Bench) -> None:
    bench.load("scale")
    bench.submit("scale", 1, 2, 3, 4)
    bench._number = 0
    with pytest.raises(InvalidArgument, match="request id 1 is in flight"):
        bench.submit("scale", 1, 2, 3, 4)


def test_a_full_queue(bench: Bench) -> None:
    bench.load("scale")
    for _ in range(51):
        bench.submit("scale", 1, 2, 3, 4, client_id="me")
    (refused,) = bench.lane.sent
    assert (refused.request_id, refused.message) == (51, "[request id: me] Exceeds maximum queue size")


def test_parked_while_a_shape_is_compiled(bench: Bench) -> None:
    """Requests of the shape wait, later ones too; a cancelled one is not run; the page says who asked for it."""
    bench.load("any")
    first = bench.submit("any", 1, 2)
    bench.turn()
    second = bench.submit("any", 3, 4)
    cancelled = bench.submit("any", 5, 6)
    bench.dispatcher.cancel(bench.submitter, cancelled)
    bench.turn()
    assert bench.sent() == []
    assert len(bench.compiler.jobs) == 1
    bench.compiler.work()
    bench.turn()
    bench.turn()
    assert sorted(bench.sent()) == [(first, ""), (second, ""), (cancelled, "CANCELLED")]
    bench.submit("any", 7, 8)
    bench.turn()
    assert bench.sent() == [(4, "")]
    assert bench.page.executing() == set()


def test_a_shape_that_does_not_compile(bench: Bench) -> None:
    bench.load("any")
    bench.submit("any", 1, 2, 3)
    bench.submit("any", 1, 2, 3)
    bench.turn()
    bench.compiler.work()
    assert [(answer.request_id, answer.code, answer.message) for answer in bench.lane.sent] == [
        (number, "INTERNAL", "model 'any' cannot be compiled for these shapes: ValueError") for number in (1, 2)
    ]


def test_too_many_shapes_at_once(bench: Bench) -> None:
    bench.load("any")
    for n in (1, 2, 4, 5):
        bench.submit("any", *range(n))
    for _ in range(4):
        bench.turn()
    assert bench.sent() == [(3, "UNAVAILABLE"), (4, "UNAVAILABLE")]
    bench.compiler.work()
    bench.compiler.work()
    bench.turn()
    bench.turn()
    assert bench.sent() == [(1, ""), (2, "")]


def test_an_evicted_shape_is_compiled_again(bench: Bench) -> None:
    bench.load("any")
    for n in (1, 2, 4, 1):
        bench.submit("any", *range(n))
        bench.turn()
        while bench.compiler.jobs:
            bench.compiler.work()
        bench.turn()
    assert bench.sent() == [(1, ""), (2, ""), (3, ""), (4, "")]


def test_at_ten_times_the_rate_the_newest_runs(bench: Bench) -> None:
    """Each execution has what was sent last; the others are answered, counted and forgotten, and those of other keys are run."""
    version = bench.load("scale_b", REPLACING)
    plain = bench.load("scale")
    assert version.statistics.slow is SlowReason.QUEUE
    for model, told in (("scale", plain), ("scale_b", version)):
        for _ in range(20):
            key = "camera" if model == "scale" else ""
            numbers = [bench.submit(model, 1, 2, 3, 4, client_id="id", replace_key=key) for _ in range(10)]
            other = bench.submit(model, 1, 2, 3, 4, replace_key="other")
            assert len(told.queue) == 2
            assert len(bench.submitter.in_flight) == 2
            (said, *_) = bench.lane.sent
            of_key = " of key 'camera'" if key else ""
            assert said.message == f"the request was replaced while it waited, by the next one{of_key}, request id 'id'"
            bench.turn()
            assert bench.sent() == [*((number, "REPLACED") for number in numbers[:-1]), (numbers[-1], ""), (other, "")]
        assert told.statistics.failures == {Failure.REPLACED: 180}
        assert told.statistics.counts().replaced == told.statistics.fail.count == 180
        assert (told.statistics.success_count, told.pending) == (40, 0)


def test_whoever_waits_for_a_program_is_replaced(bench: Bench) -> None:
    version = bench.load("any")
    first = bench.submit("any", 1, 2, replace_key="k")
    bench.turn()
    others = [bench.submit("any", 1, 2, replace_key="k") for _ in range(100)]
    assert bench.sent() == [(number, "REPLACED") for number in (first, *others[:-1])]
    assert version.pending == 1
    other_shape = bench.submit("any", 1, 2, 3, 4, replace_key="k")
    bench.compiler.work()
    bench.turn()
    assert bench.sent() == [(others[-1], "REPLACED")], "once it is queued again"
    while bench.compiler.jobs:
        bench.compiler.work()
        bench.turn()
    assert bench.sent() == [(other_shape, "")]


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ({"replace_key": "k" * 129}, "parameter 'tensord_replace' has 129 bytes, at most 128 are allowed"),
        ({"replace_key": "\u00e4" * 65}, "parameter 'tensord_replace' has 130 bytes, at most 128 are allowed"),
        ({"replace_key": "k", "sequence_id": 5}, "given with a sequence, whose requests cannot be replaced"),
    ],
)
def test_replace_keys_that_are_refused(bench: Bench, own: dict[str, Any], found: str) -> None:
    bench.load("scale")
    bench.submit("scale", 1, 2, 3, 4, **own)
    (refused,) = bench.lane.sent
    assert refused.code == "INVALID_ARGUMENT"
    assert found in refused.message


def test_cancel_and_expiry(bench: Bench) -> None:
    version = bench.load("scale")
    cancelled = bench.submit("scale", 1, 2, 3, 4)
    late = bench.submit("scale", 1, 2, 3, 4, deadline_ns=1)
    bench.dispatcher.cancel(bench.submitter, cancelled)
    bench.dispatcher.cancel(bench.submitter, 99)
    bench.turn()
    assert bench.sent() == [(cancelled, "CANCELLED"), (late, "DEADLINE_EXCEEDED")]
    assert version.statistics.fail.count == 2
    assert version.statistics.failures == {Failure.CANCELED: 2}
    assert version.statistics.execution_count == 0


def test_answers_that_find_no_room_stop_their_own_submitter(bench: Bench) -> None:
    """Requests are held beyond one arena of blocked answers, and run when there is room, in order."""
    bench.load("any")
    big = [float(i) for i in range(60_000)]
    bench.submit("any", *big)
    bench.turn()
    bench.compiler.work()
    for _ in range(14):
        bench.submit("any", *big)
    for _ in range(20):
        bench.turn()
    assert [request_id for request_id, _ in bench.sent()] == [1, 2, 3, 4]
    assert len(bench.submitter.blocked) == 5
    assert bench.submitter.held
    answered: list[int] = []
    while len(answered) < 11:
        for lease in list(bench.lane.arena._leases.values()):
            lease.release()
        bench.turn()
        answered += [request_id for request_id, _ in bench.sent()]
    assert answered == list(range(5, 16))
    assert bench.submitter.in_flight == {}


def test_a_submitter_that_goes_takes_its_requests_along(bench: Bench) -> None:
    version = bench.load("scale")
    for _ in range(5):
        bench.submit("scale", 1, 2, 3, 4)
    bench.dispatcher.drop(bench.submitter)
    bench.turn()
    assert bench.sent() == []
    assert len(version.queue) == 0
    assert bench.submitter.in_flight == {}
