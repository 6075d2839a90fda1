"""Any record a submitter could send is either a request or refused with a sentence, and nothing stays leased."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import posix_ipc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.config.model_config import parse_pbtxt
from tensord.config.options import RegionsOptions
from tensord.shm.arena import Arena, ArenaMap
from tensord.shm.cuda_regions import Driver
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import RegionSlice, RequestedOutput, Slice
from tensord.shm.operations import RegisterSystemRegion
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.regions.region_table import RegionPolicy, RegionTable
from tensord.workers.requests.preparation import Checked, CheckedInputs, Preparation
from tensord.workers.requests.prepared import validate
from tensord.workers.requests.request import Request
from tensord.workers.requests.submitter_link import SubmitterLink
from tensord.workers.tensors.buckets import shapes_key
from tensord.workers.tensors.signature import signature
from tests.generated import examples
from tests.records import Tensor, WholeRequest


def version_of(text: str) -> ModelVersion:
    made = signature(parse_pbtxt('name: "m" ' + text, "m"), {}, {})
    fields = {"signature": made, "key": lambda arrays: shapes_key(arrays, made), "version": 1}
    fields["loaded"] = SimpleNamespace(known_parameters=None)
    return cast(ModelVersion, SimpleNamespace(**fields, sets=None, sequences=None, checked=CheckedInputs()))


BATCHED = version_of(
    """max_batch_size: 4
    input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
    input { name: "w" data_type: TYPE_STRING dims: [ -1 ] optional: true }
    output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }"""
)
FREE = version_of(
    """input { name: "x" data_type: TYPE_INT64 dims: [ -1, -1 ] } input { name: "b" data_type: TYPE_BOOL dims: [ 3 ] }
    output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }"""
)


@pytest.fixture(scope="module")
def regions() -> Iterator[RegionTable]:
    table = RegionTable(RegionPolicy(RegionsOptions()), Driver(), None)
    name = f"/tensord-test-validation-{os.getpid()}"
    made = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=4096)
    os.close(made.fd)
    try:
        table.register(RegisterSystemRegion("r", name, 0, 4096), None)
        yield table
        assert table.find("r").leases == 0
    finally:
        table.close()
        posix_ipc.unlink_shared_memory(name)


@pytest.fixture(scope="module")
def submitter() -> Iterator[SubmitterLink]:
    arena, mapped = Arena(1 << 16, 1 << 16, 0), ArenaMap()
    segment = arena.segments[0]
    mapped.open(0, segment.byte_size, os.dup(segment.fd))
    yield cast(SubmitterLink, SimpleNamespace(lane=mapped, peer=9, segments=None, context=None, owner=None))
    mapped.close()
    arena.close()


def check(
    submitter: SubmitterLink, version: ModelVersion, regions: RegionTable, *inputs: Tensor, **fields: Any
) -> Request:
    request = WholeRequest(1, "m", 0, inputs, **fields)
    return validate(request.record, Preparation(request.prepared), submitter, version, regions, 50)


X = Tensor("x", "FP32", (2, 2), np.arange(4, dtype=np.float32).tobytes())

numbers = st.one_of(st.integers(-2, 5), st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 32, 4090, 65536]))
places = st.one_of(
    st.binary(max_size=40),
    st.builds(Slice, st.integers(-1, 1), numbers, numbers),
    st.builds(RegionSlice, st.sampled_from(["r", "s", ""]), numbers, numbers),
)
tensors = st.builds(
    Tensor,
    st.sampled_from(["x", "w", "b", "y", ""]),
    st.sampled_from(["FP32", "BYTES", "INT64", "BOOL", "", "FP33"]),
    st.lists(numbers, max_size=4).map(tuple),
    places,
)
outputs = st.builds(
    RequestedOutput,
    st.sampled_from(["y", "z"]),
    st.one_of(st.none(), st.builds(RegionSlice, st.sampled_from(["r", "s"]), numbers, numbers)),
    st.integers(0, 2),
)


@settings(deadline=None, max_examples=examples(400))
@given(
    version=st.sampled_from([BATCHED, FREE]),
    inputs=st.lists(tensors, max_size=4),
    wanted=st.lists(outputs, max_size=3),
    strikes=st.integers(0, 2),
)
def test_an_enemy(
    submitter: SubmitterLink,
    regions: RegionTable,
    version: ModelVersion,
    inputs: list[Tensor],
    wanted: list[RequestedOutput],
    strikes: int,
) -> None:
    region = regions.find("r")
    try:
        request = check(submitter, version, regions, *inputs, outputs=tuple(wanted), strikes=strikes)
    except ServingError as error:
        assert error.message
    else:
        assert request.rows >= 1
        for name, array in request.arrays.items():
            spec = version.signature.inputs[name]
            assert array.dtype == spec.dtype
            assert spec.fits(array.shape[1:] if version.signature.batches else array.shape)
            array.sum() if array.dtype != object else array.tolist()
        request.release()
        request.release()
    assert region.leases == 0


def test_a_good_request(submitter: SubmitterLink, regions: RegionTable) -> None:
    words = Tensor("w", "BYTES", (2, 1), b"\x01\0\0\0a\x02\0\0\0bc")
    request = check(submitter, BATCHED, regions, X, words, received_ns=7, timeout_us=3, deadline_ns=90, priority=2)
    assert (request.rows, request.arrived_ns, request.timeout_ns, request.deadline_ns, request.priority) == (
        2,
        7,
        3000,
        90,
        2,
    )
    assert request.arrays["x"].tolist() == [[0, 1], [2, 3]]
    assert request.arrays["w"].tolist() == [[b"a"], [b"bc"]]
    assert check(submitter, BATCHED, regions, X).arrived_ns == 50


def test_requests_share_a_key_unless_one_has_a_strike(submitter: SubmitterLink, regions: RegionTable) -> None:
    a, b = check(submitter, BATCHED, regions, X), check(submitter, BATCHED, regions, X)
    struck = check(submitter, BATCHED, regions, X, strikes=1)
    assert a.key == b.key
    assert a.key != struck.key


def test_views_are_of_the_arena_and_the_region(submitter: SubmitterLink, regions: RegionTable) -> None:
    region = regions.find("r")
    region.view(8, 16)[:] = np.arange(4, dtype=np.float32).tobytes()
    for place in (Slice(0, 64, 16), RegionSlice("r", 8, 16)):
        request = check(submitter, BATCHED, regions, Tensor("x", "FP32", (2, 2), place))
        assert not request.arrays["x"].flags.owndata
        request.release()
    request = check(submitter, BATCHED, regions, Tensor("x", "FP32", (2, 2), RegionSlice("r", 8, 16)))
    assert region.leases == 1
    region.view(8, 4)[:] = np.float32(9).tobytes()
    assert request.arrays["x"][0, 0] == 9
    request.release()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            (),
            "[request id: me] expected number of inputs between 1 and 2 but got 0 inputs for model 'm'. "
            "Got input(s) [], but missing required input(s) ['x']. Please provide all required input(s).",
        ),
        ((Tensor("w", "BYTES", (1, 0), b""),), "missing required input(s) ['x']"),
        ((Tensor("q", "BYTES", (1, 0), b""),), "unexpected inference input 'q' for model 'm'"),
        ((X, Tensor("w", "BYTES", (1, 0), b"")), "input 'x' batch size does not match other inputs for 'm'"),
        ((X, X), "[request id: me] input 'x' already exists in request"),
        (
            (X, *(Tensor(name, "BYTES", (2, 0), b"") for name in "wq")),
            "between 1 and 2 but got 3 inputs for model 'm'. Got input(s) ['q','w','x'], but the model takes ['x','w'].",
        ),
        ((Tensor("x", "FP32", (), b""),), "input 'x' has no shape but model requires batch dimension for 'm'"),
        ((Tensor("x", "FP32", (5, 2), b""),), "[request id: me] inference request batch-size must be <= 4 for 'm'"),
        ((Tensor("x", "FP32", (0, 2), b""),), "[request id: me] inference request batch-size must be at least 1"),
        (
            # Both are wrong; the last one is told.
            (Tensor("x", "INT8", (1, 2), b""), Tensor("w", "FP32", (1, 2), b"")),
            "[request id: me] inference input 'w' data-type is 'FP32', but model 'm' expects 'BYTES'",
        ),
        (
            (X, Tensor("w", "BYTES", (2, 1), b"\0" * 4)),
            "[request id: me] expected 2 string elements for inference input 'w' for model 'm', got 1",
        ),
        (
            (X, Tensor("w", "BYTES", (2, 1), b"\0" * 4 + b"\x09\0\0\0abc")),
            "incomplete string data for inference input 'w', expecting string of length 9 but only 3 bytes available",
        ),
        (
            (Tensor("x", "FP32", (1, 2), RegionSlice("r", 0, 0)),),
            "Invalid offset + byte size for shared memory region: 'r'",
        ),
        (
            (Tensor("x", "FP32", (2, 3), b""),),
            "[request id: me] unexpected shape for input 'x' for model 'm'. Expected [-1,2], got [2,3]. NOTE: Setting a",
        ),
    ],
)
def test_texts(submitter: SubmitterLink, regions: RegionTable, inputs: tuple[Tensor, ...], words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(submitter, BATCHED, regions, *inputs, client_id="me")
    assert words in caught.value.message


def test_region_and_classification_exclude_each_other(submitter: SubmitterLink, regions: RegionTable) -> None:
    with pytest.raises(InvalidArgument, match="Output can't set both 'shared_memory_region' and 'classification'"):
        check(submitter, BATCHED, regions, X, outputs=(RequestedOutput("y", RegionSlice("r", 0, 16), 1),))


@pytest.mark.parametrize("tensors", [[X], [X, Tensor("w", "BYTES", (-1, 1), b"\1\0\0\0a\0\0\0\0")]])
def test_a_dimension_is_found_from_the_bytes(
    submitter: SubmitterLink, regions: RegionTable, tensors: list[Tensor]
) -> None:
    tensors = [X._replace(shape=(-1, 2)), *tensors[1:]]
    for _ in range(3):
        request = check(submitter, BATCHED, regions, *tensors)
        assert (request.rows, request.arrays["x"].shape) == (2, (2, 2))
        assert all(tensor.shape[0] == 2 for tensor in request.prepared.inputs)
    region = Tensor("x", "FP32", (2, -1), RegionSlice("r", 0, 16))
    request = check(submitter, BATCHED, regions, region)
    assert request.arrays["x"].shape == (2, 2)
    request.release()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((-1, -1), "[request id: me] input 'x' shape [-1,-1] has 2 dimensions of -1"),
        ((-1, 3), "[request id: me] input 'x' shape [-1,3] cannot have the 4 elements that are given"),
        ((-1, 0), "cannot have the 4 elements"),
        ((-1, -2), "dimension -2 is negative"),
        ((-1,), "unexpected shape for input 'x'"),
    ],
)
def test_a_dimension_that_cannot_be_found(
    submitter: SubmitterLink, regions: RegionTable, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(submitter, BATCHED, regions, X._replace(shape=shape), client_id="me")
    assert words in caught.value.message


def test_outputs_are_asked_for_once(submitter: SubmitterLink, regions: RegionTable) -> None:
    twice = (RequestedOutput("y"), RequestedOutput("y", None, 2))
    with pytest.raises(InvalidArgument, match=r"\[request id: me\] output 'y' already exists in request"):
        check(submitter, BATCHED, regions, X, outputs=twice, client_id="me")


def test_only_the_very_same_inputs_were_checked_before(submitter: SubmitterLink, regions: RegionTable) -> None:
    version = version_of(
        """max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
        output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }"""
    )
    check(submitter, version, regions, X)
    assert list(version.checked) == [(("x", "FP32", (2, 2)),)]
    check(submitter, version, regions, X._replace(shape=(1, 4)))
    for other in (X._replace(shape=(2, 3)), X._replace(datatype="INT32"), X._replace(name="y")):
        with pytest.raises(InvalidArgument):
            check(submitter, version, regions, other)
    # Of the first of these only the bytes were wrong.
    assert len(version.checked) == 3


def test_shapes_without_end_are_forgotten() -> None:
    checked = CheckedInputs()
    for size in range(10_000):
        checked.learn((("x", "FP32", (size,)),), Checked(size, 1, True, [], []))
    assert (("x", "FP32", (9_999,)),) in checked
    assert len(checked) < 1000
