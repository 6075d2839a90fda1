"""The client: finds a server, and gives its models as functions of arrays.

    connect()   $TENSORD, else /run/tensord, else the user's own daemon, else localhost:8000

An address is a folder (one with a daemon's sockets, or a repository of models, which this process then serves by itself), the
path of a socket, ``unix:PATH``, ``HOST:PORT`` or ``http://HOST:PORT``.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Union

import numpy as np

from tensord_client.connection import Connection
from tensord_client.datatypes import dtype_of
from tensord_client.errors import InvalidArgument, ServingError, Unavailable
from tensord_client.http import HttpConnection, reached
from tensord_client.http_channel import Address
from tensord_client.local import LocalConnection
from tensord_client.model import Model
from tensord_client.results import Tensor
from tensord_client.service import ServiceConnection

SERVICE = "/run/tensord"
#: The names of a daemon's sockets in their folder: for clients of this host, and of HTTP.
CLIENTS, HTTP = "clients.sock", "http.sock"
_PORT = 8000
_PAUSE = 0.1

Place = Union[str, "os.PathLike[str]"]


class Client:
    """A server's models, whichever way leads to it. Any thread may use it; a process that is forked off connects anew."""

    def __init__(self, connection: Connection) -> None:
        """Takes the way to the server; ``connect`` finds one."""
        self._connection = connection

    def model(self, name: str, version: int = 0, *, timeout: float | None = None, parameter_set: str = "") -> Model:
        """Returns a model.

        Args:
          version: 0 is the newest at the time of each call.
          parameter_set: of its parameter sets the one that its calls are answered with; "": ``main``.
          timeout: seconds that a call waits for its answer, and a stream for each response; None: any time.

        Raises: NotFound: it is not served.  ServingError.
        """
        return Model(self._connection, self._connection.open(name, version), version, timeout, parameter_set)

    def empty(
        self,
        tensor: Tensor | Sequence[int],
        dtype: Any = None,
        *,
        shape: Sequence[int] | None = None,
        device: str = "",
    ) -> Any:
        """Makes an array for an input, or for an output's place, which the server reads and writes where it lies.

        Args:
          tensor: of ``Model.inputs`` or ``outputs``, with every size that varies taken as 1; or a shape, and then ``dtype``.
          shape: the whole shape, where a size of the tensor varies.
          device: a GPU, "cuda:0", as this process counts them; "": the host.

        Returns: a numpy array; on a GPU a ``DeviceArray``, which frameworks view by DLPack and ``copy_from`` fills.
        Raises: InvalidArgument: strings have no such memory, there is no more of it, or the server cannot reach that GPU's.
          Unsupported: this process serves the models itself.  Unavailable: this process has no CUDA driver.
        """
        if isinstance(tensor, Tensor):
            dtype = dtype_of(tensor.datatype)
            wanted = tuple(1 if size < 0 else size for size in tensor.shape) if shape is None else tuple(shape)
        else:
            wanted = tuple(tensor)
        if dtype is None or np.dtype(dtype).hasobject:
            raise InvalidArgument("an array that is shared has a datatype of fixed size")
        return self._connection.empty_on(device, wanted, dtype) if device else self._connection.empty(wanted, dtype)

    def close(self) -> None:
        """Ends the connection; models that are served by this process end as well. Idempotent."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client on {self._connection!r}>"


def connect(address: Place | None = None, *, wait: float = 0.0, patience: float = 30.0) -> Client:
    """Finds a server and connects to it.

    Args:
      address: where it is; None: ``$TENSORD``, else the service of this host, the user's own daemon, or localhost:8000.
      wait: seconds to wait for it to be there.
      patience: seconds that a call waits for a server that is gone, within its own timeout.

    Raises: Unavailable: nobody is there, with what was tried.
    """
    return Client(connection(address, wait, patience))


def connection(address: Place | None, wait: float, patience: float) -> Connection:
    """Finds the way to a server. Raises as ``connect``."""
    until = time.monotonic() + wait
    named = address if address is not None else os.environ.get("TENSORD") or None
    while True:
        tried: list[str] = []
        for each in [os.fspath(named)] if named is not None else _usual():
            try:
                return _way(each, patience)
            except Unavailable as error:
                tried.append(error.message)
        if time.monotonic() >= until:
            raise Unavailable("no tensord was found: " + "; ".join(tried))
        time.sleep(_PAUSE)


def _usual() -> Iterator[str]:
    """Names where a server usually is. A folder that somebody else could have made is not looked into."""
    yield f"{SERVICE}/{CLIENTS}"
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for folder in ([f"{runtime}/tensord"] if runtime else []) + [f"/tmp/tensord-{user}"]:
        try:
            found = os.lstat(folder)
        except OSError:
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077:
            yield f"{folder}/{CLIENTS}"
    yield f"localhost:{_PORT}"


def _way(address: str, patience: float) -> Connection:
    """Connects to one address. Raises Unavailable: nobody is there; InvalidArgument: it is none."""
    path = address[len("unix:") :] if address.startswith("unix:") else address
    try:
        kind = os.stat(path).st_mode
    except OSError as error:
        if path is address and "/" not in address.replace("http://", "", 1).rstrip("/"):
            return _over_tcp(address, patience)
        raise _unreachable(path, error) from None
    if not stat.S_ISDIR(kind):
        return _on_socket(path, patience)
    for name in (CLIENTS, HTTP):
        if os.path.exists(os.path.join(path, name)):
            return _on_socket(os.path.join(path, name), patience)
    if not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
        raise _unreachable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    return LocalConnection(Path(path))


def _unreachable(path: str, error: OSError) -> Unavailable:
    """Returns the error of a path that cannot be reached; where this user may not, it says who may."""
    text = f"{path}: {error.strerror}"
    if not isinstance(error, PermissionError):
        return Unavailable(text)
    for each in (*reversed(Path(path).absolute().parents), Path(path)):
        try:
            found = os.stat(each)
        except OSError:
            break
        folder = stat.S_ISDIR(found.st_mode)
        wanted = (os.X_OK | (os.R_OK if each == Path(path) else 0)) if folder else os.W_OK
        if not os.access(each, wanted, effective_ids=True):
            return Unavailable(f"{text}; {_who_may(str(each), found, wanted)}")
    return Unavailable(text)


def _who_may(path: str, found: os.stat_result, wanted: int) -> str:
    """Says who has the ``wanted`` access to a path that this user has not."""
    # Imported where it is needed: a client's start is to be quick.
    import grp
    import pwd

    def name(number: int, named: Callable[[int], str]) -> str:
        try:
            return f"'{named(number)}'"
        except KeyError:
            return str(number)

    if (found.st_mode >> 3) & wanted == wanted:
        group = name(found.st_gid, lambda number: grp.getgrgid(number).gr_name)
        return f"{path} is for members of group {group}: join it (usermod -aG), and log in again"
    user = name(found.st_uid, lambda number: pwd.getpwuid(number).pw_name)
    return f"{path} is for user {user} alone"


def _on_socket(path: str, patience: float) -> Connection:
    """Connects to a unix socket: one for clients of this host, or one of HTTP."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            if error.errno == errno.EPROTOTYPE:
                return reached(Address(path), patience)
            raise _unreachable(path, error) from None
    return ServiceConnection(path, lambda told: _over_http(path, told, patience), patience)


def _over_http(path: str, told: Mapping[str, Any], patience: float) -> Connection:
    """Connects to where a daemon says that it serves HTTP, to a unix socket first. Raises Unavailable."""
    tried = []
    for each in sorted(told.get("http", ()), key=lambda each: not each.startswith("unix:")):
        try:
            return _way(each, patience)
        except Unavailable as error:
            tried.append(error.message)
    raise Unavailable(
        f"the daemon at {path} serves no HTTP that can be reached{': ' if tried else ''}{'; '.join(tried)}"
    )


def _over_tcp(address: str, patience: float) -> HttpConnection:
    """Connects over TCP. A name may stand for several addresses: the first that answers."""
    text = (address[len("http://") :] if address.startswith("http://") else address).rstrip("/")
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(80 if address.startswith("http://") else _PORT)
    if not host or not port.isdigit():
        raise InvalidArgument(f"'{address}' is no address of a server: a folder, a socket, unix:PATH or HOST:PORT")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unavailable(f"{address}: {getattr(error, 'strerror', None) or error}") from None
    last: ServingError | None = None
    for _, _, _, _, where in found:
        try:
            return reached(Address("", str(where[0]), int(where[1])), patience)
        except Unavailable as error:
            last = last or error
    raise last or Unavailable(f"{address}: it has no address")
