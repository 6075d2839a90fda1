"""The limit of this process's open files, and the file descriptors that are reserved for requests.

A request uses file descriptors for large tensors. A region, pushed parameters, a client's lane or a connection to the clients'
socket is refused if its file descriptor would be a reserved one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterable, Iterator

from tensord.shm.errors import NoDescriptor, Unavailable

#: Descriptors kept for requests and connections; at most a quarter of the limit.
_RESERVE = 256
#: Seconds until what lacked a descriptor is tried again.
AGAIN_SECONDS = 1.0


def limit() -> int:
    """Returns how many file descriptors this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def close(fds: Iterable[int]) -> None:
    """Closes file descriptors."""
    for fd in fds:
        os.close(fd)


def raise_limit() -> int:
    """Raises this process's soft limit of open files to its hard limit. Returns the hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def check_reserve(fd: int, what: str) -> None:
    """Raises Unavailable if ``fd`` is one of the highest file descriptor numbers, which are reserved for requests.

    ``what`` is the beginning of the error's message. The caller still has to close ``fd``.
    """
    # The system always gives out the lowest free number, so all descriptors below are in use.
    most = limit()
    room = most - min(_RESERVE, most // 4)
    if fd >= room:
        raise Unavailable(
            f"{what}: {fd} files are open in a process of the server, {room} are allowed beside those kept for requests "
            f"(the limit of open files is {most})"
        )


def none_left(who: str) -> NoDescriptor:
    """Makes the error for an operation that fails because a process may open no more files. ``who`` names the process."""
    return NoDescriptor(f"{who} has as many files open as it may, {limit()}")


def lacked(error: BaseException | None) -> bool:
    """Returns whether an error, or one that led to it, was raised because a process of the daemon could open no more files."""
    while error is not None:
        if isinstance(error, NoDescriptor) or getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            return True
        # The system's loader tells only in words why it cannot load a library.
        if isinstance(error, ImportError) and os.strerror(errno.EMFILE) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def needed(what: str) -> Iterator[None]:
    """Converts an OSError in the ``with`` block to Unavailable if it says that no more files can be opened.

    ``what`` is what the file was needed for, such as "sending an arena segment".
    """
    try:
        yield
    except OSError as error:
        if not lacked(error):
            raise
        raise none_left(f"no file can be opened for {what}: the server") from error
