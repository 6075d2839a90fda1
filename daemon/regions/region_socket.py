"""The clients' unix socket for memory that is handed over by descriptor: a sealed memfd instead of a name.

    client ── {"register": {"name": "x", "byte_size": 4096}} + the memfd ──▶    SEQPACKET: a message is a request
           ── {"unregister": {"name": "x"}} ─────────────────────────────▶    "" is all of the client's own
           ◀── {}  or  {"error": "..."} ──────────────────────────────────

Whoever holds the descriptor may use the memory, so its owner is not asked; who may connect is a matter of the socket's mode (the
daemon's user and group). docs/shared-memory.md has the client's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from tensord.config.options import RegionsOptions
from tensord.daemon.control import unix_socket
from tensord.daemon.front.connection_end import ConnectionEnd
from tensord.daemon.front.peer import end_of, peer_of
from tensord.daemon.regions.region_registry import RegionRegistry
from tensord.shm import descriptors
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.operations import FAILED, Peer, RegisterSystemRegion, UnregisterRegion
from tensord.shm.regions import check_sealed

_log = logging.getLogger(__name__)
_MAX_MESSAGE = 4096
#: Descriptors received with one message, enough to tell too many from one.
_MAX_FDS = 8
_MAX_CLIENTS = 1024
#: Seconds until clients are accepted again after there were no descriptors for one.
_PAUSE = 1.0


class Register(msgspec.Struct, forbid_unknown_fields=True):
    """Registers a memfd. Offset and size are bytes; the offset is a multiple of the page size."""

    name: str
    byte_size: int
    offset: int = 0


class Unregister(msgspec.Struct, forbid_unknown_fields=True):
    """Unregisters a region; "" is all that are the client's."""

    name: str


class RegionQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """A request, with one of the two."""

    register: Register | None = None
    unregister: Unregister | None = None


class RegionSocket:
    """Owns the listening socket and its name; does nothing where no path is configured."""

    def __init__(
        self,
        options: RegionsOptions,
        environment: Mapping[str, str],
        registry: RegionRegistry,
        settled: Callable[[], Awaitable[None]],
    ) -> None:
        """Takes ``settled``, which returns when every front acts upon earlier changes (``tensord.daemon.processes.fronts``)."""
        self.path = unix_socket.path(options.socket, "regions.sock", environment) if options.enabled else None
        self._registry = registry
        self._reclaim = options.reclaim
        self._settled = settled
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Serves on the running loop. Raises InvalidArgument: the path cannot be used."""
        if self.path is None:
            return
        try:
            self._listener = unix_socket.bind(self.path, socket.SOCK_SEQPACKET, 0o660)
        except OSError as error:
            raise InvalidArgument(f"regions.socket: '{self.path}': {error.strerror or error}") from None
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Closes the socket. Clients' regions stay registered. Idempotent."""
        if self._listener is not None and self.path is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            for task in self._tasks:
                task.cancel()
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it went away again
            return
        except OSError as error:  # no descriptors left
            _log.error("a client of the region socket has to wait: %s", error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            loop.call_later(_PAUSE, self._listen)
            return
        if len(self._tasks) >= _MAX_CLIENTS:
            client.close()
            return
        client.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._serve(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket) -> None:
        """Serves one request after the other, until the client is gone."""
        loop = asyncio.get_running_loop()
        with client, contextlib.closing(ConnectionEnd()) as connection, contextlib.suppress(OSError):  # it went away
            peer = peer_of(client.fileno())
            while (message := await _receive(client)) is not None:
                content, fds = message
                try:
                    answer = await self._answer(content, fds, peer, client.fileno(), connection)
                finally:
                    descriptors.close(fds)
                await loop.sock_sendall(client, msgspec.json.encode(answer))

    async def _answer(
        self, content: bytes, fds: list[int], peer: Peer, client: int, connection: ConnectionEnd
    ) -> dict[str, str]:
        try:
            question = msgspec.json.decode(content, type=RegionQuestion)
            if question.register is not None:
                with end_of(client, connection, self._reclaim) as end:
                    await self._register(question.register, fds, peer, end)
            elif question.unregister is not None:
                await self._registry.unregister(UnregisterRegion("system", question.unregister.name), peer)
            else:
                raise InvalidArgument("a request is an object with 'register' or 'unregister'")
            await self._settled()
        except msgspec.MsgspecError as error:
            return {"error": f"malformed request: {error}"}
        except ServingError as error:
            return {"error": error.message}
        except Exception:
            _log.exception("a request on the region socket failed")
            return {"error": FAILED}
        return {}

    async def _register(self, wanted: Register, fds: list[int], peer: Peer, end: int) -> None:
        if len(fds) != 1:
            raise InvalidArgument(
                f"failed to register shared memory region '{wanted.name[:255]}': "
                f"{len(fds)} descriptors came with the request, 1 is expected"
            )
        check_sealed(wanted.name, fds[0])
        request = RegisterSystemRegion(wanted.name, "", wanted.offset, wanted.byte_size)
        await self._registry.register(request, peer, end, sealed=fds[0])


async def _receive(client: socket.socket) -> tuple[bytes, list[int]] | None:
    """Receives a message and its descriptors, which the caller then owns; None: the client is gone."""
    await _readable(client)
    content, fds, flags, _ = socket.recv_fds(client, _MAX_MESSAGE, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    if not content:
        descriptors.close(fds)
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        descriptors.close(fds)
        raise ConnectionError
    return content, fds


async def _readable(client: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def ready_now() -> None:
        loop.remove_reader(client.fileno())
        ready.set_result(None)

    loop.add_reader(client.fileno(), ready_now)
    try:
        await ready
    finally:
        loop.remove_reader(client.fileno())
