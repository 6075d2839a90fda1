"""Maps each error to its HTTP status and its gRPC status. Both protocols use this one table.

Source: Triton's HttpCodeFromError and GrpcStatusUtil, and the answers of a real server; gRPC's statuscodes.md.
"""

from __future__ import annotations

from tensord.daemon.front.access import Restricted
from tensord.shm.errors import InvalidArgument, ServingError

# The gRPC statuses.
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
#: The name of each gRPC status, by its number.
NAMES = tuple(_BY_NAME)
#: code -> (HTTP status, gRPC status name)
_TABLE: dict[str, tuple[int, str]] = {
    "INVALID_ARGUMENT": (400, "INVALID_ARGUMENT"),
    "NOT_FOUND": (404, "NOT_FOUND"),
    "ALREADY_EXISTS": (400, "ALREADY_EXISTS"),
    "UNAVAILABLE": (503, "UNAVAILABLE"),
    "UNSUPPORTED": (501, "UNIMPLEMENTED"),
    "REPLACED": (409, "ABORTED"),
    "CANCELLED": (400, "CANCELLED"),
    "DEADLINE_EXCEEDED": (504, "DEADLINE_EXCEEDED"),
    "INTERNAL": (500, "INTERNAL"),
    "UNKNOWN": (400, "UNKNOWN"),
}


class BodyTooLarge(InvalidArgument):
    """Raised when an HTTP request body exceeds its limit. The HTTP status is 413."""

    status = 413

    def __init__(self, found: str, limit: int) -> None:
        """Formats the message. ``found``: how large the body is, such as "has more than 10 bytes". ``limit``: in bytes."""
        super().__init__(f"the request body {found}, at most {limit} are allowed")

    @property
    def refusal(self) -> tuple[int, str]:
        """Returns the HTTP status (413) and the text of the response that refuses the request."""
        return self.status, self.message


def http_status(code: str | ServingError) -> int:
    """Returns the HTTP status of an error, or of an error's code such as "NOT_FOUND"."""
    if isinstance(code, Restricted):
        return 403
    if isinstance(code, BodyTooLarge):
        return code.status
    return _TABLE[code.code if isinstance(code, ServingError) else code][0]


def grpc_status(code: str | ServingError) -> str:
    """Returns the name of the gRPC status of an error, or of an error's code such as "NOT_FOUND"."""
    return _TABLE[code.code if isinstance(code, ServingError) else code][1]


def grpc_number(code: str | ServingError) -> int:
    """Returns the number of the gRPC status of an error, or of an error's code such as "NOT_FOUND"."""
    return _BY_NAME[grpc_status(code)]
