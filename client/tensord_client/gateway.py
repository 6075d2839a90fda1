"""What gateways share: flags, API keys, sockets, look-ups, limits. A gateway serves a daemon's models over another protocol."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hmac
import logging
import math
import os
import re
import reprlib
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tensord_client.asynchronous import AsyncClient, AsyncModel, connect_async
from tensord_client.client import headers_of
from tensord_client.common.arrays import Array
from tensord_client.common.results import Answer
from tensord_client.common.tensors import Tensor
from tensord_client.errors import InvalidArgument, ResultsHeld, ServingError

Flags = dict[str, tuple[Any, str]]
#: The flags of every gateway: what they are if they are not given, and what they say.
FLAGS: Flags = {
    "--server": (None, "the daemon's folder, socket or HTTP's HOST:PORT; else $TENSORD, or the daemon of this host"),
    "--header": ([], "NAME:VALUE, sent to the daemon with each request over HTTP; may be repeated"),
    "--api-key-file": (None, "a file with a key a line, one of which a client has to tell"),
    "--certificate": (None, "a file with a certificate chain in PEM: clients connect with TLS"),
    "--key": (None, "a file with the certificate's key in PEM"),
    "--max-connections": (256, "clients at the same time"),
    "--timeout": (60, "seconds for an answer of the model"),
    "--patience": (30, "seconds of these for a daemon that is being replaced"),
    "--wait": (60, "seconds for the daemon when the gateway starts"),
    "--stop-timeout": (30, "seconds for requests under way when the gateway stops"),
}
#: Matches a path in an error, which clients do not get: errors of connections name sockets, and errors of models name files.
FILE = re.compile(r"(?<![\w.\]/])(?:unix:)?/[^\s;,:'\")]+")
#: Connections above --max-connections, which are told so; models that stay looked up, and seconds for which a look-up holds.
_TOLD, _MODELS, _FRESH = 64, 256, 1.0
#: The most dimensions of an array from a client, and the largest size of one.
MAX_DIMENSIONS, MAX_SIZE = 8, 1 << 31


def options(module: str, about: Any, flags: Flags, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line of a gateway program, which has ``flags`` and the flags of all gateways.

    ``module``: the program's module. ``about``: the module's docstring. ``flags``: each flag's default and help text, by name.
    ``arguments``: the command line. If it is None, this process's command line is parsed.
    """
    parser = argparse.ArgumentParser(f"python -m {module}", description=about.partition("\n")[0])
    flag, many, number = {"action": "store_true"}, {"action": "append"}, {"type": _positive}
    for name, (default, meaning) in {**flags, **FLAGS}.items():
        own: Any = {bool: flag, list: many, int: number}.get(type(default), {})
        parser.add_argument(name, default=default, help=f"{meaning} ({default})" if default else meaning, **own)
    return parser.parse_args(arguments)


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1 << 40:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {1 << 40}")
    return int(number) if number.is_integer() else number


class Listening(socket.socket):
    """The socket that listens at ``--address``. It closes new connections at once while too many connections are open."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Binds the socket to ``--address``. Raises InvalidArgument if this is not HOST:PORT, or OSError if the port is taken."""
        where = urlsplit(f"//{options.address}")
        if where.hostname is None or where.port is None:  # which would be all addresses of the host
            raise InvalidArgument(f"--address is '{options.address}', HOST:PORT is expected")
        super().__init__(socket.AF_INET6 if ":" in where.hostname else socket.AF_INET)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Those that it accepts have it too. asyncio sets it for sockets alone that it makes by itself: without it an answer in
        # two parts waits 40 ms for the client's acknowledgement.
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.bind((where.hostname, where.port))
        self._open, self._most = list[socket.socket](), options.max_connections + _TOLD

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection. If too many are open, closes it and raises ConnectionAbortedError, which event loops ignore."""
        accepted, address = super().accept()
        self._open = [each for each in self._open if each.fileno() >= 0]
        if len(self._open) >= self._most:
            accepted.close()
            raise ConnectionAbortedError
        self._open.append(accepted)
        return accepted, address


class Gateway:
    """Base class of gateways. A gateway serves a daemon's models over another protocol, and checks its clients' API keys."""

    #: Looks a model up, and makes what is kept of it.
    make: Callable[[str, int], Awaitable[Any]]

    def __init__(self, client: AsyncClient, options: argparse.Namespace, header: Callable[[bytes], bytes]) -> None:
        """Reads the API keys of clients from the file ``options.api_key_file``. If that is None, clients need no key.

        ``header`` returns the Authorization header that a client with a given key sends. Raises OSError if the file cannot be
        read. Raises InvalidArgument if the file has no key.
        """
        self.client, self.options = client, options
        keys = Path(options.api_key_file).read_bytes().split() if options.api_key_file else []
        if options.api_key_file and not keys:
            raise InvalidArgument("the file of --api-key-file has no key")
        self._headers, self._looking_up = [header(key) for key in keys], asyncio.Lock()
        self._made: dict[tuple[str, int], tuple[float, Any]] = {}

    def is_known(self, given: Sequence[str]) -> bool:
        """Returns whether ``given`` is one Authorization header with a valid API key. True if no API keys are configured."""
        one = given[0].encode(errors="replace") if len(given) == 1 else b""
        # All are compared, each in constant time.
        return not self._headers or sum([hmac.compare_digest(header, one) for header in self._headers]) > 0

    async def model(self, asked: tuple[str, int], age: float = _FRESH) -> Any:
        """Returns the result of ``self.make`` for a model's name and version. The result may be up to ``age`` seconds old."""
        async with self._looking_up:  # so that one connection to the daemon is enough
            if asked not in self._made or time.monotonic() - self._made[asked][0] > age:
                self._made.pop(asked, None)
                self._made[asked] = time.monotonic(), await self.make(*asked)
                if len(self._made) > _MODELS:
                    del self._made[next(iter(self._made))]
            return self._made[asked][1]


async def ask(model: AsyncModel, inputs: Mapping[str, Any], **own: Any) -> Answer:
    """Calls the model and returns its answer. Repeats the call as long as the model raises ``ResultsHeld``.

    Other tasks run between two calls, and can release older answers. ``own``: keyword arguments for the model.
    """
    while True:
        try:
            return await model(inputs, **own)
        except ResultsHeld:
            await asyncio.sleep(0)


def told(error: ServingError) -> str:
    """Returns the message of ``error`` for clients. Each absolute file path in the message is replaced by "(a path)"."""
    return FILE.sub("(a path)", error.message)


def bound(what: str, number: int, unit: str, most: int) -> int:
    """Returns ``number``, or raises InvalidArgument if it is above ``most``. ``what`` and ``unit`` are for the error's text."""
    if number > most:
        raise InvalidArgument(f"{what} {number} {unit}, at most {most} may be")
    return number


def byte_size(what: str, dtype: np.dtype[Any], shape: Any) -> int:
    """Returns the size of an array in bytes. ``what`` is the array's name for errors.

    Raises InvalidArgument if ``shape`` is not a list of at most ``MAX_DIMENSIONS`` integers from 0 to ``MAX_SIZE``, or if the
    other sizes of an empty array make more than 64 MiB, because numpy counts them.
    """
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size <= MAX_SIZE for size in shape):
        raise InvalidArgument(f"{what} has the shape {reprlib.repr(shape)}, sizes are from 0 to {MAX_SIZE}")
    bound(f"{what} has", len(shape), "dimensions", MAX_DIMENSIONS)
    if 0 in shape:
        # numpy counts the other sizes, also where it makes more rows or larger numbers of it.
        bound(
            f"{what}{shape} has without its sizes of 0",
            math.prod(filter(None, shape)) * dtype.itemsize,
            "bytes",
            1 << 26,
        )
    return math.prod(shape) * dtype.itemsize


def array(what: str, dtype: np.dtype[Any], shape: Any, content: Any) -> Array:
    """Makes a read-only array from ``content``, the bytes of a client's array. ``what`` is the array's name for errors.

    Raises InvalidArgument if ``shape`` is not valid, or ``content`` is not bytes of the size that the array needs.
    """
    size = byte_size(what, dtype, shape)
    given = len(content) if isinstance(content, bytes) else type(content).__name__
    if given != size:
        raise InvalidArgument(f"{what}{shape} takes {size} bytes, and {given} came")
    return np.frombuffer(content, dtype).reshape(shape)


def rows(model: AsyncModel) -> list[dict[str, Tensor]]:
    """Returns the model's inputs by name, and the model's outputs by name. The shapes lack the batch dimension."""
    batched, both = model.max_batch_size > 0, (model.inputs, model.outputs)
    return [{each.name: each._replace(shape=each.shape[batched:]) for each in tensors} for tensors in both]


def for_client(values: Array, tensor: Tensor | None) -> Array:
    """Returns ``values`` as float32 if ``tensor`` describes a BF16 output. Otherwise returns ``values`` unchanged."""
    if tensor is None or tensor.datatype != "BF16":
        return values
    made: Array = values.view(np.uint16).astype(np.uint32)
    made <<= 16  # in place, which leaves a scalar an array
    return made.view(np.float32)


def notify(state: bytes) -> None:
    """Sends ``state``, such as b"READY=1", to systemd. Does nothing if systemd has not started this process."""
    if where := os.environ.get("NOTIFY_SOCKET", ""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state, where.replace("@", "\0", 1))


Serve = Callable[[AsyncClient, argparse.Namespace, Listening], contextlib.AbstractAsyncContextManager[None]]


def main(module: str, options: argparse.Namespace, what: str, serve: Serve) -> None:
    """Runs a gateway, which serves a daemon's models over another protocol, until SIGTERM or SIGINT comes.

    ``module``: the gateway's Python module, for the log. ``what``: what is served, such as "models", for the log. ``serve``:
    returns an asynchronous context manager that serves clients in its block. Raises SystemExit if an error ends the gateway.
    """

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        own: dict[str, Any] = {"patience": options.patience, "headers": headers_of(options.header)}
        with Listening(options) as listening:  # which refuses clients until they are served
            async with await connect_async(options.server, wait=options.wait, **own) as client:
                # Python before 3.11.9 keeps connections whose TLS handshake has failed, with 256 KiB each, until it collects
                # garbage of the last generation: it does so after hundreds of them, and looks at none of what is there now.
                gc.freeze()
                gc.set_threshold(700, 5, 0)
                async with serve(client, options, listening):
                    logging.getLogger(module).info("%s are served on %s:%s", what, *listening.getsockname()[:2])
                    notify(b"READY=1")
                    await stop.wait()
                    notify(b"STOPPING=1")

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    # It warns of each write to a connection that has been lost: whoever connects could fill the log.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    try:
        asyncio.run(run())
    except (ServingError, OSError, ValueError) as error:
        sys.exit(f"{module}: {error}")
