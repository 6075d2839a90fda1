"""An HTTP inference request as values: the JSON head decoded and checked, the binary parts located. Sans-I/O.

    body of a binary request   | JSON head (Inference-Header-Content-Length bytes) | part | part | ...
                               parts follow in the order of the inputs that have a binary_data_size, without padding

What belongs to the protocol is refused here; what only the model's configuration can tell is left to the worker. Checks
follow each other as a real Triton's do, because clients see the first one that fails: text, id, parameters, inputs one by one
(name, datatype, shape, one data source), outputs, left-over binary data.
Source: Triton docs/protocol/extension_binary_data.md, extension_shared_memory.md; KServe V2 REST.
"""

from __future__ import annotations

from daemon.http import json_data, request_head
from daemon.http.decoded_request import DecodedRequest, Part, Source
from daemon.http.json_values import refusal, unsigned
from daemon.http.request_head import ABSENT, ExactInput, ExactRequest, InputHead, Malformed, RequestHead
from daemon.http.request_parameters import read_parameters
from daemon.http.requested_outputs import read_outputs, read_region
from shm.datatypes import ELEMENT_SIZES, element_count
from shm.errors import InvalidArgument


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
    try:
        return _decoded(request_head.quick(head), tail_size, model)
    except Malformed:
        return _decoded(request_head.exact(head), tail_size, model)


def _decoded(request: RequestHead | ExactRequest, tail_size: int, model: str) -> DecodedRequest:
    """Raises also Malformed: data that the quick way does not understand."""
    decoded = DecodedRequest(request.id, [], (), {}, False, {})
    if request.parameters:
        read_parameters(request.parameters, decoded)
    offset = 0
    for entry in request.inputs:
        source = _source(entry, offset)
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


def _source(entry: InputHead | ExactInput, offset: int) -> Source:
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
    if isinstance(entry, InputHead):
        return json_data.quick(entry.data, entry.datatype, count)
    return json_data.exact(entry.data, entry.datatype, shape, count, name)
