"""The exceptions of the daemon and of the client. All are subclasses of ``ServingError``.

Between processes, an error is sent as its code and its message. The receiver makes an exception of them with ``from_code``.
"""

from __future__ import annotations

from typing import ClassVar

#: The message of errors raised by a client that was closed, and of requests that a process has from the one it was forked from.
CLOSED, FORKED = "the client was closed", "the request is one of the process that this one was forked from"
#: How a message about a request without an id begins.
_NO_ID = "[request id: <id_unknown>] "


class ServingError(Exception):
    """Base class of all errors that a client may see.

    ``message`` is a sentence for people, without paths or keys. ``code`` is the kind of error, such as "NOT_FOUND".
    """

    code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArgument(ServingError):
    """The request is wrong, and sending it again cannot succeed."""

    code = "INVALID_ARGUMENT"


class NotFound(ServingError):
    """The model, version, parameter set or region that the request names does not exist."""

    code = "NOT_FOUND"


class AlreadyExists(ServingError):
    """The request is to make something, such as a region, whose name is already in use."""

    code = "ALREADY_EXISTS"


class Unavailable(ServingError):
    """The server cannot answer now, or was lost. The request itself is not wrong.

    Sending the request again is safe unless the message says that it may have run.
    """

    code = "UNAVAILABLE"


class Unsupported(ServingError):
    """This server or this kind of connection does not offer what the request asks for."""

    code = "UNSUPPORTED"


class Replaced(ServingError):
    """A newer request with the same ``replace_key`` replaced this request, or a newer push replaced this push."""

    code = "REPLACED"


class Cancelled(ServingError):
    """The request was cancelled, or the client was closed or went away before the answer was sent."""

    code = "CANCELLED"

    def __init__(self, message: str = "the request was cancelled") -> None:
        super().__init__(message)


class DeadlineExceeded(Cancelled):
    """No answer came before the request's deadline, or within the time that the caller waits."""

    code = "DEADLINE_EXCEEDED"

    def __init__(self, message: str = "Deadline Exceeded") -> None:
        super().__init__(message)


class Internal(ServingError):
    """The server or the model has a defect, or a worker process ended while it had a request that may not be run twice."""

    code = "INTERNAL"


class Unknown(ServingError):
    """The error's code belongs to no other class of this module."""

    code = "UNKNOWN"


_KINDS = (InvalidArgument, NotFound, AlreadyExists, Unavailable, Unsupported, Replaced, Cancelled, DeadlineExceeded)
_BY_CODE: dict[str, type[ServingError]] = {kind.code: kind for kind in (*_KINDS, Internal, Unknown)}


def kind_of(code: str) -> type[ServingError]:
    """Returns the error class that has a code, such as "NOT_FOUND", or ``Unknown`` if no class has the code."""
    return _BY_CODE.get(code, Unknown)


def from_code(code: str, message: str) -> ServingError:
    """Makes the exception for a code and message from another process. An unknown code becomes ``Unknown``."""
    return kind_of(code)(message)


def in_plain_words(message: str) -> str:
    """Returns an error's message without Triton's prefix for requests that have no id, and without any text after " NOTE: "."""
    start = len(_NO_ID) if message.startswith(_NO_ID) else 0
    return message[start:].partition(" NOTE: ")[0].rstrip()
