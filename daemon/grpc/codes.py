"""Defines the gRPC status codes by their names. The table in ``tensord.daemon.front.status`` says which error gets which.

Source: gRPC's statuscodes.md.
"""

from __future__ import annotations

from tensord.daemon.front.status import grpc_status
from tensord.shm.errors import ServingError

(
    OK,
    CANCELLED,
    UNKNOWN,
    INVALID_ARGUMENT,
    DEADLINE_EXCEEDED,
    NOT_FOUND,
    ALREADY_EXISTS,
    PERMISSION_DENIED,
    RESOURCE_EXHAUSTED,
    FAILED_PRECONDITION,
    ABORTED,
    OUT_OF_RANGE,
    UNIMPLEMENTED,
    INTERNAL,
    UNAVAILABLE,
    DATA_LOSS,
    UNAUTHENTICATED,
) = range(17)
_BY_NAME: dict[str, int] = {
    name: number for name, number in globals().items() if name.isupper() and type(number) is int
}
#: By number.
NAMES = tuple(_BY_NAME)


def number(error: str | ServingError) -> int:
    """Returns the gRPC status code of an error, or of an error's code such as "NOT_FOUND"."""
    return _BY_NAME[grpc_status(error)]
