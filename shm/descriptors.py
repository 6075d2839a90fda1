"""File descriptors of this process: how many it may open, and how many of them are kept for requests.

A client's region takes a descriptor for as long as it is registered, a large tensor takes some while its request runs. So that
clients' regions never leave none for requests, a region is only taken while the reserve is untouched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterable, Iterator

from tensord.shm.errors import Unavailable

#: Descriptors kept for requests and connections; at most a quarter of the limit.
_RESERVE = 256


def limit() -> int:
    """Returns how many descriptors this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def close(fds: Iterable[int]) -> None:
    """Closes all the descriptors."""
    for fd in fds:
        os.close(fd)


def raise_limit() -> int:
    """Raises the limit to what the system allows; children inherit it. Returns the limit that holds now."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def check_reserve(fd: int, what: str) -> None:
    """Checks that opening ``fd`` for ``what`` left the reserve of descriptors untouched.

    The system gives out the lowest number that is free, so all below it are in use.

    Raises: Unavailable: there are not; the descriptor stays the caller's.
    """
    most = limit()
    room = most - min(_RESERVE, most // 4)
    if fd >= room:
        raise Unavailable(
            f"{what}: {fd} files are open in a process of the server, {room} are allowed beside those kept for requests "
            f"(the limit of open files is {most})"
        )


@contextlib.contextmanager
def needed(what: str) -> Iterator[None]:
    """Turns a lack of descriptors inside the block into Unavailable."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise Unavailable(
            f"no file can be opened for {what}: the server has as many open as it may, {limit()}"
        ) from error
