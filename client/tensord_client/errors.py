"""The exceptions of the client. They are the same over every kind of connection; messages are the server's own sentences."""

from __future__ import annotations

import re

from tensord_client.common.errors import CLOSED as CLOSED
from tensord_client.common.errors import AlreadyExists as AlreadyExists
from tensord_client.common.errors import Cancelled as Cancelled
from tensord_client.common.errors import DeadlineExceeded as DeadlineExceeded
from tensord_client.common.errors import Internal as Internal
from tensord_client.common.errors import InvalidArgument as InvalidArgument
from tensord_client.common.errors import NotFound as NotFound
from tensord_client.common.errors import Replaced as Replaced
from tensord_client.common.errors import ServingError as ServingError
from tensord_client.common.errors import Unavailable as Unavailable
from tensord_client.common.errors import Unknown as Unknown
from tensord_client.common.errors import Unsupported as Unsupported
from tensord_client.common.errors import in_plain_words, kind_of


class ResultsHeld(ServingError):
    """Raised if this process holds too many answers in the server's memory. It must release some answers first.

    Attributes: ``held`` is the number of these answers. ``limit`` is how many answers a process may hold.
    """

    code = "RESULTS_HELD"

    def __init__(self, held: int, limit: int, byte_size: int = 0, refusal: str = "") -> None:
        """Makes the error's message. ``held``: how many answers this process holds. ``limit``: how many answers it may hold.

        ``refusal``: the error text with which the server refused a request, or "" if this process itself refused it.
        ``byte_size``: the size of all held answers. It is only used with ``refusal``.
        """
        size, most = (f" of {byte_size} bytes", "") if refusal else ("", f", at most {limit} may be")
        super().__init__(
            f"{held} results{size} are held in the server's memory{most}: release them, or drop their arrays"
            + (f" ({refusal})" if refusal else "")
        )
        self.held = held
        self.limit = limit


def too_many_waiting(count: int, most: int) -> Unavailable:
    """Makes the error for a request that cannot be queued, because ``count`` requests wait in this process and ``most`` may."""
    return Unavailable(f"{count} requests wait in this process to be sent, at most {most} may: wait for answers first")


#: The message about an output that is larger than its place.
_TOO_SMALL = re.compile(r"specified with the request for output '(.*)' \((\d+) bytes\) should be at least (\d+) bytes")
#: HTTP status -> error. What the table lacks is the request's fault up to 499, and the server's from 500 on.
_BY_STATUS = {403: Unavailable, 404: NotFound, 409: Replaced, 501: Unsupported, 503: Unavailable, 504: DeadlineExceeded}


def from_code(code: str, message: str) -> ServingError:
    """Makes the exception for an error code of the server, such as "NOT_FOUND". An unknown code becomes ``Unknown``."""
    return _in_plain_words(kind_of(code), message)


def from_status(status: int, message: str) -> ServingError:
    """Makes the exception for an HTTP status other than success. ``message`` is the error's text."""
    return _in_plain_words(_BY_STATUS.get(status, Internal if status >= 500 else InvalidArgument), message)


def _in_plain_words(kind: type[ServingError], message: str) -> ServingError:
    if found := _TOO_SMALL.search(message):
        return InvalidArgument("output '{}' takes {} bytes, and its place has {}".format(*found.group(1, 3, 2)))
    return kind(in_plain_words(message))
