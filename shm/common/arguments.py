"""Checks the keyword arguments of calls in Python: of clients, and of models that call other models."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .errors import InvalidArgument
from .scheduling import MAX_SEQUENCE_ID, PARAMETERS, Kind, Parameter, Scheduling, SequenceId, set_named


def read_arguments(
    own: Mapping[str, Any], parameter_set: str = "", **others: Callable[[str, Any], Any]
) -> tuple[Scheduling, dict[str, Any]]:
    """Checks the keyword arguments of a request. Returns its scheduling, and the others, without those that are None.

    All are of Python's types then, and no numpy scalars.

    Args:
      own: the arguments, as ``Arguments`` has them. A parameter set is named by one of ``parameters``.
      parameter_set: the parameter set where ``own`` names none.
      others: further arguments that a request may have, each with what checks it.

    Raises: InvalidArgument: a value is of another type or out of range.  TypeError: a request has no such argument.
    """
    said: dict[str, Any] = {}
    fields: dict[str, Any] = {"parameter_set": parameter_set}
    for name, value in own.items():
        check = _FIELDS.get(name)
        if check is None:
            check = _OTHERS.get(name) or others.get(name)
            if check is None:
                raise TypeError(f"a request to a model has no {name}")
            if value is not None:
                said[name] = check(name, value)
        elif value is not None:
            fields[name] = check(name, value)
    if "parameters" in said:
        said["parameters"], name = set_named(said["parameters"])
        fields["parameter_set"] = name or parameter_set
    return Scheduling(**fields), said


def natural(name: str, value: Any) -> int:
    """Checks and returns an integer of 64 bits without a sign. Raises InvalidArgument, which gives its name: it is none."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} is {reprlib.repr(value)}, a whole number is expected") from None
    if not 0 <= number < 1 << 64:
        raise InvalidArgument(f"{name} is {reprlib.repr(number)}, at least 0 and less than 2**64 is expected")
    return number


def text(name: str, value: Any) -> str:
    """Checks and returns a text. Raises InvalidArgument, which gives its name: it is none."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is {reprlib.repr(value)}, a text is expected")
    return str.__str__(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name} is {reprlib.repr(value)}, True or False is expected")
    return bool(value)


def _sequence_id(name: str, value: Any) -> SequenceId:
    if not isinstance(value, str):
        return natural(name, value)
    if len(value.encode(errors="replace")) > MAX_SEQUENCE_ID:
        raise InvalidArgument(f"{name} is {reprlib.repr(value)}, a text of {MAX_SEQUENCE_ID} bytes at most is expected")
    return str.__str__(value)


def _parameters(name: str, value: Any) -> dict[str, Parameter]:
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name} are {reprlib.repr(value)}, a mapping of names to values is expected")
    return {text("the name of a parameter", key): _parameter(key, each) for key, each in value.items()}


def _parameter(name: str, value: Any) -> Parameter:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        if not -1 << 63 <= value < 1 << 64:
            raise InvalidArgument(f"parameter '{name}' is {reprlib.repr(value)}, which takes more than 64 bits")
        return value if isinstance(value, bool) else int(value)
    if isinstance(value, float):
        return float(value)
    if not isinstance(value, str):
        raise InvalidArgument(f"parameter '{name}' is {reprlib.repr(value)}, a bool, a number or a text is expected")
    return str.__str__(value)


_CHECKS: dict[Kind, Callable[[str, Any], Any]] = {
    Kind.NUMBER: natural,
    Kind.DURATION: natural,
    Kind.FLAG: _flag,
    Kind.TEXT: text,
    Kind.SEQUENCE_ID: _sequence_id,
}
_FIELDS = {row.field: _CHECKS[row.kind] for row in PARAMETERS.values() if row.kind in _CHECKS}
_OTHERS: dict[str, Callable[[str, Any], Any]] = {"parameters": _parameters, "request_id": text}
