"""Serves the Unix socket on which local clients ask for lanes and pass shared memory (memfds) to the daemon.

The mode and folder of the socket decide who may connect. The kernel tells the daemon which user a client is. When a client
closes its connection, the daemon ends the client's lanes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tensord import __version__
from tensord.config import restrictions
from tensord.config.options import Options
from tensord.daemon.clients.client_lanes import ClientConnection, ClientLanes
from tensord.daemon.clients.client_messages import (
    MAX_ANSWER,
    MAX_QUESTION,
    ClientError,
    ClientQuestion,
    HelloAnswer,
    OpenLanes,
    Register,
)
from tensord.daemon.control import runtime_directory, unix_socket
from tensord.daemon.front.peer import ConnectionEnd, end_of, peer_of
from tensord.shm import descriptors
from tensord.shm.common.descriptors import descriptors_in
from tensord.shm.control_records import ModelState
from tensord.shm.errors import Internal, InvalidArgument, ServingError, Unavailable, Unsupported
from tensord.shm.messages import WIRE_VERSION
from tensord.shm.operations import (
    FAILED,
    DropParameters,
    ListParameters,
    Operation,
    Peer,
    RegisterSystemRegion,
    RevertParameters,
    UnregisterRegion,
)
from tensord.shm.regions import check_sealed, refused
from tensord.shm.seldom import Seldom

if TYPE_CHECKING:
    from tensord.daemon.operator.audit import Audit
    from tensord.daemon.operator.operations import Operations
    from tensord.daemon.processes.fronts import Fronts
    from tensord.daemon.regions.region_registry import RegionRegistry

_log = logging.getLogger(__name__)
#: The socket's name in its folder, and that of the HTTP socket beside it.
NAME = "clients.sock"
HTTP_NAME = "http.sock"
#: Descriptors received with one message, enough to tell too many from one.
_MAX_FDS = 8
#: Errors of a host that is short of something for a moment, such as descriptors on their way.
_SHORTAGES = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)
#: Seconds until clients are accepted again after there were no descriptors for one.
_PAUSE = 1.0


_QUESTIONS = ", ".join(f"'{name}'" for name in ClientQuestion.__struct_fields__)
#: Bytes of an answer that are left for what is not the list of parameter sets.
_BESIDE_LIST = 1 << 10


class ClientSocket:
    """Serves the Unix socket on which local clients ask for lanes and send the file descriptors of their memory."""

    def __init__(
        self,
        options: Options,
        environment: Mapping[str, str],
        registry: RegionRegistry,
        fronts: Fronts,
        lanes: ClientLanes,
        operations: Operations,
        audit: Audit,
    ) -> None:
        self.path = unix_socket.path(options.clients.socket, NAME, environment)
        self._options = options
        self._environment = environment
        self._registry = registry
        self._fronts = fronts
        self._lanes = lanes
        self._operations = operations
        self._audit = audit
        self._restricted = "parameters" in restrictions.parse(options.http.restricted_api)
        self._listener: socket.socket | None = None
        self._clients: dict[asyncio.Task[None], None] = {}
        self._seldom = Seldom()

    # ------------------------------------------------------------------------------------------------------- the socket

    def listen(self) -> None:
        """Binds the clients' socket and listens on it. Clients that connect wait until ``serve`` is called.

        The path is in clients.socket or, if that is "", in the folder RUNTIME_DIRECTORY of a service. Raises InvalidArgument if
        this path cannot be bound. If there is no such path, a default path is used. If that cannot be bound, logs a warning.
        """
        mode = int(self._options.clients.socket_mode, 8)
        if self.path is not None:
            try:
                listener = unix_socket.bind(self.path, socket.SOCK_SEQPACKET, mode)
            except OSError as error:
                raise InvalidArgument(f"clients.socket: '{self.path}': {error.strerror or error}") from None
        else:
            try:
                path = self._default_folder() / NAME
                listener = unix_socket.bind(path, socket.SOCK_SEQPACKET, mode)
            except OSError as error:
                reason = "another daemon has it" if error.errno == errno.EADDRINUSE else error.strerror or error
                _log.warning(
                    "clients get no lanes and hand over no memory: no clients' socket by default (%s); clients.socket "
                    "names a place for one",
                    reason,
                )
                return
            self.path = path
        listener.listen(1024)
        listener.setblocking(False)
        self._listener = listener

    def _default_folder(self) -> Path:
        configured = self._options.supervisor.control_socket
        return Path(configured).parent if configured else runtime_directory.own(self._environment)

    @property
    def http_path(self) -> Path | None:
        """Returns the path for the HTTP fronts' Unix socket, or None if clients.http is off or no clients' socket listens."""
        if self._listener is None or self.path is None or not self._options.clients.http:
            return None
        return self.path.with_name(HTTP_NAME).absolute()

    def serve(self) -> None:
        """Begins to accept clients, on the running event loop, if ``listen`` has bound a socket."""
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def stop_accepting(self) -> None:
        """Closes the listening socket and removes its path. Connections stay open. May be called again."""
        if self._listener is not None and self.path is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            with contextlib.suppress(OSError):
                self.path.unlink()

    def close(self) -> None:
        """Closes the listening socket and ends the connections of clients. Regions stay registered. May be called again."""
        self.stop_accepting()
        for task in self._clients:
            task.cancel()

    def describe(self) -> dict[str, Any]:
        """Returns the path of the socket and the numbers of clients and lanes, as values for JSON."""
        return {"socket": str(self.path) if self._listener is not None else None} | self._lanes.statistics()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it went away again
            return
        except OSError as error:  # no descriptors left
            if self._seldom.is_due():
                _log.error("a client of the clients' socket has to wait: %s", error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            loop.call_later(_PAUSE, self.serve)
            return
        client.setblocking(False)
        peer = peer_of(client.fileno())
        try:
            descriptors.check_reserve(client.fileno(), "a client's connection")
            connection = self._lanes.admit(peer)
        except Unavailable as error:
            self._say(peer, "a connection", error)
            _refuse(client, error)
            return
        task = asyncio.get_running_loop().create_task(self._serve(client, connection))
        self._clients[task] = None
        task.add_done_callback(self._clients.pop)

    # -------------------------------------------------------------------------------------------------------- a client

    async def _serve(self, client: socket.socket, connection: ClientConnection) -> None:
        try:
            with client, contextlib.closing(ConnectionEnd()) as end, contextlib.suppress(OSError):  # it went away
                while (message := await _receive(client)) is not None:
                    content, fds = message
                    if not content:
                        continue
                    try:
                        answer, sockets = await self._answer(content, fds, connection, client, end)
                    finally:
                        descriptors.close(fds)
                    await self._reply(client, connection, answer, sockets)
        finally:
            self._lanes.leave(connection)

    async def _reply(
        self, client: socket.socket, connection: ClientConnection, answer: Any, sockets: list[socket.socket]
    ) -> None:
        with contextlib.ExitStack() as closing:
            for sock in sockets:
                closing.enter_context(sock)
            try:
                await _send(client, msgspec.json.encode(answer), [sock.fileno() for sock in sockets])
                return
            except OSError as error:
                if not sockets or error.errno not in _SHORTAGES:
                    raise
                text = error.strerror
        self._lanes.withdraw(connection, answer)
        short = Unavailable(f"lanes to model '{answer.model}' cannot be handed over now: {text}")
        self._say(connection.peer, f"a lane to model '{answer.model}'", short)
        await _send(client, msgspec.json.encode(ClientError.of(short)), [])

    async def _answer(
        self, content: bytes, fds: list[int], connection: ClientConnection, client: socket.socket, end: ConnectionEnd
    ) -> tuple[Any, list[socket.socket]]:
        try:
            question = msgspec.json.decode(content, type=ClientQuestion)
            asked = [part for part in msgspec.structs.astuple(question) if part is not None]
            if len(asked) != 1:
                raise InvalidArgument(f"a request is an object with one of {_QUESTIONS}")
            if question.hello is not None:
                return self._hello(), []
            if question.open is not None:
                return await self._open(question.open, connection, client)
            if question.register is not None:
                with end_of(client.fileno(), end, self._options.regions.reclaim) as closed:
                    await self._register(question.register, fds, connection.peer, closed)
                return {}, []
            if question.unregister is None and self._restricted:
                raise Unsupported("parameters need a key on this server (http.restricted_api): ask over HTTP")
            operation = _operation(question, fds)
            result = await self._operations.answer(operation, connection.peer, fds[0] if fds else -1)
            if isinstance(operation, ListParameters):
                return self._list_parameters(result), []
            return msgspec.Raw(result) if result else {}, []
        except msgspec.MsgspecError as error:
            return ClientError.of(InvalidArgument(f"malformed request: {error}")), []
        except ServingError as error:
            return ClientError.of(error), []
        except OSError:  # the client went away
            raise
        except Exception:
            _log.exception("a request on the clients' socket failed")
            return ClientError.of(Internal(FAILED)), []

    def _list_parameters(self, found: bytes) -> Any:
        if len(found) > MAX_ANSWER - _BESIDE_LIST:
            raise Unsupported(
                f"the list of parameter sets has {len(found)} bytes, too many for this socket: ask over HTTP"
            )
        return {"parameters": msgspec.Raw(found)}

    def _hello(self) -> HelloAnswer:
        http = [url.removeprefix("http://") for url in self._fronts.urls("http")]
        return HelloAnswer(self._options.server_name, __version__, WIRE_VERSION, self._lanes.offered, http)

    async def _open(
        self, wanted: OpenLanes, connection: ClientConnection, client: socket.socket
    ) -> tuple[Any, list[socket.socket]]:
        state = await _unless_gone(client, self._lanes.find(connection, wanted))
        try:
            return self._lanes.open(connection, wanted, state)
        except ServingError as error:
            self._lanes.refused += 1
            self._say(connection.peer, f"a lane to model '{wanted.model[:255]}'", error)
            raise

    async def _register(self, wanted: Register, fds: list[int], peer: Peer, end: int) -> None:
        request = RegisterSystemRegion(wanted.name, "", wanted.offset, wanted.byte_size)
        try:
            if len(fds) != 1:
                raise refused(wanted.name[:255], f"{len(fds)} descriptors came with the request, 1 is expected")
            check_sealed(wanted.name, fds[0])
            with descriptors.needed(f"shared memory region '{wanted.name[:255]}'"):
                await self._registry.register(request, peer, end, sealed=fds[0])
        except ServingError as error:
            self._audit.note(request, peer, error)
            raise
        self._audit.note(request, peer)
        await self._fronts.settled()

    def _say(self, peer: Peer, what: str, error: ServingError) -> None:
        """Logs that the client ``peer`` does not get ``what``, such as "a lane". Logs at most one line per user in a minute."""
        if self._seldom.is_due(peer.owner):
            _log.warning("%s is refused to %s (process %d): %s", what, peer.owner, peer.pid, error.message)


def _operation(question: ClientQuestion, fds: list[int]) -> Operation:
    """Returns the operation on regions or parameters that ``question`` asks for."""
    if question.unregister is not None:
        return UnregisterRegion("", question.unregister.name)
    if (listed := question.parameters) is not None:
        return ListParameters(listed.model, listed.version, listed.set)
    if (push := question.push) is not None:
        if len(fds) > 1:
            raise InvalidArgument(f"{len(fds)} descriptors came with a push of parameters, 1 is expected at most")
        return push.operation(push.model, push.version, push.set, os.fstat(fds[0]).st_size if fds else -1)
    if (named := question.revert) is not None:
        return RevertParameters(named.model, named.version, named.set)
    named = question.drop
    assert named is not None
    return DropParameters(named.model, named.version, named.set)


def _refuse(client: socket.socket, error: ServingError) -> None:
    """Sends an error to a client whose connection is refused, and closes the connection."""
    with client, contextlib.suppress(OSError):
        client.send(msgspec.json.encode(ClientError.of(error)))
        # What the client has sent is taken: else it would read of a reset connection first.
        client.shutdown(socket.SHUT_RD)
        while client.recv(1):
            pass


async def _receive(client: socket.socket) -> tuple[bytes, list[int]] | None:
    """Receives a client's message and its file descriptors. Returns None if the connection has ended.

    If the process has too few free descriptors to receive them, sends the client the error Unavailable and returns (b"", []).
    Raises ConnectionError if the message is too long or has too many descriptors.
    """
    loop = asyncio.get_running_loop()
    await _ready(loop.add_reader, loop.remove_reader, client.fileno())
    room = socket.CMSG_SPACE(4 * _MAX_FDS)
    content, ancillary, flags, _ = client.recvmsg(MAX_QUESTION, room, socket.MSG_CMSG_CLOEXEC)
    fds = descriptors_in(ancillary)
    if not content:
        descriptors.close(fds)
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        descriptors.close(fds)
        if flags & socket.MSG_TRUNC or len(fds) == _MAX_FDS:
            raise ConnectionError
        await _send(client, msgspec.json.encode(ClientError.of(descriptors.none_left("the server"))), [])
        return b"", []
    return content, fds


async def _send(client: socket.socket, content: bytes, fds: list[int]) -> None:
    """Sends ``content``, an answer to a client, with the file descriptors ``fds``."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            if fds:
                socket.send_fds(client, [content], fds)
            else:
                client.send(content)
            return
        except BlockingIOError:
            await _ready(loop.add_writer, loop.remove_writer, client.fileno())


async def _ready(add: Callable[..., None], remove: Callable[[int], bool], fd: int) -> None:
    """Waits until ``fd`` can be read, if ``add`` and ``remove`` are the event loop's ``add_reader`` and ``remove_reader``.

    Waits until ``fd`` can be written, if ``add`` and ``remove`` are ``add_writer`` and ``remove_writer``.
    """
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def now() -> None:
        remove(fd)
        if not ready.done():  # cancelled in the iteration in which the descriptor has become ready
            ready.set_result(None)

    add(fd, now)
    try:
        await ready
    finally:
        remove(fd)


async def _unless_gone(client: socket.socket, finding: Coroutine[Any, Any, ModelState]) -> ModelState:
    """Awaits ``finding`` and returns its result. Raises ConnectionError if the client closes its connection first."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(finding)
    gone = False

    def readable() -> None:
        nonlocal gone
        loop.remove_reader(client.fileno())
        with contextlib.suppress(OSError):
            if client.recv(1, socket.MSG_PEEK):
                return  # its next question: it is there
        gone = True
        task.cancel()

    loop.add_reader(client.fileno(), readable)
    try:
        return await task
    except asyncio.CancelledError:
        if gone:
            raise ConnectionError from None
        raise
    finally:
        loop.remove_reader(client.fileno())
