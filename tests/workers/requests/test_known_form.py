"""A request of a form is the same request that it would be had it been sent whole; and nothing outlives what it was found of."""

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
from tensord.shm.forms import Forms, own_contents, request_template, whole_request
from tensord.shm.messages import Content, FormSubmit, Inline, RegionSlice, RequestedOutput, Slice, Submit, Tensor
from tensord.shm.operations import RegisterSystemRegion
from tensord.workers.dispatch.validation import validate, validate_formed
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.regions.region_table import RegionTable
from tensord.workers.requests.known_form import KnownForm
from tensord.workers.requests.request import Request
from tensord.workers.requests.submitter import Submitter
from tests.workers.dispatch.test_validation import BATCHED, FREE, outputs, regions, submitter, tensors, version_of

__all__ = ["regions", "submitter"]  # fixtures

slices = st.builds(Slice, st.integers(-1, 1), st.integers(-1, 40), st.integers(-1, 40))
X = Tensor("x", "FP32", (2, 2), Inline(np.arange(4, dtype=np.float32).tobytes()))
OTHER = Tensor("x", "FP32", (2, 2), Inline(np.arange(4, 8, dtype=np.float32).tobytes()))
WORDS = Tensor("w", "BYTES", (2, 1), Inline(b"\x01\0\0\0a\x02\0\0\0bc"))
IN_REGION = Tensor("x", "FP32", (2, 2), RegionSlice("r", 8, 16))


def submit_of(*inputs: Tensor, **fields: Any) -> Submit:
    return Submit(1, "m", 0, inputs, **fields)


def form_of(submit: Submit) -> KnownForm:
    return KnownForm(0, Forms[Submit]().form(request_template(submit)).template)


def record_of(submit: Submit) -> FormSubmit:
    given = {name: getattr(submit, name) for name in FormSubmit.__struct_fields__ if hasattr(submit, name)}
    return FormSubmit(form=0, contents=own_contents(submit.inputs), **given)


def meaning(request: Request) -> dict[str, Any]:
    """All that a request is, its leases too; it is over then."""
    found = {
        "id": (request.request_id, request.client_id, request.label),
        "kind": (request.submit.model, request.submit.version, request.submit.parameters),
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
        "timeline": request.timeline,
    }
    request.release()
    return found


def outcome(make: Any) -> Any:
    """What becomes of a request: what it is, or how it is refused."""
    try:
        return meaning(make())
    except ServingError as error:
        return type(error), error.message


def checked(
    submit: Submit, form: KnownForm, submitter: Submitter, version: ModelVersion, regions: RegionTable
) -> tuple[Any, Any]:
    """What becomes of it as one of a form, and whole."""
    return (
        outcome(lambda: validate_formed(record_of(submit), form, submitter, version, regions, 50)),
        outcome(lambda: validate(submit, submitter, version, regions, 50)),
    )


@pytest.mark.parametrize(
    ("version", "inputs", "fields"),
    [
        (BATCHED, (X,), {}),
        (BATCHED, (X, WORDS), {"outputs": (RequestedOutput("y"),)}),
        (BATCHED, (WORDS, X), {"client_id": "me", "deadline_ns": 9, "received_ns": 4, "priority": 2, "timeout_us": 3}),
        (BATCHED, (IN_REGION,), {"outputs": (RequestedOutput("y", RegionSlice("r", 100, 16)),)}),
        (BATCHED, (X,), {"outputs": (RequestedOutput("y", RegionSlice("r", 100, 16)),)}),
        (BATCHED, (X,), {"outputs": (RequestedOutput("y", classification=1),), "parameters": {"p": 1}}),
        (BATCHED, (IN_REGION, WORDS), {}),
        (
            FREE,
            (
                Tensor("b", "BOOL", (3,), Inline(b"\1\0\1")),
                Tensor("x", "INT64", (1, 2), RegionSlice("r", 0, 16)),
            ),
            {"sequence_id": 7, "sequence_start": True},
        ),
    ],
)
def test_it_is_the_request_that_it_would_be_whole(
    submitter: Submitter,
    regions: RegionTable,
    version: ModelVersion,
    inputs: tuple[Tensor, ...],
    fields: dict[str, Any],
) -> None:
    submit = submit_of(*inputs, **fields)
    form = form_of(submit)
    for _ in range(3):
        formed, whole = checked(submit, form, submitter, version, regions)
        assert isinstance(whole, dict), whole
        assert formed == whole
    assert regions.find("r").leases == 0


def test_each_has_its_own_tensors(submitter: Submitter, regions: RegionTable) -> None:
    assert validate(submit_of(X), submitter, BATCHED, regions, 50).rows == 2  # so that such shapes are familiar
    form = form_of(submit_of(X))
    for tensor in (X, OTHER, X, OTHER):
        request = validate_formed(record_of(submit_of(tensor)), form, submitter, BATCHED, regions, 50)
        assert isinstance(tensor.place, Inline)
        assert request.small == validate(submit_of(tensor), submitter, BATCHED, regions, 50).small
        assert request.arrays["x"].tobytes() == tensor.place.content


@settings(deadline=None, max_examples=300)
@given(
    version=st.sampled_from([BATCHED, FREE]),
    inputs=st.lists(tensors, max_size=4),
    wanted=st.lists(outputs, max_size=3),
    contents=st.lists(st.one_of(st.binary(max_size=20), slices), max_size=4),
)
def test_an_enemy_gets_what_it_would_get_whole(
    submitter: Submitter,
    regions: RegionTable,
    version: ModelVersion,
    inputs: list[Tensor],
    wanted: list[RequestedOutput],
    contents: list[Content],
) -> None:
    """The same words too; and nothing stays leased, however often it comes."""
    submit = submit_of(*inputs, outputs=tuple(wanted), client_id="me")
    form = form_of(submit)
    for _ in range(3):
        formed, whole = checked(submit, form, submitter, version, regions)
        assert formed == whole
        other = FormSubmit(1, 0, tuple(contents), "me")
        formed = outcome(lambda other=other: validate_formed(other, form, submitter, version, regions, 50))
        whole = outcome(
            lambda other=other: validate(whole_request(form.submit, other), submitter, version, regions, 50)
        )
        assert formed == whole
    assert regions.find("r").leases == 0


@pytest.mark.parametrize("inputs", [(X,), (X, WORDS), (IN_REGION, WORDS)])
@pytest.mark.parametrize("known", [False, True])
def test_other_sizes_are_refused_with_the_words_for_them(
    submitter: Submitter, regions: RegionTable, inputs: tuple[Tensor, ...], known: bool
) -> None:
    submit = submit_of(*inputs, client_id="me")
    form = form_of(submit)
    if known:
        assert isinstance(checked(submit, form, submitter, BATCHED, regions)[0], dict)
    for content in (b"", b"1234567", bytes(15), bytes(17)):
        wrong = submit_of(
            *(
                Tensor(tensor.name, tensor.datatype, tensor.shape, Inline(content))
                if isinstance(tensor.place, Inline)
                else tensor
                for tensor in inputs
            ),
            client_id="me",
        )
        formed, whole = checked(wrong, form, submitter, BATCHED, regions)
        assert formed == whole
        assert whole[0] is InvalidArgument
    # It is none the worse for that.
    formed, whole = checked(submit, form, submitter, BATCHED, regions)
    assert isinstance(whole, dict)
    assert formed == whole


@pytest.mark.parametrize("inputs", [(X,), (IN_REGION,), (IN_REGION, WORDS), (X, WORDS)])
def test_another_number_of_tensors(submitter: Submitter, regions: RegionTable, inputs: tuple[Tensor, ...]) -> None:
    submit = submit_of(*inputs)
    form = form_of(submit)
    wanted = len(record_of(submit).contents)
    for _ in range(2):
        for given_ in {0, 1, 2, 3} - {wanted}:
            record = FormSubmit(1, 0, (bytes(16),) * given_)
            with pytest.raises(
                InvalidArgument, match=f"{given_} tensors came in a record whose form has {wanted} there"
            ):
                validate_formed(record, form, submitter, BATCHED, regions, 50)
        assert isinstance(checked(submit, form, submitter, BATCHED, regions)[0], dict)
    assert regions.find("r").leases == 0


# ------------------------------------------------------------------------------------------------------------ meanwhile


def load_of(max_batch_size: int, data_type: str = "TYPE_FP32") -> ModelVersion:
    return version_of(
        f"""max_batch_size: {max_batch_size} input {{ name: "x" data_type: {data_type} dims: [ 2 ] }}
        output {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }}"""
    )


def test_another_load_is_looked_at_again(submitter: Submitter, regions: RegionTable) -> None:
    """It has another input, then a smaller batch; and the first again, which is another load too."""
    submit = submit_of(X)
    form = form_of(submit)
    loads = [load_of(*each) for each in ((4, "TYPE_FP32"), (4, "TYPE_INT32"), (1, "TYPE_FP32"), (4, "TYPE_FP32"))]
    for number in (0, 1, 0, 2, 3):
        version = loads[number]
        for _ in range(2):
            formed, whole = checked(submit, form, submitter, version, regions)
            assert formed == whole
            assert isinstance(whole, dict) == (number in (0, 3))
            if isinstance(formed, dict):
                assert formed["version"] is version


def test_what_is_known_goes_with_the_load(submitter: Submitter, regions: RegionTable) -> None:
    """Plans of answers too: they say the version."""
    submit = submit_of(X)
    form = form_of(submit)
    for version in (load_of(4), load_of(4)):
        validate_formed(record_of(submit), form, submitter, version, regions, 50)
        assert form.familiar is version.familiar
        assert form.plans == {}
        form.plans[object()] = object()  # type: ignore[index, assignment]
        validate_formed(record_of(submit), form, submitter, version, regions, 50)
        assert len(form.plans) == 1


class Loaded:
    """What stands for a load in a test, and can be watched."""


def test_a_form_does_not_keep_a_model(submitter: Submitter, regions: RegionTable) -> None:
    form = form_of(submit_of(X))
    version: Any = load_of(4)
    version.loaded = Loaded()
    alive = weakref.ref(version.loaded)
    for _ in range(2):
        request = validate_formed(record_of(submit_of(X)), form, submitter, version, regions, 50)
    del version, request
    gc.collect()
    assert alive() is None
    assert "KnownForm for 'm'" in repr(form)


# -------------------------------------------------------------------------------------------------------------- regions


@pytest.fixture
def table(regions: RegionTable) -> Iterator[tuple[RegionTable, Any]]:
    """The same table, and a way to register ``s`` again with another size."""
    name = f"/tensord-test-known-form-{os.getpid()}"
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
    "submit",
    [
        submit_of(Tensor("x", "FP32", (2, 2), RegionSlice("s", 8, 16))),
        submit_of(Tensor("x", "FP32", (2, 2), RegionSlice("s", 8, 16)), WORDS),
        submit_of(X, outputs=(RequestedOutput("y", RegionSlice("s", 8, 16)),)),
    ],
    ids=["input", "input beside another", "output"],
)
def test_a_region_that_is_another_one_meanwhile(
    submitter: Submitter, table: tuple[RegionTable, Any], submit: Submit
) -> None:
    """1. registered; 2. gone; 3. there again but too small; 4. just large enough; 5. gone while it is in use."""
    regions, register = table
    form = form_of(submit)
    for byte_size, expected in (
        (64, None),
        (0, NotFound),
        (20, InvalidArgument),
        (24, None),
        (0, NotFound),
        (64, None),
    ):
        register(byte_size)
        for _ in range(2):
            formed, whole = checked(submit, form, submitter, BATCHED, regions)
            assert formed == whole
            assert whole[0] is expected if expected else isinstance(whole, dict)
    request = validate_formed(record_of(submit), form, submitter, BATCHED, regions, 50)
    (region,) = request.regions
    closed: list[bool] = []
    assert regions.unregister("system", "s") == 1
    regions.when_closed("s", lambda: closed.append(True))
    assert not closed
    assert checked(submit, form, submitter, BATCHED, regions)[0][0] is NotFound
    assert region.leases == 1
    request.release()
    regions.settle()
    assert closed == [True]


def test_a_form_that_was_first_refused(submitter: Submitter, table: tuple[RegionTable, Any]) -> None:
    """Nothing was learned from that."""
    regions, register = table
    register(0)
    submit = submit_of(Tensor("x", "FP32", (2, 2), RegionSlice("s", 0, 16)))
    form = form_of(submit)
    assert checked(submit, form, submitter, BATCHED, regions)[0][0] is NotFound
    assert form.familiar is None
    register(64)
    formed, whole = checked(submit, form, submitter, BATCHED, regions)
    assert isinstance(whole, dict)
    assert formed == whole
