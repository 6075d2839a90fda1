"""The operator's Unix socket: tensorctl sends commands and the supervisor sends answers, each as a line with a JSON object.

    {"command": "load", "name": "digits"}   ─▶   {"result": ...}  or  {"error": "..."}

A client that can connect may do everything, so only the daemon's user may open the socket (mode 0600); it is not on the
network.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Mapping

import msgspec

from tensord.config.options import SupervisorOptions
from tensord.daemon.control import runtime_directory, unix_socket
from tensord.daemon.control.runtime_directory import CONTROL_SOCKET
from tensord.daemon.operator.operator_commands import OperatorCommands, OperatorQuestion
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.operations import FAILED

_log = logging.getLogger(__name__)
_MAX_LINE = 1 << 20


class ControlSocket:
    """Serves the Unix socket on which tensorctl sends commands to the daemon."""

    def __init__(self, options: SupervisorOptions, environment: Mapping[str, str], commands: OperatorCommands) -> None:
        self.path = unix_socket.path(options.control_socket, CONTROL_SOCKET, environment)
        self._environment = environment
        self._commands = commands
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.Task[None], None] = {}

    async def open(self) -> None:
        """Binds the control socket and begins to answer. Raises InvalidArgument if a given path cannot be bound."""
        sock = self._bound() if self.path is not None else self._bound_by_default()
        if sock is not None:
            self._server = await asyncio.start_unix_server(self._serve, sock=sock, limit=_MAX_LINE)

    def _bound(self) -> socket.socket:
        assert self.path is not None
        try:
            return unix_socket.bind(self.path, socket.SOCK_STREAM, 0o600)
        except OSError as error:
            raise InvalidArgument(f"supervisor.control_socket: '{self.path}': {error.strerror or error}") from None

    def _bound_by_default(self) -> socket.socket | None:
        """Binds the control socket at its default path, or returns None if that fails."""
        try:
            folder = runtime_directory.own(self._environment)
            for left in runtime_directory.sockets(folder, CONTROL_SOCKET):
                # Daemons of this user that were killed have left it.
                unix_socket.remove_stale(left, socket.SOCK_STREAM)
            path = folder / CONTROL_SOCKET
            try:
                sock = unix_socket.bind(path, socket.SOCK_STREAM, 0o600)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                path = folder / runtime_directory.further(CONTROL_SOCKET, os.getpid())
                sock = unix_socket.bind(path, socket.SOCK_STREAM, 0o600)
                _log.info("another daemon of this user runs: tensorctl finds this one with --socket %s", path)
        except OSError as error:
            _log.warning(
                "tensorctl cannot reach this daemon: no control socket by default (%s); supervisor.control_socket names a "
                "place for one",
                error.strerror or error,
            )
            return None
        self.path = path
        return sock

    def close(self) -> None:
        """Closes the control socket and removes its path. May be called again."""
        if self._server is not None and self.path is not None:
            self._server.close()
            self._server = None
            for client in self._clients:
                client.cancel()
            with contextlib.suppress(OSError):
                self.path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = None
        try:
            while line := await reader.readline():
                writer.write(await self._answer(line) + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError, asyncio.CancelledError):
            pass  # it went away, or sent a line beyond the limit, or we stop
        finally:
            self._clients.pop(task, None)
            writer.close()

    async def _answer(self, line: bytes) -> bytes:
        try:
            question = msgspec.json.decode(line, type=OperatorQuestion)
            return msgspec.json.encode({"result": msgspec.Raw(await self._commands.answer(question))})
        except msgspec.MsgspecError as error:
            return msgspec.json.encode({"error": f"malformed question: {error}"})
        except ServingError as error:
            return msgspec.json.encode({"error": error.message})
        except Exception:
            _log.exception("a question on the control socket failed")
            return msgspec.json.encode({"error": FAILED})
