"""The request's ``parameters``: those the protocol reserves are taken out, the others go to the model.

Source: Triton docs/protocol/extension_parameters.md, extension_sequence.md, extension_schedule_policy.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensord.daemon.http.decoded_request import DecodedRequest
from tensord.daemon.http.json_values import boolean, is_unsigned, text, unsigned
from tensord.daemon.submit.scheduling import UNSCHEDULED, Scheduling
from tensord.shm.errors import InvalidArgument, ServingError, Unsupported
from tensord.shm.messages import MAX_SEQUENCE_ID, Parameter

_INT64_MAX = (1 << 63) - 1


def read_parameters(given: dict[str, Any], decoded: DecodedRequest) -> None:
    """Fills in what the parameters say. Raises InvalidArgument, Unsupported: string sequence ids that are too long."""
    for key, value in given.items():
        if key in _SCHEDULING:
            field, read = _SCHEDULING[key]
            decoded.scheduling = decoded.scheduling._replace(**{field: read(key, value)})
        elif key == "binary_data_output":
            decoded.all_binary = boolean(key, value)
        else:
            decoded.parameters[key] = _parameter(key, value)


def part(given: dict[str, Any]) -> tuple[Scheduling, dict[str, Any]]:
    """What parameters say of one request alone, and the others. What is wrong is among these: ``read_parameters`` says why."""
    if _SCHEDULING.keys().isdisjoint(given):
        return UNSCHEDULED, given
    own: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in given.items():
        if key in _SCHEDULING:
            field, read = _SCHEDULING[key]
            try:
                own[field] = read(key, value)
                continue
            except ServingError:
                pass
        others[key] = value
    return Scheduling(**own), others


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


def _sequence_id(key: str, value: Any) -> int | str:
    if is_unsigned(value):
        return int(value)
    identifier = text(key, value)
    if len(identifier.encode()) > MAX_SEQUENCE_ID:
        raise Unsupported(f"string correlation ID cannot be longer than {MAX_SEQUENCE_ID} characters")
    return identifier


#: Name of a parameter -> the field of Scheduling that it fills, and what reads it.
_SCHEDULING: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "priority": ("priority", unsigned),
    "timeout": ("timeout_us", unsigned),
    "sequence_id": ("sequence_id", _sequence_id),
    "sequence_start": ("sequence_start", boolean),
    "sequence_end": ("sequence_end", boolean),
}
