"""Checks single values of a request's JSON. The texts of errors are those of a real Triton.

A function that is named after a kind of value returns a value of that kind, or raises InvalidArgument. ``key``: the name of the
value for the error's message. If it is "", the message has no name.
"""

from __future__ import annotations

from typing import Any

from tensord.shm.errors import InvalidArgument

UINT64_MAX = (1 << 64) - 1


def refusal(wanted: str, key: str = "", given: str = "") -> InvalidArgument:
    """Returns the error for a value of another kind than ``wanted``.

    ``key``: the name of the value, or "" if the message names none. ``given``: the kind of the value, or "" if it is not known.
    """
    return InvalidArgument(f"{_place(key)}attempt to access JSON {given or f'non-{wanted}'} as {wanted}")


def boolean(value: Any, key: str = "") -> bool:
    if not isinstance(value, bool):
        raise refusal("boolean", key)
    return value


def text(value: Any, key: str = "") -> str:
    if not isinstance(value, str):
        raise refusal("string", key)
    return value


def array(value: Any, key: str = "") -> list[Any]:
    if not isinstance(value, list):
        raise refusal("array", key)
    return value


def unsigned(value: Any, key: str = "") -> int:
    if not is_unsigned(value):
        raise refusal("unsigned-integer", key)
    return int(value)


def member(holder: Any, name: str, key: str = "") -> Any:
    """Returns the member ``name`` of the JSON object ``holder``.

    Raises InvalidArgument if ``holder`` is no object or has no such member. The error names ``key``, unless ``key`` is "".
    """
    if not isinstance(holder, dict) or name not in holder:
        raise InvalidArgument(f"{_place(key)}attempt to access non-existing object member '{name}'")
    return holder[name]


def is_unsigned(value: Any) -> bool:
    """Returns whether a value is an unsigned 64-bit integer. True and False do not count as integers."""
    return type(value) is int and 0 <= value <= UINT64_MAX


def _place(key: str) -> str:
    return f"Unable to parse '{key}': " if key else ""
