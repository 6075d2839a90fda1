"""The body of a CUDA register request. Sentences as recorded against a real Triton, with status 400 for all of them."""

from __future__ import annotations

from typing import Any

import msgspec

from tensord.shm.errors import InvalidArgument

#: cudaIpcMemHandle_t.
_HANDLE_BYTE_SIZE = 64
_INT64 = (1 << 63) - 1


def cuda_registration(fields: dict[str, Any]) -> tuple[bytes, int, int]:
    """Raw handle, device_id and byte_size. Raises InvalidArgument."""
    if "raw_handle" not in fields:
        raise InvalidArgument("Shared memory register request has no 'raw_handle' field")
    handle = fields["raw_handle"]
    if not isinstance(handle, dict) or "b64" not in handle:
        raise InvalidArgument("attempt to access non-existing object member 'b64'")
    if "byte_size" not in fields:
        raise InvalidArgument("Shared memory register request has no 'byte_size' field")
    if "device_id" not in fields:
        raise InvalidArgument("attempt to access non-existing object member 'device_id'")
    device_id, byte_size = _unsigned(fields["device_id"]), _unsigned(fields["byte_size"])
    return _raw_handle(handle["b64"]), device_id, byte_size


def _raw_handle(text: Any) -> bytes:
    try:
        handle: bytes = msgspec.convert(text, bytes)
    except msgspec.ValidationError:
        handle = b""
    if len(handle) != _HANDLE_BYTE_SIZE:
        raise InvalidArgument("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return handle


def _unsigned(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _INT64:
        raise InvalidArgument("attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value
