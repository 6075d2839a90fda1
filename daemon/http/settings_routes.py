"""The HTTP form of the settings that clients may see and change: logging and tracing.

Types are strict, and wrong ones are refused in Triton's sentences. Unknown keys are ignored; null changes nothing (logging), or
clears a value (tracing). Source: Triton docs/protocol/extension_logging.md, extension_trace.md; answers as recorded.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tensord.daemon.control.log_settings import FILE_REFUSED, FORMATS, MAX_VERBOSE
from tensord.daemon.front.endpoints import Endpoints
from tensord.daemon.front.entries import check_count
from tensord.daemon.http import json_body, request_head
from tensord.daemon.http.whole_body import read_body
from tensord.daemon.tracing import trace_settings
from tensord.shm.errors import InvalidArgument, Unavailable, Unsupported
from tensord.shm.settings import ChangeLog, ChangeTrace

#: Settings a trace request may name; others are ignored.
TRACE_SETTINGS = ("trace_file", "trace_level", "trace_rate", "trace_count", "log_frequency")


class SettingsRoutes:
    """The handlers."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    async def log_settings(self, request: Request) -> Response:
        return json_body.answer(await self._endpoints.log_settings(ChangeLog()))

    async def change_log_settings(self, request: Request) -> Response:
        given = _named(await read_body(request, json_body.MAX_BODY))
        if given.get("log_file") is not None:
            raise Unsupported(FILE_REFUSED)
        wanted = ChangeLog(
            _bool(given.get("log_info")),
            _bool(given.get("log_warning")),
            _bool(given.get("log_error")),
            _verbose(given.get("log_verbose_level")),
            _format(given.get("log_format")),
        )
        return json_body.answer(await self._endpoints.log_settings(wanted))

    async def trace_settings(self, request: Request) -> Response:
        return json_body.answer(await self._endpoints.trace_settings(ChangeTrace(_model(request))))

    async def change_trace_settings(self, request: Request) -> Response:
        body = await read_body(request, json_body.MAX_BODY)
        await self._endpoints.check_traced(_model(request))
        given = _named(body)
        wanted: dict[str, list[str]] = {}
        for name, value in given.items():
            if name not in TRACE_SETTINGS:
                continue
            if value is None:
                wanted[name] = []
            elif name == "trace_level":
                # No level at all is no change: it is null that clears.
                wanted |= {name: levels} if (levels := _texts(value)) else {}
            elif name == "trace_file":
                raise Unsupported(trace_settings.FILE_REFUSED)
            else:
                wanted[name] = [_text(value)]
        return json_body.answer(await self._endpoints.trace_settings(trace_settings.parse(_model(request), wanted)))


def _model(request: Request) -> str:
    """ "" is all of them."""
    name: str = request.path_params.get("model", "")
    return name


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise InvalidArgument("attempt to access JSON non-array as array")
    check_count(len(value), "values of a setting")
    return [_text(item) for item in value]


def _named(body: bytes) -> dict[str, Any]:
    """The settings a request names; an array names none, as for Triton."""
    value = request_head.parse(body)
    if isinstance(value, list):
        return {}
    if not isinstance(value, dict):
        raise InvalidArgument("failed to parse the request JSON buffer: an object is expected")
    check_count(len(value), "settings")
    return value


def _bool(value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise InvalidArgument("attempt to access JSON non-boolean as boolean")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument("attempt to access JSON non-string as string")
    return value


def _verbose(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidArgument("attempt to access JSON non-unsigned-integer as unsigned-integer")
    if value > MAX_VERBOSE:
        raise InvalidArgument(f"'log_verbose_level' is {value}, at most {MAX_VERBOSE} is allowed")
    return value


def _format(value: Any) -> str | None:
    if value is None:
        return None
    if _text(value) not in FORMATS:
        raise Unavailable(f"invalid argument for --log_format, got: {value}")
    return _text(value)
