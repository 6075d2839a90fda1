"""An HTTP inference request as values: the JSON head decoded and checked, the binary parts located. Sans-I/O.

    body of a binary request   | JSON head (Inference-Header-Content-Length bytes) | part | part | ...
                               parts follow in the order of the inputs that have a binary_data_size, without padding

What belongs to the protocol is refused here; what only the model's configuration can tell is left to the worker.
Source: Triton docs/protocol/extension_binary_data.md, extension_shared_memory.md; KServe V2 REST.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from shm.arrays import DTYPES, byte_content
from shm.datatypes import ELEMENT_SIZES, element_count
from shm.errors import InvalidArgument, Unsupported
from shm.messages import Parameter, RegionSlice, RequestedOutput

_INT64 = (1 << 63) - 1
#: Nested deeper than any shape can be.
_MAX_DEPTH = 64
_EMPTY = msgspec.Raw(b"")


class InputHead(msgspec.Struct):
    """One entry of ``inputs``."""

    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw = _EMPTY
    parameters: dict[str, Any] = {}


class OutputHead(msgspec.Struct):
    """One entry of ``outputs``."""

    name: str
    parameters: dict[str, Any] = {}


class RequestHead(msgspec.Struct):
    """The JSON object. Unknown keys are ignored, as Triton does."""

    inputs: list[InputHead]
    id: str = ""
    outputs: list[OutputHead] = []
    parameters: dict[str, Any] = {}


@dataclass(slots=True)
class Part:
    """Where a binary tensor lies: an offset from the first binary part, in bytes."""

    offset: int
    byte_size: int


#: Where an input's bytes come from: the body, a region, or (as wire bytes) the JSON itself.
Source = Part | RegionSlice | bytes


@dataclass(slots=True)
class DecodedRequest:
    """Everything a request says, before its tensors have places."""

    id: str
    inputs: list[tuple[str, str, tuple[int, ...], Source]]
    outputs: tuple[RequestedOutput, ...]
    #: Names of outputs to send as binary; None: as ``all_binary`` says.
    binary: dict[str, bool]
    all_binary: bool
    parameters: dict[str, Parameter]
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False


_decoder = msgspec.json.Decoder(RequestHead)
_floats = msgspec.json.Decoder(list[float])
_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "BOOL": msgspec.json.Decoder(list[bool]),
    "BYTES": msgspec.json.Decoder(list[str]),
    "FP32": _floats,
    "FP64": _floats,
}
_integers = msgspec.json.Decoder(list[int])
_anything = msgspec.json.Decoder()


class Recognised:
    """Heads decoded before. A client that asks again and again sends the same head with other tensors behind it."""

    #: Longer heads hold data, or are rare.
    MAX_HEAD = 2048
    MAX_COUNT = 512

    def __init__(self) -> None:
        self._decoded: dict[tuple[bytes, int], DecodedRequest] = {}

    def decode(self, head: bytes | memoryview, tail_size: int) -> DecodedRequest:
        """As ``decode``; the result may be shared with other requests and must not be changed."""
        if len(head) > self.MAX_HEAD:
            return decode(head, tail_size)
        key = (bytes(head), tail_size)
        found = self._decoded.get(key)
        if found is None:
            found = decode(head, tail_size)
            if any(type(source) is bytes for _, _, _, source in found.inputs):
                return found  # with its data inside it will hardly come again
            if len(self._decoded) >= self.MAX_COUNT:
                self._decoded.clear()
            self._decoded[key] = found
        return found


def decode(head: bytes | memoryview, tail_size: int) -> DecodedRequest:
    """Decodes the head of a request whose binary parts have ``tail_size`` bytes together.

    Raises: InvalidArgument: not JSON, not of the protocol's form, or contradicting itself.  Unsupported: string ids too long.
    """
    request = _decode_head(head)
    decoded = DecodedRequest(request.id, [], (), {}, False, {})
    if request.parameters:
        _read_parameters(request.parameters, decoded)
    offset = 0
    for entry in request.inputs:
        source = _source(entry, offset)
        if type(source) is Part:
            offset += source.byte_size
            if offset > tail_size:
                raise InvalidArgument(
                    f"unexpected size for input '{entry.name}', expecting {offset - tail_size} additional bytes"
                )
        decoded.inputs.append((entry.name, entry.datatype, tuple(entry.shape), source))
    if request.outputs:
        decoded.outputs = tuple(_requested(entry, decoded) for entry in _unique(request.outputs))
    if offset != tail_size:
        raise InvalidArgument(
            f"unexpected additional input data: {tail_size} bytes follow the JSON, the inputs take {offset}"
        )
    return decoded


def _decode_head(head: bytes | memoryview) -> RequestHead:
    try:
        return _decoder.decode(head)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"failed to parse the request JSON: {error}") from error
    except RecursionError as error:
        raise InvalidArgument("failed to parse the request JSON: it is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument("failed to parse the request JSON: it is not UTF-8 text") from error
    except msgspec.DecodeError as error:
        # NaN and the infinities are no JSON, but Triton and its clients write them.
        if b"NaN" in bytes(head) or b"Inf" in bytes(head):
            return _decode_with_literals(bytes(head), error)
        raise InvalidArgument(f"failed to parse the request JSON: {error}") from error


def _decode_with_literals(head: bytes, first: msgspec.DecodeError) -> RequestHead:
    """The slow way for the few requests that spell NaN, Infinity or -Infinity."""
    try:
        value = json.loads(head)
        if isinstance(value, dict):
            for entry in value.get("inputs", ()):
                if isinstance(entry, dict) and "data" in entry:
                    # Kept as text for the typed step; repr-like dumps write the literals again.
                    entry["data"] = msgspec.Raw(json.dumps(entry["data"], ensure_ascii=False).encode())
        request = msgspec.convert(value, RequestHead)
        # json takes lone surrogates, which no record can carry; they show when the text is encoded.
        msgspec.json.encode(request)
        return request
    except (TypeError, ValueError, RecursionError, msgspec.ValidationError) as error:
        reason = error if isinstance(error, msgspec.ValidationError) else first
        raise InvalidArgument(f"failed to parse the request JSON: {reason}") from error


def _unique(outputs: Sequence[OutputHead]) -> list[OutputHead]:
    return list({entry.name: entry for entry in outputs}.values())


# ---------------------------------------------------------------------------------------------------------- parameters


def _read_parameters(given: dict[str, Any], decoded: DecodedRequest) -> None:
    for key, value in given.items():
        match key:
            case "binary_data_output":
                decoded.all_binary = _bool(key, value)
            case "sequence_start":
                decoded.sequence_start = _bool(key, value)
            case "sequence_end":
                decoded.sequence_end = _bool(key, value)
            case "sequence_id":
                decoded.sequence_id = _sequence_id(value)
            case "priority":
                decoded.priority = _unsigned(key, value)
            case "timeout":
                decoded.timeout_us = _unsigned(key, value)
            case _:
                decoded.parameters[key] = _parameter(key, value)


def _parameter(key: str, value: Any) -> Parameter:
    if key.startswith("triton_"):
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    if isinstance(value, int) and not isinstance(value, bool):
        if -_INT64 - 1 <= value <= _INT64:
            return value
        try:
            return float(value)
        except OverflowError as error:
            raise InvalidArgument(f"parameter '{key}' is out of the range of a double") from error
    if isinstance(value, bool | float | str):
        return value
    raise InvalidArgument(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _bool(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(f"parameter '{key}' has invalid type. It should be 'bool'.")
    return value


def _unsigned(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _INT64:
        raise InvalidArgument(f"parameter '{key}' should be an unsigned integer")
    return value


def _sequence_id(value: Any) -> int | str:
    if isinstance(value, str):
        if len(value.encode()) > 128:
            raise Unsupported("string correlation ID cannot be longer than 128 characters")
        return value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise InvalidArgument("parameter 'sequence_id' should be an unsigned integer or a string")
    return value


# -------------------------------------------------------------------------------------------------------------- inputs


def _source(entry: InputHead, offset: int) -> Source:
    """The one data source of an input."""
    name, parameters = entry.name, entry.parameters
    if entry.datatype not in ELEMENT_SIZES:
        raise InvalidArgument(f"invalid datatype for input {name}")
    count = element_count(entry.shape, f"input '{name}' shape")
    given = []
    if entry.data is not _EMPTY:
        given.append("'data'")
    if "binary_data_size" in parameters:
        given.append("'binary_data_size'")
    if "shared_memory_region" in parameters:
        given.append("'shared_memory_region'")
    if len(given) != 1:
        raise InvalidArgument(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            "'shared_memory_region' in 'parameters'. "
            + (f"But set {' '.join(given)}" if given else "But no field is set")
        )
    if given[0] == "'binary_data_size'":
        return Part(offset, _unsigned("binary_data_size", parameters["binary_data_size"]))
    if given[0] == "'data'":
        return _json_content(entry, count)
    return _region(parameters)


def _region(parameters: dict[str, Any]) -> RegionSlice:
    region = parameters["shared_memory_region"]
    if not isinstance(region, str):
        raise InvalidArgument("parameter 'shared_memory_region' should be a string")
    numbers = [parameters.get(key, 0) for key in ("shared_memory_offset", "shared_memory_byte_size")]
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool):
            raise InvalidArgument(
                "parameters 'shared_memory_offset' and 'shared_memory_byte_size' should be unsigned integers"
            )
        if not 0 <= number <= _INT64:
            raise InvalidArgument(
                f"Invalid offset + byte size for shared memory region: '{region}': {numbers[0]} + {numbers[1]}"
            )
    return RegionSlice(region, *numbers)


def _json_content(entry: InputHead, count: int) -> bytes:
    """The wire bytes of tensor data given as JSON numbers, booleans or strings, flat or nested."""
    datatype, name = entry.datatype, entry.name
    if datatype in ("FP16", "BF16"):
        raise InvalidArgument(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    values = _flat_values(entry)
    if len(values) != count:
        raise InvalidArgument(
            f"Unable to parse 'data': Shape does not match true shape of 'data' field: input '{name}' has {len(values)} values, "
            f"shape {entry.shape} needs {count}"
        )
    if datatype == "BYTES":
        elements = np.empty(count, np.object_)
        elements[:] = values
        return byte_content(elements)
    try:
        with np.errstate(over="ignore"):  # beyond FP32 is infinity, as everywhere
            return (
                np.array(values, np.float64 if datatype == "FP32" else DTYPES[datatype])
                .astype(DTYPES[datatype])
                .tobytes()
            )
    except OverflowError as error:
        raise InvalidArgument(
            f"Unable to parse 'data': a value of input '{name}' is out of the range of {datatype}"
        ) from error


def _flat_values(entry: InputHead) -> list[Any]:
    decoder = _DECODERS.get(entry.datatype, _integers)
    text = bytes(entry.data)
    nested = text[1:].lstrip()[:1] == b"["
    try:
        try:
            if not nested:
                flat: list[Any] = decoder.decode(text)
                return flat
            return _flattened(_anything.decode(text), decoder)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            # The literals again; whatever else is wrong was found when the head was decoded.
            return _flattened(json.loads(text), decoder)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidArgument(f"Unable to parse 'data' of input '{entry.name}' as {entry.datatype}: {error}") from error
    except RecursionError as error:
        raise InvalidArgument(f"Unable to parse 'data' of input '{entry.name}': it is nested too deeply") from error


def _flattened(value: Any, decoder: msgspec.json.Decoder[Any]) -> list[Any]:
    """Nesting is row-major order, so the leaves in order are the flat data."""
    for _ in range(_MAX_DEPTH):
        if not (isinstance(value, list) and value and isinstance(value[0], list)):
            break
        if not all(isinstance(item, list) for item in value):
            raise InvalidArgument("Unable to parse 'data': values and lists stand side by side")
        value = [item for inner in value for item in inner]
    flat: list[Any] = msgspec.convert(value, decoder.type)
    return flat


# ------------------------------------------------------------------------------------------------------------- outputs


def _requested(entry: OutputHead, decoded: DecodedRequest) -> RequestedOutput:
    parameters = entry.parameters
    if not parameters:
        return RequestedOutput(entry.name)
    if "binary_data" in parameters:
        decoded.binary[entry.name] = _bool("binary_data", parameters["binary_data"])
    classification = _unsigned("classification", parameters.get("classification", 0))
    if "shared_memory_region" not in parameters:
        return RequestedOutput(entry.name, None, classification)
    if decoded.binary.get(entry.name):
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'binary_data'")
    if classification:
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
    return RequestedOutput(entry.name, _region(parameters))


def decode_raw(metadata: bytes, config: bytes, byte_size: int) -> DecodedRequest:
    """A request whose whole body is the one input's bytes (Inference-Header-Content-Length: 0); all outputs come back binary.

    The shape is the model's, with at most one variable dimension, which the size tells; a batching model gets a batch of one.
    Raises: InvalidArgument: the model has not exactly one input of a fixed-size datatype, or no shape has that many bytes.
    """
    inputs = msgspec.json.decode(metadata)["inputs"]
    if len(inputs) != 1:
        raise InvalidArgument(f"a raw request needs a model with exactly one input, this one has {len(inputs)}")
    name, datatype, shape = inputs[0]["name"], inputs[0]["datatype"], list(inputs[0]["shape"])
    if msgspec.json.decode(config).get("max_batch_size", 0) > 0:
        shape[0] = 1
    element = ELEMENT_SIZES[datatype]
    if element is None or shape.count(-1) > 1:
        raise InvalidArgument(f"a raw request cannot tell the shape of input '{name}', {datatype}{shape}")
    known = element_count([dim for dim in shape if dim != -1]) * element
    if -1 in shape and known and byte_size % known == 0:
        shape[shape.index(-1)] = byte_size // known
    elif -1 in shape or known != byte_size:
        raise InvalidArgument(
            f"input byte size mismatch for input '{name}'. Expected {datatype}{shape}, got {byte_size} bytes"
        )
    return DecodedRequest("", [(name, datatype, tuple(shape), Part(0, byte_size))], (), {}, True, {})
