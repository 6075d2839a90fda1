"""A request goes where most of its regions are."""

from __future__ import annotations

from tensord.daemon.submit.region_places import RegionPlaces
from tensord.shm.control_records import RegionPlace
from tensord.shm.messages import PreparedRequest, RegionSlice, RequestedOutput
from tests.records import Tensor, WholeRequest


def asks(*inputs: str, outputs: tuple[str, ...] = ()) -> PreparedRequest:
    tensors = tuple(Tensor(f"x{i}", "FP32", (1,), RegionSlice(name, 0, 4)) for i, name in enumerate(inputs))
    body = Tensor("b", "FP32", (1,), b"abcd")
    wanted = tuple(RequestedOutput(f"y{i}", RegionSlice(name, 0, 4)) for i, name in enumerate(outputs))
    return WholeRequest(1, "m", 0, (*tensors, body), (*wanted, RequestedOutput("z"))).prepared


def test_where_requests_go() -> None:
    places = RegionPlaces()
    assert not places
    places.update(RegionPlace("a", "cuda:0"))
    places.update(RegionPlace("b", "cuda:1"))
    assert places
    assert places.gpu_of(asks()) == ""
    assert places.gpu_of(asks("system")) == ""
    assert places.gpu_of(asks("system", "b")) == "cuda:1"
    assert places.gpu_of(asks(outputs=("a",))) == "cuda:0"
    assert places.gpu_of(asks("a", outputs=("system", "a"))) == "cuda:0"
    # Where most of the bytes are; an equal share goes to the first that is named.
    assert places.gpu_of(asks("system", "a", outputs=("b",))) == "cuda:0"
    assert places.gpu_of(asks("system", "a", outputs=("b", "b"))) == "cuda:1"


def test_regions_that_are_gone() -> None:
    places = RegionPlaces()
    places.update(RegionPlace("a", "cuda:1"))
    places.update(RegionPlace("a", ""))
    places.update(RegionPlace("never", ""))
    assert not places
    assert places.gpu_of(asks("a")) == ""
