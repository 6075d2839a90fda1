"""The operator's unix socket: tensorctl asks, the supervisor answers. One JSON object a line each way.

    {"command": "load", "name": "digits"}   ─▶   {"result": ...}  or  {"error": "..."}

Whoever may connect may do everything, so the socket is the owner's alone (mode 0600); nobody reaches it over the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from config.options import Supervisor as SupervisorOptions
from daemon import unix_socket
from daemon.operations import Operations
from shm.errors import InvalidArgument, ServingError
from shm.messages import (
    LoadModel,
    ModelStatistics,
    Operation,
    Peer,
    RegionRecords,
    RepositoryIndex,
    UnloadModel,
    UnregisterRegion,
)

_log = logging.getLogger(__name__)
_MAX_LINE = 1 << 20
_OPERATOR = Peer("operator")


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """What tensorctl sends."""

    command: str
    name: str = ""
    config: str = ""


class ControlSocket:
    """Owns the listening socket and its name; does nothing where no path is configured."""

    def __init__(
        self,
        options: SupervisorOptions,
        environment: Mapping[str, str],
        operations: Operations,
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        self.path = unix_socket.path(options.control_socket, "control.sock", environment)
        self._operations = operations
        self._describe = describe
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Raises InvalidArgument: the path cannot be used."""
        if self.path is None:
            return
        try:
            sock = unix_socket.bind(self.path, socket.SOCK_STREAM, 0o600)
        except OSError as error:
            raise InvalidArgument(f"supervisor.control_socket: '{self.path}': {error.strerror or error}") from None
        self._server = await asyncio.start_unix_server(self._serve, sock=sock, limit=_MAX_LINE)

    def close(self) -> None:
        """Idempotent."""
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
        self._clients.add(task)
        try:
            while line := await reader.readline():
                writer.write(await self._answer(line) + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError, asyncio.CancelledError):
            pass  # it went away, or sent a line beyond the limit, or we stop
        finally:
            self._clients.discard(task)
            writer.close()

    async def _answer(self, line: bytes) -> bytes:
        try:
            question = msgspec.json.decode(line, type=Question)
            if question.command == "status":
                return msgspec.json.encode({"result": self._describe()})
            result = await self._operations.answer(_operation(question), _OPERATOR)
            return msgspec.json.encode({"result": msgspec.Raw(result or b"null")})
        except msgspec.MsgspecError as error:
            return msgspec.json.encode({"error": f"malformed question: {error}"})
        except ServingError as error:
            return msgspec.json.encode({"error": error.message})
        except Exception:
            _log.exception("a question on the control socket failed")
            return msgspec.json.encode({"error": "the server failed to carry out the operation"})


def _operation(question: Question) -> Operation:
    match question.command:
        case "models":
            return RepositoryIndex()
        case "load":
            return LoadModel(question.name, question.config)
        case "unload":
            return UnloadModel(question.name)
        case "statistics":
            return ModelStatistics(question.name)
        case "regions":
            return RegionRecords(question.name)
        case "unregister":
            return UnregisterRegion("", question.name)
    raise InvalidArgument(f"unknown command '{question.command}'")
