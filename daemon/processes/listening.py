"""Opens the listening sockets for all fronts. The supervisor binds them, or the service manager passes them (sd_listen_fds(3)).

Connections that clients open while a front is replaced wait in the backlog of the socket. The service manager passes sockets
as the descriptors from 3 on. FileDescriptorName= in a socket's unit names the protocol, http or grpc. A socket whose unit
names none is for HTTP. For three sockets, the service manager sets these variables:

    LISTEN_PID=<this process>  LISTEN_FDS=3  LISTEN_FDNAMES=http:http:grpc
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensord.daemon.control import unix_socket

_BACKLOG = 1024
#: This host has no such address: another address of the same name may be one of its own.
_ELSEWHERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_FIRST = 3  # SD_LISTEN_FDS_START
_PROTOCOLS = ("http", "grpc")
_FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)


class ListenError(Exception):
    """Raised if a listening socket cannot be bound or used. ``key``: "port" if the port is at fault, or else "address"."""

    def __init__(self, message: str, key: str = "address") -> None:
        super().__init__(message)
        self.key = key


@contextlib.contextmanager
def named(section: str, port: str = "port") -> Iterator[None]:
    """Adds the name of the wrong option, such as ``http.port``, to the text of a ListenError that the ``with`` block raises.

    The name is ``section``, a dot, and then ``port`` if the port is wrong, or else "address".
    """
    try:
        yield
    except ListenError as error:
        key = port if error.key == "port" else error.key
        raise ListenError(f"{section}.{key}: {error}", key) from None


def bind_each(*binds: Callable[[], None]) -> None:
    """Calls all ``binds``, even if one fails. Then raises ListenError with the reason of each failure."""
    refused: list[str] = []
    for bind in binds:
        try:
            bind()
        except ListenError as error:
            refused.append(str(error))
    if refused:
        raise ListenError("\n         ".join(refused))


class Listener:
    """A listening TCP or Unix socket, with the URL that clients see."""

    def __init__(self, sock: socket.socket, protocol: str, path: str = "") -> None:
        self.socket = sock
        #: The protocol, "http" or "grpc".
        self.protocol = protocol
        #: The URL that clients see; None once closed.
        self.url: str | None = url(sock, protocol)
        if sock.family != socket.AF_UNIX:
            # Connections inherit the option, so that nobody sets it for each.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _never_pace(sock)
        # The inode of a path that was made here: if it is replaced meanwhile, another process owns the name now.
        self._path = path
        self._inode = os.stat(path).st_ino if path else 0

    def close(self) -> None:
        """Closes the socket, and removes the path of a Unix socket that this process bound. May be called again."""
        self.socket.close()
        self.url = None
        path, self._path = self._path, ""
        with contextlib.suppress(OSError):
            if path and os.stat(path).st_ino == self._inode:
                os.unlink(path)


def listen(address: str, port: int, protocol: str, mode: str = "0660") -> Listener:
    """Binds a listening socket: a Unix socket if ``address`` is ``unix:PATH``, else a TCP socket.

    ``protocol``: "http" or "grpc". ``mode``: the file mode of a Unix socket, in octal digits.
    Raises ListenError if the socket cannot be bound.
    """
    if address.startswith("unix:"):
        path = os.path.abspath(address.removeprefix("unix:").removeprefix("//") or ".")
        return Listener(_listen_unix(path, int(mode, 8)), protocol, path)
    # URLs and ``shown`` have an IPv6 address in brackets.
    bracketed = address.startswith("[") and address.endswith("]")
    return Listener(_listen_tcp(address[1:-1] if bracketed else address, port), protocol)


def listen_all(addresses: Sequence[str], port: int, protocol: str, mode: str) -> list[Listener]:
    """Binds a listening socket for each address: a Unix socket for ``unix:PATH``, else a TCP socket on ``port``.

    ``protocol``: "http" or "grpc". ``mode``: the file mode of Unix sockets, in octal digits.
    If a socket cannot be bound, closes the sockets that were bound, and raises ListenError.
    """
    made: list[Listener] = []
    try:
        for address in addresses:
            made.append(listen(address, port, protocol, mode))
    except BaseException:
        for listener in made:
            listener.close()
        raise
    return made


def _listen_unix(path: str, mode: int) -> socket.socket:
    """Binds a listening Unix socket to a path, with the file mode ``mode``."""
    try:
        sock = unix_socket.bind(Path(path), socket.SOCK_STREAM | socket.SOCK_NONBLOCK, mode)
    except OSError as error:
        reason = error.strerror or error
        if error.errno == errno.EADDRINUSE:
            reason = "a process listens there already" if Path(path).is_socket() else "there is a file of that name"
        raise ListenError(f"cannot listen on unix:{path}: {reason}") from None
    sock.listen(_BACKLOG)
    return sock


def _listen_tcp(address: str, port: int) -> socket.socket:
    try:
        found = resolved(address, port)
    except ListenError as error:
        raise ListenError(f"cannot listen on {shown(address, port)}: {error}") from None
    refused = ListenError(f"cannot listen on {shown(address, port)}: the name has no address")
    for family, kind, proto, _, where in found:
        try:
            return _bound(family, kind, proto, where)
        except OSError as error:
            key = "address" if error.errno in _ELSEWHERE else "port"
            refused = ListenError(f"cannot listen on {shown(address, port)}: {error.strerror}", key)
            if key == "port":
                break
    raise refused


def resolved(address: str, port: int) -> list[Any]:
    """Returns what ``getaddrinfo`` finds for a host name or an address to listen on. Raises ListenError with the reason."""
    try:
        return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ListenError(getattr(error, "strerror", "it is no host name")) from None


def _bound(family: int, kind: int, proto: int, where: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _never_pace(sock: socket.socket) -> None:
    # A congestion control that paces (bbr) would have each 64 KiB of a large answer wait for a timer. Any process may choose
    # Reno, and connections inherit it: setting it on a connection is too late.
    host = sock.getsockname()[0]
    if ipaddress.ip_address(host).is_loopback:
        with contextlib.suppress(OSError):  # they are slower then, and nothing else
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def url(sock: socket.socket, protocol: str = "http") -> str:
    """Returns the URL of a bound socket: ``PROTOCOL://127.0.0.1:8000``, ``unix:/path`` or (abstract address) ``unix:@name``."""
    if sock.family == socket.AF_UNIX:
        name = sock.getsockname()
        return f"unix:{name}" if isinstance(name, str) else f"unix:@{name[1:].decode(errors='replace')}"
    host, port = sock.getsockname()[:2]
    return f"{protocol}://{shown(host, port)}"


def shown(address: str, port: int) -> str:
    """Returns ``address:port``, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def inherited(environment: Mapping[str, str]) -> dict[str, list[Listener]]:
    """Returns the listening sockets that the service manager passed to this process, by protocol ("http", "grpc").

    ``environment``: holds LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES.
    Raises ListenError if a descriptor is no listening stream socket, if its name is no known protocol, or if LISTEN_FDS and
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
