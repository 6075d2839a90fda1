"""Single JSON values where the protocol wants a boolean, an unsigned integer or a string, with Triton's sentences.

Source: the sentences a real Triton 2.51 answers with (its ``triton::common::TritonJson``), as recorded.
"""

from __future__ import annotations

from typing import Any

from tensord.shm.errors import InvalidArgument

UINT64_MAX = (1 << 64) - 1


def refusal(key: str, given: str, wanted: str) -> InvalidArgument:
    """``key`` holds a value that is ``given`` where ``wanted`` is needed."""
    return InvalidArgument(f"Unable to parse '{key}': attempt to access JSON {given} as {wanted}")


def boolean(key: str, value: Any) -> bool:
    """Raises InvalidArgument on anything but true and false."""
    if not isinstance(value, bool):
        raise refusal(key, "non-boolean", "boolean")
    return value


def unsigned(key: str, value: Any) -> int:
    """Raises InvalidArgument on anything but an integer of 64 bits without a sign."""
    if not is_unsigned(value):
        raise refusal(key, "non-unsigned-integer", "unsigned-integer")
    return int(value)


def text(key: str, value: Any) -> str:
    """Raises InvalidArgument on anything but a string."""
    if not isinstance(value, str):
        raise refusal(key, "non-string", "string")
    return value


def is_unsigned(value: Any) -> bool:
    """Whether it is an integer of 64 bits without a sign; true and false are none."""
    return type(value) is int and 0 <= value <= UINT64_MAX
