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

from tensord.daemon.http import json_cut, json_data, open_data, request_head
from tensord.daemon.http.decoded_request import DecodedRequest, Part, Source, Values
from tensord.daemon.http.json_array import PIECE_BYTE_SIZE, JsonArray
from tensord.daemon.http.json_base64 import JsonBase64
from tensord.daemon.http.json_strings import JsonStrings, is_flat
from tensord.daemon.http.json_values import refusal, unsigned
from tensord.daemon.http.request_head import ABSENT, ExactInput, ExactRequest, InputHead, Malformed, RequestHead
from tensord.daemon.http.request_parameters import read_parameters
from tensord.daemon.http.requested_outputs import read_outputs, read_region
from tensord.shm.datatypes import ELEMENT_SIZES, element_count, wire_name
from tensord.shm.errors import InvalidArgument
from tensord.shm.open_shape import OPEN, check, closed, is_open

#: Shorter texts are read whole, longer ones only once their large data is cut out.
MAX_UNCUT = 4096
#: The slow way is for texts up to this size: about four milliseconds.
_MAX_EXACT = 256 << 10
_QUOTE = ord('"')


def decode(head: bytes | memoryview, tail_size: int, model: str, apart: json_cut.Cut | None = None) -> DecodedRequest:
    """Decodes the head of a request to ``model`` whose binary parts have ``tail_size`` bytes together.

    ``apart``: what ``json_cut`` found, of a head longer than MAX_UNCUT.
    Raises: InvalidArgument: not JSON, not of the protocol's form, or contradicting itself.  Unsupported: string ids too long.
    """
    text = head if apart is None else apart.text
    try:
        return decode_head(request_head.quick(text), apart, tail_size, model)
    except Malformed as error:
        return decode_exactly(text, apart, tail_size, model, error)


def decode_exactly(
    text: bytes | memoryview, apart: json_cut.Cut | None, tail_size: int, model: str, reason: Malformed
) -> DecodedRequest:
    """Decodes a text that the quick way does not understand (``reason``), in Triton's words. Raises as ``decode``."""
    if len(text) > _MAX_EXACT:
        raise InvalidArgument(f"failed to parse the request JSON: {reason}") from reason
    exact = request_head.exact(text, apart.place if apart is not None else request_head.itself)
    return decode_head(exact, apart, tail_size, model)


def decode_head(
    request: RequestHead | ExactRequest, apart: json_cut.Cut | None, tail_size: int, model: str
) -> DecodedRequest:
    """Decodes a head whose JSON was read. Raises as ``decode``, and Malformed: data that the quick way does not understand."""
    decoded = DecodedRequest(request.id, [], (), {}, False, {})
    if request.parameters:
        read_parameters(request.parameters, decoded)
    offset = 0
    for entry in request.inputs:
        entry.datatype = wire_name(entry.datatype)
        source = _source(entry, offset, apart)
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


def _source(entry: InputHead | ExactInput, offset: int, apart: json_cut.Cut | None) -> Source:
    """The one data source of an input."""
    name, parameters, shape = entry.name, request_head.given(entry.parameters), entry.shape
    if entry.datatype not in ELEMENT_SIZES:
        raise InvalidArgument(f"invalid datatype for input {name}")
    for dim in shape:
        if type(dim) is not int or dim < OPEN:
            raise refusal("shape", "non-unsigned-integer", "unsigned-integer")
    count = 0
    if is_open(shape):
        check(shape, f"input '{name}' shape")
    else:
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
    return read_values(entry, count, apart)


def read_values(entry: InputHead | ExactInput, count: int, apart: json_cut.Cut | None) -> Values:
    """The ``data`` of an input with so many elements. Raises InvalidArgument, Malformed."""
    number = apart.number_of(entry.data) if apart is not None else None
    if is_open(entry.shape):
        # What the data make of it; of binary tensors and regions the worker finds out.
        count = _count(entry, None if apart is None or number is None else apart.document[slice(*apart.spans[number])])
        entry.shape = closed(entry.shape, count, f"input '{entry.name}' shape")
    if apart is not None and number is not None:
        return _converted(apart, number, entry, count)
    if isinstance(entry, InputHead):
        text = memoryview(entry.data)
        if text.nbytes > _MAX_EXACT:
            raise InvalidArgument(
                f"Unable to parse 'data': input '{entry.name}' has {text.nbytes} bytes of text that is no flat array, "
                f"at most {_MAX_EXACT} are allowed"
            )
        return json_data.quick(entry.data, entry.datatype, count)
    return json_data.exact(entry.data, entry.datatype, list(entry.shape), count, entry.name)


def _count(entry: InputHead | ExactInput, text: memoryview | None) -> int:
    """How many values the data of an input have. ``text``: where they were cut out."""
    what = f"input '{entry.name}' shape"
    if text is None and not isinstance(entry, InputHead):
        return open_data.of_value(entry.data, entry.datatype, what)
    return open_data.of_text(memoryview(entry.data) if text is None else text, entry.datatype, what)


def _converted(apart: json_cut.Cut, number: int, entry: InputHead | ExactInput, count: int) -> Values:
    """The data that was cut out: now, or what converts it later, in steps."""
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
        except Malformed:
            values = request_head.parse(bytes(text), lambda offset: start + offset)
            return json_data.exact(values, datatype, shape, count, name)
    array = JsonArray(text, start, name, datatype, shape, count)
    return array if end - start > PIECE_BYTE_SIZE else array.wire_bytes()
