"""Tests which worker gets a request, and that a remembered route holds until something it depends on changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from tensord.daemon.submit.in_flight import InFlight, WorkerLink
from tensord.daemon.submit.model_states import ModelStates
from tensord.daemon.submit.routing import RegionPlaces, Routing
from tensord.shm.control_records import ModelGone, ModelState, RegionPlace
from tensord.shm.errors import NotFound, Unavailable
from tensord.shm.messages import PreparedRequest, RegionSlice, RequestedOutput, RequestRecord
from tensord.shm.prepared import MAX_NUMBERS, Numbered
from tensord.shm.sequence_page import SequenceKeys, SequencePage
from tests.fakes import CalledBack
from tests.records import Tensor, WholeRequest


def worker_of(incarnation: int, device: str = "cpu:0") -> WorkerLink:
    return WorkerLink(incarnation, device, *cast(Any, (None, None, None)))


def asks(regions: tuple[str, ...] = (), model: str = "m") -> WholeRequest:
    inputs = tuple(Tensor(f"x{name}", "UINT8", (1,), RegionSlice(name, 0, 1)) for name in regions)
    return WholeRequest(1, model, 0, (*inputs, Tensor("y", "UINT8", (1,), b"1")))


def plain(request: WholeRequest) -> InFlight:
    return CalledBack(on_answer=lambda *_: None, record=request.record)


def numbered(request: WholeRequest) -> InFlight:
    return CalledBack(on_answer=lambda *_: None, record=request.of(0), numbered=Numbered(0, request.prepared))


def routing_to(*workers: WorkerLink, row: int = 0) -> Routing:
    routing = Routing(ModelStates(), row, {}, 10)
    for worker in workers:
        routing.add(worker)
    routing.model_changed(ModelState("m", 1, "READY", workers=tuple(worker.incarnation for worker in workers)))
    return routing


def test_the_least_loaded_and_among_equals_the_first() -> None:
    first, second = worker_of(1), worker_of(2)
    routing = routing_to(first, second)
    assert routing.find(plain(asks())) is first
    first.in_flight[1] = plain(asks())
    assert routing.find(plain(asks())) is second
    routing.close(second)
    assert routing.find(plain(asks())) is first


def test_each_front_begins_with_another_worker() -> None:
    first, second = worker_of(1), worker_of(2)
    assert [routing_to(first, second, row=row).find(plain(asks())) for row in range(3)] == [first, second, first]


def test_regions_of_one_device_or_none() -> None:
    first, second = worker_of(1, "cuda:0"), worker_of(2, "cuda:1")
    routing = routing_to(first, second)
    routing.region_placed(RegionPlace("a", "cuda:0"))
    routing.region_placed(RegionPlace("b", "cuda:1"))
    assert routing.find(plain(asks(("b",)))) is second
    assert (routing.gpu_of(asks(("b",)).prepared), routing.gpu_of(asks().prepared)) == ("cuda:1", "")
    assert routing.find(plain(asks(("a", "b", "a")))) is first
    # It is being replaced, and copies between GPUs are for models that are not to be there.
    routing.close(second)
    assert routing.find(plain(asks(("b",)))) is None
    assert routing.find(plain(asks(("a", "b")))) is first


def test_a_model_that_is_not_where_the_regions_are() -> None:
    """A model on several other devices runs on the least loaded one, as without regions."""
    workers = [worker_of(number, device) for number, device in enumerate(("cuda:0", "cuda:1", "cuda:1/1", "cpu:0"))]
    routing = routing_to(*workers)
    routing.region_placed(RegionPlace("a", "cuda:0"))
    routing.region_placed(RegionPlace("b", "cuda:1"))
    state = ModelState("m", 1, "READY", workers=(1, 2, 3), devices=("cuda:1", "cuda:1/1", "cpu:0"))
    routing.model_changed(state)
    workers[1].in_flight[1] = workers[1].in_flight[2] = workers[2].in_flight[3] = plain(asks())
    assert routing.find(plain(asks(("a",)))) is workers[3]
    assert routing.gpu_of(asks(("a",)).prepared) == ""
    assert routing.find(plain(asks(("b",)))) is workers[2]
    assert routing.gpu_of(asks(("b",)).prepared) == "cuda:1"


def test_models_that_are_not_there() -> None:
    routing = routing_to(worker_of(1))
    with pytest.raises(NotFound):
        routing.find(plain(asks(model="other")))
    assert routing.state_of(asks(model="other").prepared) is None
    state = ModelState("m", 1, "READY", workers=(1,), repeatable=False)
    routing.model_changed(state)
    assert routing.state_of(asks().prepared) == state


# ------------------------------------------------------------------------------------------------------------ sequences


def of_sequence(sequence: int | str) -> InFlight:
    kind = Numbered(0, asks().prepared)
    return CalledBack(
        on_answer=lambda *_: None, record=RequestRecord(1, 0, (b"1",), sequence_id=sequence), numbered=kind
    )


def test_a_request_of_a_sequence_is_routed_and_nothing_is_remembered_of_its_kind() -> None:
    first, second = (
        WorkerLink(number, f"cpu:{number}", *cast(Any, (None, None)), SequencePage.create(4)) for number in (1, 2)
    )
    routing = routing_to(first, second)
    config = b'{"sequence_batching": {"max_sequence_idle_microseconds": 1000000000}}'
    routing.model_changed(ModelState("m", 1, "READY", workers=(1, 2), config=config, repeatable=False, sticky=True))
    keys = SequenceKeys("m", 1)
    second.sequences.admit(keys.key(5), 1)
    second.in_flight |= {number: of_sequence(1) for number in range(9)}
    pending = of_sequence(5)
    assert routing.find(pending) is second
    assert pending.sequence == keys.key(5)
    assert routing.find(of_sequence("5")) in (first, second)
    # One of no sequence goes where there is least to do.
    assert routing.find(of_sequence(0)) is routing.find(of_sequence("")) is first
    assert not routing.remembered
    # A dead one takes along what it has.
    second.in_flight.clear()
    assert not routing.bury(second)
    assert routing.workers == {1: first}
    with pytest.raises(Unavailable, match="sequence 5 of model 'm' was lost when its worker died"):
        routing.find(pending)
    for worker in (first, second):
        worker.sequences.close()


# -------------------------------------------------------------------------------------------------------------- changes


@pytest.mark.parametrize(
    "change",
    [
        lambda routing: routing.model_changed(ModelState("m", 1, "READY", workers=(2,))),
        lambda routing: routing.model_changed(ModelGone("m", 1)),
        lambda routing: routing.region_placed(RegionPlace("a", "cuda:1")),
        lambda routing: routing.close(routing.workers[1]),
        lambda routing: routing.add(worker_of(3)),
    ],
    ids=["model", "gone", "region", "closed", "opened"],
)
def test_every_change_ends_what_is_remembered(change: Callable[[Routing], None]) -> None:
    first, second = worker_of(1, "cuda:0"), worker_of(2, "cuda:1")
    routing = routing_to(first, second)
    pending = numbered(asks(("a",)))
    assert routing.find(pending) is first
    assert routing.remembered == {pending.numbered: (first, second)}
    change(routing)
    assert not routing.remembered


def test_only_kinds_with_a_worker_are_remembered_and_not_too_many() -> None:
    routing = routing_to(worker_of(1))
    routing.find(plain(asks()))
    assert not routing.remembered
    routing.close(routing.workers[1])
    assert routing.find(numbered(asks())) is None
    assert not routing.remembered
    routing.add(worker_of(1))
    for _ in range(MAX_NUMBERS + 1):
        routing.find(numbered(asks()))
        assert 0 < len(routing.remembered) <= MAX_NUMBERS
    assert "1 workers" in repr(routing)


# ------------------------------------------------------------------------------------------------------ regions on GPUs


def names(*inputs: str, outputs: tuple[str, ...] = ()) -> PreparedRequest:
    tensors = tuple(Tensor(f"x{i}", "FP32", (1,), RegionSlice(name, 0, 4)) for i, name in enumerate(inputs))
    body = Tensor("b", "FP32", (1,), b"abcd")
    wanted = tuple(RequestedOutput(f"y{i}", RegionSlice(name, 0, 4)) for i, name in enumerate(outputs))
    return WholeRequest(1, "m", 0, (*tensors, body), (*wanted, RequestedOutput("z"))).prepared


def test_where_requests_go() -> None:
    places = RegionPlaces()
    assert not places
    places.note(RegionPlace("a", "cuda:0"))
    places.note(RegionPlace("b", "cuda:1"))
    assert places
    assert places.gpu_of(names()) == ""
    assert places.gpu_of(names("system")) == ""
    assert places.gpu_of(names("system", "b")) == "cuda:1"
    assert places.gpu_of(names(outputs=("a",))) == "cuda:0"
    assert places.gpu_of(names("a", outputs=("system", "a"))) == "cuda:0"
    # Where most of the bytes are; an equal share goes to the first that is named.
    assert places.gpu_of(names("system", "a", outputs=("b",))) == "cuda:0"
    assert places.gpu_of(names("system", "a", outputs=("b", "b"))) == "cuda:1"


def test_regions_that_are_gone() -> None:
    places = RegionPlaces()
    places.note(RegionPlace("a", "cuda:1"))
    places.note(RegionPlace("a", ""))
    places.note(RegionPlace("never", ""))
    assert not places
    assert places.gpu_of(names("a")) == ""
