"""Flags, keys, sockets and errors of gateways: programs that speak another protocol and ask the models of a daemon."""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import re
import signal
import socket
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tensord_client.common.arrays import Array
from tensord_client.errors import InvalidArgument, ServingError

#: The flags of every gateway: what they are if they are not given, and what they say.
FLAGS: dict[str, tuple[Any, str]] = {
    "--server": (None, "the daemon's folder, socket or HTTP's HOST:PORT; else $TENSORD, or the daemon of this host"),
    "--api-key-file": (None, "a file with a key a line, one of which a client has to tell"),
    "--certificate": (None, "a file with a certificate chain in PEM: clients connect with TLS"),
    "--key": (None, "a file with the certificate's key in PEM"),
    "--timeout": (60, "seconds for an answer of the model"),
    "--patience": (30, "seconds of these for a daemon that is being replaced"),
    "--wait": (60, "seconds for the daemon when the gateway starts"),
    "--stop-timeout": (30, "seconds for requests under way when the gateway stops"),
}
#: Matches a path in an error, which clients do not get: errors of connections name sockets, and errors of models name files.
FILE = re.compile(r"(?<![\w.\]/])(?:unix:)?/[^\s;,:'\")]+")


def told(error: ServingError) -> str:
    """Returns the text of an error for clients, without paths."""
    return FILE.sub("(a path)", error.message)


def options(
    module: str, about: str | None, flags: Mapping[str, tuple[Any, str]], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parses the command line of a gateway program, which has ``flags`` and the flags of all gateways.

    ``module``: the program's module. ``about``: the module's docstring. ``flags``: each flag's default and help text, by name.
    ``arguments``: the command line. If it is None, this process's command line is parsed.
    """
    parser = argparse.ArgumentParser(f"python -m {module}", description=str(about).partition("\n")[0])
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


def place(options: argparse.Namespace) -> tuple[str, int]:
    """Returns the host and port of ``--address``. Raises InvalidArgument if it is not HOST:PORT."""
    where = urlsplit(f"//{options.address}")
    if where.hostname is None or where.port is None:  # which would be all addresses of the host
        raise InvalidArgument(f"--address is '{options.address}', HOST:PORT is expected")
    return where.hostname, where.port


def listening(options: argparse.Namespace) -> socket.socket:
    """Opens the socket at ``--address`` where clients connect.

    Raises InvalidArgument if the address is not HOST:PORT, or OSError if it is in use.
    """
    host, port = place(options)
    made = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Those that it accepts have it too. asyncio sets it for sockets alone that it makes by itself: without it an answer in two
    # parts waits 40 ms for the client's acknowledgement.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def keys(options: argparse.Namespace) -> list[bytes]:
    """Reads the keys in the file of ``--api-key-file``. Without this flag, there are none.

    Raises InvalidArgument if the file has no key.
    """
    found = Path(options.api_key_file).read_bytes().split() if options.api_key_file else []
    if options.api_key_file and not found:
        raise InvalidArgument("the file of --api-key-file has no key")
    return found


def is_known(headers: Sequence[bytes], given: Sequence[str]) -> bool:
    """Returns whether a client may ask.

    ``headers`` are the Authorization headers that are allowed. If there are none, everybody may ask. ``given`` are the
    client's Authorization headers.
    """
    one = given[0].encode(errors="replace") if len(given) == 1 else b""
    # All are compared, each in constant time.
    return not headers or sum([hmac.compare_digest(header, one) for header in headers]) > 0


def notify(state: bytes) -> None:
    """Tells systemd the state of the service, if systemd has started it."""
    if where := os.environ.get("NOTIFY_SOCKET", ""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state, where.replace("@", "\0", 1))


def stop_event() -> asyncio.Event:
    """Returns an event that SIGTERM and SIGINT set from now on."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def without_bfloat16(values: Array, datatype: str) -> Array:
    """Returns BF16 values as float32, and any other values unchanged."""
    if datatype != "BF16":
        return values
    made: Array = (np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return made


def main(module: str, run: Coroutine[Any, Any, None]) -> None:
    """Runs a gateway. If an error ends it, exits with the error, after ``module``, on standard error."""
    try:
        asyncio.run(run)
    except (ServingError, OSError, ValueError) as error:
        sys.exit(f"{module}: {error}")
