"""The exceptions of the client: one family, whichever way a request went, with the server's own sentences."""

from __future__ import annotations

from typing import ClassVar


class ServingError(Exception):
    """An error with a sentence; ``code`` is the server's name for its kind."""

    code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArgument(ServingError):
    """The request is wrong and will stay wrong."""

    code = "INVALID_ARGUMENT"


class NotFound(ServingError):
    """The named model, version or region does not exist."""

    code = "NOT_FOUND"


class AlreadyExists(ServingError):
    """The name is taken."""

    code = "ALREADY_EXISTS"


class Unavailable(ServingError):
    """Nothing is wrong with the request; the server cannot take it now. A retry is safe."""

    code = "UNAVAILABLE"


class Unsupported(ServingError):
    """The request was understood, and is deliberately not offered."""

    code = "UNSUPPORTED"


class Cancelled(ServingError):
    """The request was cancelled."""

    code = "CANCELLED"


class Replaced(ServingError):
    """The request waited, and a newer one of its key took its place."""

    code = "REPLACED"


class DeadlineExceeded(Cancelled):
    """The deadline of the request has passed."""

    code = "DEADLINE_EXCEEDED"

    def __init__(self, message: str = "Deadline Exceeded") -> None:
        super().__init__(message)


class Internal(ServingError):
    """The server or the model has a defect, or the worker ended under a request that may not be run twice."""

    code = "INTERNAL"


class Unknown(ServingError):
    """A failure nobody could classify."""

    code = "UNKNOWN"


class ResultsHeld(ServingError):
    """The program holds as many results in the server's memory as it may: release some of them."""

    code = "RESULTS_HELD"

    def __init__(self, held: int, limit: int) -> None:
        super().__init__(
            f"{held} results are held in the server's memory, at most {limit} may be: release them, or drop their arrays"
        )
        self.held = held
        self.limit = limit


_BY_CODE: dict[str, type[ServingError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        NotFound,
        AlreadyExists,
        Unavailable,
        Unsupported,
        Cancelled,
        Replaced,
        DeadlineExceeded,
        Internal,
        Unknown,
    )
}
#: HTTP status -> error. What the table lacks is the request's fault up to 499, and the server's from 500 on.
_BY_STATUS = {403: Unavailable, 404: NotFound, 409: Replaced, 501: Unsupported, 503: Unavailable, 504: DeadlineExceeded}


def from_code(code: str, message: str) -> ServingError:
    """Makes the exception of an error that the server told by its code; an unknown code becomes ``Unknown``."""
    return _BY_CODE.get(code, Unknown)(message)


def from_status(status: int, message: str) -> ServingError:
    """Makes the exception that an HTTP status stands for."""
    return _BY_STATUS.get(status, Internal if status >= 500 else InvalidArgument)(message)
