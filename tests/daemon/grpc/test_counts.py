"""Tests how often anything may stand in a request message: the bound of each field that repeats, and of what nobody knows."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from tensord.daemon.front.entries import MAX_ENTRIES
from tensord.daemon.grpc.counts import MAX_DIMS, MAX_INNER, MAX_NUMBERS, MAX_TEXT, MAX_VALUES, check
from tensord.shm.errors import InvalidArgument
from tests.daemon.grpc.counted_messages import REPEATED, SERVICE, Repeated

Infer = service_pb2.ModelInferRequest
Load = service_pb2.RepositoryModelLoadRequest


def most(repeated: Repeated) -> int:
    leaf = repeated.path[-1]
    if leaf.name == "shape" and repeated.packed:
        return MAX_DIMS
    if leaf.name.endswith("_contents") and len(repeated.path) > 1:
        return MAX_NUMBERS if repeated.packed else MAX_VALUES
    return MAX_ENTRIES if len(repeated.path) == 1 else MAX_INNER


@pytest.mark.parametrize("repeated", REPEATED, ids=str)
def test_each_field_that_repeats_has_a_bound(repeated: Repeated) -> None:
    if repeated.grows:
        check(repeated.message(1 << 20), repeated.descriptor)
        return
    bound = most(repeated)
    check(repeated.message(bound), repeated.descriptor)
    with pytest.raises(InvalidArgument, match=rf"more than {bound} .*, at most {bound} are taken"):
        check(repeated.message(bound + 1), repeated.descriptor)


def test_there_are_such_fields() -> None:
    names = {str(repeated) for repeated in REPEATED}
    assert {
        "ModelInfer:parameters",
        "ModelInfer:inputs.contents.bytes_contents",
        "TraceSetting:settings.value.value",
    } <= names
    assert {"ModelInfer:inputs.parameters", "LogSettings:settings", "RepositoryModelLoad:parameters"} <= names


@pytest.mark.parametrize("method", list(SERVICE.methods), ids=lambda method: method.name)
@pytest.mark.parametrize(
    "field", [b"\xf8\x07\x00", b"\xfa\x07\x00", b"\xfb\x07\xfc\x07"], ids=["number", "bytes", "group"]
)
def test_fields_that_nobody_knows_have_a_bound(method: Any, field: bytes) -> None:
    each = 2 if field[0] == 0xFB else 1
    check(field * (MAX_ENTRIES // each), method.input_type)
    with pytest.raises(InvalidArgument, match=f"more than {MAX_ENTRIES} unknown fields are given"):
        check(field * (MAX_ENTRIES + 1), method.input_type)


def test_a_field_that_does_not_repeat_has_one_too() -> None:
    with pytest.raises(InvalidArgument, match="more than 1024 id are given"):
        check(b"\x1a\x00" * 1025, Infer.DESCRIPTOR)


@pytest.mark.parametrize(
    "message",
    [
        Infer(model_name="m" * MAX_TEXT),
        Infer(inputs=[Infer.InferInputTensor(name="m" * MAX_TEXT)]),
        service_pb2.ModelMetadataRequest(name="m" * MAX_TEXT),
        Load(model_name="m", parameters={"config": service_pb2.ModelRepositoryParameter(string_param=" " * MAX_TEXT)}),
    ],
)
def test_text_has_a_bound(message: Any) -> None:
    with pytest.raises(InvalidArgument, match="bytes besides its tensors, at most 1048576 are allowed"):
        check(message.SerializeToString(), message.DESCRIPTOR)


@pytest.mark.parametrize(
    "message",
    [
        Infer(inputs=[Infer.InferInputTensor(contents={"bytes_contents": [b"a" * (4 << 20)]})]),
        Infer(inputs=[Infer.InferInputTensor(contents={"fp32_contents": [1.0] * (1 << 20)})]),
        Load(parameters={"file:1/a": service_pb2.ModelRepositoryParameter(bytes_param=bytes(4 << 20))}),
    ],
)
def test_data_has_none_here(message: Any) -> None:
    check(message.SerializeToString(), message.DESCRIPTOR)


def test_negative_numbers_are_counted_once_each() -> None:
    """They take ten bytes."""
    contents = service_pb2.InferTensorContents(int64_contents=[-1] * MAX_NUMBERS)
    check(Infer(inputs=[{"contents": contents}]).SerializeToString(), Infer.DESCRIPTOR)
    contents.int64_contents.append(-1)
    with pytest.raises(InvalidArgument, match="numbers in typed_contents"):
        check(Infer(inputs=[{"contents": contents}]).SerializeToString(), Infer.DESCRIPTOR)


@pytest.mark.parametrize("end", [b"\x0a\xff\xff\xff\x07ab", b"\x0f", b"\x22\x80", b"\x08" + b"\x80" * 11])
def test_what_is_no_message_is_left_to_protobuf(end: bytes) -> None:
    message = b"\x0a\x01a" * (MAX_ENTRIES - 1) + end
    check(message, Infer.DESCRIPTOR)
    with pytest.raises(DecodeError):
        Infer.FromString(message)
