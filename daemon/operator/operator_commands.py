"""Carries out tensorctl's commands: operations that clients may ask for too, and commands about the daemon itself."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from tensord.config.options import Seconds
from tensord.daemon.control import runtime_directory
from tensord.daemon.control.log_settings import MAX_VERBOSE
from tensord.daemon.control.push_fields import PushFields
from tensord.daemon.operator.operations import Operations
from tensord.daemon.processes.child import Child
from tensord.daemon.tracing import trace_settings
from tensord.shm.errors import InvalidArgument, ServingError, Unavailable
from tensord.shm.operations import (
    MAIN_SET,
    ChangeLog,
    ConnectionRecords,
    DropParameters,
    ListParameters,
    LoadModel,
    ModelStatistics,
    Operation,
    Peer,
    RecentErrors,
    RegionRecords,
    RepositoryIndex,
    RevertParameters,
    SequenceRecords,
    TakeProfile,
    UnloadModel,
    UnregisterRegion,
)

if TYPE_CHECKING:
    from tensord.daemon.supervisor import Supervisor

_OPERATOR = Peer("operator")
#: How long a child may take to list what it has.
_LIST_SECONDS = 5.0
#: The errors of all fronts together that are shown.
_MAX_ERRORS = 100


class OperatorQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """A command of tensorctl with its arguments, as it is sent over the control socket in JSON."""

    command: str
    name: str = ""
    config: str = ""
    #: True: the answer comes once all that was begun has ended.
    wait: bool = True
    #: Settings of the log or of traces that change; None: they are only read.
    settings: dict[str, Any] | None = None
    #: The length of a profile, or the time of a drain; None: ``supervisor.drain_time``.
    seconds: Seconds | None = None
    #: Where a profile is written; "": in a folder of the daemon's own.
    folder: str = ""
    #: The version of a model whose parameter sets are meant; 0: the newest, or all.
    version: int = 0
    set: str = ""
    push: PushFields | None = None


class _LogSettings(msgspec.Struct, forbid_unknown_fields=True):
    """Log settings that tensorctl changes. A field that is None changes nothing."""

    info: bool | None = None
    warning: bool | None = None
    error: bool | None = None
    verbose: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERBOSE)] | None = None
    format: Literal["default", "ISO8601", "json"] | None = None


class OperatorCommands:
    """Carries out the commands of tensorctl."""

    def __init__(self, supervisor: Supervisor, operations: Operations) -> None:
        self._supervisor = supervisor
        self._operations = operations

    async def answer(self, question: OperatorQuestion) -> bytes:
        """Carries out a command of tensorctl and returns its result as JSON. Raises ServingError if it fails."""
        match question.command:
            case "status":
                return msgspec.json.encode(self._supervisor.describe())
            case "config":
                return msgspec.json.encode(await self._supervisor.configuration.described())
            case "reload":
                return await self._reload(question.wait)
            case "drain":
                self._supervisor.drain.begin(question.seconds)
                await self._supervisor.fronts.settled()
                if question.wait:
                    await self._supervisor.drain.finished()
                return msgspec.json.encode({"seconds": self._supervisor.drain.seconds})
            case "undrain":
                self._supervisor.drain.end()
                await self._supervisor.fronts.settled()
                return b"null"
            case "restart":
                await self._supervisor.workers.restart(question.name)
                await self._supervisor.fronts.settled()
                return b"null"
            case "profile":
                return await self._profile(question.name, question.seconds or 0.0, question.folder)
            case "connections":
                rows = await _rows(self._supervisor.fronts, "front", ConnectionRecords())
                return msgspec.json.encode([*rows, *self._supervisor.lanes.records()])
            case "errors":
                supervisor = self._supervisor
                return msgspec.json.encode(await recent_errors(supervisor.fronts, supervisor.workers.ready()))
            case "sequences":
                return msgspec.json.encode(await _rows(self._supervisor.workers.ready(), "worker", SequenceRecords()))
            case "model":
                return await self._operations.describe_model(question.name)
            case "load" | "unload":
                return await self._load_or_unload(question)
            case "unregister" if question.name:
                # A client may unregister what is not there; an operator has mistyped it.
                await self._operations.answer(RegionRecords(question.name), _OPERATOR)
        return await self._operations.answer(_operation(question), _OPERATOR) or b"null"

    async def _load_or_unload(self, question: OperatorQuestion) -> bytes:
        # In modes other than "explicit" the error says what to do instead.
        try:
            return await self._operations.answer(_operation(question), _OPERATOR) or b"null"
        except ServingError:
            mode = self._supervisor.options.repository.control_mode
            if mode == "explicit":
                raise
            raise InvalidArgument(
                f'models are loaded and unloaded by name in mode "explicit" alone, and repository.control_mode is "{mode}": '
                "`tensorctl reload` loads what has changed"
            ) from None

    async def _profile(self, name: str, seconds: float, folder: str) -> bytes:
        """Has the worker ``name`` record a profile for ``seconds``. Returns the folder of the profile as JSON.

        ``folder``: where the profile is written, or "" for a new folder.
        """
        worker = self._supervisor.workers.named(name)
        at = runtime_directory.of_service(os.environ, "STATE_DIRECTORY") or tempfile.gettempdir()
        folder = folder or f"{at}/tensord-profiles-{os.geteuid()}/{name}-{time.strftime('%Y%m%dT%H%M%S')}"
        await worker.result_of(TakeProfile(seconds, folder))
        return msgspec.json.encode({"folder": folder})

    async def _reload(self, wait: bool) -> bytes:
        """Reloads the configuration and the model repositories. Returns b"null".

        If ``wait`` is True, also waits for the loads of models, and raises Unavailable if one fails.
        Raises InvalidArgument if the new configuration cannot be used.
        """
        outcomes = await self._supervisor.reload()
        if wait:
            failures = [error for error in await asyncio.gather(*outcomes) if error]
            await self._supervisor.fronts.settled()
            if failures:
                # Triton's sentences end with a semicolon and a new line each.
                lines = [" ".join(failure.split()).rstrip(";") for failure in failures]
                raise Unavailable(
                    f"the configuration is in force, and {len(failures)} of {len(outcomes)} models were not loaded:\n    "
                    + "\n    ".join(lines)
                )
        return b"null"


def _operation(question: OperatorQuestion) -> Operation:
    match question.command:
        case "models":
            return RepositoryIndex(detailed=True)
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
        case "log":
            return ChangeLog(**msgspec.structs.asdict(msgspec.convert(question.settings or {}, _LogSettings)))
        case "trace":
            settings = msgspec.convert(question.settings or {}, dict[str, list[str]])
            return trace_settings.parse(question.name, settings)
        case "parameters":
            return ListParameters(question.name, question.version, question.set)
        case "push":
            return (question.push or PushFields()).operation(question.name, question.version, question.set)
        case "drop":
            return DropParameters(question.name, question.version, question.set)
        case "revert":
            return RevertParameters(question.name, question.version, question.set or MAIN_SET)
    raise InvalidArgument(f"unknown command '{question.command}'")


async def _rows(children: Iterable[Child], label: str, operation: Operation) -> list[dict[str, Any]]:
    """Asks processes for the rows that ``operation`` lists. Returns the rows of those that answer in time.

    ``label``: the key under which each row has its process's name.
    """
    asked = [*children]
    told = await asyncio.gather(*(_list_of(child, operation) for child in asked))
    return [{label: child.name, **row} for child, found in zip(asked, told, strict=True) for row in found]


async def _list_of(child: Child, operation: Operation) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(await child.result_of(operation, seconds=_LIST_SECONDS), type=list[dict[str, Any]])
    except ServingError:
        return []


async def recent_errors(fronts: Iterable[Child], workers: Iterable[Child]) -> list[dict[str, Any]]:
    """Returns the latest errors of fronts and workers, newest first. The key "front" holds the name of the front or worker."""
    rows = await _rows([*fronts, *workers], "front", RecentErrors())
    latest = sorted(rows, key=lambda row: row["time"], reverse=True)[:_MAX_ERRORS]
    return [
        row | {"time": datetime.fromtimestamp(row["time"], UTC).isoformat(timespec="milliseconds")} for row in latest
    ]
