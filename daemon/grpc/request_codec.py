"""Decodes and checks the head of a ModelInferRequest: all fields except its id and its raw tensors. Sans-I/O.

Requests that break the protocol are refused here; faults that only the model's configuration shows are left to the worker.
Source: grpc_service.proto; the texts of errors are those of a real Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from tensord.daemon.grpc import counts, packed_numbers
from tensord.daemon.grpc.walk import fields
from tensord.daemon.submit.model_states import ModelStates, malformed_version, parse_version
from tensord.daemon.submit.placement import InputContent
from tensord.protocol import grpc_service_pb2
from tensord.shm.arrays import DTYPES, encoded
from tensord.shm.common.datatypes import DATATYPES
from tensord.shm.common.scheduling import PARAMETERS, UNSCHEDULED, Kind, Scheduling, checked_text
from tensord.shm.control_records import ModelState
from tensord.shm.datatypes import ELEMENT_SIZES, MAX_ELEMENTS, MAX_RANK, element_count, wire_name
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import (
    Parameter,
    PreparedRequest,
    PreparedTensor,
    RegionSlice,
    RequestedOutput,
)

_NOTHING = PreparedRequest("")
#: Bytes of a model's name in logs and traces of a refused request.
_MAX_NAME = 300
#: Tag byte of the field ``model_name``.
_MODEL_NAME = 0x0A
#: A contents field -> the datatype of its numbers.
_CONTENTS = {each.contents: name for name, each in DATATYPES.items() if each.contents}


@dataclass(slots=True)
class DecodedHead:
    """Holds all fields of a decoded ModelInferRequest except ``id`` and ``raw_input_contents``.

    The object never changes, because requests share it.
    """

    model: str
    version: int
    #: The constant part of requests with this head: all but id, scheduling and contents.
    prepared: PreparedRequest = _NOTHING
    #: The content of each input; None: it is a raw tensor.
    contents: list[InputContent | None] = field(default_factory=list)
    #: How many raw tensors belong to it.
    raw_count: int = 0
    parameters: dict[str, Parameter] = field(default_factory=dict)
    scheduling: Scheduling = UNSCHEDULED
    #: A parameter says when it is to be run, be it what would hold without it.
    schedules: bool = False
    #: The client wants a last, empty response where the model's last one does not say that it is.
    empty_final: bool = False
    #: All tensors are raw, or in regions: then it says nothing that belongs to one request alone.
    is_raw: bool = True

    def with_raws(self, raws: Sequence[InputContent]) -> list[InputContent]:
        """Returns the content of each input. An input without content in the head gets the next of ``raws``.

        ``raws``: the tensors of the message's ``raw_input_contents``. There must be ``self.raw_count`` of them.
        """
        rest = iter(raws)
        return [next(rest) if content is None else content for content in self.contents]

    def miscounted(self, count: int) -> InvalidArgument:
        """Returns the error for a message whose number of ``raw_input_contents``, ``count``, is wrong."""
        if count > self.raw_count:
            return InvalidArgument(
                f"{count} raw_input_contents are given for model '{self.model}', its inputs take {self.raw_count}"
            )
        raws = [
            tensor.name for tensor, content in zip(self.prepared.inputs, self.contents, strict=True) if content is None
        ]
        return InvalidArgument(
            f"unable to find data for input tensor '{raws[count]}' for model '{self.model}' in request."
        )


def decode_head(head: bytes, has_raw: bool, table: ModelStates) -> tuple[DecodedHead, ModelState]:
    """Decodes the head of an inference request. Returns it and the state of the model version, which serves or is being loaded.

    ``head``: an encoded ModelInferRequest from which the caller has removed ``id`` and ``raw_input_contents``.
    ``has_raw``: whether the caller has removed any ``raw_input_contents``. If so, no input may have ``contents``.
    Raises InvalidArgument if ``head`` is invalid, and Unsupported if a sequence id in it is too long.
    Raises Unavailable if the version neither serves nor is being loaded now, but the daemon expects it to serve later.
    Raises NotFound if the model or the version is unknown, or if the daemon does not expect the version to serve.
    """
    if len(head) > counts.UNCOUNTED:
        counts.check(head, grpc_service_pb2.ModelInferRequest.DESCRIPTOR)
    try:
        request = grpc_service_pb2.ModelInferRequest.FromString(head)
    except DecodeError:
        raise InvalidArgument("failed to parse the request message") from None
    model, version = request.model_name, request.model_version
    decoded = DecodedHead(model, read_version(model, version) if version else 0)
    state = table.expect(model, decoded.version)
    for key, value in request.parameters.items():
        _read_parameter(key, value, decoded)
    inputs: list[PreparedTensor] = []
    for entry in request.inputs:
        name, datatype, shape = entry.name, entry.datatype, tuple(entry.shape)
        if datatype not in ELEMENT_SIZES:
            datatype = wire_name(datatype)
        if shape and min(shape) < 0:
            shown = ",".join(map(str, shape))
            raise InvalidArgument(
                f"All input dimensions should be specified for input '{name}' for model '{model}', got [{shown}]"
            )
        if len(shape) > MAX_RANK or 0 in shape or prod(shape) > MAX_ELEMENTS:
            element_count(shape, f"input '{name}' shape")  # which says what is wrong
        content = region = None
        if entry.parameters or entry.HasField("contents") or datatype not in ELEMENT_SIZES:
            content = _content(entry, datatype, has_raw, model)
        if content is None:
            decoded.raw_count += 1
        elif isinstance(content, RegionSlice):
            region = content
        else:
            decoded.is_raw = False
        inputs.append(PreparedTensor(name, datatype, shape, region))
        decoded.contents.append(content)
    outputs = [_requested(entry) if entry.parameters else RequestedOutput(entry.name) for entry in request.outputs]
    decoded.prepared = PreparedRequest(model, decoded.version, tuple(inputs), tuple(outputs), decoded.parameters)
    return decoded, state


def model_of(head: bytes) -> str:
    """Returns the first 300 bytes of the model name in ``head``, an encoded ModelInferRequest, or "" if it has no name."""
    name = b""
    for tag, _, begin, size in fields(head, len(head)):
        if tag == _MODEL_NAME:
            name = head[begin : begin + min(size, _MAX_NAME)]
    return name.decode(errors="replace")


def read_version(model: str, text: str) -> int:
    """Parses a model version. Returns 0 for the newest version if ``text`` is "".

    Raises NotFound if ``text`` is "0". Raises InvalidArgument if ``text`` is negative or no integer.
    """
    if not text:
        return 0
    digits = text[1:] if text[0] == "-" else text
    if not (digits.isascii() and digits.isdigit()):
        raise malformed_version(text)
    if text[0] == "-":
        raise InvalidArgument(
            f"invalid model version specified '{text[:64]}' , version should be an integral value > 0"
        )
    return parse_version(model, text)


# ------------------------------------------------------------------------------------------------- inputs and outputs


def _content(entry: Any, datatype: str, has_raw: bool, model: str) -> InputContent | None:
    name = entry.name
    if "shared_memory_region" in entry.parameters:
        if entry.HasField("contents"):
            raise InvalidArgument(
                f"unexpected 'content' provided when using shared memory for input tensor '{name}' for model '{model}'"
            )
        return _region(name, entry.parameters)
    if datatype not in ELEMENT_SIZES:
        raise InvalidArgument(f"invalid datatype for input {name}")
    if not entry.HasField("contents"):
        return None
    if has_raw:
        raise InvalidArgument(
            f"contents field must not be specified when using raw_input_contents for '{name}' for model '{model}'"
        )
    filled = [column.name for column, _ in entry.contents.ListFields()]
    if not filled:
        return None
    what = f"unexpected explicit tensor data for input tensor '{name}' for model '{model}'"
    if len(filled) > 1:
        raise InvalidArgument(f"{what}, binary data was already supplied.")
    kind = _CONTENTS[filled[0]]
    if DATATYPES[datatype].contents != filled[0]:
        raise InvalidArgument(f"{what} of type '{kind}', expected datatype '{datatype}'")
    return _typed_bytes(name, datatype, kind, entry.contents)


def _typed_bytes(name: str, datatype: str, kind: str, contents: Any) -> bytes:
    """Converts ``contents``, an InferTensorContents with values of datatype ``kind``, to the bytes of a ``datatype`` tensor.

    Raises InvalidArgument if a value is out of the range of ``datatype``. ``name``: the input's name, for that error.
    """
    if datatype == "BYTES":
        return encoded(list(contents.bytes_contents))
    numbers, dtype = packed_numbers.of_contents(contents, DTYPES[kind]), DTYPES[datatype]
    if numbers.dtype != dtype:
        limits = np.iinfo(dtype)
        if len(numbers) and not (limits.min <= numbers.min() and numbers.max() <= limits.max):
            raise InvalidArgument(f"a value of input '{name}' is out of the range of {datatype}")
        numbers = numbers.astype(dtype)
    return numbers.tobytes()


def _region(name: str, parameters: Any) -> RegionSlice:
    """Reads the slice of a region from ``parameters``, the gRPC parameters of the input or output ``name``."""

    def read(key: str, choice: str) -> Any:
        return _value(f"'{key}' parameter for tensor '{name}'", parameters[key], choice) if key in parameters else 0

    region = read("shared_memory_region", "string_param")
    offset, byte_size = read("shared_memory_offset", "int64_param"), read("shared_memory_byte_size", "int64_param")
    if "shared_memory_byte_size" not in parameters:
        raise InvalidArgument(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter "
            f"for tensor '{name}'"
        )
    if offset < 0:
        raise InvalidArgument(f"Invalid offset for shared memory region: '{region}'")
    if byte_size < 0:
        raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{region}'")
    return RegionSlice(region, offset, byte_size)


def _requested(entry: Any) -> RequestedOutput:
    parameters = entry.parameters
    classification = 0
    if "classification" in parameters:
        value = parameters["classification"]
        if value.WhichOneof("parameter_choice") != "int64_param":
            raise InvalidArgument("invalid value type for 'classification' parameter, expected int64_param")
        classification = value.int64_param
        if classification <= 0:
            raise InvalidArgument("invalid value for 'classification' parameter, expected >= 0")
    if "shared_memory_region" not in parameters:
        return RequestedOutput(entry.name, None, classification)
    if classification:
        raise InvalidArgument("output can't set both 'shared_memory_region' and 'classification'")
    return RequestedOutput(entry.name, _region(entry.name, parameters))


# ---------------------------------------------------------------------------------------------------------- parameters


def decode_scheduling(parameters: bytes) -> Scheduling | None:
    """Decodes the scheduling parameters of a gRPC request, such as the priority.

    ``parameters``: an encoded ModelInferRequest that has only the field ``parameters``.
    Returns None if the message cannot be decoded, or if any parameter is invalid or is no scheduling parameter.
    """
    try:
        given = grpc_service_pb2.ModelInferRequest.FromString(parameters).parameters
        if PARAMETERS.keys() >= given.keys():
            decoded = DecodedHead("", 0)
            for key, value in given.items():
                _read_parameter(key, value, decoded)
            return decoded.scheduling
    except (DecodeError, ServingError):
        pass
    return None


def _read_parameter(key: str, value: Any, decoded: DecodedHead) -> None:
    if (row := PARAMETERS.get(key)) is not None:
        decoded.schedules = True
        decoded.scheduling = decoded.scheduling._replace(**{row.field: _scheduling(key, value, row.kind)})
    elif key == "triton_enable_empty_final_response":
        decoded.empty_final = _value(f"'{key}' parameter", value, "bool_param")
    elif key.startswith("triton_"):
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
            "starting with 'triton_' are allowed: triton_enable_empty_final_response"
        )
    else:
        choice = value.WhichOneof("parameter_choice")
        if choice not in ("int64_param", "bool_param", "string_param", "double_param"):
            raise InvalidArgument(
                f"invalid value type for '{key}' parameter, expected int64_param, bool_param, or string_param."
            )
        decoded.parameters[key] = getattr(value, choice)


def _value(what: str, value: Any, *choices: str) -> Any:
    choice = value.WhichOneof("parameter_choice")
    if choice not in choices:
        *others, last = choices
        expected = f"{', '.join(others)} or {last}" if others else last
        raise InvalidArgument(f"invalid value type for {what}, expected {expected}.")
    return getattr(value, choice)


_CHOICES = {
    Kind.NUMBER: ("int64_param", "uint64_param"),
    Kind.DURATION: ("int64_param",),
    Kind.FLAG: ("bool_param",),
    Kind.TEXT: ("string_param",),
    Kind.SEQUENCE_ID: ("int64_param", "uint64_param", "string_param"),
    Kind.SET_NAME: ("string_param",),
}


def _scheduling(key: str, value: Any, kind: Kind) -> Any:
    given = _value(f"'{key}' parameter", value, *_CHOICES[kind])
    if isinstance(given, str):
        return checked_text(given, kind)
    if given < 0:
        raise InvalidArgument(f"invalid value for '{key}', expected value >= 0.")
    return given
