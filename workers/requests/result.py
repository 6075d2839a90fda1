"""The result of a model for one request: its outputs, or an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import Parameter

#: Bytes of a response's parameters, as JSON: they travel in its record, and not in an arena.
_MAX_BYTE_SIZE = 1 << 20
#: gRPC has no field for a larger one.
_MAX_INTEGER = (1 << 63) - 1


class Response(dict[str, Array]):
    """The outputs of one response, with its response parameters."""

    __slots__ = ("parameters",)

    def __init__(self, outputs: dict[str, Array], parameters: dict[str, Parameter]) -> None:
        super().__init__(outputs)
        self.parameters = parameters


#: Output name -> array of the client's shape, in the order the model made them.
Result = dict[str, Array] | ServingError
#: Stands for the result of a request that its model answers by its sender, now or later.
STREAMED = Response({}, {})


def checked_parameters(given: Mapping[Any, Any]) -> dict[str, Parameter]:
    """Returns the parameters of a response as they are sent to the client: plain bools, ints, floats and strs.

    Raises InvalidArgument: a name is no str, a value cannot be sent (``checked_parameter``), a str cannot be encoded in UTF-8,
    or all parameters together have more than 1 MiB as JSON.
    """
    checked = {_sendable(key): checked_parameter(key, value) for key, value in given.items()}
    size = len(json.dumps(checked, ensure_ascii=False).encode())
    if size > _MAX_BYTE_SIZE:
        raise InvalidArgument(f"the parameters are {size} bytes, at most {_MAX_BYTE_SIZE} are sent")
    return checked


def checked_parameter(name: str, value: Any) -> Parameter:
    """Returns ``value`` as a plain bool, int, float or str, of which records are made. A scalar of numpy becomes one of these.

    Raises InvalidArgument: ``value`` is none of these, is an int that does not fit into 64 bits with a sign, or is a str that
    cannot be encoded in UTF-8. ``name``: the parameter's name, for errors.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -_MAX_INTEGER - 1 <= value <= _MAX_INTEGER:
            raise InvalidArgument(
                f"parameter '{name}' is an integer of {value.bit_length()} bits, those that fit into 64 with a sign are sent"
            )
        return int(value)
    if isinstance(value, float):
        return float(value)
    return _sendable(value)


def _sendable(text: Any) -> str:
    if not isinstance(text, str):
        raise InvalidArgument(
            f"a response's parameters are a dict of bool, int, float or str by name, found {type(text)}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a parameter's text cannot be sent as UTF-8: {error.reason}") from None
    return str.__str__(text)
