"""The JSON object of a control request (repository, regions, settings), and its fields, with the sentences of a real Triton 2.51.

Where Triton answers a client's mistake with 500, the sentence is the same and the status 400. Source: as recorded.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from tensord.daemon.front.entries import check_count
from tensord.daemon.http.request_head import is_unsigned, parse
from tensord.shm.errors import InvalidArgument

#: cudaIpcMemHandle_t.
_HANDLE_BYTE_SIZE = 64
_INT64_MAX = (1 << 63) - 1


def read(body: bytes, required: bool = False) -> dict[str, Any]:
    """Reads the fields of a JSON body. An empty body has none, unless ``required``; neither has JSON that is no object.

    Raises: InvalidArgument: not JSON.
    """
    if not body and not required:
        return {}
    value = parse(body)
    return members(value) if isinstance(value, dict) else {}


def settings(body: bytes) -> dict[str, Any]:
    """Reads the settings that a body names; an array names none, as for Triton. Raises InvalidArgument."""
    value = parse(body)
    if isinstance(value, list):
        return {}
    if not isinstance(value, dict):
        raise InvalidArgument("failed to parse the request JSON buffer: an object is expected")
    check_count(len(value), "settings")
    return value


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


def texts(value: Any) -> list[str]:
    """Raises InvalidArgument on anything but an array of strings."""
    if not isinstance(value, list):
        raise _refusal("array")
    check_count(len(value), "values of a setting")
    return [text(item) for item in value]


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
    """Returns a member of an object. Raises InvalidArgument: it has none of that name."""
    if not isinstance(holder, dict) or key not in holder:
        raise InvalidArgument(f"attempt to access non-existing object member '{key}'")
    return holder[key]


def base64_content(key: str, value: Any) -> bytes:
    """Decodes a base64 string. Raises InvalidArgument: no string, or no base64."""
    try:
        return base64.b64decode(text(value), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"'{key}' should be base64 text") from error


def cuda_registration(fields: dict[str, Any]) -> tuple[bytes, int, int]:
    """Reads the raw handle, device_id and byte_size of a CUDA register request. Raises InvalidArgument."""
    if "raw_handle" not in fields:
        raise InvalidArgument("Shared memory register request has no 'raw_handle' field")
    handle = member(fields["raw_handle"], "b64")
    if "byte_size" not in fields:
        raise InvalidArgument("Shared memory register request has no 'byte_size' field")
    device_id, byte_size = _int64(member(fields, "device_id")), _int64(fields["byte_size"])
    return _raw_handle(handle), device_id, byte_size


def _raw_handle(text: Any) -> bytes:
    try:
        handle: bytes = msgspec.convert(text, bytes)
    except msgspec.ValidationError:
        handle = b""
    if len(handle) != _HANDLE_BYTE_SIZE:
        raise InvalidArgument("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return handle


def _int64(value: Any) -> int:
    number = unsigned(value)
    if number > _INT64_MAX:
        raise _refusal("unsigned-integer")
    return number


def _refusal(wanted: str) -> InvalidArgument:
    return InvalidArgument(f"attempt to access JSON non-{wanted} as {wanted}")
