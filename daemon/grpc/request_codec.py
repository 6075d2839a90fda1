"""ModelInferRequest as values: the head decoded by protobuf and checked, the raw tensors located. Sans-I/O.

    | model_name, id, inputs, outputs, ... (fields 1 to 6) | raw_input_contents (field 7) | raw_input_contents | ...

On the wire the raw tensors are the last fields, so a message is cut into its head and the places of its tensors without touching
their bytes. A client that asks again and again sends the same head but for its ``id``: what it meant last time holds.
What belongs to the protocol is refused here; what only the model's configuration can tell is left to the worker.
Source: grpc_service.proto; texts as recorded against a real Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from daemon.inference import Content, InferenceRequest
from daemon.model_table import ModelTable, parse_version
from shm.arrays import DTYPES, byte_content
from shm.datatypes import ELEMENT_SIZES, element_count
from shm.errors import InvalidArgument, ServingError, Unsupported
from shm.messages import Parameter, RegionSlice, RequestedOutput

_INT64 = (1 << 63) - 1
#: Tag bytes of the fields 1 to 7, all length-delimited.
_ID, _RAW = 0x1A, 0x3A
_TAGS = frozenset((0x0A, 0x12, _ID, 0x22, 0x2A, 0x32, _RAW))

#: Datatype of a contents field, and the datatypes that may come in it.
_CONTENTS = {
    "bool_contents": ("BOOL", ("BOOL",)),
    "int_contents": ("INT32", ("INT8", "INT16", "INT32")),
    "int64_contents": ("INT64", ("INT64",)),
    "uint_contents": ("UINT32", ("UINT8", "UINT16", "UINT32")),
    "uint64_contents": ("UINT64", ("UINT64",)),
    "fp32_contents": ("FP32", ("FP32",)),
    "fp64_contents": ("FP64", ("FP64",)),
    "bytes_contents": ("BYTES", ("BYTES",)),
}


@dataclass(slots=True)
class DecodedHead:
    """What a request says beside its raw tensors and its id. Shared between requests: never changed."""

    model: str
    version: int
    #: Name, datatype, shape, and content where it is no raw tensor.
    inputs: list[tuple[str, str, tuple[int, ...], Content | None]] = field(default_factory=list)
    #: How many raw tensors belong to it.
    raw_count: int = 0
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: dict[str, Parameter] = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    #: The client wants a last, empty response where the model's last one does not say that it is.
    empty_final: bool = False


class RefusedRequest(Exception):
    """A request that cannot be decoded: the error, and the id where it could be read."""

    def __init__(self, error: ServingError, client_id: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.client_id = client_id


class Recognised:
    """Heads decoded before, by their bytes."""

    #: Longer heads hold data, or are rare.
    MAX_HEAD = 2048
    MAX_COUNT = 512

    def __init__(self, table: ModelTable) -> None:
        self._table = table
        self._decoded: dict[tuple[bytes, bool], DecodedHead] = {}

    def decode(self, message: bytes | memoryview) -> tuple[DecodedHead, InferenceRequest, bool]:
        """A message as a request, and whether its model answers any number of times. Raises RefusedRequest."""
        head, client_id, raws = split(message)
        try:
            text = client_id.decode()
        except UnicodeDecodeError:
            raise RefusedRequest(InvalidArgument("the request id is not UTF-8 text"), "") from None
        key = (head, bool(raws))
        try:
            decoded = self._decoded.get(key) or self._decode(key)
            state = self._table.find(decoded.model, decoded.version)
            decoupled = not state.stateless and is_decoupled(state.config)
            return decoded, _request(decoded, text, message, raws), decoupled
        except ServingError as error:
            raise RefusedRequest(error, text) from None

    def _decode(self, key: tuple[bytes, bool]) -> DecodedHead:
        decoded = decode_head(key[0], key[1], self._table)
        if len(key[0]) <= self.MAX_HEAD:
            if len(self._decoded) >= self.MAX_COUNT:
                self._decoded.clear()
            self._decoded[key] = decoded
        return decoded


def is_decoupled(config: bytes) -> bool:
    """Whether a model with this configuration (JSON) answers any number of times."""
    policy = msgspec.json.decode(config).get("model_transaction_policy") if config else None
    return bool(policy and policy.get("decoupled"))


def split(message: bytes | memoryview) -> tuple[bytes, bytes, list[tuple[int, int]]]:
    """The head without the id, the id, and where the raw tensors lie: (begin, end) each. Raises RefusedRequest: malformed."""
    at, end = 0, len(message)
    raws: list[tuple[int, int]] = []
    pieces: list[bytes] = []
    kept = 0
    client_id = b""
    try:
        while at < end:
            start = at
            tag = message[at]
            size = message[at + 1]
            at += 2
            if tag not in _TAGS:
                at = _skipped(message, start)
                continue
            if size > 127:
                size, at = _varint(message, at - 1)
            if at + size > end:
                raise IndexError
            if tag == _RAW:
                raws.append((at, at + size))
            elif tag == _ID:
                client_id = bytes(message[at : at + size])
            if tag in (_RAW, _ID):
                if kept < start:
                    pieces.append(bytes(message[kept:start]))
                kept = at + size
            at += size
    except IndexError:
        raise RefusedRequest(InvalidArgument("failed to parse the request message: it is cut short"), "") from None
    if at > end:
        raise RefusedRequest(InvalidArgument("failed to parse the request message: it is cut short"), "")
    if kept < end:
        pieces.append(bytes(message[kept:]))
    return (pieces[0] if len(pieces) == 1 else b"".join(pieces)), client_id, raws


def _varint(message: bytes | memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


def _skipped(message: bytes | memoryview, at: int) -> int:
    """Where the field after this one begins; protobuf ignores fields it does not know."""
    tag, at = _varint(message, at)
    match tag & 7:
        case 0:
            return _varint(message, at)[1]
        case 1:
            return at + 8
        case 2:
            size, at = _varint(message, at)
            return at + size
        case 5:
            return at + 4
    raise IndexError


# ---------------------------------------------------------------------------------------------------------------- head


def decode_head(head: bytes, has_raw: bool, table: ModelTable) -> DecodedHead:
    """Everything but the raw tensors. ``has_raw``: tensors came as raw_input_contents, so none may come typed.

    Raises: NotFound, InvalidArgument: no such model or version.  InvalidArgument: not of the protocol's form.
    """
    try:
        request = service_pb2.ModelInferRequest.FromString(head)
    except DecodeError:
        raise InvalidArgument("failed to parse the request message") from None
    model = request.model_name
    decoded = DecodedHead(model, read_version(model, request.model_version))
    table.find(model, decoded.version)
    for key, value in request.parameters.items():
        _read_parameter(key, value, decoded)
    for entry in request.inputs:
        shape = tuple(entry.shape)
        if any(size < 0 for size in shape):
            shown = ",".join(map(str, shape))
            raise InvalidArgument(
                f"All input dimensions should be specified for input '{entry.name}' for model '{model}', got [{shown}]"
            )
        content = _content(entry, shape, has_raw, model)
        decoded.raw_count += content is None
        decoded.inputs.append((entry.name, entry.datatype, shape, content))
    unique = {entry.name: entry for entry in request.outputs}
    decoded.outputs = tuple(_requested(entry) for entry in unique.values())
    return decoded


def read_version(model: str, text: str) -> int:
    """A version as text; "" is the newest. Raises InvalidArgument: not a positive number.  NotFound: 0."""
    if not text:
        return 0
    digits = text[1:] if text[0] == "-" else text
    if not (digits.isascii() and digits.isdigit()):
        raise InvalidArgument(
            f"failed to get model version from specified version string '{text[:64]}' (details: stol), "
            "version should be an integral value > 0"
        )
    if text[0] == "-":
        raise InvalidArgument(
            f"invalid model version specified '{text[:64]}' , version should be an integral value > 0"
        )
    return parse_version(model, text)


def _request(
    decoded: DecodedHead, client_id: str, message: bytes | memoryview, raws: list[tuple[int, int]]
) -> InferenceRequest:
    if len(raws) > decoded.raw_count:
        raise InvalidArgument(
            f"{len(raws)} raw_input_contents are given for model '{decoded.model}', its inputs take {decoded.raw_count}"
        )
    inputs: list[tuple[str, str, tuple[int, ...], Content]] = []
    number = 0
    for name, datatype, shape, content in decoded.inputs:
        if content is None:
            if number == len(raws):
                raise InvalidArgument(
                    f"unable to find data for input tensor '{name}' for model '{decoded.model}' in request."
                )
            begin, end = raws[number]
            number += 1
            content = message[begin:end]
        inputs.append((name, datatype, shape, content))
    return InferenceRequest(
        decoded.model,
        decoded.version,
        inputs,
        decoded.outputs,
        decoded.parameters,
        client_id,
        decoded.priority,
        decoded.timeout_us,
        decoded.sequence_id,
        decoded.sequence_start,
        decoded.sequence_end,
    )


# ---------------------------------------------------------------------------------------------------------- parameters


def _read_parameter(key: str, value: Any, decoded: DecodedHead) -> None:
    kind = value.WhichOneof("parameter_choice")
    match key:
        case "sequence_id":
            decoded.sequence_id = _sequence_id(value, kind)
        case "sequence_start":
            decoded.sequence_start = _bool(key, value, kind)
        case "sequence_end":
            decoded.sequence_end = _bool(key, value, kind)
        case "priority":
            if kind not in ("int64_param", "uint64_param"):
                raise InvalidArgument(
                    "invalid value type for 'priority' parameter, expected int64_param or uint64_param."
                )
            decoded.priority = getattr(value, kind)
            if not 0 <= decoded.priority <= _INT64:
                raise InvalidArgument("invalid value for 'priority', expected value >= 0.")
        case "timeout":
            if kind != "int64_param":
                raise InvalidArgument("invalid value type for 'timeout' parameter, expected int64_param.")
            if value.int64_param < 0:
                raise InvalidArgument("invalid value for 'timeout', expected value >= 0.")
            decoded.timeout_us = value.int64_param
        case "triton_enable_empty_final_response":
            decoded.empty_final = _bool(key, value, kind)
        case _ if key.startswith("triton_"):
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                "starting with 'triton_' are allowed: triton_enable_empty_final_response"
            )
        case _:
            if kind not in ("int64_param", "bool_param", "string_param", "double_param"):
                raise InvalidArgument(
                    f"invalid value type for '{key}' parameter, expected int64_param, bool_param, or string_param."
                )
            decoded.parameters[key] = getattr(value, kind)


def _bool(key: str, value: Any, kind: str | None) -> bool:
    if kind != "bool_param":
        raise InvalidArgument(f"invalid value type for '{key}' parameter, expected bool_param.")
    return bool(value.bool_param)


def _sequence_id(value: Any, kind: str | None) -> int | str:
    if kind == "string_param":
        text: str = value.string_param
        if len(text.encode()) > 128:
            raise Unsupported("string correlation ID cannot be longer than 128 characters")
        return text
    if kind != "int64_param":
        raise InvalidArgument("invalid value type for 'sequence_id' parameter, expected int64_param or string_param.")
    number: int = value.int64_param
    if number < 0:
        raise InvalidArgument("invalid value for 'sequence_id', expected value >= 0.")
    return number


# ------------------------------------------------------------------------------------------------------------- tensors


def _content(entry: Any, shape: tuple[int, ...], has_raw: bool, model: str) -> Content | None:
    """The content of an input that is no raw tensor; None: it is one."""
    name, datatype = entry.name, entry.datatype
    if "shared_memory_region" in entry.parameters:
        if entry.HasField("contents"):
            raise InvalidArgument(
                f"unexpected 'content' provided when using shared memory for input tensor '{name}' for model '{model}'"
            )
        return _region(name, entry.parameters)
    if datatype not in ELEMENT_SIZES:
        raise InvalidArgument(f"invalid datatype for input {name}")
    count = element_count(shape, f"input '{name}' shape")
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
    kind, takes = _CONTENTS[filled[0]]
    if datatype not in takes:
        raise InvalidArgument(f"{what} of type '{kind}', expected datatype '{datatype}'")
    return _typed_bytes(name, datatype, getattr(entry.contents, filled[0]), count, model)


def _typed_bytes(name: str, datatype: str, values: Any, count: int, model: str) -> bytes:
    """Typed contents as wire bytes. Raises InvalidArgument: a value does not fit its datatype, or the count the shape."""
    if datatype == "BYTES":
        elements = np.empty(len(values), np.object_)
        elements[:] = list(values)
        return byte_content(elements)
    try:
        return np.array(values, DTYPES[datatype]).tobytes()
    except OverflowError:
        raise InvalidArgument(f"a value of input '{name}' is out of the range of {datatype}") from None


def _region(name: str, parameters: Any) -> RegionSlice:
    numbers = []
    region = parameters["shared_memory_region"]
    if region.WhichOneof("parameter_choice") != "string_param":
        raise InvalidArgument(
            f"invalid value type for 'shared_memory_region' parameter for tensor '{name}', expected string_param."
        )
    for key in ("shared_memory_offset", "shared_memory_byte_size"):
        if key not in parameters:
            numbers.append(0)
            continue
        value = parameters[key]
        if value.WhichOneof("parameter_choice") != "int64_param":
            raise InvalidArgument(
                f"invalid value type for '{key}' parameter for tensor '{name}', expected int64_param."
            )
        numbers.append(value.int64_param)
    if "shared_memory_byte_size" not in parameters:
        raise InvalidArgument(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter "
            f"for tensor '{name}'"
        )
    if numbers[0] < 0:
        raise InvalidArgument(f"Invalid offset for shared memory region: '{region.string_param}'")
    if numbers[1] < 0:
        raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{region.string_param}'")
    return RegionSlice(region.string_param, *numbers)


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
