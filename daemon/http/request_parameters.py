"""The request's ``parameters``: those the protocol reserves are taken out, the others go to the model.

Source: Triton docs/protocol/extension_parameters.md, extension_sequence.md, extension_schedule_policy.md.
"""

from __future__ import annotations

from typing import Any

from daemon.http.decoded_request import DecodedRequest
from daemon.http.json_values import boolean, is_unsigned, text, unsigned
from shm.errors import InvalidArgument, Unsupported
from shm.messages import Parameter

_INT64_MAX = (1 << 63) - 1
_MAX_SEQUENCE_ID = 128


def read_parameters(given: dict[str, Any], decoded: DecodedRequest) -> None:
    """Fills in what the parameters say. Raises InvalidArgument, Unsupported: string sequence ids that are too long."""
    for key, value in given.items():
        match key:
            case "binary_data_output":
                decoded.all_binary = boolean(key, value)
            case "sequence_start":
                decoded.sequence_start = boolean(key, value)
            case "sequence_end":
                decoded.sequence_end = boolean(key, value)
            case "sequence_id":
                decoded.sequence_id = _sequence_id(value)
            case "priority":
                decoded.priority = unsigned(key, value)
            case "timeout":
                decoded.timeout_us = unsigned(key, value)
            case _:
                decoded.parameters[key] = _parameter(key, value)


def _parameter(key: str, value: Any) -> Parameter:
    if key.startswith("triton_"):
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    if type(value) is int:
        if -_INT64_MAX - 1 <= value <= _INT64_MAX:
            return value
        try:
            return float(value)
        except OverflowError as error:
            raise InvalidArgument(f"parameter '{key}' is out of the range of a double") from error
    if isinstance(value, bool | float | str):
        return value
    raise InvalidArgument(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _sequence_id(value: Any) -> int | str:
    if is_unsigned(value):
        return int(value)
    identifier = text("sequence_id", value)
    if len(identifier.encode()) > _MAX_SEQUENCE_ID:
        raise Unsupported(f"string correlation ID cannot be longer than {_MAX_SEQUENCE_ID} characters")
    return identifier
