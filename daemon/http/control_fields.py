"""The JSON object of a control request (repository, regions), and its fields, with the sentences of a real Triton 2.51.

Where Triton answers a client's mistake with 500, the sentence is the same and the status 400. Source: as recorded.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from tensord.daemon.front.entries import check_count
from tensord.daemon.http.json_values import is_unsigned
from tensord.daemon.http.request_head import parse
from tensord.shm.errors import InvalidArgument


def read(body: bytes, required: bool = False) -> dict[str, Any]:
    """The fields of a body; an empty one has none, unless ``required``. What is no object has no fields either.

    Raises: InvalidArgument: not JSON.
    """
    if not body and not required:
        return {}
    value = parse(body)
    return members(value) if isinstance(value, dict) else {}


def boolean(value: Any) -> bool:
    """Raises InvalidArgument on anything but true and false."""
    if not isinstance(value, bool):
        raise _refusal("boolean")
    return value


def text(value: Any) -> str:
    """Raises InvalidArgument on anything but a string."""
    if not isinstance(value, str):
        raise _refusal("string")
    return value


def unsigned(value: Any) -> int:
    """Raises InvalidArgument on anything but an integer of 64 bits without a sign."""
    if not is_unsigned(value):
        raise _refusal("unsigned-integer")
    return int(value)


def members(value: Any) -> dict[str, Any]:
    """Raises InvalidArgument on anything but an object, and on one with more members than are taken."""
    if not isinstance(value, dict):
        raise InvalidArgument("attempt to get members for non-object")
    check_count(len(value), "members of an object")
    return value


def member(holder: Any, key: str) -> Any:
    """Raises InvalidArgument: there is none."""
    if not isinstance(holder, dict) or key not in holder:
        raise InvalidArgument(f"attempt to access non-existing object member '{key}'")
    return holder[key]


def base64_content(key: str, value: Any) -> bytes:
    """Raises InvalidArgument: no string, or no base64."""
    try:
        return base64.b64decode(text(value), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"'{key}' should be base64 text") from error


def _refusal(wanted: str) -> InvalidArgument:
    return InvalidArgument(f"attempt to access JSON non-{wanted} as {wanted}")
