"""Decodes an HTTP inference request: its JSON head is checked, its binary parts are located. Sans-I/O.

    body of a binary request   | JSON head (Inference-Header-Content-Length bytes) | part | part | ...
                               parts follow in the order of the inputs that have a binary_data_size, without padding

Violations of the protocol are refused here; what only the model's configuration can tell is checked by the worker. Checks come in
the order of a real Triton, because clients see the first one that fails: text, id, parameters, inputs one by one (name, datatype,
shape, one data source), outputs, left-over binary data.
Source: Triton docs/protocol: extension_binary_data.md, extension_shared_memory.md, extension_classification.md,
extension_parameters.md, extension_sequence.md, extension_schedule_policy.md; KServe V2 REST.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import msgspec

from tensord.daemon.http import json_cut, json_data, request_head
from tensord.daemon.http.decoded_request import BinaryPart, DecodedRequest, Source, Values
from tensord.daemon.http.json_steps import PIECE_BYTE_SIZE, JsonArray, JsonBase64, JsonStrings, is_flat
from tensord.daemon.http.json_values import UINT64_MAX, boolean, is_unsigned, refusal, text, unsigned
from tensord.daemon.http.request_head import (
    ABSENT,
    InputHead,
    OutputHead,
    RequestHead,
    UnusualText,
)
from tensord.daemon.submit.model_states import configured
from tensord.shm.common.scheduling import PARAMETERS, UNSCHEDULED, Kind, Scheduling, checked_text
from tensord.shm.control_records import ModelState
from tensord.shm.datatypes import (
    ELEMENT_SIZES,
    MAX_ELEMENTS,
    MAX_RANK,
    OPEN,
    check_shape,
    closed,
    element_count,
    elements,
    is_open,
    wire_name,
)
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import Parameter, RegionSlice, RequestedOutput

#: Shorter texts are read whole, longer ones only once their large data is cut out.
MAX_UNCUT = 4096
#: The slow way is for texts up to this size: about four milliseconds.
_MAX_EXACT = 256 << 10
_QUOTE = ord('"')
_INT64_MAX = (1 << 63) - 1
_BLANKS = b"[], \t\r\n"
#: How Triton's messages about raw requests begin; such a request has no id.
_RAW = "[request id: <id_unknown>] "
#: Longer texts are not counted: it would keep the loop for more than a millisecond or two.
_MAX_COUNTED = 1 << 20


def decode(head: bytes | memoryview, tail_size: int, model: str, apart: json_cut.Cut | None = None) -> DecodedRequest:
    """Decodes the JSON head of an inference request.

    Args:
      head: the whole JSON.
      tail_size: the number of bytes of all binary tensors that follow the JSON.
      model: the name of the model, for error messages.
      apart: the large data that was cut out of the JSON, or None.
    Raises InvalidArgument if the head is no JSON, not in the protocol's format, or contradicts itself.
    Raises Unsupported if a sequence id is a string and too long.
    """
    text = head if apart is None else apart.text
    try:
        return decode_head(request_head.quick(text), apart, tail_size, model)
    except UnusualText as error:
        return decode_exactly(text, apart, tail_size, model, error)


def decode_exactly(
    text: bytes | memoryview, apart: json_cut.Cut | None, tail_size: int, model: str, reason: UnusualText
) -> DecodedRequest:
    """Decodes the JSON head of a request as ``decode`` does, with the exact parser: the quick parser failed with ``reason``.

    ``text``: the JSON, without the large data that was cut out of it. Raises InvalidArgument if it is too long, too.
    """
    if len(text) > _MAX_EXACT:
        raise InvalidArgument(f"failed to parse the request JSON: {reason}") from reason
    exact = request_head.exact(text, apart.place if apart is not None else request_head.itself)
    return decode_head(exact, apart, tail_size, model)


def decode_head(request: RequestHead, apart: json_cut.Cut | None, tail_size: int, model: str) -> DecodedRequest:
    """Checks the parsed JSON of an inference request, and returns the decoded request. Raises as ``decode`` does.

    Raises UnusualText if an input has data that the fast JSON parser cannot convert. Parse the JSON with the exact parser then.
    """
    decoded = DecodedRequest(request.id, [], (), {}, False, {})
    if request.parameters:
        read_parameters(request.parameters, decoded)
    offset = 0
    for entry in request.inputs:
        if entry.datatype not in ELEMENT_SIZES:
            entry.datatype = wire_name(entry.datatype)
        source = _source(entry, offset, apart)
        if type(source) is BinaryPart:
            offset += source.byte_size
            if offset > tail_size:
                raise InvalidArgument(
                    f"unexpected size for input '{entry.name}', expecting {offset - tail_size} additional bytes "
                    f"for model '{model}'"
                )
        decoded.inputs.append((entry.name, entry.datatype, tuple(entry.shape), source))
    if request.outputs:
        decoded.outputs = tuple([_requested(entry, decoded) for entry in request.outputs])
    if offset != tail_size:
        raise InvalidArgument(f"unexpected additional input data for model '{model}'")
    return decoded


def _source(entry: InputHead, offset: int, apart: json_cut.Cut | None) -> Source:
    name, shape = entry.name, entry.shape
    said: Any = entry.parameters
    parameters = said if type(said) is dict else msgspec.to_builtins(said)
    if entry.datatype not in ELEMENT_SIZES:
        raise InvalidArgument(f"invalid datatype for input {name}")
    for dim in shape:
        if type(dim) is not int or dim < OPEN:
            raise refusal("unsigned-integer", "shape")
    if OPEN in shape:
        check_shape(shape, f"input '{name}' shape")
    elif len(shape) > MAX_RANK or 0 in shape or prod(shape) > MAX_ELEMENTS:
        element_count(shape, f"input '{name}' shape")  # which says what is wrong
    given = []
    if entry.data is not ABSENT:
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
        return BinaryPart(offset, unsigned(parameters["binary_data_size"], "binary_data_size"))
    if given[0] == "'shared_memory_region'":
        return _region(parameters)
    return read_values(entry, apart)


def read_values(entry: InputHead, apart: json_cut.Cut | None) -> Values:
    """Converts the JSON ``data`` of ``entry``, an input whose shape was checked, to the bytes of a tensor.

    If the data is large, the result is an object that converts it later, in steps.
    ``apart``: the large data that was cut out of the JSON, or None.
    Raises InvalidArgument if the data is wrong or does not fit the shape.
    Raises UnusualText if only the exact JSON parser can convert the data.
    """
    count = prod(entry.shape)
    number = apart.number_of(entry.data) if apart is not None else None
    if is_open(entry.shape):
        # What the data make of it; of binary tensors and regions the worker finds out.
        count = _count(entry, None if apart is None or number is None else apart.document[slice(*apart.spans[number])])
        entry.shape = closed(entry.shape, count, f"input '{entry.name}' shape")
    if apart is not None and number is not None:
        return _converted(apart, number, entry, count)
    if type(entry.data) is msgspec.Raw:
        text = memoryview(entry.data)
        if text.nbytes > _MAX_EXACT:
            raise InvalidArgument(
                f"Unable to parse 'data': input '{entry.name}' has {text.nbytes} bytes of text that is no flat array, "
                f"at most {_MAX_EXACT} are allowed"
            )
        return json_data.quick(entry.data, entry.datatype, count)
    return json_data.exact(entry.data, entry.datatype, list(entry.shape), count, entry.name)


def _count(entry: InputHead, text: memoryview | None) -> int:
    what = f"input '{entry.name}' shape"
    if text is None and type(entry.data) is not msgspec.Raw:
        return count_in_value(entry.data, entry.datatype, what)
    return count_in_text(memoryview(entry.data) if text is None else text, entry.datatype, what)


def _converted(apart: json_cut.Cut, number: int, entry: InputHead, count: int) -> Values:
    start, end = apart.spans[number]
    text, name, datatype, shape = apart.document[start:end], entry.name, entry.datatype, list(entry.shape)
    if text[0] == _QUOTE:
        if len(text) > PIECE_BYTE_SIZE:
            return JsonBase64(text, datatype, count)
        return json_data.exact(bytes(text[1:-1]).decode("ascii", "replace"), datatype, shape, count, name)
    if is_flat(text):
        if datatype != "BYTES":
            json_data.refuse_half_floats(datatype, count, name)
            raise json_data.of_wrong_kind(datatype)
        if len(text) > PIECE_BYTE_SIZE:
            return JsonStrings(text, name, count)
        try:
            return json_data.quick(msgspec.Raw(bytes(text)), datatype, count)
        except UnusualText:
            values = request_head.parse(bytes(text), lambda offset: start + offset)
            return json_data.exact(values, datatype, shape, count, name)
    array = JsonArray(text, start, name, datatype, shape, count)
    return array if end - start > PIECE_BYTE_SIZE else array.wire_bytes()


# -------------------------------------------------------------------------------------- requests without JSON


def decode_raw(state: ModelState, body: bytes | memoryview) -> DecodedRequest:
    """Decodes a raw request, whose whole body is the bytes of the model's only input.

    If one dimension of the input has a variable size, the size of the body determines this dimension. A BYTES input must have
    exactly one element, and the body is this element without a length prefix. If the model batches, the batch has one row.
    Every output is sent back as binary. ``state``: the state of the model version that the request names.
    Raises InvalidArgument if the number of inputs is not 1, if several dimensions vary, or if the body does not fit the shape.
    Source: Triton docs/protocol/extension_binary_data.md, "Raw Binary Request". Errors have the texts of a real Triton.
    """
    inputs = msgspec.json.decode(state.metadata)["inputs"]
    if len(inputs) != 1:
        raise InvalidArgument(
            f"{_RAW}Raw request must only have 1 input (found 1) to be deduced but got {len(inputs)} inputs in "
            f"'{state.name}' model configuration"
        )
    name, datatype, shape = inputs[0]["name"], inputs[0]["datatype"], list(inputs[0]["shape"])
    if configured(state).max_batch_size > 0:
        shape[0] = 1
    if shape.count(-1) > 1:
        raise InvalidArgument(
            f"{_RAW}The shape of the raw input '{name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    source: Source = BinaryPart(0, len(body))
    if datatype == "BYTES":
        if -1 in shape or element_count(shape) != 1:
            raise InvalidArgument(f"{_RAW}For BYTE datatype raw input '{name}', the model must have input shape [1]")
        source = len(body).to_bytes(4, "little") + body
    else:
        _fill(state.name, shape, ELEMENT_SIZES[datatype] or 1, len(body))
    return DecodedRequest("", [(name, datatype, tuple(shape), source)], (), {}, True, {})


def _fill(model: str, shape: list[Any], element_size: int, byte_size: int) -> None:
    known = element_count([dim for dim in shape if dim != -1]) * element_size
    count = 1
    if -1 in shape:
        count = shape[shape.index(-1)] = byte_size // known if known else 0
    if known * count != byte_size:
        raise InvalidArgument(
            f"{_RAW}input byte size mismatch for input 'raw_input' for model '{model}'. "
            f"Expected {known * count}, got {byte_size}"
        )


# -------------------------------------------------------------------------------------- how many values an open shape has


# Texts are not read for it: in an array of numbers, nested or not, there is a comma less than there are values; in one of strings
# there are two quotation marks to each. Of what is no such array the count may be anything: whoever converts it refuses it.


def count_in_text(text: bytes | memoryview, datatype: str, what: str) -> int:
    """Returns how many values a JSON array has, or how many elements of ``datatype`` a base64 string has.

    ``text``: the array or the string, as JSON. ``what``: the beginning of error messages.
    Raises InvalidArgument if the text is too long, or if the string is no base64 of whole elements.
    """
    if len(text) > _MAX_COUNTED:
        raise InvalidArgument(
            f"{what} has a dimension of -1, which is found from at most {_MAX_COUNTED} bytes of JSON, {len(text)} are given"
        )
    text = bytes(text)
    if text[:1] == b'"':
        try:
            return count_in_value(msgspec.json.decode(text, type=str), datatype, what)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise refusal("array", "data") from error
    if datatype == "BYTES":
        plain = text.replace(b"\\\\", b"")
        return (plain.count(b'"') - plain.count(b'\\"')) // 2
    return text.count(b",") + 1 if text.translate(None, _BLANKS) else 0


def count_in_value(value: Any, datatype: str, what: str) -> int:
    """Returns the number of elements of a tensor in JSON, which is a nested list or a base64 string.

    ``datatype``: the tensor's datatype, which only a string needs. ``what``: the beginning of error messages.
    Raises InvalidArgument if the string is no base64 of whole elements.
    """
    if isinstance(value, str):
        return elements(datatype, json_data.from_base64(value), what)
    left, count = [value], 0
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        else:
            count += 1
    return count


# -------------------------------------------------------------------------------------- outputs and regions


def _requested(entry: OutputHead, decoded: DecodedRequest) -> RequestedOutput:
    said: Any = entry.parameters
    parameters = said if type(said) is dict else msgspec.to_builtins(said)
    classification = parameters.get("classification", 0)
    if type(classification) is not int or not 0 <= classification <= UINT64_MAX:
        raise InvalidArgument(
            "Unable to set 'classification': attempt to access JSON non-unsigned-integer as unsigned-integer"
        )
    if "binary_data" in parameters:
        decoded.binary[entry.name] = boolean(parameters["binary_data"], "binary_data")
    if "shared_memory_region" not in parameters:
        return RequestedOutput(entry.name, None, classification)
    region = _region(parameters)
    if decoded.binary.get(entry.name):
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'binary_data'")
    if classification:
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
    return RequestedOutput(entry.name, region)


def _region(parameters: dict[str, Any]) -> RegionSlice:
    """Returns the name of a region, the offset and the byte size from ``parameters``, the parameters of an input or output."""
    region = text(parameters["shared_memory_region"], "shared_memory_region")
    offset = unsigned(parameters.get("shared_memory_offset", 0), "shared_memory_offset")
    byte_size = unsigned(parameters.get("shared_memory_byte_size", 0), "shared_memory_byte_size")
    if offset > _INT64_MAX:
        raise InvalidArgument(f"Invalid offset for shared memory region: '{region}'")
    if byte_size > UINT64_MAX - offset:
        raise InvalidArgument(
            f"Integer overflow detected: byte_size ({byte_size}) + offset ({offset}) exceeds maximum value ({UINT64_MAX}) "
            f"for region '{region}'"
        )
    if byte_size > _INT64_MAX:
        raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{region}'")
    return RegionSlice(region, offset, byte_size)


# -------------------------------------------------------------------------------------- single values and parameters


def read_parameters(given: dict[str, Any], decoded: DecodedRequest) -> None:
    """Decodes the parameters of a request, ``given``, and stores them in ``decoded``. Does not change ``given``.

    Raises InvalidArgument if a parameter has a wrong type or a reserved name.
    Raises Unsupported if a sequence id is a string and too long.
    """
    for key, value in given.items():
        if key in _SCHEDULING:
            field, read = _SCHEDULING[key]
            decoded.scheduling = decoded.scheduling._replace(**{field: read(value, key)})
        elif key == "binary_data_output":
            decoded.all_binary = boolean(value, key)
        else:
            decoded.parameters[key] = _parameter(key, value)


def part(given: dict[str, Any]) -> tuple[Scheduling, dict[str, Any]]:
    """Separates parameters that schedule a request, such as its priority, from the others, and returns both.

    A malformed parameter for scheduling is returned among the others, where ``read_parameters`` will refuse it.
    """
    if _SCHEDULING.keys().isdisjoint(given):
        return UNSCHEDULED, given
    own: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in given.items():
        if key in _SCHEDULING:
            field, read = _SCHEDULING[key]
            try:
                own[field] = read(value, key)
                continue
            except ServingError:
                pass
        others[key] = value
    return Scheduling(**own), others


def _parameter(key: str, value: Any) -> Parameter:
    if key.startswith("triton_"):
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    if type(value) is int:
        if -_INT64_MAX - 1 <= value <= _INT64_MAX:
            return value
        try:
            return float(value)
        except OverflowError as error:
            raise InvalidArgument(f"parameter '{key}' is out of the range of a double") from error
    if isinstance(value, bool | float | str):
        return value
    raise InvalidArgument(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _sequence_id(value: Any, key: str) -> int | str:
    return int(value) if is_unsigned(value) else checked_text(text(value, key), Kind.SEQUENCE_ID)


def _set_name(value: Any, key: str) -> str:
    return checked_text(text(value, key), Kind.SET_NAME)


_READERS: dict[Kind, Callable[[Any, str], Any]] = {
    Kind.NUMBER: unsigned,
    Kind.DURATION: unsigned,
    Kind.FLAG: boolean,
    Kind.TEXT: text,
    Kind.SEQUENCE_ID: _sequence_id,
    Kind.SET_NAME: _set_name,
}
#: Name of a parameter -> the field of Scheduling that it fills, and what reads it.
_SCHEDULING = {name: (row.field, _READERS[row.kind]) for name, row in PARAMETERS.items()}
