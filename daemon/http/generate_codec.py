"""Converts the JSON object of a generate request to an inference request, and joins its responses to one answer. Sans-I/O.

    request   {"text_input": "a", "temperature": 0.5, "parameters": {...}}
    answer    {"id": .., "model_name": .., "model_version": .., "text_output": "b"}

A key of the request is an input if the model has an input of that name, and else a parameter. The object ``parameters`` may
hold more inputs and parameters. In the answer, an output of one element is that element; any other output is a flat list.
Source: Triton docs/protocol/extension_generate.md; the texts of errors are those of a real Triton 2.51.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tensord.daemon.http import json_data, request_head
from tensord.daemon.http.control_fields import members
from tensord.daemon.http.decoded_request import DecodedRequest
from tensord.daemon.http.json_text import View
from tensord.daemon.http.json_values import text
from tensord.daemon.http.request_codec import read_parameters
from tensord.shm.control_records import ModelState
from tensord.shm.datatypes import element_count
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import Content, Parameter, PreparedAnswer, PreparedTensor, RegionSlice, Slice, placed

#: Shorter texts are read whatever they hold.
_MAX_UNCOUNTED = 256 << 10
#: The most marks in longer texts: reading what is between them takes some tens of milliseconds, on the loop.
_MAX_MARKS = 1 << 18


def decode(body: bytes, metadata: bytes) -> DecodedRequest:
    """Decodes the body of a generate request to an inference request.

    ``metadata``: the model's metadata as JSON, with the names of the inputs and their shapes, including the batch dimension.
    Raises InvalidArgument if the body is no JSON object, has too many values, or has a wrong value for an input or parameter.
    Raises Unsupported if a sequence id is a string and too long.
    """
    if b"\0" in body:
        end = body.index(b"\0")
        raise InvalidArgument(
            f"failed to parse the request JSON buffer: The document root must not be followed by other values. at {end}"
        )
    if len(body) > _MAX_UNCOUNTED:
        # Of a text without these there are few values, however long they are.
        marks = len(body) - len(body.translate(None, b",:[]{}"))
        if marks > _MAX_MARKS:
            raise InvalidArgument(
                f"the request JSON has {marks} commas, colons and brackets, at most {_MAX_MARKS} are allowed; "
                "send large tensors with infer"
            )
    fields = members(request_head.parse(body))
    inputs = {entry["name"]: entry for entry in msgspec.json.decode(metadata)["inputs"]}
    decoded = DecodedRequest(text(fields.pop("id", ""), "id"), [], (), {}, False, {})
    for key, value in fields.items():
        if key == "parameters" and key not in inputs:
            try:
                for inner, inner_value in members(value).items():
                    _read(inner, inner_value, inputs, decoded)
            except InvalidArgument as error:
                raise InvalidArgument(f"Converting keyword: 'parameters': {error.message}") from error
        else:
            _read(key, value, inputs, decoded)
    return decoded


def _read(key: str, value: Any, inputs: dict[str, dict[str, Any]], decoded: DecodedRequest) -> None:
    entry = inputs.get(key)
    if entry is None:
        read_parameters({key: value}, decoded)
        return
    values = value if isinstance(value, list) else [value]
    shape = _shape(key, values, entry["shape"])
    count = element_count(shape, f"input '{key}' shape")
    content = json_data.exact(values, entry["datatype"], shape, count, key)
    decoded.inputs.append((key, entry["datatype"], tuple(shape), content))


def _shape(name: str, values: list[Any], wanted: list[int]) -> list[int]:
    shape = _nesting(values, len(wanted)) if any(isinstance(value, list) for value in values) else None
    if shape is None:
        shape = [1 if dim == -1 else dim for dim in wanted]
        if -1 in wanted:
            known = element_count(shape)
            last = len(wanted) - 1 - wanted[::-1].index(-1)
            shape[last] = len(values) // known if known else 1
        fits = element_count(shape) == len(values)
    else:
        fits = len(shape) == len(wanted) and all(w in (-1, dim) for dim, w in zip(shape, wanted, strict=True))
    if not fits:
        raise InvalidArgument(f"The schema can not convert input '{name}' to tensor with proper shape")
    return shape


def _nesting(values: Any, max_rank: int) -> list[int]:
    lengths: list[int] = []
    while isinstance(values, list) and len(lengths) <= max_rank:
        lengths.append(len(values))
        values = values[0] if values else None
    return lengths


class JoinedAnswers:
    """Joins all responses to a generate request into one answer.

    Each output is concatenated along its first axis; outputs without axes become a list. ``max_byte_size``: the most bytes of
    all outputs together.
    """

    def __init__(self, state: ModelState, max_byte_size: int) -> None:
        self._state = state
        self._max_byte_size = max_byte_size
        self._byte_size = 0
        self._parameters: dict[str, Parameter] = {}
        outputs = msgspec.json.decode(state.metadata)["outputs"]
        #: Name of an output -> its datatype, its shape but for the first axis, and the sizes and bytes of its parts.
        self._outputs: dict[str, tuple[str, list[int], list[int], list[bytes]]] = {
            each["name"]: (each["datatype"], each["shape"][1:], [], []) for each in outputs
        }

    def add(self, prepared: PreparedAnswer, contents: tuple[Content, ...], view: View) -> None:
        """Adds a response, and copies the bytes of its outputs.

        Args:
          prepared: describes the outputs.
          contents: the bytes of each output, or their slice of the response arena.
          view: returns the memory of a slice.
        Raises InvalidArgument if all outputs added so far have more bytes together than the constructor's ``max_byte_size``.
        """
        self._parameters |= prepared.parameters
        for tensor, place in placed(prepared.outputs, contents):
            assert not isinstance(place, RegionSlice)
            content = bytes(view(place) if isinstance(place, Slice) else place)
            self._byte_size += len(content)
            if self._byte_size > self._max_byte_size:
                raise InvalidArgument(
                    f"the responses of model '{self._state.name}' have more than {self._max_byte_size} bytes, "
                    "use generate stream"
                )
            _, _, sizes, parts = self._outputs[tensor.name]
            sizes.append(tensor.shape[0] if tensor.shape else 1)
            parts.append(content)

    def whole(self) -> tuple[PreparedAnswer, tuple[Content, ...]]:
        """Joins all responses that were added. Returns the joined answer without the outputs' bytes, and each output's bytes.

        If no response was added, the outputs have no elements.
        """
        tensors = [
            PreparedTensor(name, datatype, (sum(sizes), *rest))
            for name, (datatype, rest, sizes, _) in self._outputs.items()
        ]
        contents = [b"".join(parts) for *_, parts in self._outputs.values()]
        return PreparedAnswer(self._state.version, tuple(tensors), self._parameters), tuple(contents)
