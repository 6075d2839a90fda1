"""Finds a server and connects to it. A ``Client`` looks up the server's models, which are called as functions of arrays.

The docstring of ``connect`` says what an address is, and where a server is looked for without one. The folders in
$XDG_RUNTIME_DIR and /tmp are skipped unless this user owns them and nobody else may use them.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import starmap
from pathlib import Path
from typing import Any, Union

import numpy as np

from tensord_client.common.call import FOREVER, named
from tensord_client.common.connection import Connection
from tensord_client.common.model import Model
from tensord_client.common.results import Tensor
from tensord_client.errors import InvalidArgument, ServingError, Unavailable
from tensord_client.http import HttpConnection, reached
from tensord_client.http_channel import Address
from tensord_client.lane import LaneConnection

SERVICE = "/run/tensord"
#: The names of a daemon's sockets in their folder: for clients of this host, and of HTTP.
CLIENTS, HTTP = "clients.sock", "http.sock"
_PORT = 8000
#: Match the name of an HTTP header, and its value (RFC 9110).
_NAME, _VALUE = (
    re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"),
    re.compile(r"[!-~\x80-\xff]([ -~\t\x80-\xff]*[!-~\x80-\xff])?"),
)
#: Matches header fields by which HTTP, or the client, says how a request or its answer is to be read.
_OWN = re.compile(
    "accept-encoding|connection|content-.*|expect|host|inference-.*|te|tensord-.*|traceparent|trailer|transfer-.*|upgrade",
    re.IGNORECASE,
)
_PAUSE = 0.1

Place = Union[str, "os.PathLike[str]"]


class AnyClient:
    """Base class of ``Client`` and ``AsyncClient``. It has a connection to a server, and makes arrays that the two share."""

    def __init__(self, connection: Connection) -> None:
        """Wraps an open connection in a client. Programs call ``connect`` or ``connect_async`` instead."""
        self._connection = connection

    def empty(
        self,
        tensor: Tensor | Sequence[int] | int,
        dtype: Any = None,
        *,
        shape: Sequence[int] | None = None,
        device: str = "",
    ) -> Any:
        """Makes an array for a model's input or output. The server reads and writes the array's memory without a copy.

        If the client uses HTTP or serves the models in its own process, an array on the host is an ordinary numpy array.

        Args:
          tensor: an item of a model's ``inputs`` or ``outputs``, or a shape.
          dtype: the numpy dtype, if ``tensor`` is a shape. It is ignored if ``tensor`` is an item.
          shape: the complete shape, if ``tensor`` is an item with variable sizes (-1). None makes every variable size 1.
          device: a GPU, such as "cuda:0", as this process counts GPUs. "" means host memory.

        Returns: a numpy array with undefined content. On a GPU, a ``DeviceArray`` with undefined content: ``copy_from`` fills
          it, and other libraries view it by DLPack.
        Raises: InvalidArgument: the dtype is missing or has no fixed size (strings), the array is larger than the server
          allows, ``shape`` does not fit ``tensor``, or the server cannot use the GPU.  Unsupported: ``device`` is a GPU, and
          the client serves the models in its own process.  Unavailable: no memory is free for the array, this process has no
          CUDA driver or no such GPU, or the client is closed.
        """
        if isinstance(tensor, Tensor):
            dtype = tensor.dtype
            wanted = tuple(1 if size < 0 else size for size in tensor.shape) if shape is None else tuple(shape)
            if len(wanted) != len(tensor.shape) or any(a not in (-1, b) for a, b in zip(tensor.shape, wanted)):
                raise InvalidArgument(f"'{tensor.name}' is {tensor.datatype}{list(tensor.shape)}, not {list(wanted)}")
        else:
            wanted = (tensor,) if isinstance(tensor, int) else tuple(tensor)
        if dtype is None:
            raise InvalidArgument("an array of a shape alone needs a dtype")
        if np.dtype(dtype).hasobject:
            raise InvalidArgument("an array that is shared has a datatype of fixed size")
        if any(size < 0 for size in wanted):
            raise InvalidArgument(f"an array of shape {list(wanted)} has a negative dimension")
        return self._connection.empty_on(device, wanted, dtype) if device else self._connection.empty(wanted, dtype)

    def __reduce__(self) -> Any:
        raise TypeError("a client cannot be pickled, it is its process's own: call connect() in each process")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self._connection!r}>"


class Client(AnyClient, AbstractContextManager["Client"]):
    """A connection to a server. ``model`` looks up the server's models.

    Thread-safe. After a fork the child process connects anew by itself.
    """

    def model(self, name: str, version: int = 0, *, timeout: float | None = None, parameter_set: str = "") -> Model:
        """Looks up a model on the server and returns it as a function of arrays.

        Args:
          version: the version to call, or 0 for the newest at the time of each call.
          parameter_set: the model's parameter set that calls are answered with. "" means ``main``.
          timeout: the seconds that a call waits for its answer, and a stream for each response. None means no limit.

        Raises: NotFound: the server does not serve this model or version.  Unavailable: the model is not ready, or no server
          answers.  InvalidArgument: an argument has a wrong type.  ServingError: any other error of the server.
        """
        name, version = named(name, version)
        return Model(self._connection, self._connection.open(name, version), version, timeout, parameter_set)

    def close(self) -> None:
        """Closes the connection. If this process serves models itself, they are unloaded. Idempotent."""
        self._connection.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
    address: Place | None = None,
    *,
    wait: float = 0.0,
    patience: float = 30.0,
    headers: Mapping[str, str] | None = None,
) -> Client:
    """Finds a server, connects to it and returns the client.

    Args:
      address: a folder with a daemon's sockets, the path of a socket, ``unix:PATH``, ``HOST:PORT`` or ``http://HOST:PORT``. It
        may also be a repository of models, which this process then serves by itself. None means ``$TENSORD`` or, if it is not
        set, the first of /run/tensord, $XDG_RUNTIME_DIR/tensord, /tmp/tensord-UID and localhost:8000 that answers.
      wait: the seconds to wait for a server to appear. With 0, each address is tried once.
      patience: the seconds that a call waits, within its own timeout, for a lost server to come back.
      headers: header fields that every HTTP request has, such as a key that the server requires. Requests over lanes have no
        headers, and a server that requires a key for inference gives no lanes.

    Raises: Unavailable: no server answers; the message lists the addresses that were tried.  InvalidArgument: ``address`` has
      none of these forms, or ``headers`` has a malformed name or value, or a field that the client writes by itself.
    """
    return Client(connection(address, wait, patience, headers))


def connection(
    address: Place | None, wait: float, patience: float, headers: Mapping[str, str] | None = None
) -> Connection:
    """Finds a server and returns an open connection to it. The arguments and errors are the same as for ``connect``."""
    fields = b"".join(starmap(_field, (headers or {}).items()))
    until, patience = time.monotonic() + wait, min(patience, FOREVER)  # locks cannot be waited for without an end
    named = address if address is not None else os.environ.get("TENSORD") or None
    while True:
        tried: list[str] = []
        for each in [os.fspath(named)] if named is not None else _usual():
            try:
                return _connected(each, patience, fields)
            except Unavailable as error:
                tried.append(error.message)
        if time.monotonic() >= until:
            raise Unavailable("no tensord was found: " + "; ".join(tried))
        time.sleep(_PAUSE)


def _usual() -> Iterator[str]:
    """Yields the addresses at which ``connect`` looks for a server if no address is given and ``$TENSORD`` is not set."""
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


def headers_of(lines: Iterable[str]) -> dict[str, str]:
    """Parses the values of a program's options ``--header NAME:VALUE``. Returns a dict from header names to header values.

    Raises InvalidArgument if a value in ``lines`` has no colon.
    """
    fields = [line.partition(":") for line in lines]
    if wrong := [name for name, colon, _ in fields if not colon]:
        raise InvalidArgument(f"--header is '{wrong[0]}', NAME:VALUE is expected")
    return {name.strip(): value.strip() for name, _, value in fields}


def _field(name: str, value: str) -> bytes:
    if _OWN.fullmatch(name):
        raise InvalidArgument(
            f"'{name}' is a header that the client writes by itself, or that would change how it is read"
        )
    if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        raise InvalidArgument(
            f"'{name}' is no header of HTTP that can be sent, or its value has other than visible characters"
        )
    return f"{name}: {value}\r\n".encode("latin-1")


def _connected(address: str, patience: float, fields: bytes) -> Connection:
    path = address[len("unix:") :] if address.startswith("unix:") else address
    try:
        kind = os.stat(path).st_mode
    except OSError as error:
        scheme, found, rest = address.partition("://")
        if found and (scheme != "http" or rest.strip("/").count("/")):
            raise InvalidArgument(f"'{address}' is no address of a server: http://HOST:PORT is one") from None
        if path is address and "/" not in address.replace("http://", "", 1).rstrip("/"):
            return _over_tcp(address, patience, fields)
        raise _unreachable(path, error) from None
    if not stat.S_ISDIR(kind):
        return _on_socket(path, patience, fields)
    for name in (CLIENTS, HTTP):
        if os.path.exists(os.path.join(path, name)):
            return _on_socket(os.path.join(path, name), patience, fields)
    if not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
        raise _unreachable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    if not _holds_a_model(Path(path)):
        # A daemon that is being started has no sockets in its folder yet.
        raise Unavailable(f"{path}: it holds neither a daemon's sockets nor a model")
    try:
        # Only such a client imports it.
        from tensord import testing
    except ImportError as error:
        raise Unavailable(f"to serve models from a folder takes tensord in this process: {error}") from None
    from tensord_client.common.local import LocalConnection

    load: Any = functools.partial(testing.served, Path(path))
    return LocalConnection(load)


def _holds_a_model(repository: Path) -> bool:
    """Returns whether at least one folder in ``repository`` is a model's folder."""
    return any(
        path.name == "config.pbtxt" or (path.name.isdecimal() and path.is_dir())
        for path in (*repository.glob("[!.]*/config.pbtxt"), *repository.glob("[!.]*/[1-9]*"))
    )


def _unreachable(path: str, error: OSError) -> Unavailable:
    """Makes the exception to raise if this process failed with ``error`` to reach a server at ``path``."""
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


def _who_may(path: str, status: os.stat_result, access: int) -> str:
    # Imported where it is needed: a client's start is to be quick.
    import grp
    import pwd

    def name(number: int, named: Callable[[int], str]) -> str:
        try:
            return f"'{named(number)}'"
        except KeyError:
            return str(number)

    if (status.st_mode >> 3) & access == access:
        group = name(status.st_gid, lambda number: grp.getgrgid(number).gr_name)
        return f"{path} is for members of group {group}: join it (usermod -aG), and log in again"
    user = name(status.st_uid, lambda number: pwd.getpwuid(number).pw_name)
    return f"{path} is for user {user} alone"


def _on_socket(path: str, patience: float, fields: bytes) -> Connection:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            if error.errno == errno.EPROTOTYPE:
                return reached(Address(path), patience, fields)
            raise _unreachable(path, error) from None
    over_http = functools.partial(_over_http, path, patience, fields)
    return LaneConnection(path, over_http, patience=patience, keyed=bool(fields))


def _over_http(path: str, patience: float, fields: bytes, greeting: Mapping[str, Any]) -> Connection:
    tried = []
    for each in sorted(greeting.get("http", ()), key=lambda each: not each.startswith("unix:")):
        try:
            return _connected(each, patience, fields)
        except Unavailable as error:
            tried.append(error.message)
    raise Unavailable(
        f"the daemon at {path} serves no HTTP that can be reached{': ' if tried else ''}{'; '.join(tried)}"
    )


def _over_tcp(address: str, patience: float, fields: bytes) -> HttpConnection:
    text = (address[len("http://") :] if address.startswith("http://") else address).rstrip("/")
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(80 if address.startswith("http://") else _PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidArgument(f"'{address}' is no address of a server: a folder, a socket, unix:PATH or HOST:PORT")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unavailable(f"{address}: {getattr(error, 'strerror', None) or error}") from None
    last: ServingError | None = None
    for _, _, _, _, where in found:
        try:
            return reached(Address("", str(where[0]), int(where[1])), patience, fields)
        except Unavailable as error:
            last = last or error
    raise last or Unavailable(f"{address}: it has no address")
