"""How many values the ``data`` of an input has, where its shape leaves a dimension to be found from that. Sans-I/O.

Texts are not read for it: in an array of numbers, nested or not, there is a comma less than there are values; in one of strings
there are two quotation marks to each. Of what is no such array the count may be anything: whoever converts it refuses it.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from tensord.daemon.http.json_values import refusal
from tensord.shm.errors import InvalidArgument
from tensord.shm.open_shape import elements

_BLANKS = b"[], \t\r\n"
#: Longer texts are not counted: it would keep the loop for more than a millisecond or two.
_MAX_TEXT = 1 << 20


def of_text(text: bytes | memoryview, datatype: str, what: str) -> int:
    """The values of a JSON text: an array, or a string in base64. Raises InvalidArgument: a string that is none; too long."""
    if len(text) > _MAX_TEXT:
        raise InvalidArgument(
            f"{what} has a dimension of -1, which is found from at most {_MAX_TEXT} bytes of JSON, {len(text)} are given"
        )
    text = bytes(text)
    if text[:1] == b'"':
        try:
            return of_value(msgspec.json.decode(text, type=str), datatype, what)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise refusal("data", "non-array", "array") from error
    if datatype == "BYTES":
        plain = text.replace(b"\\\\", b"")
        return (plain.count(b'"') - plain.count(b'\\"')) // 2
    return text.count(b",") + 1 if text.translate(None, _BLANKS) else 0


def of_value(value: Any, datatype: str, what: str) -> int:
    """How many elements a JSON value has as data of an input."""
    if isinstance(value, str):
        try:
            return elements(datatype, base64.b64decode(value, validate=True), what)
        except (binascii.Error, ValueError) as error:
            raise refusal("data", "non-array", "array") from error
    left, count = [value], 0
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        else:
            count += 1
    return count
