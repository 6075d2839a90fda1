"""Whatever C does not answer has a reason: that of its model version, or that of its kind of requests, and is counted by it."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from tensord.shm.figures import SlowReason
from tensord.shm.messages import RegionSlice, RequestedOutput
from tensord.shm.operations import RegisterSystemRegion
from tensord.workers.models import model_version
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.native.extensions import available
from tensord.workers.processor import output_memory
from tests.records import Tensor
from tests.repositories import ensemble, write_model
from tests.workers.dispatch.test_fast_path import call, region
from tests.workers.dispatch.test_sequence_runs import Sums
from tests.workers.parameters.pushing import PushingLoop, numbered, write_numbered
from tests.workers.worker_loop import OPTIONS, WorkerLoop

__all__ = ["region"]  # a fixture

pytestmark = pytest.mark.skipif(not available, reason="the C extension was not built")

ROWS = 8
MODEL = """
    inputs = {"x": "DATATYPE[WIDTH]"}
    outputs = {"y": "DATATYPE[WIDTH]"}
    max_batch_size = 8
    MORE

    def create(path, config, device):
        return (lambda ARGUMENTS: {"y": inputs["x"]}), PARAMETERS
"""
STEPPED = """
    import jax.numpy as jnp

    inputs = {"x": "FP32[1]"}
    outputs = {"y": "FP32[1]"}
    slots, max_steps = 4, 1

    def create(path, config, device):
        def init(params, slots):
            return jnp.zeros(slots)

        def insert(params, carry, slot, inputs):
            return carry.at[slot].set(inputs["x"][0]), {}

        def step(params, carry, active):
            return carry, {"y": carry[:, None]}, active, active

        return (init, insert, step), None
"""


class Case(NamedTuple):
    """A model and a kind of requests to it; what of ``MODEL`` is replaced, and what the requests have besides their input."""

    reason: SlowReason | None
    config: str = ""
    replaced: Mapping[str, str] = {}
    outputs: tuple[RequestedOutput, ...] = ()
    own: Mapping[str, Any] = {}
    rows: int = 1
    width: int = 4


def queued(rules: str) -> str:
    return f"max_batch_size: 8 dynamic_batching {{ {rules} }}"


#: Of a model version.
VERSIONS = [
    Case(SlowReason.INSTANCES, replaced={"MORE": "host = True"}),
    Case(SlowReason.ORDERED, queued("preserve_ordering: true")),
    Case(SlowReason.QUEUE, queued("priority_levels: 2 default_priority_level: 1")),
    Case(SlowReason.CACHE, "response_cache { enable: true }"),
    Case(SlowReason.DATATYPES, replaced={"DATATYPE": "BOOL"}),
    Case(
        SlowReason.PROPERTIES,
        replaced={"MORE": 'request = {"seed": ("INT64", 7)}', "ARGUMENTS": "params, inputs, request"},
    ),
]
#: Of a kind of requests.
KINDS = [
    Case(None),
    Case(SlowReason.CLASSIFICATION, outputs=(RequestedOutput("y", classification=2),)),
    Case(SlowReason.NEW, own={"strikes": 1}),
    Case(SlowReason.TRACED, own={"trace": 1}),
    Case(SlowReason.UNFIT, replaced={"WIDTH": str(1 << 16)}, rows=3, width=1 << 16),
    Case(SlowReason.UNFIT, replaced={"WIDTH": "s", "MORE": 'buckets = {"s": (8,)}'}),
]


def named(case: Case) -> str:
    return "answered_in_c" if case.reason is None else case.reason.label


@pytest.fixture
def loop(leaves_nothing: None) -> Iterator[WorkerLoop]:
    cache = msgspec.structs.replace(OPTIONS.response_cache, byte_size=1 << 20)
    made = WorkerLoop(msgspec.structs.replace(OPTIONS, response_cache=cache))
    yield made
    made.close()


def load(loop: WorkerLoop, folder: Path, case: Case, name: str = "m") -> ModelVersion:
    source = MODEL
    for word, other in {
        **case.replaced,
        "DATATYPE": "FP32",
        "WIDTH": "4",
        "MORE": "",
        "PARAMETERS": "{}",
        "ARGUMENTS": "params, inputs",
    }.items():
        source = source.replace(word, case.replaced.get(word, other))
    write_model(folder, name, source, f'backend: "jax" {case.config}')
    loop.load(folder / name)
    return loop.version(name)


def ask(loop: WorkerLoop, name: str, case: Case = Case(None)) -> None:  # noqa: B008
    """Sends a request, and waits for its answer and until it is counted."""
    datatype = case.replaced.get("DATATYPE", "FP32")
    content = np.zeros((case.rows, case.width), {"BOOL": np.bool_}.get(datatype, np.float32))
    lease = loop.arena.loan(content.nbytes)
    assert lease is not None
    lease.view[:] = content.tobytes()
    place = lease.place if content.nbytes > 4096 else content.tobytes()
    tensor = Tensor("x", datatype, content.shape, place)
    loop.submit(name, [tensor], case.outputs, leases=[lease], own=case.own)
    (answer,) = loop.answers(1)
    assert answer.code == "", answer.message
    lease.release()
    if answer.lease is not None:
        loop.front.release(answer.lease)
    loop.worker.iterate()


def slow(of: ModelVersion) -> dict[str, int]:
    return {label: count for label, count in of.statistics.counts().slow.items() if count}


@pytest.mark.parametrize("case", VERSIONS, ids=named)
def test_a_model_version_has_its_reason_from_the_start(loop: WorkerLoop, tmp_path: Path, case: Case) -> None:
    found = load(loop, tmp_path, case)
    assert case.reason is not None
    assert found.statistics.counts().slow == {case.reason.label: 0}
    for _ in range(3):
        ask(loop, "m", case)
    assert slow(found) == {case.reason.label: 3}


@pytest.mark.parametrize("case", KINDS, ids=named)
def test_a_kind_of_requests_has_its_reason(loop: WorkerLoop, tmp_path: Path, case: Case) -> None:
    found = load(loop, tmp_path, case)
    for _ in range(5):
        ask(loop, "m", case)
    assert slow(found) == ({} if case.reason is None else {case.reason.label: 5})


def test_outputs_that_are_copied_to_their_places(
    loop: WorkerLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_memory, "attached", lambda: False)
    case = Case(SlowReason.LARGE, replaced={"WIDTH": str(1 << 18)}, width=1 << 18)
    found = load(loop, tmp_path, case)
    for _ in range(3):
        ask(loop, "m", case)
    assert slow(found) == {SlowReason.LARGE.label: 3}


def test_what_is_not_built_answers_nothing(loop: WorkerLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_version, "available", False)
    assert load(loop, tmp_path, Case(None)).statistics.slow is SlowReason.NOT_COMPILED


def test_steps_of_ensembles(loop: WorkerLoop, tmp_path: Path) -> None:
    """One step runs in a thread of its own: no pipeline has it, and its requests are the ensemble's, not a client's."""
    load(loop, tmp_path, Case(None), "plain")
    load(loop, tmp_path, VERSIONS[0], "host")
    steps = [("plain", {"x": "x"}, {"y": "between"}), ("host", {"x": "between"}, {"y": "y"})]
    ensemble(tmp_path, "chain", ["x FP32 4"], ["y FP32 4"], steps, ROWS)
    loop.load(tmp_path / "chain")
    for _ in range(3):
        ask(loop, "chain")
    assert slow(loop.version("chain")) == {SlowReason.STEPS.label: 3}
    assert slow(loop.version("plain")) == {SlowReason.INSIDE.label: 3}


def test_a_stepped_model(loop: WorkerLoop, tmp_path: Path) -> None:
    write_model(tmp_path, "m", STEPPED, 'backend: "jax"')
    loop.load(tmp_path / "m")
    assert loop.version("m").statistics.slow is SlowReason.STREAMS


def test_parameters_that_answers_tell(leaves_nothing: None, tmp_path: Path) -> None:
    """An answer that says which set it is of is C's for main alone."""
    with contextlib.closing(PushingLoop()) as loop:
        loop.load(write_numbered(tmp_path, "m", "max_batch_size: 8"))
        loop.push("m", numbered(1.0), 1, "a")
        for _ in range(3):
            loop.ask_value("m", set="a", tells=True)
            loop.worker.iterate()
        assert slow(loop.version("m")) == {SlowReason.PARAMETERS.label: 3}


def test_regions_of_sequences(loop: WorkerLoop, tmp_path: Path, region: tuple[str, mmap.mmap, int]) -> None:
    """What a region has lost shows when the step has run, and a step is not run again."""
    found = Sums(loop, tmp_path).version
    assert call(loop, RegisterSystemRegion("r", region[0], 0, 4096)).code == ""
    for step in range(3):
        own = {"sequence_id": 5, "sequence_start": step == 0}
        loop.submit("sums", [Tensor("x", "FP32", (1, 1), RegionSlice("r", 0, 4))], own=own)
        (answer,) = loop.answers(1)
        assert answer.code == "", answer.message
        loop.worker.iterate()
    assert slow(found) == {SlowReason.REGIONS.label: 3}


def test_a_load_goes_on_counting(loop: WorkerLoop, tmp_path: Path) -> None:
    first = load(loop, tmp_path, KINDS[1])
    ask(loop, "m", KINDS[1])
    loop.load(tmp_path / "m")
    ask(loop, "m", KINDS[1])
    second = loop.version("m")
    assert second is not first
    assert slow(second) == {SlowReason.CLASSIFICATION.label: 2}


def test_a_request_that_failed_has_no_reason_to_be_slow(loop: WorkerLoop, tmp_path: Path) -> None:
    case = Case(None, replaced={"PARAMETERS": "{}", "WIDTH": "4", "MORE": "import jax"})
    found = load(loop, tmp_path, case)
    found.jitted.execute = lambda execution, carry=None: 1 // 0  # type: ignore[method-assign,union-attr]
    loop.submit("m", [Tensor("x", "FP32", (1, 4), bytes(16))])
    (answer,) = loop.answers(1)
    assert answer.code == "INTERNAL"
    loop.worker.iterate()
    assert slow(found) == {}
