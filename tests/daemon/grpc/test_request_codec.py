"""ModelInferRequests, as protobuf writes them, into requests: tensors of every datatype either way, and what is refused."""

from __future__ import annotations

import struct
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from tensord.daemon.grpc.prepared import PreparedMessages, Understood
from tensord.daemon.grpc.request_codec import model_of
from tensord.daemon.grpc.request_fields import RefusedRequest
from tensord.daemon.grpc.walk import walk
from tensord.daemon.submit.model_states import ModelStates
from tensord.daemon.submit.placement import UnsentRequest
from tensord.daemon.submit.submitter import Submitter
from tensord.shm.arrays import DTYPES
from tensord.shm.control_records import ModelState
from tensord.shm.datatypes import ELEMENT_SIZES
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import PreparedRequest, PreparedTensor, RegionSlice
from tensord.shm.prepared import Numbers
from tests.daemon.grpc.requests import REQUESTS, TYPED, Infer, Parameter


def table() -> ModelStates:
    models = ModelStates()
    models.update(ModelState("m", 1, "READY", workers=(1,), metadata=b"{}"))
    return models


def tensor(datatype: str = "UINT8", shape: tuple[int, ...] = (2,), name: str = "x", **columns: Any) -> Any:
    entry = Infer.InferInputTensor(name=name, datatype=datatype, shape=shape)
    for column, values in columns.items():
        getattr(entry.contents, column).extend(values)
    return entry


def located(name: str = "x", **parameters: Any) -> Any:
    entry = tensor(name=name)
    for key, value in parameters.items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        entry.parameters[f"shared_memory_{key}"].CopyFrom(Parameter(**{kind: value}))
    return entry


def message(*inputs: Any, raw: tuple[bytes, ...] = (), **fields: Any) -> bytes:
    content: bytes = Infer(model_name="m", inputs=inputs, raw_input_contents=raw, **fields).SerializeToString()
    return content


class Numbering:
    """The part of a submitter that gives prepared requests their numbers."""

    def __init__(self) -> None:
        self.numbers: Numbers[PreparedRequest] = Numbers()


def reader(models: ModelStates | None = None) -> PreparedMessages:
    """Returns a reader that has read no message yet."""
    models = models or table()
    return forms_of(models)


def forms_of(models: ModelStates) -> PreparedMessages:
    return PreparedMessages(models, cast(Submitter, Numbering()))


def read(messages: PreparedMessages, content: bytes | memoryview) -> Understood:
    """Reads a message as a front does."""
    walked = walk(content, 0, len(content), 0)
    return messages.read(content, 0, len(content), walked, None if walked is None else messages[walked[0]])


def decoded(content: bytes) -> UnsentRequest:
    return request_of(read(reader(), content))


def request_of(understood: Understood) -> UnsentRequest:
    head = understood.head
    return UnsentRequest(
        head.prepared, head.with_raws(understood.contents), understood.client_id, understood.scheduling
    )


def refusal(content: bytes) -> ServingError:
    with pytest.raises(RefusedRequest) as caught:
        decoded(content)
    return caught.value.error


# ------------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("datatype", sorted(TYPED))
def test_typed_contents(datatype: str) -> None:
    column, values = TYPED[datatype]
    request = decoded(message(tensor(datatype, **{column: values})))
    assert request.prepared.inputs == (PreparedTensor("x", datatype, (2,)),)
    (content,) = request.contents
    if datatype == "BYTES":
        assert content == b"".join(struct.pack("<I", len(value)) + value for value in values)
    else:
        assert content == np.array(values, DTYPES[datatype]).tobytes()


@pytest.mark.parametrize("datatype", sorted(ELEMENT_SIZES))
def test_raw_contents_stay_where_they_are(datatype: str) -> None:
    size = ELEMENT_SIZES[datatype]
    raw = serialize_byte_tensor(np.array([b"a", b""], np.object_)).item() if size is None else bytes(range(2 * size))
    whole = memoryview(message(tensor(datatype), raw=(raw,)))
    request = decoded(whole)  # type: ignore[arg-type]
    (content,) = request.contents
    assert request.prepared.inputs[0].datatype == datatype
    assert isinstance(content, memoryview)
    assert (content, content.obj) == (raw, whole.obj)


@pytest.mark.parametrize("datatype", sorted(ELEMENT_SIZES))
@pytest.mark.parametrize("column", sorted({column for column, _ in TYPED.values()}))
def test_a_column_takes_its_datatypes_alone(datatype: str, column: str) -> None:
    values = next(values for name, values in TYPED.values() if name == column)
    if datatype in TYPED and TYPED[datatype][0] == column:
        return
    error = refusal(message(tensor(datatype, **{column: values})))
    assert isinstance(error, InvalidArgument)
    assert f"expected datatype '{datatype}'" in error.message


@pytest.mark.parametrize(
    ("datatype", "column", "value"),
    [
        ("INT8", "int_contents", 128),
        ("INT8", "int_contents", -129),
        ("INT16", "int_contents", 1 << 15),
        ("UINT8", "uint_contents", 256),
        ("UINT16", "uint_contents", 1 << 16),
    ],
)
def test_a_value_its_datatype_cannot_hold(datatype: str, column: str, value: int) -> None:
    error = refusal(message(tensor(datatype, **{column: [0, value]})))
    assert error.message == f"a value of input 'x' is out of the range of {datatype}"


def test_a_region() -> None:
    request = decoded(message(located(region="r", offset=8, byte_size=2)))
    assert request.contents == [RegionSlice("r", 8, 2)] == [request.prepared.inputs[0].region]


def both(entry: Any) -> Any:
    entry.contents.uint_contents.extend([1, 2])
    return entry


REFUSED: list[tuple[bytes, str]] = [
    (message(tensor(uint_contents=[1, 2]), raw=(b"ab",)), "contents field must not be specified when using raw_input"),
    (message(tensor(), tensor(uint_contents=[1], name="z"), raw=(b"ab",)), "contents field must not be specified"),
    (message(tensor(uint_contents=[1, 2], int_contents=[1])), "binary data was already supplied"),
    (message(both(located(region="r", byte_size=2))), "unexpected 'content' provided when using shared memory"),
    (message(tensor(), raw=(b"ab", b"c")), "2 raw_input_contents are given for model 'm', its inputs take 1"),
    (message(located(region="r", byte_size=2), raw=(b"ab",)), "1 raw_input_contents are given for model 'm'"),
    (message(tensor(), tensor(name="z"), raw=(b"ab",)), "unable to find data for input tensor 'z'"),
    (message(tensor()), "unable to find data for input tensor 'x'"),
    (message(tensor("FP8"), raw=(b"ab",)), "invalid datatype for input x"),
    (message(tensor(shape=(2, -1)), raw=(b"ab",)), "All input dimensions should be specified for input 'x'"),
    (message(tensor(shape=(1 << 62, 1 << 62)), raw=(b"ab",)), "input 'x' shape"),
    (message(located(region=5, byte_size=2)), "'shared_memory_region' parameter for tensor 'x', expected string_param"),
    (message(located(region="r", byte_size="2")), "'shared_memory_byte_size' parameter for tensor 'x', expected int64"),
    (message(located(region="r")), "'shared_memory_byte_size' must be specified"),
    (message(located(region="r", byte_size=2, offset=-1)), "Invalid offset for shared memory region: 'r'"),
    (message(located(region="r", byte_size=-2)), "Invalid offset [+] byte size for shared memory region: 'r'"),
    (message(tensor(), raw=(b"ab",))[:-1], "it is cut short"),
    (b"\x0a\xff", "it is cut short"),
    (b"\x0a\x02\xff\xff", "failed to parse the request message"),
]


@pytest.mark.parametrize(("content", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_what_is_refused(content: bytes, text: str) -> None:
    error = refusal(content)
    assert isinstance(error, InvalidArgument)
    assert text.replace("[+]", "+") in error.message


# ---------------------------------------------------------------------------------------------------------- properties


def test_the_model_of_a_refused_request() -> None:
    """Whatever else is wrong; who sends a name of a megabyte fills no log with it."""
    for name, said in (("m", "m"), ("", ""), ("n" * 1_000_000, "n" * 300)):
        message = service_pb2.ModelInferRequest(model_name=name, model_version="x", id="i")
        assert model_of(message.SerializeToString()) == said


@given(REQUESTS)
def test_any_request_is_a_request_or_refused(request_: Any) -> None:
    """Never another exception; and what is taken is what protobuf says it is."""
    content = request_.SerializeToString()
    try:
        request = decoded(content)
    except RefusedRequest as refused:
        assert isinstance(refused.error, ServingError)
        assert refused.error.message
        assert refused.client_id == request_.id
        return
    assert (request.prepared.model, request.id) == (request_.model_name, request_.id)
    assert [(each.name, each.datatype, list(each.shape)) for each in request.prepared.inputs] == [
        (entry.name, entry.datatype, list(entry.shape)) for entry in request_.inputs
    ]
    raws = [bytes(content) for content in request.contents if not isinstance(content, RegionSlice)]
    if request_.raw_input_contents:
        assert raws == list(request_.raw_input_contents)


@given(st.one_of(st.binary(max_size=200), st.tuples(REQUESTS, st.integers(0, 300), st.binary(max_size=4))))
def test_any_bytes_are_a_request_or_refused(given_: Any) -> None:
    """Garbage, and requests that were bent somewhere."""
    if isinstance(given_, bytes):
        content = given_
    else:
        request_, at, piece = given_
        whole = request_.SerializeToString()
        content = whole[:at] + piece + whole[at + len(piece) :]
    try:
        assert isinstance(decoded(content), UnsentRequest)
    except RefusedRequest as refused:
        assert isinstance(refused.error, ServingError)
