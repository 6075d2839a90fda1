"""A request goes where its regions are, and says so when they are apart."""

from __future__ import annotations

import pytest

from daemon.submit.region_places import RegionPlaces
from shm.control_records import RegionPlace
from shm.errors import InvalidArgument
from shm.messages import Inline, RegionSlice, RequestedOutput, Submit, Tensor


def submit(*inputs: str, outputs: tuple[str, ...] = ()) -> Submit:
    tensors = tuple(Tensor(f"x{i}", "FP32", (1,), RegionSlice(name, 0, 4)) for i, name in enumerate(inputs))
    body = Tensor("b", "FP32", (1,), Inline(b"abcd"))
    wanted = tuple(RequestedOutput(f"y{i}", RegionSlice(name, 0, 4)) for i, name in enumerate(outputs))
    return Submit(1, "m", 0, (*tensors, body), (*wanted, RequestedOutput("z")))


def test_where_requests_go() -> None:
    places = RegionPlaces()
    assert not places
    places.update(RegionPlace("a", "cuda:0"))
    places.update(RegionPlace("b", "cuda:1"))
    assert places
    assert places.device_of(submit()) == ""
    assert places.device_of(submit("system")) == ""
    assert places.device_of(submit("system", "b")) == "cuda:1"
    assert places.device_of(submit(outputs=("a",))) == "cuda:0"
    assert places.device_of(submit("a", outputs=("system", "a"))) == "cuda:0"
    with pytest.raises(InvalidArgument, match="region 'a' is on GPU 0 and region 'b' on GPU 1"):
        places.device_of(submit("system", "a", outputs=("b",)))


def test_regions_that_are_gone() -> None:
    places = RegionPlaces()
    places.update(RegionPlace("a", "cuda:1"))
    places.update(RegionPlace("a", ""))
    places.update(RegionPlace("never", ""))
    assert not places
    assert places.device_of(submit("a")) == ""
