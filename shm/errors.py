"""The one exception family of tensord. Only ``tensord.daemon.front.status`` maps it to HTTP statuses and gRPC codes.

Between processes an error travels as code and text, never as a pickled exception: the sender takes ``ServingError.code``, the
receiver calls ``from_code``.
"""

from __future__ import annotations

from typing import ClassVar

#: The message that a client gets for a defect of ours.
DEFECT = "internal error; the server's log has the details"


class ServingError(Exception):
    """Base of all errors that a client may see. ``message`` is a calm sentence with names and numbers, without paths or keys."""

    code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArgument(ServingError):
    """Raised when the request itself is wrong: a retry would fail again."""

    code = "INVALID_ARGUMENT"


class FileTooLarge(InvalidArgument):
    """Raised when a file of a model is larger than the limit for files of its kind."""

    def __init__(self, name: str, byte_size: int, limit: int) -> None:
        super().__init__(f"{name} has {byte_size} bytes, at most {limit} are read")


class NotFound(ServingError):
    """Raised when the model, version or region that the request names does not exist."""

    code = "NOT_FOUND"


#: NotFound's message begins so where a model or a version of it is not served.
UNKNOWN_MODEL = "Request for unknown model: "


class AlreadyExists(ServingError):
    """Raised when the name that the request wants to use is taken."""

    code = "ALREADY_EXISTS"


class Unavailable(ServingError):
    """Raised when nothing is wrong with the request, but the server cannot serve it now. A retry is safe."""

    code = "UNAVAILABLE"


class Unsupported(ServingError):
    """Raised when the request was understood, but asks for something that this server deliberately does not offer."""

    code = "UNSUPPORTED"


class Replaced(ServingError):
    """Raised for a request that was dropped from its model's queue because a newer one with the same key replaced it."""

    code = "REPLACED"


class Cancelled(ServingError):
    """Raised for a request whose client has gone away or has cancelled it."""

    code = "CANCELLED"

    def __init__(self, message: str = "the request was cancelled") -> None:
        super().__init__(message)


class DeadlineExceeded(Cancelled):
    """Raised when the client's deadline for the call has passed."""

    code = "DEADLINE_EXCEEDED"

    def __init__(self, message: str = "Deadline Exceeded") -> None:
        super().__init__(message)


class Internal(ServingError):
    """Raised for a defect of the server or of a model."""

    code = "INTERNAL"


class Unknown(ServingError):
    """Raised for a failure that belongs to no other class here."""

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
    """Makes the exception for a code and message that another process has sent; an unknown code becomes ``Unknown``."""
    return _BY_CODE.get(code, Unknown)(message)
