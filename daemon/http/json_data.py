"""Converts the JSON ``data`` of an input to the tensor's bytes in the format of the binary tensor data extension.

A client may send ``data`` as an array, flat or nested like the shape, with the values in row-major order:

    BOOL            true, false
    INT*, UINT*     integers in the datatype's range; 2.0 and 1e2 are no integers
    FP32, FP64      numbers, NaN, Infinity, -Infinity; a number beyond FP32's range becomes infinity
    BYTES           strings, encoded as UTF-8
    FP16, BF16      not allowed as an array

For each datatype, a client may also send ``data`` as one string, the base64 of the tensor's bytes.
Source: KServe V2 "Tensor Data"; its request schema for base64.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from tensord.daemon.http.json_values import refusal
from tensord.daemon.http.request_head import UnusualText
from tensord.shm.arrays import DTYPES, array, encoded
from tensord.shm.common.datatypes import DATATYPES
from tensord.shm.datatypes import MAX_RANK
from tensord.shm.errors import InvalidArgument

_text = msgspec.json.Decoder(str)
_integers = msgspec.json.Decoder(list[int])
#: The decoder of a list of elements, by the kind that an element is in JSON.
_QUICK: dict[str, msgspec.json.Decoder[Any]] = {
    "boolean": msgspec.json.Decoder(list[bool]),
    "string": msgspec.json.Decoder(list[str]),
    "double": msgspec.json.Decoder(list[float]),
    "signed-integer": _integers,
    "unsigned-integer": _integers,
}
#: The error for data with more or fewer values than its shape has.
MISMATCH = "Unable to parse 'data': Shape does not match true shape of 'data' field"


def quick(text: msgspec.Raw, datatype: str, count: int) -> bytes:
    """Converts ``text``, a flat JSON array or a JSON string of base64, to the bytes of a tensor with ``count`` elements.

    Raises InvalidArgument if ``text`` is a string but not the base64 of a tensor with this datatype and number of elements.
    Raises UnusualText if this function cannot convert ``text``. The caller must then parse the text and call ``exact``.
    """
    if bytes(memoryview(text)[:1]) == b'"':
        return _from_base64(_quick_text(text), datatype, [count])
    decoder = _QUICK.get(DATATYPES[datatype].json)
    if decoder is None:
        raise UnusualText
    try:
        values = decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UnusualText from error
    if len(values) != count:
        raise UnusualText
    try:
        return _wire_bytes(values, datatype)
    except OverflowError as error:
        raise UnusualText from error


def _quick_text(text: msgspec.Raw) -> str:
    try:
        return _text.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnusualText from error


def exact(value: Any, datatype: str, shape: list[int], count: int, name: str) -> bytes:
    """Converts ``value``, the parsed ``data`` of the input ``name``, to the bytes of a tensor.

    ``count``: the number of elements of the shape.
    Raises InvalidArgument if the value does not fit the datatype or the shape.
    """
    if isinstance(value, str):
        return _from_base64(value, datatype, shape)
    if not isinstance(value, list):
        raise refusal("array", "data")
    refuse_half_floats(datatype, count, name)
    leaves = _leaves(value, shape, name)
    content = flat(leaves, datatype, name)
    # A shape without dimensions is the model's to refuse: no model but one of scalars has it.
    if len(leaves) != count and shape:
        raise InvalidArgument(MISMATCH)
    return content


def flat(leaves: list[Any], datatype: str, name: str) -> bytes:
    """Converts ``leaves``, which are values of the input ``name``, to the bytes of a tensor.

    Raises InvalidArgument if a value does not fit the datatype.
    """
    for leaf in leaves:
        _check(leaf, datatype)
    try:
        return _wire_bytes(leaves, datatype)
    except OverflowError as error:
        raise InvalidArgument(
            f"Unable to parse 'data': a value of input '{name}' is out of the range of {datatype}"
        ) from error


def refuse_half_floats(datatype: str, count: int, name: str) -> None:
    """Raises InvalidArgument if an input that is a JSON array has the datatype FP16 or BF16. Empty inputs are allowed.

    ``count``: the number of elements of the input. ``name``: the name of the input.
    """
    if count and not DATATYPES[datatype].json:
        raise InvalidArgument(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )


def _wire_bytes(values: list[Any], datatype: str) -> bytes:
    if datatype == "BYTES":
        return encoded(values)
    dtype = DTYPES[datatype]
    if datatype != "FP32":
        return np.array(values, dtype).tobytes()
    with np.errstate(over="ignore"):
        return np.array(values, np.float64).astype(dtype).tobytes()


def from_base64(text: str | bytes) -> bytes:
    """Decodes a base64 text, which is the ``data`` of an input or a part of it.

    Raises InvalidArgument if the text is no base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise refusal("array", "data") from error


def _from_base64(text: str, datatype: str, shape: list[int]) -> bytes:
    content = from_base64(text)
    try:
        array(content, datatype, shape)
    except (ValueError, InvalidArgument) as error:
        raise refusal("array", "data") from error
    return content


def _leaves(value: list[Any], shape: list[int], name: str) -> list[Any]:
    """Returns the values of nested lists, in row-major order. Raises InvalidArgument if they are not nested as ``shape``."""
    level: list[Any] = value
    dims = [len(value)]
    while any(isinstance(item, list) for item in level):
        if not all(isinstance(item, list) and len(item) == len(level[0]) for item in level) or len(dims) == MAX_RANK:
            raise misnested(shape, name)
        dims.append(len(level[0]))
        level = [item for inner in level for item in inner]
    if level and len(dims) > 1 and not is_nesting_of(dims, shape):
        raise misnested(shape, name)
    return level


def is_nesting_of(dims: Sequence[int], shape: Sequence[int]) -> bool:
    """Returns whether ``dims``, the lengths of nested lists from the outside in, equals ``shape`` if 1s are ignored in both."""
    return [dim for dim in dims if dim != 1] == [dim for dim in shape if dim != 1]


def misnested(shape: list[int], name: str) -> InvalidArgument:
    """Returns the error for nested lists that contradict the shape of the input ``name``."""
    return InvalidArgument(f"Unable to parse 'data': input '{name}' is nested, but not as its shape {shape} says")


def of_wrong_kind(datatype: str) -> InvalidArgument:
    """Returns the error for a JSON value that cannot be an element of a tensor."""
    kind = DATATYPES[datatype].json or "signed-integer"
    if kind == "string":
        return InvalidArgument("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    return refusal(kind, "data", "non-number" if kind == "double" else "")


def _check(leaf: Any, datatype: str) -> None:
    # Only 64-bit numbers are checked for their range here; numpy checks the others.
    kind = DATATYPES[datatype].json
    if kind == "boolean":
        right = isinstance(leaf, bool)
    elif kind == "string":
        right = isinstance(leaf, str)
    elif kind == "double":
        right = isinstance(leaf, int | float) and not isinstance(leaf, bool)
    elif kind == "unsigned-integer":
        right = type(leaf) is int and 0 <= leaf < 1 << 64
    else:
        right = type(leaf) is int and -(1 << 63) <= leaf < 1 << 63
    if not right:
        raise of_wrong_kind(datatype)
