"""The daemon's exceptions: those that it shares with clients, and a few that only the daemon raises.

Only ``tensord.daemon.front.status`` maps exceptions to HTTP statuses and gRPC codes.
"""

from __future__ import annotations

from tensord.shm.common.errors import AlreadyExists as AlreadyExists
from tensord.shm.common.errors import Cancelled as Cancelled
from tensord.shm.common.errors import DeadlineExceeded as DeadlineExceeded
from tensord.shm.common.errors import Internal as Internal
from tensord.shm.common.errors import InvalidArgument as InvalidArgument
from tensord.shm.common.errors import NotFound as NotFound
from tensord.shm.common.errors import Replaced as Replaced
from tensord.shm.common.errors import ServingError as ServingError
from tensord.shm.common.errors import Unavailable as Unavailable
from tensord.shm.common.errors import Unknown as Unknown
from tensord.shm.common.errors import Unsupported as Unsupported
from tensord.shm.common.errors import from_code as from_code
from tensord.shm.common.submission import UNKNOWN_MODEL as UNKNOWN_MODEL

#: The message that a client gets for a defect of ours.
DEFECT = "internal error; the server's log has the details"


class NoDescriptor(Unavailable):
    """Raised when a process of the daemon may open no more files. The operation that failed can succeed later."""


class FileTooLarge(InvalidArgument):
    """Raised when a model's file is larger than the limit for files of its kind."""

    def __init__(self, name: str, byte_size: int, limit: int) -> None:
        super().__init__(f"{name} has {byte_size} bytes, at most {limit} are read")
