"""Logs who changed models, parameters, regions or settings: a line for each such operation that was carried out or refused.

A line names a client on a Unix socket by the user and process id that the kernel reports, and any other client by its address.
Only the supervisor's event loop uses this module.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from tensord.shm.errors import ServingError
from tensord.shm.operations import (
    ChangeLog,
    ChangeTrace,
    DropParameters,
    LoadModel,
    Operation,
    Peer,
    PushParameters,
    RegisterCudaRegion,
    RegisterSystemRegion,
    RevertParameters,
    UnloadModel,
    UnregisterRegion,
)
from tensord.shm.seldom import LineRate

_log = logging.getLogger("tensord.audit")
#: Lines in a second at most, of regions and of all else: who registers a region for each request shall not fill the log, nor
#: have a push left out of it.
_MAX_LINES = 20
_REGIONS = (RegisterSystemRegion, RegisterCudaRegion, UnregisterRegion)
#: Characters of a name or an error in a line.
_MAX_TEXT = 200


class Audit:
    """Logs who asked for each operation that can change something, at a limited rate. ``clock``: returns the time in ns."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._regions, self._others = LineRate(_MAX_LINES, clock), LineRate(_MAX_LINES, clock)

    def note(
        self, operation: Operation, peer: Peer | None, error: ServingError | None = None, result: bytes = b""
    ) -> None:
        """Logs an operation, unless it only reads. ``error``: why the operation was refused, or None if it was carried out.

        ``peer``: the client that asked, or None if a model's code asked. ``result``: what a push or roll-back returned (JSON).
        """
        what = _described(operation)
        if not what:
            return
        rate = self._regions if isinstance(operation, _REGIONS) else self._others
        if not rate.admits():
            return
        refused = f", refused: {error.message[:_MAX_TEXT]}" if error is not None else ""
        now = _in_force(operation, result) if error is None else ""
        _log.info("audit: %s by %s%s%s%s", what, _named(peer), now, refused, rate.say_left_out())


def _described(operation: Operation) -> str:
    """Returns a phrase for the audit log, such as "load of model 'm'", or "" if the operation changes nothing."""
    match operation:
        case LoadModel(name, config, files):
            given = ", with a configuration" if config else ""
            return f"load of model '{name[:_MAX_TEXT]}'{given}{f' and {len(files)} files' if files else ''}"
        case UnloadModel(name):
            return f"unload of model '{name[:_MAX_TEXT]}'"
        case PushParameters():
            return f"push of {_parameters(operation)}"
        case RevertParameters():
            return f"roll-back of {_parameters(operation)}"
        case DropParameters():
            return f"drop of {_parameters(operation)}"
        case RegisterSystemRegion(name, key, offset, byte_size):
            whose = f"'{key[:_MAX_TEXT]}'" if key else "a memfd"
            place = f"{byte_size} bytes of {whose} from {offset}"
            return f"registration of region '{name[:_MAX_TEXT]}' ({place})"
        case RegisterCudaRegion(name, _, device, byte_size):
            return f"registration of region '{name[:_MAX_TEXT]}' ({byte_size} bytes of GPU {device})"
        case UnregisterRegion(kind, name):
            named = f"region '{name[:_MAX_TEXT]}'" if name else f"all {kind} regions" if kind else "all regions"
            return f"unregistration of {named}"
        case ChangeLog() | ChangeTrace():
            if not (changed := operation.changes()):
                return ""
            kind = "log settings" if isinstance(operation, ChangeLog) else _traced(operation.model)
            listed = ", ".join(f"{field}={value!r}" for field, value in changed.items())
            return f"change of {kind} ({listed[:_MAX_TEXT]})"
    return ""


def _parameters(operation: PushParameters | RevertParameters | DropParameters) -> str:
    version = f" version {operation.version}" if operation.version else ""
    return f"parameter set '{operation.set[:_MAX_TEXT]}' of model '{operation.model[:_MAX_TEXT]}'{version}"


def _in_force(operation: Operation, result: bytes) -> str:
    if not isinstance(operation, PushParameters | RevertParameters):
        return ""
    put = msgspec.json.decode(result)
    return f": number {put['number']} of version {put['version']}, {put['byte_size']} bytes"


def _traced(model: str) -> str:
    return f"trace settings of model '{model[:_MAX_TEXT]}'" if model else "trace settings"


def _named(peer: Peer | None) -> str:
    if peer is None:
        return "a model"
    if peer.kind == "unix":
        return f"uid {peer.uid}, pid {peer.pid}"
    if peer.kind == "operator":
        return "tensorctl"
    return peer.address or "a client that is gone"
