"""The daemon that an attack is aimed at, and functions that open and fill connections to it."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import tritonclient.http as httpclient

from bench.helper import object_name
from tensord.daemon.grpc import frames

#: Where attackers come from: a client of its own for the daemon, which shares its memory out by address.
_FROM = "127.0.0.2", 0


@dataclass
class Target:
    """A daemon's HTTP and gRPC addresses (HOST:PORT), its socket for clients, and how many seconds to attack it."""

    http: str
    grpc: str
    seconds: float
    #: The daemon's socket for clients.
    clients: str = ""
    #: What happened, by name.
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.seconds
        # Thousands of connections need as many descriptors here.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def going_on(self) -> bool:
        """Returns whether the attack goes on: until its time is over and at least one thing was counted."""
        return time.monotonic() < self._end or not self.counts

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Counts timeouts and lost connections within the block instead of raising them: the daemon may refuse an attacker."""
        try:
            yield
        except TimeoutError:
            self.count("timeouts")
        except OSError:
            self.count("connections lost")

    @contextlib.contextmanager
    def region(self, byte_size: int) -> Iterator[str]:
        """Registers a system region of zeros within the block and yields its name.

        With it a small request can ask for a large answer.
        """
        name = object_name()
        path = Path("/dev/shm", name)
        with httpclient.InferenceServerClient(self.http) as client:
            try:
                path.touch(0o600)
                os.truncate(path, byte_size)
                client.register_system_shared_memory(name, f"/{name}", byte_size)
                yield name
                with self.refusals():
                    client.unregister_system_shared_memory(name)
            finally:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def posting(self) -> Iterator[Callable[..., None]]:
        """Yields a function that posts a body to a path on one kept connection and counts the status of each answer."""
        connection = http.client.HTTPConnection(self.http, timeout=60, source_address=_FROM)

        def post(path: str, body: bytes | str, headers: Mapping[str, str] = types.MappingProxyType({})) -> None:
            with self.refusals():
                connection.request("POST", path, body, headers)
                with connection.getresponse() as answer:
                    answer.read()
                    self.count(f"status {answer.status}")

        with contextlib.closing(connection):
            yield post

    def http_socket(self) -> socket.socket:
        """Returns a new connection to the HTTP front."""
        return _connected(self.http)

    def grpc_socket(self, settings: tuple[tuple[int, int], ...] = ()) -> socket.socket:
        """Returns a new connection to the gRPC front, on which the HTTP/2 preface and SETTINGS were sent."""
        made = _connected(self.grpc)
        try:
            made.sendall(frames.PREFACE + frames.settings(settings))
        except OSError:
            made.close()
            raise
        return made


class Closes(Protocol):
    """A connection of any kind."""

    def close(self) -> None: ...


Connected = TypeVar("Connected", bound=Closes)


def hold(
    target: Target,
    count: int,
    connect: Callable[[], Connected],
    send: Callable[[Connected], object],
    pause: float = 0.01,
) -> None:
    """Keeps ``count`` connections and calls ``send`` with each in turn, until the time is over; replaces those that are lost."""
    connections: list[Connected] = []
    while target.going_on():
        with target.refusals():
            while len(connections) < count:
                connections.append(connect())
        for connection in list(connections):
            try:
                send(connection)
            except OSError:
                target.count("connections lost")
                connections.remove(connection)
                connection.close()
            if not target.going_on():
                break
        time.sleep(pause)
    for connection in connections:
        connection.close()


def pile_up(target: Target, connect: Callable[[], Closes], count: int) -> None:
    """Opens up to ``count`` connections and keeps them until the time is over; opens further ones in place of those refused."""
    connections: list[Closes] = []
    while target.going_on():
        if len(connections) < count:
            with target.refusals():
                connections.append(connect())
                target.count("connections")
        else:
            time.sleep(0.05)
    for connection in connections:
        connection.close()


def burst(target: Target, connect: Callable[[], socket.socket], request: bytes, count: int) -> None:
    """Opens ``count`` connections, then sends the request on all of them at once, and keeps them until the time is over."""
    connections: list[socket.socket] = []
    for _ in range(count):
        with target.refusals():
            connections.append(connect())
    for connection in connections:
        with target.refusals():
            connection.sendall(request)
            target.count("requests")
    while target.going_on():
        time.sleep(0.05)
    for connection in connections:
        connection.close()


def drain(connection: socket.socket, at_most: int = 1 << 20) -> int:
    """Reads what has arrived, without waiting; returns how many bytes. Raises ConnectionError: the daemon has hung up."""
    connection.setblocking(False)
    try:
        taken = len(connection.recv(at_most))
        if not taken:
            raise ConnectionError("the daemon hung up")
        return taken
    except BlockingIOError:
        return 0
    finally:
        connection.settimeout(5)


def _connected(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 5, _FROM)
