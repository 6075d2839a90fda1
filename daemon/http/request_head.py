"""Parses the JSON of an inference request, with a quick parser or an exact one. Sans-I/O.

The function ``quick`` parses with msgspec, and can read nearly every request. If it raises UnusualText, the caller must use the
function ``exact``, which parses with RapidJSON and is slower. ``exact`` ignores unknown keys and accepts the literals NaN and
Infinity, as Triton does. The errors of ``exact`` have the texts of a real Triton.

Both return a RequestHead. ``quick`` leaves the ``data`` of inputs as JSON text. ``exact`` parses it too, and its ``parameters``
are dicts.
Source: the recorded error messages of a real Triton 2.51.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import rapidjson
from msgspec import UNSET, UnsetType

from tensord.daemon.front.entries import MAX_ENTRIES, check_count
from tensord.daemon.http.json_values import array, member, text
from tensord.shm.errors import InvalidArgument

#: ``data`` of an input that has none.
ABSENT = msgspec.Raw(b"")
_NO_PARAMETERS: dict[str, Any] = {}
#: Name of a list -> what errors call its entries.
_ENTRIES = {"inputs": "inputs", "outputs": "outputs", "shape": "dimensions"}
_PARSE_ERROR = "failed to parse the request JSON buffer: "
_RAPIDJSON_ERROR = re.compile(r"Parse error at offset (\d+): (.*)", re.DOTALL)


class UnusualText(Exception):
    """Raised if only the exact parser, which is slower, can read the JSON of a request."""


class TensorParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds the ``parameters`` of one input or output."""

    binary_data_size: int | UnsetType = UNSET
    binary_data: bool | UnsetType = UNSET
    classification: int | UnsetType = UNSET
    shared_memory_region: str | UnsetType = UNSET
    shared_memory_offset: int | UnsetType = UNSET
    shared_memory_byte_size: int | UnsetType = UNSET
    content_type: str | UnsetType = UNSET


_NONE_GIVEN = TensorParameters()


class InputHead(msgspec.Struct, forbid_unknown_fields=True):
    """One input tensor in the JSON of an inference request. ``data`` is ABSENT if the entry has none.

    In those of ``exact``, ``data`` is a parsed value, and ``parameters`` a dict.
    """

    name: str
    shape: tuple[int, ...]
    datatype: str
    data: msgspec.Raw = ABSENT
    parameters: TensorParameters = _NONE_GIVEN


class OutputHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of ``outputs`` in the JSON of an inference request."""

    name: str
    parameters: TensorParameters = _NONE_GIVEN


class RequestHead(msgspec.Struct, forbid_unknown_fields=True):
    """Holds the fields of the JSON object of an inference request.

    In those of ``exact``, ``inputs`` and ``outputs`` are iterators, which raise InvalidArgument at a malformed entry.
    """

    inputs: list[InputHead]
    id: str = ""
    outputs: tuple[OutputHead, ...] = ()
    parameters: dict[str, Any] = _NO_PARAMETERS
    #: Ignored: the request's path names the model.
    model_name: str = ""


_decoder = msgspec.json.Decoder(RequestHead)
#: A text of at most that size cannot have too many entries: each takes four bytes, as ``"":1``.
_UNCOUNTED = 4 * MAX_ENTRIES


def quick(head: bytes | memoryview) -> RequestHead:
    """Parses ``head``, the JSON of an inference request, by the fast decoder.

    Raises UnusualText if the fast decoder cannot read the JSON, which the slower exact parser may be able to read.
    Raises InvalidArgument if a list has too many entries.
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
    return offset


def exact(head: bytes | memoryview, place: Callable[[int], int] = itself) -> RequestHead:
    """Parses ``head``, the JSON of an inference request, with a slow parser that also reads NaN and infinities.

    ``place``: converts an offset in ``head`` to the offset in the text that the client sent, for error messages.
    Raises InvalidArgument if ``head`` is no JSON, or if the request's id or parameters are malformed.
    Iterating over ``inputs`` or ``outputs`` of the result raises InvalidArgument if an entry is malformed, or if the request
    has no ``inputs``.
    """
    value = parse(bytes(head), place)
    request: dict[str, Any] = value if isinstance(value, dict) else {}
    identifier = text(request["id"], "id") if "id" in request else ""
    parameters = request.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidArgument("failed to get request params.: attempt to get members for non-object")
    check_count(len(parameters), "parameters")
    return RequestHead(_inputs(request), identifier, _outputs(request), parameters)  # type: ignore[arg-type]


def parse(document: bytes, place: Callable[[int], int] = itself) -> Any:
    """Parses a JSON text. The literals NaN, Infinity, -Infinity and Inf are accepted as well.

    ``place``: converts an offset in ``document`` to the offset that error messages name. By default both are the same.
    Raises InvalidArgument, which says what is wrong and at which byte, if the text is no JSON.
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
    def __init__(self, value: Any, end: int) -> None:
        super().__init__(value if isinstance(value, dict) else {})
        # Here a NUL byte follows the object, which is why its request is refused.
        self.end = end


def _inputs(request: dict[str, Any]) -> Iterator[InputHead]:
    for entry in _entries("inputs", member(request, "inputs", "inputs")):
        name = _text("name", entry)
        datatype = _text("datatype", entry)
        shape = _entries("shape", member(entry, "shape", "shape"))
        parameters = _parameters(entry)
        yield InputHead(name, shape, datatype, entry.get("data", ABSENT), parameters)  # type: ignore[arg-type]
    if isinstance(request, _Ended):
        raise InvalidArgument(f"{_PARSE_ERROR}The document root must not be followed by other values. at {request.end}")


def _outputs(request: dict[str, Any]) -> Iterator[OutputHead]:
    if "outputs" not in request:
        return
    for entry in _entries("outputs", request["outputs"]):
        yield OutputHead(_text("name", entry), _parameters(entry))  # type: ignore[arg-type]


def _entries(key: str, value: Any) -> list[Any]:
    entries = array(value, key)
    check_count(len(entries), _ENTRIES[key])
    return entries


def _text(key: str, holder: Any) -> str:
    return text(member(holder, key, key), key)


def _parameters(entry: dict[str, Any]) -> dict[str, Any]:
    parameters = entry.get("parameters", _NO_PARAMETERS)
    if not isinstance(parameters, dict):
        raise InvalidArgument("Unable to parse 'parameters': attempt to get members for non-object")
    check_count(len(parameters), "parameters of a tensor")
    return parameters
