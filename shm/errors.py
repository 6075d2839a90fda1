"""The one exception family of tensord. Only ``tensord.daemon.front.status`` maps it to HTTP statuses and gRPC codes.

Across processes go ``code`` and text, never a pickled exception: ``ServingError.code`` out, ``from_code`` in.
"""

from __future__ import annotations

from typing import ClassVar

#: The message that a client gets for a defect of ours.
DEFECT = "internal error; the server's log has the details"


class ServingError(Exception):
    """An error with a calm sentence for the client, which names the thing and the numbers, never a path, key or handle."""

    code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArgument(ServingError):
    """The request is wrong and will stay wrong."""

    code = "INVALID_ARGUMENT"


class FileTooLarge(InvalidArgument):
    """A file of a model is larger than any that is read of its kind."""

    def __init__(self, name: str, byte_size: int, limit: int) -> None:
        super().__init__(f"{name} has {byte_size} bytes, at most {limit} are read")


class NotFound(ServingError):
    """The named model, version or region does not exist."""

    code = "NOT_FOUND"


#: NotFound's message begins so where a model or a version of it is not served.
UNKNOWN_MODEL = "Request for unknown model: "


class AlreadyExists(ServingError):
    """The name is taken."""

    code = "ALREADY_EXISTS"


class Unavailable(ServingError):
    """Nothing is wrong with the request; the server cannot take it now. A retry is safe."""

    code = "UNAVAILABLE"


class Unsupported(ServingError):
    """The request was understood, and is deliberately not offered."""

    code = "UNSUPPORTED"


class Replaced(ServingError):
    """A newer request took the place of this one while it waited in its model's queue."""

    code = "REPLACED"


class Cancelled(ServingError):
    """The client went away or asked for a stop."""

    code = "CANCELLED"


class DeadlineExceeded(Cancelled):
    """The client's deadline for the call has passed."""

    code = "DEADLINE_EXCEEDED"

    def __init__(self, message: str = "Deadline Exceeded") -> None:
        super().__init__(message)


class Internal(ServingError):
    """A defect of the server or of a model."""

    code = "INTERNAL"


class Unknown(ServingError):
    """A failure nobody could classify."""

    code = "UNKNOWN"


_BY_CODE: dict[str, type[ServingError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        NotFound,
        AlreadyExists,
        Unavailable,
        Unsupported,
        Replaced,
        Cancelled,
        DeadlineExceeded,
        Internal,
        Unknown,
    )
}


def from_code(code: str, message: str) -> ServingError:
    """Rebuilds an error that crossed a process border; an unknown code becomes ``Unknown``."""
    return _BY_CODE.get(code, Unknown)(message)
