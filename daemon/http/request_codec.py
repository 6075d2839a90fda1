"""An HTTP inference request as values: the JSON head decoded and checked, the binary parts located. Sans-I/O.

    body of a binary request   | JSON head (Inference-Header-Content-Length bytes) | part | part | ...
                               parts follow in the order of the inputs that have a binary_data_size, without padding

What belongs to the protocol is refused here; what only the model's configuration can tell is left to the worker. Checks
follow each other as a real Triton's do, because clients see the first one that fails: text, id, parameters, inputs one by one
(name, datatype, shape, one data source), outputs, left-over binary data.
Source: Triton docs/protocol/extension_binary_data.md, extension_shared_memory.md; KServe V2 REST.
"""

from __future__ import annotations

import msgspec

from daemon.http import json_array, json_data, request_head
from daemon.http.decoded_request import DecodedRequest, Part, Source
from daemon.http.json_array import PIECE_BYTE_SIZE, JsonArray
from daemon.http.json_strings import JsonStrings, is_flat
from daemon.http.json_values import refusal, unsigned
from daemon.http.request_head import ABSENT, ExactInput, ExactRequest, InputHead, Malformed, RequestHead
from daemon.http.request_parameters import read_parameters
from daemon.http.requested_outputs import read_outputs, read_region
from shm.datatypes import ELEMENT_SIZES, element_count
from shm.errors import InvalidArgument

#: Shorter texts are read whole.
_MAX_UNCUT = 4096
#: The slow way is for texts up to this size: about four milliseconds.
_MAX_EXACT = 256 << 10
#: All but the data of tensors.
_MAX_TEXT = 1 << 20


class Recognised:
    """Heads decoded before. A client that asks again and again sends the same head with other tensors behind it."""

    #: Longer heads hold data, or are rare.
    MAX_HEAD = 2048
    MAX_COUNT = 512

    def __init__(self) -> None:
        self._decoded: dict[tuple[bytes, int], DecodedRequest] = {}

    def decode(self, head: bytes | memoryview, tail_size: int, model: str) -> DecodedRequest:
        """As ``decode``; the result may be shared with other requests and must not be changed."""
        if len(head) > self.MAX_HEAD:
            return decode(head, tail_size, model)
        key = (bytes(head), tail_size)
        found = self._decoded.get(key)
        if found is None:
            found = decode(head, tail_size, model)
            if any(type(source) is bytes for _, _, _, source in found.inputs):
                return found  # with its data inside it will hardly come again
            if len(self._decoded) >= self.MAX_COUNT:
                self._decoded.clear()
            self._decoded[key] = found
        return found


def decode(head: bytes | memoryview, tail_size: int, model: str) -> DecodedRequest:
    """Decodes the head of a request to ``model`` whose binary parts have ``tail_size`` bytes together.

    Raises: InvalidArgument: not JSON, not of the protocol's form, or contradicting itself.  Unsupported: string ids too long.
    """
    arrays = json_array.cut(head) if len(head) > _MAX_UNCUT else None
    text = head if arrays is None else arrays.text
    if len(text) > _MAX_TEXT:
        _refuse_long_text(text)
    try:
        return _decoded(request_head.quick(text), arrays, tail_size, model)
    except Malformed as error:
        if len(text) > _MAX_EXACT:
            raise InvalidArgument(f"failed to parse the request JSON: {error}") from error
        exact = request_head.exact(text, arrays.place if arrays is not None else request_head.itself)
        return _decoded(exact, arrays, tail_size, model)


class _DataHead(msgspec.Struct):
    data: msgspec.Raw = ABSENT


class _Outline(msgspec.Struct):
    inputs: list[_DataHead] = []


_outline = msgspec.json.Decoder(_Outline)


def _refuse_long_text(text: bytes | memoryview) -> None:
    """Raises InvalidArgument: so much of it is no tensor data that reading it would take more memory than the text."""
    try:
        inputs = _outline.decode(text).inputs
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"failed to parse the request JSON: {error}") from error
    other = _solid_size(text) - sum(_solid_size(entry.data) for entry in inputs)
    if other > _MAX_TEXT:
        raise InvalidArgument(
            f"the request JSON has {other} bytes besides the data of its tensors, at most {_MAX_TEXT} are allowed"
        )


def _solid_size(text: bytes | memoryview | msgspec.Raw) -> int:
    return len(bytes(text).translate(None, b" \t\r\n"))


def _decoded(
    request: RequestHead | ExactRequest, arrays: json_array.Cut | None, tail_size: int, model: str
) -> DecodedRequest:
    """Raises also Malformed: data that the quick way does not understand."""
    decoded = DecodedRequest(request.id, [], (), {}, False, {})
    if request.parameters:
        read_parameters(request.parameters, decoded)
    offset = 0
    for entry in request.inputs:
        source = _source(entry, offset, arrays)
        if type(source) is Part:
            offset += source.byte_size
            if offset > tail_size:
                raise InvalidArgument(
                    f"unexpected size for input '{entry.name}', expecting {offset - tail_size} additional bytes "
                    f"for model '{model}'"
                )
        decoded.inputs.append((entry.name, entry.datatype, tuple(entry.shape), source))
    if request.outputs:
        read_outputs(request.outputs, decoded)
    if offset != tail_size:
        raise InvalidArgument(f"unexpected additional input data for model '{model}'")
    return decoded


def _source(entry: InputHead | ExactInput, offset: int, arrays: json_array.Cut | None) -> Source:
    """The one data source of an input."""
    name, parameters, shape = entry.name, entry.parameters, entry.shape
    if entry.datatype not in ELEMENT_SIZES:
        raise InvalidArgument(f"invalid datatype for input {name}")
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise refusal("shape", "non-unsigned-integer", "unsigned-integer")
    count = element_count(shape, f"input '{name}' shape")
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
        return Part(offset, unsigned("binary_data_size", parameters["binary_data_size"]))
    if given[0] == "'shared_memory_region'":
        return read_region(parameters)
    number = arrays.array_of(entry.data) if arrays is not None else None
    if arrays is not None and number is not None:
        start, end = arrays.spans[number]
        array = JsonArray(arrays.document[start:end], start, name, entry.datatype, shape, count)
        return array if end - start > PIECE_BYTE_SIZE else array.wire_bytes()
    if isinstance(entry, InputHead):
        text = memoryview(entry.data)
        if text.nbytes > PIECE_BYTE_SIZE:
            if entry.datatype == "BYTES" and is_flat(text):
                return JsonStrings(text, name, count)
            if text.nbytes > _MAX_EXACT and bytes(text[:1]) == b"[":
                raise InvalidArgument(
                    f"Unable to parse 'data': input '{name}' has {text.nbytes} bytes of text that is no flat array, "
                    f"at most {_MAX_EXACT} are allowed"
                )
        return json_data.quick(entry.data, entry.datatype, count)
    return json_data.exact(entry.data, entry.datatype, shape, count, name)
