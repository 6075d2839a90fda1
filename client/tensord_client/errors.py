"""The exceptions of the client. They are the same over every kind of connection; messages are the server's own sentences."""

from __future__ import annotations

import re
from typing import ClassVar

#: The message of errors raised by a client that was closed, and of requests that a process has from the one it was forked from.
CLOSED, FORKED = "the client was closed", "the request is one of the process that this one was forked from"


class ServingError(Exception):
    """Base class of the client's errors. ``message``: a sentence for people; ``code``: the kind of error, such as "NOT_FOUND"."""

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
    """The request would make something under a name, such as a region, that exists already."""

    code = "ALREADY_EXISTS"


class Unavailable(ServingError):
    """The server cannot answer now, or was lost; the request itself is not wrong.

    Sending the request again is safe unless the message says that it may have run.
    """

    code = "UNAVAILABLE"


class Unsupported(ServingError):
    """The request was understood, but this server or this kind of connection does not offer what it asks for."""

    code = "UNSUPPORTED"


class Cancelled(ServingError):
    """The request was cancelled, by its caller or because the client was closed while it was under way."""

    code = "CANCELLED"


class Replaced(ServingError):
    """A newer request with the same ``replace_key`` took this one's place, or a newer push of parameters overtook this push."""

    code = "REPLACED"


class DeadlineExceeded(Cancelled):
    """No answer came before the request's deadline, or within the time that the caller waits."""

    code = "DEADLINE_EXCEEDED"

    def __init__(self, message: str = "Deadline Exceeded") -> None:
        super().__init__(message)


class Internal(ServingError):
    """The server or the model has a defect, or a worker process ended while it had a request that may not be run twice."""

    code = "INTERNAL"


class Unknown(ServingError):
    """An error whose kind the client does not know."""

    code = "UNKNOWN"


class ResultsHeld(ServingError):
    """The program holds as many answers in the server's memory as it may, by their number or by their bytes; release some.

    ``held``: answers that are held; ``limit``: the most that may be.
    """

    code = "RESULTS_HELD"

    def __init__(self, held: int, limit: int, byte_size: int = 0, refusal: str = "") -> None:
        """Makes the error of a program that holds ``held`` answers.

        ``byte_size``, ``refusal``: the answers' bytes, and the server's sentence, where it had no room for another answer.
        """
        size, most = (f" of {byte_size} bytes", "") if refusal else ("", f", at most {limit} may be")
        super().__init__(
            f"{held} results{size} are held in the server's memory{most}: release them, or drop their arrays"
            + (f" ({refusal})" if refusal else "")
        )
        self.held = held
        self.limit = limit


def too_many_waiting(count: int, most: int) -> Unavailable:
    """Makes the error for a request that cannot be queued: ``count`` requests wait in this process, and at most ``most`` may."""
    return Unavailable(f"{count} requests wait in this process to be sent, at most {most} may: wait for answers first")


#: How a message about a request without an id begins, and one about an output that is larger than its place.
_NO_ID = "[request id: <id_unknown>] "
_TOO_SMALL = re.compile(r"specified with the request for output '(.*)' \((\d+) bytes\) should be at least (\d+) bytes")
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
    """Makes the exception for an error code of the server, such as "NOT_FOUND"; for an unknown code an ``Unknown``."""
    return _in_plain_words(_BY_CODE.get(code, Unknown), message)


def from_status(status: int, message: str) -> ServingError:
    """Makes the exception for an HTTP status that is no success."""
    return _in_plain_words(_BY_STATUS.get(status, Internal if status >= 500 else InvalidArgument), message)


def _in_plain_words(kind: type[ServingError], message: str) -> ServingError:
    """Makes the exception without what the protocol adds to the message: the id of a request that has none, a note.

    A place that is too small is the caller's mistake, and Triton's Internal.
    """
    if found := _TOO_SMALL.search(message):
        return InvalidArgument("output '{}' takes {} bytes, and its place has {}".format(*found.group(1, 3, 2)))
    start = len(_NO_ID) if message.startswith(_NO_ID) else 0
    return kind(message[start:].partition(" NOTE: ")[0].rstrip())
