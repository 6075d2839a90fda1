"""The operator's unix socket: tensorctl asks, the supervisor answers. One JSON object a line each way.

    {"command": "load", "name": "digits"}   ─▶   {"result": ...}  or  {"error": "..."}

Whoever may connect may do everything, so the socket is the owner's alone (mode 0600); nobody reaches it over the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from config.options import Supervisor as SupervisorOptions
from daemon.operations import Operations
from shm.errors import InvalidArgument, ServingError
from shm.messages import (
    LoadModel,
    ModelStatistics,
    Operation,
    RegionStatus,
    RepositoryIndex,
    UnloadModel,
    UnregisterRegion,
)

_log = logging.getLogger(__name__)
_MAX_LINE = 1 << 20


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
        self.path = socket_path(options, environment)
        self._operations = operations
        self._describe = describe
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Raises InvalidArgument: the path cannot be used."""
        if self.path is None:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            _remove_stale(self.path)
            # No moment in which others may connect: the mode is there before the name is.
            before = os.umask(0o177)
            try:
                sock.bind(str(self.path))
            finally:
                os.umask(before)
            self._server = await asyncio.start_unix_server(self._serve, sock=sock, limit=_MAX_LINE)
        except OSError as error:
            sock.close()
            raise InvalidArgument(f"supervisor.control_socket: '{self.path}': {error.strerror or error}") from None

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
            result = await self._operations.answer(_operation(question))
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
            return RegionStatus("system", question.name)
        case "unregister":
            return UnregisterRegion("system", question.name)
    raise InvalidArgument(f"unknown command '{question.command}'")


def socket_path(options: SupervisorOptions, environment: Mapping[str, str]) -> Path | None:
    """Where the socket is: as configured, else in systemd's runtime directory, else nowhere."""
    if options.control_socket:
        return Path(options.control_socket)
    runtime = environment.get("RUNTIME_DIRECTORY", "").split(":")[0]
    return Path(runtime, "control.sock") if runtime else None


def _remove_stale(path: Path) -> None:
    """A socket that nobody listens on is a killed predecessor's; anything else is left, and bind says so."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
