"""Carries out what tensorctl asks: operations as clients have them, and what concerns the daemon itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from tensord.daemon.control.log_settings import MAX_VERBOSE
from tensord.daemon.operator.operations import Operations
from tensord.daemon.tracing import trace_settings
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.shm.operations import (
    ChangeLog,
    LoadModel,
    ModelStatistics,
    Operation,
    Peer,
    RegionRecords,
    RepositoryIndex,
    UnloadModel,
    UnregisterRegion,
)

if TYPE_CHECKING:
    from tensord.daemon.supervisor import Supervisor

_OPERATOR = Peer("operator")


class OperatorQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """A question of tensorctl."""

    command: str
    name: str = ""
    config: str = ""
    #: Whether to answer once all that was begun has ended.
    wait: bool = True
    #: Settings of the log or of traces that change; None: they are only read.
    settings: dict[str, Any] | None = None


class _LogSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The settings of the log that change; None: this one does not."""

    info: bool | None = None
    warning: bool | None = None
    error: bool | None = None
    verbose: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERBOSE)] | None = None
    format: Literal["default", "ISO8601", "json"] | None = None


class OperatorCommands:
    """Answers tensorctl. Belongs to the supervisor's loop."""

    def __init__(self, supervisor: Supervisor, operations: Operations) -> None:
        self._supervisor = supervisor
        self._operations = operations

    async def answer(self, question: OperatorQuestion) -> bytes:
        """Returns the result as JSON. Raises ServingError: a sentence about why not."""
        match question.command:
            case "status":
                return msgspec.json.encode(self._supervisor.describe())
            case "config":
                return msgspec.json.encode(await self._supervisor.configuration.described())
            case "reload":
                return await self._reload(question.wait)
            case "drain":
                self._supervisor.drain.begin()
                if question.wait:
                    await self._supervisor.drain.finished()
                return b"null"
            case "undrain":
                self._supervisor.drain.end()
                await self._supervisor.fronts.settled()
                return b"null"
            case "model":
                return await self._operations.describe_model(question.name)
        return await self._operations.answer(_operation(question), _OPERATOR) or b"null"

    async def _reload(self, wait: bool) -> bytes:
        """Reloads the configuration. Raises InvalidArgument: it is refused.  Unavailable: a load that it began has failed."""
        outcomes = await self._supervisor.reload()
        if wait:
            failures = [error for error in await asyncio.gather(*outcomes) if error]
            if failures:
                raise Unavailable(
                    f"the configuration is in force, and {len(failures)} of {len(outcomes)} models were not loaded: "
                    + "; ".join(failures)
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
    raise InvalidArgument(f"unknown command '{question.command}'")
