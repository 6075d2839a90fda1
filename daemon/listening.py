"""The listening socket: bound by the supervisor, or inherited from the service manager, and handed to a front.

It outlives every front, so connections made while a front is replaced wait in its backlog instead of being refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

_FIRST_INHERITED = 3  # SD_LISTEN_FDS_START
_BACKLOG = 1024


class ListenError(Exception):
    """A sentence for the operator with address, port and reason."""


def listen(address: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ListenError."""
    try:
        (family, kind, proto, _, where), *_ = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ListenError(f"cannot listen on {shown(address, port)}: {error.strerror}") from None
    sock = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ListenError(f"cannot listen on {shown(address, port)}: {error.strerror}") from None
    return sock


def inherited(environment: Mapping[str, str]) -> socket.socket | None:
    """The socket that systemd passes (sd_listen_fds(3)); None without socket activation.

    Raises: ListenError: not exactly one listening TCP socket.
    """
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = environment.get("LISTEN_FDS", "0")
    if count == "0":
        return None
    if count != "1":
        raise ListenError(f"socket activation: {count} sockets were passed, expected one")
    try:
        sock = socket.socket(fileno=_FIRST_INHERITED)
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ListenError(f"socket activation: descriptor {_FIRST_INHERITED}: {error.strerror}") from None
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM or not listening:
        sock.detach()
        raise ListenError(f"socket activation: descriptor {_FIRST_INHERITED} is not a listening TCP socket")
    sock.setblocking(False)
    os.set_inheritable(sock.fileno(), False)
    return sock


def url(sock: socket.socket) -> str:
    """``http://127.0.0.1:8000`` of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://{shown(host, port)}"


def shown(address: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address or '*'}:{port}"
