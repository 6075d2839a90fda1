"""A request with a number is the request that it would be had it said everything; and nothing outlives what it was found of."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import posix_ipc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.shm.errors import InvalidArgument, NotFound, ServingError
from tensord.shm.messages import Content, PreparedRequest, RegionSlice, RequestedOutput, RequestRecord, Slice
from tensord.shm.operations import RegisterSystemRegion
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.regions.region_table import RegionTable
from tensord.workers.requests.prepared import Preparation, validate
from tensord.workers.requests.request import Request
from tensord.workers.requests.submitter_link import SubmitterLink
from tests.generated import examples
from tests.records import Tensor, WholeRequest
from tests.workers.requests.test_prepared import BATCHED, FREE, outputs, regions, submitter, tensors, version_of

__all__ = ["regions", "submitter"]  # fixtures

slices = st.builds(Slice, st.integers(-1, 1), st.integers(-1, 40), st.integers(-1, 40))
X = Tensor("x", "FP32", (2, 2), np.arange(4, dtype=np.float32).tobytes())
OTHER = Tensor("x", "FP32", (2, 2), np.arange(4, 8, dtype=np.float32).tobytes())
WORDS = Tensor("w", "BYTES", (2, 1), b"\x01\0\0\0a\x02\0\0\0bc")
IN_REGION = Tensor("x", "FP32", (2, 2), RegionSlice("r", 8, 16))


def request_of(*inputs: Tensor, **fields: Any) -> WholeRequest:
    return WholeRequest(1, "m", 0, inputs, **fields)


def preparation_of(request: WholeRequest) -> Preparation:
    return Preparation(request.prepared, 0)


def record_of(request: WholeRequest) -> RequestRecord:
    return request.of(0)


def meaning(request: Request) -> dict[str, Any]:
    """Returns all that a request means, its leases included, and ends the request."""
    found = {
        "id": (request.request_id, request.client_id, request.label),
        "kind": (request.prepared.model, request.prepared.version, request.prepared.parameters),
        "strikes": request.own.strikes,
        "sequence": (request.own.sequence_id, request.own.sequence_start, request.own.sequence_end),
        "key": request.key,
        "rows": request.rows,
        "arrays": {name: (array.dtype, array.shape, array.tolist()) for name, array in request.arrays.items()},
        "order": list(request.arrays),
        "outputs": dict(request.outputs),
        "regions": [region.name for region in request.regions],
        "leases": [region.leases for region in request.regions],
        "when": (request.arrived_ns, request.deadline_ns, request.timeout_ns, request.priority),
        "copied": request.copied_byte_size,
        "version": request.version,
        "submitter": request.submitter,
        "cancelled": request.cancelled,
        "traced": request.timeline is not None,
    }
    request.release()
    return found


def outcome(make: Any) -> Any:
    """Makes a request; returns what it means, or the error that refuses it."""
    try:
        return meaning(make())
    except ServingError as error:
        return type(error), error.message


def checked(
    request: WholeRequest,
    preparation: Preparation,
    submitter: SubmitterLink,
    version: ModelVersion,
    regions: RegionTable,
) -> tuple[Any, Any]:
    """Returns the outcomes of a request sent by number, and of the whole request where nothing is known."""
    numbered = outcome(lambda: validate(record_of(request), preparation, submitter, version, regions, 50))
    return numbered, whole(request.record, request.prepared, submitter, version, regions)


def whole(
    record: RequestRecord,
    prepared: PreparedRequest,
    submitter: SubmitterLink,
    version: ModelVersion,
    regions: RegionTable,
) -> Any:
    """Returns the outcome of a whole request, which is the same the first and the second time that a load sees it."""
    version.checked.clear()
    first, second = (
        outcome(lambda: validate(record, Preparation(prepared), submitter, version, regions, 50)) for _ in range(2)
    )
    assert first == second
    return first


@pytest.mark.parametrize(
    ("version", "inputs", "fields"),
    [
        (BATCHED, (X,), {}),
        (BATCHED, (X,), {"strikes": 1, "trace": 1}),
        (BATCHED, (X, WORDS), {"outputs": (RequestedOutput("y"),)}),
        (BATCHED, (WORDS, X), {"client_id": "me", "deadline_ns": 9, "received_ns": 4, "priority": 2, "timeout_us": 3}),
        (BATCHED, (IN_REGION,), {"outputs": (RequestedOutput("y", RegionSlice("r", 100, 16)),)}),
        (BATCHED, (X,), {"outputs": (RequestedOutput("y", RegionSlice("r", 100, 16)),)}),
        (BATCHED, (X,), {"outputs": (RequestedOutput("y", classification=1),), "parameters": {"p": 1}}),
        (BATCHED, (IN_REGION, WORDS), {}),
        (
            FREE,
            (Tensor("b", "BOOL", (3,), b"\1\0\1"), Tensor("x", "INT64", (1, 2), RegionSlice("r", 0, 16))),
            {"sequence_id": 7, "sequence_start": True},
        ),
    ],
)
def test_it_is_the_request_that_it_would_be_whole(
    submitter: SubmitterLink,
    regions: RegionTable,
    version: ModelVersion,
    inputs: tuple[Tensor, ...],
    fields: dict[str, Any],
) -> None:
    request = request_of(*inputs, **fields)
    preparation = preparation_of(request)
    for _ in range(3):
        numbered, expected = checked(request, preparation, submitter, version, regions)
        assert isinstance(expected, dict), expected
        assert numbered == expected
    assert regions.find("r").leases == 0


def test_each_has_its_own_tensors(submitter: SubmitterLink, regions: RegionTable) -> None:
    assert (
        validate(request_of(X).record, Preparation(request_of(X).prepared), submitter, BATCHED, regions, 50).rows == 2
    )  # so that such shapes are known
    preparation = preparation_of(request_of(X))
    for tensor in (X, OTHER, X, OTHER):
        request = validate(record_of(request_of(tensor)), preparation, submitter, BATCHED, regions, 50)
        assert isinstance(tensor.place, bytes)
        assert (
            request.small
            == validate(
                request_of(tensor).record, Preparation(request_of(tensor).prepared), submitter, BATCHED, regions, 50
            ).small
        )
        assert request.arrays["x"].tobytes() == tensor.place


@settings(deadline=None, max_examples=examples(300))
@given(
    version=st.sampled_from([BATCHED, FREE]),
    inputs=st.lists(tensors, max_size=4),
    wanted=st.lists(outputs, max_size=3),
    contents=st.lists(st.one_of(st.binary(max_size=20), slices), max_size=4),
)
def test_an_enemy_gets_what_it_would_get_whole(
    submitter: SubmitterLink,
    regions: RegionTable,
    version: ModelVersion,
    inputs: list[Tensor],
    wanted: list[RequestedOutput],
    contents: list[Content],
) -> None:
    """The errors have the same words, and nothing stays leased, however often the request comes."""
    request = request_of(*inputs, outputs=tuple(wanted), client_id="me")
    preparation = preparation_of(request)
    for _ in range(3):
        numbered, expected = checked(request, preparation, submitter, version, regions)
        assert numbered == expected
        other = RequestRecord(1, 0, tuple(contents), "me")
        numbered = outcome(lambda other=other: validate(other, preparation, submitter, version, regions, 50))
        assert numbered == whole(other, preparation.prepared, submitter, version, regions)
    assert regions.find("r").leases == 0


@pytest.mark.parametrize("inputs", [(X,), (X, WORDS), (IN_REGION, WORDS)])
@pytest.mark.parametrize("known", [False, True])
def test_other_sizes_are_refused_with_the_words_for_them(
    submitter: SubmitterLink, regions: RegionTable, inputs: tuple[Tensor, ...], known: bool
) -> None:
    request = request_of(*inputs, client_id="me")
    preparation = preparation_of(request)
    if known:
        assert isinstance(checked(request, preparation, submitter, BATCHED, regions)[0], dict)
    for content in (b"", b"1234567", bytes(15), bytes(17)):
        wrong = request_of(
            *(
                Tensor(tensor.name, tensor.datatype, tensor.shape, content)
                if isinstance(tensor.place, bytes)
                else tensor
                for tensor in inputs
            ),
            client_id="me",
        )
        numbered, expected = checked(wrong, preparation, submitter, BATCHED, regions)
        assert numbered == expected
        assert expected[0] is InvalidArgument
    # It is none the worse for that.
    numbered, expected = checked(request, preparation, submitter, BATCHED, regions)
    assert isinstance(expected, dict)
    assert numbered == expected


@pytest.mark.parametrize("inputs", [(X,), (IN_REGION,), (IN_REGION, WORDS), (X, WORDS)])
def test_another_number_of_tensors(submitter: SubmitterLink, regions: RegionTable, inputs: tuple[Tensor, ...]) -> None:
    request = request_of(*inputs)
    preparation = preparation_of(request)
    wanted = len(record_of(request).contents)
    for _ in range(2):
        for given_ in {0, 1, 2, 3} - {wanted}:
            record = RequestRecord(1, 0, (bytes(16),) * given_)
            with pytest.raises(
                InvalidArgument, match=f"{given_} tensors came in a record that was prepared for {wanted}"
            ):
                validate(record, preparation, submitter, BATCHED, regions, 50)
        assert isinstance(checked(request, preparation, submitter, BATCHED, regions)[0], dict)
    assert regions.find("r").leases == 0


# ------------------------------------------------------------------------------------------------------------ meanwhile


def load_of(max_batch_size: int, data_type: str = "TYPE_FP32") -> ModelVersion:
    return version_of(
        f"""max_batch_size: {max_batch_size} input {{ name: "x" data_type: {data_type} dims: [ 2 ] }}
        output {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }}"""
    )


def test_another_load_is_looked_at_again(submitter: SubmitterLink, regions: RegionTable) -> None:
    """It has another input, then a smaller batch; and the first again, which is another load too."""
    request = request_of(X)
    preparation = preparation_of(request)
    loads = [load_of(*each) for each in ((4, "TYPE_FP32"), (4, "TYPE_INT32"), (1, "TYPE_FP32"), (4, "TYPE_FP32"))]
    for number in (0, 1, 0, 2, 3):
        version = loads[number]
        for _ in range(2):
            numbered, expected = checked(request, preparation, submitter, version, regions)
            assert numbered == expected
            assert isinstance(expected, dict) == (number in (0, 3))
            if isinstance(numbered, dict):
                assert numbered["version"] is version


def test_what_is_known_goes_with_the_load(submitter: SubmitterLink, regions: RegionTable) -> None:
    """Plans of answers too: they say the version."""
    request = request_of(X)
    preparation = preparation_of(request)
    for version in (load_of(4), load_of(4)):
        validate(record_of(request), preparation, submitter, version, regions, 50)
        assert preparation.load is version.checked
        assert preparation.plans == {}
        preparation.plans[object()] = object()  # type: ignore[index, assignment]
        validate(record_of(request), preparation, submitter, version, regions, 50)
        assert len(preparation.plans) == 1


class Loaded:
    """Stands for a load, and can have weak references."""


def test_a_preparation_does_not_keep_a_model(submitter: SubmitterLink, regions: RegionTable) -> None:
    preparation = preparation_of(request_of(X))
    version: Any = load_of(4)
    version.loaded = Loaded()
    alive = weakref.ref(version.loaded)
    for _ in range(2):
        request = validate(record_of(request_of(X)), preparation, submitter, version, regions, 50)
    del version, request
    gc.collect()
    assert alive() is None
    assert "Preparation for 'm'" in repr(preparation)


# -------------------------------------------------------------------------------------------------------------- regions


@pytest.fixture
def table(regions: RegionTable) -> Iterator[tuple[RegionTable, Any]]:
    """Yields the same table, and a function that registers ``s`` again with another size."""
    name = f"/tensord-test-preparation-{os.getpid()}"
    made = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=4096)
    os.close(made.fd)

    def register(byte_size: int) -> None:
        regions.unregister("system", "s")
        if byte_size:
            regions.register(RegisterSystemRegion("s", name, 0, byte_size), None)

    try:
        yield regions, register
    finally:
        register(0)
        posix_ipc.unlink_shared_memory(name)


@pytest.mark.parametrize(
    "asked",
    [
        request_of(Tensor("x", "FP32", (2, 2), RegionSlice("s", 8, 16))),
        request_of(Tensor("x", "FP32", (2, 2), RegionSlice("s", 8, 16)), WORDS),
        request_of(X, outputs=(RequestedOutput("y", RegionSlice("s", 8, 16)),)),
    ],
    ids=["input", "input beside another", "output"],
)
def test_a_region_that_is_another_one_meanwhile(
    submitter: SubmitterLink, table: tuple[RegionTable, Any], asked: WholeRequest
) -> None:
    """1. registered; 2. gone; 3. there again but too small; 4. just large enough; 5. gone while it is in use."""
    regions, register = table
    preparation = preparation_of(asked)
    for byte_size, refusal in ((64, None), (0, NotFound), (20, InvalidArgument), (24, None), (0, NotFound), (64, None)):
        register(byte_size)
        for _ in range(2):
            numbered, expected = checked(asked, preparation, submitter, BATCHED, regions)
            assert numbered == expected
            assert expected[0] is refusal if refusal else isinstance(expected, dict)
    made = validate(record_of(asked), preparation, submitter, BATCHED, regions, 50)
    (region,) = made.regions
    closed: list[bool] = []
    assert regions.unregister("system", "s") == 1
    regions.when_closed("s", lambda: closed.append(True))
    assert not closed
    assert checked(asked, preparation, submitter, BATCHED, regions)[0][0] is NotFound
    assert region.leases == 1
    made.release()
    regions.settle()
    assert closed == [True]


def test_one_that_was_first_refused(submitter: SubmitterLink, table: tuple[RegionTable, Any]) -> None:
    """Nothing was learned from that."""
    regions, register = table
    register(0)
    request = request_of(Tensor("x", "FP32", (2, 2), RegionSlice("s", 0, 16)))
    preparation = preparation_of(request)
    assert checked(request, preparation, submitter, BATCHED, regions)[0][0] is NotFound
    assert preparation.load is None
    register(64)
    numbered, expected = checked(request, preparation, submitter, BATCHED, regions)
    assert isinstance(expected, dict)
    assert numbered == expected
