"""The one error table: what each member of the family is on the wire. Both protocols import it; nothing else knows numbers.

Source: Triton's HttpCodeFromError and GrpcStatusUtil, as recorded against a real server.
"""

from __future__ import annotations

from tensord.daemon.front.access import Restricted
from tensord.shm.errors import ServingError

#: code -> (HTTP status, gRPC status name)
_TABLE: dict[str, tuple[int, str]] = {
    "INVALID_ARGUMENT": (400, "INVALID_ARGUMENT"),
    "NOT_FOUND": (404, "NOT_FOUND"),
    "ALREADY_EXISTS": (400, "ALREADY_EXISTS"),
    "UNAVAILABLE": (503, "UNAVAILABLE"),
    "UNSUPPORTED": (501, "UNIMPLEMENTED"),
    "CANCELLED": (400, "CANCELLED"),
    "DEADLINE_EXCEEDED": (504, "DEADLINE_EXCEEDED"),
    "INTERNAL": (500, "INTERNAL"),
    "UNKNOWN": (400, "UNKNOWN"),
}


def http_status(code: str | ServingError) -> int:
    """The HTTP status of an error or of its code."""
    if isinstance(code, Restricted):
        return 403
    return _TABLE[code.code if isinstance(code, ServingError) else code][0]


def grpc_status(code: str | ServingError) -> str:
    """The name of the gRPC status of an error or of its code."""
    return _TABLE[code.code if isinstance(code, ServingError) else code][1]
