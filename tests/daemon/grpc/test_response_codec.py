"""Answers written by hand, read by protobuf."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from tensord.daemon.grpc import response_codec
from tensord.daemon.grpc.response_codec import AnswerLayout
from tensord.shm.datatypes import ELEMENT_SIZES
from tensord.shm.messages import Parameter, PreparedAnswer, RegionSlice, Slice
from tests.records import Tensor, WholeAnswer, own_contents

ARENA = bytes(range(256)) * 300
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SHAPES = st.lists(st.integers(0, (1 << 63) - 1), max_size=4).map(tuple)
PLACES = st.one_of(
    st.binary(max_size=200),
    st.builds(Slice, st.just(0), st.integers(0, 500), st.integers(0, 70_000)),
    st.just(RegionSlice("r", 0, 5)),
)
PARAMETERS: st.SearchStrategy[dict[str, Parameter]] = st.dictionaries(
    TEXT, st.one_of(st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False), TEXT), max_size=4
)


def view(place: Slice) -> memoryview:
    return memoryview(ARENA)[place.offset : place.offset + place.byte_size]


def content(tensor: Tensor) -> bytes:
    match tensor.place:
        case bytes():
            return tensor.place
        case Slice():
            return bytes(view(tensor.place))
    return b""


def values(parameters: Any) -> dict[str, Any]:
    return {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in parameters.items()}


@given(
    TEXT,
    st.integers(1, (1 << 63) - 1),
    TEXT,
    st.lists(st.builds(Tensor, TEXT, st.sampled_from(sorted(ELEMENT_SIZES)), SHAPES, PLACES), max_size=4),
    PARAMETERS,
    st.sampled_from([None, False, True]),
)
def test_protobuf_reads_what_was_written(
    model: str,
    version: int,
    client_id: str,
    outputs: list[Tensor],
    parameters: dict[str, Parameter],
    final: bool | None,
) -> None:
    completion = WholeAnswer(1, version=version, outputs=tuple(outputs), parameters=parameters)
    layout = AnswerLayout(completion.prepared, model, final)
    if client_id:
        layout.pieces(b"another id", completion.contents, view)
    parts = layout.pieces(client_id.encode(), completion.contents, view)
    answer = service_pb2.ModelInferResponse.FromString(b"".join(parts))
    assert (answer.model_name, answer.model_version, answer.id) == (model, str(version), client_id)
    assert [(o.name, o.datatype, tuple(o.shape)) for o in answer.outputs] == [
        (o.name, o.datatype, o.shape) for o in outputs
    ]
    assert list(answer.raw_output_contents) == [content(tensor) for tensor in outputs]
    said = {} if final is None else {"triton_final_response": final}
    assert values(answer.parameters) == {**parameters, **said}
    streamed = service_pb2.ModelStreamInferResponse.FromString(b"".join(response_codec.streamed(parts)))
    assert (streamed.error_message, streamed.infer_response) == ("", answer)


def test_a_slice_is_not_copied() -> None:
    outputs = (Tensor("y", "UINT8", (70_000,), Slice(0, 3, 70_000)),)
    prepared = WholeAnswer(1, version=1, outputs=outputs).prepared
    parts = AnswerLayout(prepared, "m").pieces(b"", own_contents(outputs), view)
    (slice_,) = (part for part in parts if isinstance(part, memoryview))
    assert slice_.obj is ARENA


@pytest.mark.parametrize(("value", "choice"), [(True, "bool"), (-1, "int64"), (0.5, "double"), ("a", "string")])
def test_a_parameter_keeps_its_type(value: Parameter, choice: str) -> None:
    parts = AnswerLayout(PreparedAnswer(1, parameters={"p": value}), "m").pieces(b"", (), view)
    found = service_pb2.ModelInferResponse.FromString(b"".join(parts)).parameters["p"]
    assert found.WhichOneof("parameter_choice") == f"{choice}_param"


@given(TEXT, TEXT, TEXT, st.sampled_from([None, False, True]))
def test_an_error_of_a_stream(message: str, client_id: str, model: str, final: bool | None) -> None:
    content = response_codec.streamed_error(message, client_id, model, final)
    answer = service_pb2.ModelStreamInferResponse.FromString(content)
    inner = answer.infer_response
    assert (answer.error_message, inner.id, inner.model_name) == (message, client_id, model)
    assert values(inner.parameters) == ({} if final is None else {"triton_final_response": final})


def test_an_empty_last_answer() -> None:
    answer = service_pb2.ModelStreamInferResponse.FromString(response_codec.empty_final("m", "a"))
    inner = answer.infer_response
    assert (inner.model_name, inner.model_version, inner.id, len(inner.outputs)) == ("m", "", "a", 0)
    assert values(inner.parameters) == {"triton_final_response": True}
