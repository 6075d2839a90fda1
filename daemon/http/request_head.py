"""Reads the JSON object of an inference request, in one of two ways. Sans-I/O.

    text ─▶ quick: msgspec, straight into these types                             nearly every request
              └─ UnusualText ─▶ exact: RapidJSON, then key by key in Triton's order

The exact way is the slow one: it says what is wrong in the sentences a real Triton says it in, and knows the literals NaN and
Infinity, which are no JSON, but Triton and its clients write them. Both ways give objects with the same attributes. ``data`` is
text that is still to be read, or values; ``parameters`` are what the protocol knows of them, or all that were given. Unknown keys
are ignored, as Triton does, by the exact way: msgspec would not look at what they hold, which may be no JSON.
Source: the sentences that a real Triton 2.51 answers with (its ``triton::common::TritonJson``), as recorded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import rapidjson
from msgspec import UNSET, UnsetType

from tensord.daemon.front.entries import MAX_ENTRIES, check_count
from tensord.shm.errors import InvalidArgument

#: ``data`` of an input that has none.
ABSENT = msgspec.Raw(b"")
_NO_PARAMETERS: dict[str, Any] = {}
#: How errors call the entries of a list.
_ENTRIES = {"inputs": "inputs", "outputs": "outputs", "shape": "dimensions"}
_PARSE_ERROR = "failed to parse the request JSON buffer: "
UINT64_MAX = (1 << 64) - 1
_RAPIDJSON_ERROR = re.compile(r"Parse error at offset (\d+): (.*)", re.DOTALL)


class UnusualText(Exception):
    """Raised where a text is not as clients usually write it, so that the slower, exact parser reads it or says what is wrong."""


class TensorParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds the ``parameters`` of an input or output that the protocol knows, and those that clients of other servers add."""

    binary_data_size: int | UnsetType = UNSET
    binary_data: bool | UnsetType = UNSET
    classification: int | UnsetType = UNSET
    shared_memory_region: str | UnsetType = UNSET
    shared_memory_offset: int | UnsetType = UNSET
    shared_memory_byte_size: int | UnsetType = UNSET
    content_type: str | UnsetType = UNSET


_NONE_GIVEN = TensorParameters()


class InputHead(msgspec.Struct, forbid_unknown_fields=True):
    """Holds one entry of ``inputs``."""

    name: str
    shape: tuple[int, ...]
    datatype: str
    data: msgspec.Raw = ABSENT
    parameters: TensorParameters = _NONE_GIVEN


class OutputHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds one entry of ``outputs``."""

    name: str
    parameters: TensorParameters = _NONE_GIVEN


class RequestHead(msgspec.Struct, forbid_unknown_fields=True):
    """Holds the JSON object of a request."""

    inputs: list[InputHead]
    id: str = ""
    outputs: tuple[OutputHead, ...] = ()
    parameters: dict[str, Any] = _NO_PARAMETERS
    #: The path says it.
    model_name: str = ""


@dataclass(slots=True)
class ExactInput:
    """Holds an entry of ``inputs`` with ``data`` as a value, or ABSENT."""

    name: str
    shape: Sequence[int]
    datatype: str
    data: Any
    parameters: dict[str, Any]


@dataclass(slots=True)
class ExactOutput:
    """Holds an entry of ``outputs`` whose parameters may be anything."""

    name: str
    parameters: dict[str, Any]


@dataclass(slots=True)
class ExactRequest:
    """Holds the JSON object of a request; inputs and outputs are parsed one by one, so that the first mistake is refused."""

    id: str
    parameters: dict[str, Any]
    inputs: Iterable[ExactInput]
    outputs: Iterable[ExactOutput]


_decoder = msgspec.json.Decoder(RequestHead)
#: In a text of that size there are fewer entries than may be: each takes four bytes, as ``"":1``.
_UNCOUNTED = 4 * MAX_ENTRIES


def quick(head: bytes | memoryview) -> RequestHead:
    """Parses JSON as clients usually write it, with a typed decoder.

    Raises: UnusualText: not JSON, or not as the protocol says.  InvalidArgument: more entries than are taken.
    """
    try:
        request = _decoder.decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnusualText(str(error)) from error
    if len(head) > _UNCOUNTED:
        check_count(len(request.inputs), "inputs")
        check_count(len(request.outputs), "outputs")
        check_count(len(request.parameters), "parameters")
    return request


def itself(offset: int) -> int:
    """Returns the place of a byte in a text that is whole."""
    return offset


def exact(head: bytes | memoryview, place: Callable[[int], int] = itself) -> ExactRequest:
    """Parses any JSON text as Triton does. Raises InvalidArgument, now or while inputs and outputs are iterated over.

    ``place``: where a byte of ``head`` lies in what the client sent.
    """
    value = parse(bytes(head), place)
    request: dict[str, Any] = value if isinstance(value, dict) else {}
    identifier = text("id", request["id"]) if "id" in request else ""
    parameters = request.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidArgument("failed to get request params.: attempt to get members for non-object")
    check_count(len(parameters), "parameters")
    return ExactRequest(identifier, parameters, _inputs(request), _outputs(request))


def parse(document: bytes, place: Callable[[int], int] = itself) -> Any:
    """Reads a JSON text with the literals NaN, Infinity, -Infinity and Inf.

    Raises: InvalidArgument: not JSON; the text says what is wrong and at which byte.
    """
    # A NUL byte is the end of the text, as for every C string. No JSON holds one.
    text, nul, _ = document.partition(b"\0")
    try:
        value = rapidjson.loads(text)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{_PARSE_ERROR}Invalid encoding in string. at {place(error.start)}") from error
    except ValueError as error:
        found = _RAPIDJSON_ERROR.match(str(error))
        if found is None:  # an integer of thousands of digits, which Python refuses to read
            raise InvalidArgument(f"{_PARSE_ERROR}Number too big to be stored in double.") from error
        raise InvalidArgument(f"{_PARSE_ERROR}{found[2]} at {place(int(found[1]))}") from error
    except RecursionError as error:
        raise InvalidArgument(f"{_PARSE_ERROR}it is nested too deeply") from error
    return _Ended(value, place(len(text))) if nul else value


class _Ended(dict[str, Any]):
    """Holds a request with something behind it, which is refused only when nothing else is wrong with it."""

    def __init__(self, value: Any, end: int) -> None:
        super().__init__(value if isinstance(value, dict) else {})
        self.end = end


def _inputs(request: dict[str, Any]) -> Iterator[ExactInput]:
    for entry in _array("inputs", _member("inputs", request)):
        name = text("name", _member("name", entry))
        datatype = text("datatype", _member("datatype", entry))
        shape = _array("shape", _member("shape", entry))
        parameters = _parameters(entry)
        yield ExactInput(name, shape, datatype, entry.get("data", ABSENT), parameters)
    if isinstance(request, _Ended):
        raise InvalidArgument(f"{_PARSE_ERROR}The document root must not be followed by other values. at {request.end}")


def _outputs(request: dict[str, Any]) -> Iterator[ExactOutput]:
    if "outputs" not in request:
        return
    for entry in _array("outputs", request["outputs"]):
        yield ExactOutput(text("name", _member("name", entry)), _parameters(entry))


def _member(key: str, holder: Any) -> Any:
    if not isinstance(holder, dict) or key not in holder:
        raise InvalidArgument(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'")
    return holder[key]


def _array(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise refusal(key, "non-array", "array")
    check_count(len(value), _ENTRIES[key])
    return value


def _parameters(entry: dict[str, Any]) -> dict[str, Any]:
    parameters = entry.get("parameters", _NO_PARAMETERS)
    if not isinstance(parameters, dict):
        raise InvalidArgument("Unable to parse 'parameters': attempt to get members for non-object")
    check_count(len(parameters), "parameters of a tensor")
    return parameters


# ---------------------------------------------------------------------------------- single values, in Triton's sentences


def refusal(key: str, given: str, wanted: str) -> InvalidArgument:
    """Says that ``key`` holds a value that is ``given`` where ``wanted`` is needed."""
    return InvalidArgument(f"Unable to parse '{key}': attempt to access JSON {given} as {wanted}")


def text(key: str, value: Any) -> str:
    """Raises InvalidArgument on anything but a string."""
    if not isinstance(value, str):
        raise refusal(key, "non-string", "string")
    return value


def is_unsigned(value: Any) -> bool:
    """Tells whether a value is an integer of 64 bits without a sign; true and false are none."""
    return type(value) is int and 0 <= value <= UINT64_MAX
