"""Reads the JSON body of an HTTP request about the model repository, regions or settings.

The functions raise InvalidArgument, which the client gets as status 400, if the body or a value in the body is wrong.
The texts of errors are those of Triton 2.51.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from tensord.daemon.front.entries import check_count
from tensord.daemon.http.json_values import array, member, refusal, text, unsigned
from tensord.daemon.http.request_head import parse
from tensord.shm.errors import InvalidArgument

#: cudaIpcMemHandle_t.
_HANDLE_BYTE_SIZE = 64
_INT64_MAX = (1 << 63) - 1


def read(body: bytes, required: bool = False) -> dict[str, Any]:
    """Returns the fields of the JSON object in ``body``, the body of a request.

    The result is empty if the body is empty, or if the JSON is no object. ``required``: whether an empty body is an error.
    Raises InvalidArgument if the body is no JSON, is empty although ``required``, or has too many fields.
    """
    if not body and not required:
        return {}
    value = parse(body)
    return members(value) if isinstance(value, dict) else {}


def settings(body: bytes) -> dict[str, Any]:
    """Returns the settings in the JSON object that is the body of a request.

    The result is empty for a JSON array, as in Triton.
    Raises InvalidArgument if the body is neither a JSON object nor an array, or has too many settings.
    """
    value = parse(body)
    if isinstance(value, list):
        return {}
    if not isinstance(value, dict):
        raise InvalidArgument("failed to parse the request JSON buffer: an object is expected")
    check_count(len(value), "settings")
    return value


def texts(value: Any) -> list[str]:
    check_count(len(array(value)), "values of a setting")
    return [text(item) for item in value]


def members(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument("attempt to get members for non-object")
    check_count(len(value), "members of an object")
    return value


def base64_content(key: str, value: Any) -> bytes:
    """Decodes a string of base64. Raises InvalidArgument, whose message names ``key``, if ``value`` is no such string."""
    try:
        return base64.b64decode(text(value), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"'{key}' should be base64 text") from error


def needed(fields: dict[str, Any], name: str) -> Any:
    """Returns the field ``name`` of a request to register a region. Raises InvalidArgument if it is missing."""
    if name not in fields:
        raise InvalidArgument(f"Shared memory register request has no '{name}' field")
    return fields[name]


def cuda_registration(fields: dict[str, Any]) -> tuple[bytes, int, int]:
    """Returns the CUDA IPC handle, the device id and the byte size that a request to register CUDA memory has in ``fields``.

    Raises InvalidArgument if a field is wrong or missing.
    """
    handle, size = member(needed(fields, "raw_handle"), "b64"), needed(fields, "byte_size")
    device_id, byte_size = _int64(member(fields, "device_id")), _int64(size)
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
        raise refusal("unsigned-integer")
    return number
