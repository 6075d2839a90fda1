"""Takes over listening sockets that the service manager has bound and passes to the daemon (sd_listen_fds(3)).

    LISTEN_PID=<us>  LISTEN_FDS=3  LISTEN_FDNAMES=http:http:grpc      descriptors 3, 4 and 5

A socket's name is its protocol, set as FileDescriptorName= in its unit. A socket without a name, which systemd then names after
the unit, is for HTTP. The paths of Unix sockets belong to the service manager, so they stay when the daemon ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from tensord.daemon.processes.listening import Listener, ListenError

_FIRST = 3  # SD_LISTEN_FDS_START
_PROTOCOLS = ("http", "grpc")
_FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)


def inherited(environment: Mapping[str, str]) -> dict[str, list[Listener]]:
    """Returns the listening sockets that the service manager passed, by protocol ("http", "grpc"); empty: none.

    Raises ListenError: a descriptor is not a listening stream socket, its name is not a known protocol, or LISTEN_FDS and
    LISTEN_FDNAMES are malformed or contradict each other.
    """
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return {}
    count = environment.get("LISTEN_FDS", "0")
    if not (count.isascii() and count.isdigit()):
        raise ListenError(f"socket activation: LISTEN_FDS is '{count}', a number is expected")
    names = environment["LISTEN_FDNAMES"].split(":") if "LISTEN_FDNAMES" in environment else [""] * int(count)
    if len(names) != int(count):
        raise ListenError(f"socket activation: {count} sockets were passed, but {len(names)} names for them")
    found: dict[str, list[Listener]] = {}
    for fd, name in enumerate(names, _FIRST):
        protocol = _protocol(fd, name)
        found.setdefault(protocol, []).append(Listener(_taken(fd), protocol))
    return found


def _protocol(fd: int, name: str) -> str:
    if name in _PROTOCOLS:
        return name
    # These are systemd's names for a socket whose unit gives none.
    if name in ("", "unknown") or name.endswith(".socket"):
        return "http"
    raise ListenError(
        f"socket activation: descriptor {fd} is called '{name}': FileDescriptorName= in its unit has to be http or grpc"
    )


def _taken(fd: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ListenError(f"socket activation: descriptor {fd}: {error.strerror}") from None
    if sock.family not in _FAMILIES or sock.type != socket.SOCK_STREAM or not listening:
        sock.detach()
        raise ListenError(f"socket activation: descriptor {fd} is not a listening TCP or Unix stream socket")
    sock.setblocking(False)
    os.set_inheritable(sock.fileno(), False)
    return sock
