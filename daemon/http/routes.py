"""Every endpoint but infer, as a Starlette application: health, metadata, configuration, statistics, repository, regions.

Handlers answer from the front's own table of models, or ask the supervisor. Errors are one JSON object with ``error``, whatever
raised them. Source: KServe V2 REST and Triton's extensions; texts and statuses as recorded against a real Triton.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from daemon.http.calls import Calls
from daemon.model_table import ModelTable, parse_version
from daemon.status import http_status
from shm.errors import InvalidArgument, NotFound, ServingError
from shm.messages import (
    LoadModel,
    ModelState,
    ModelStatistics,
    RegionStatus,
    RegisterSystemRegion,
    RepositoryIndex,
    UnloadModel,
    UnregisterRegion,
)

#: What works, in Triton's order and spelling.
EXTENSIONS = (
    "classification",
    "model_repository",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
_MAX_BODY = 1 << 20
_INT64 = (1 << 63) - 1

Handler = Callable[[Request], Awaitable[Response]]


class Endpoints:
    """The handlers, over what a front knows and whom it can ask."""

    def __init__(self, table: ModelTable, calls: Calls, server_name: str, version: str, strict: bool) -> None:
        self._table = table
        self._calls = calls
        self._server = _json({"name": server_name, "version": version, "extensions": EXTENSIONS})
        self._strict = strict
        #: Told to stop: not ready any more.
        self.stopping = False

    def application(self) -> Starlette:
        """The ASGI application."""
        model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
        regions, repository = "/v2/systemsharedmemory", "/v2/repository"
        table: list[tuple[str, str, Handler]] = [
            ("GET", "/v2/health/live", self.live),
            ("GET", "/v2/health/ready", self.ready),
            ("GET", "/v2", self.server_metadata),
            ("GET", "/v2/models/stats", self.statistics),
            ("POST", f"{repository}/index", self.index),
            ("POST", f"{repository}/models/{{model}}/load", self.load),
            ("POST", f"{repository}/models/{{model}}/unload", self.unload),
            ("POST", f"{regions}/region/{{region}}/register", self.register),
        ]
        for prefix in (model, version):
            table += [
                ("GET", prefix, self.metadata),
                ("GET", f"{prefix}/ready", self.model_ready),
                ("GET", f"{prefix}/config", self.config),
                ("GET", f"{prefix}/stats", self.statistics),
                ("POST", f"{prefix}/infer", self.infer),
            ]
        for kind in ("system", "cuda"):
            for prefix in (f"/v2/{kind}sharedmemory", f"/v2/{kind}sharedmemory/region/{{region}}"):
                table += [
                    ("GET", f"{prefix}/status", self.region_status),
                    ("POST", f"{prefix}/unregister", self.unregister),
                ]
        table.append(("POST", "/v2/cudasharedmemory/region/{region}/register", self.register_cuda))
        routes = [Route(path, _exactly(method, handler), methods=[method]) for method, path, handler in table]
        application = Starlette(
            routes=routes,
            exception_handlers={ServingError: _serving_error, HTTPException: _http_error, Exception: _unexpected},
        )
        application.router.redirect_slashes = False
        return application

    # ------------------------------------------------------------------------------------------------ health

    async def live(self, request: Request) -> Response:
        return Response()

    async def ready(self, request: Request) -> Response:
        return Response(status_code=200 if self.is_ready() else 400)

    def is_ready(self) -> bool:
        """Whether every model that is wanted is served now; see ``repository.strict_readiness``."""
        if self.stopping:
            return False
        return all(self._holds_nothing_up(state) for state in self._table.states())

    def _holds_nothing_up(self, state: ModelState) -> bool:
        match state.state:
            case "READY":
                return bool(state.workers)
            case "LOADING":
                # A new version beside one that serves is no reason to send clients away.
                return bool(self._table.ready_versions(state.name))
            case "UNAVAILABLE":
                return not self._strict or state.reason == "unloaded"
            case _:
                return not self._strict or state.state != "UNLOADING"

    # ------------------------------------------------------------------------------------------------ models

    async def server_metadata(self, request: Request) -> Response:
        return _answer(self._server)

    async def model_ready(self, request: Request) -> Response:
        try:
            model, version = _target(request)
        except NotFound:
            model, version = "", 0
        if self._table.is_ready(model, version):
            return Response()
        return _answer(_json({"error": "Model version not ready"}), 400)

    async def metadata(self, request: Request) -> Response:
        model, version = _target(request)
        metadata = msgspec.json.decode(self._table.find(model, version).metadata)
        versions = [str(number) for number in self._table.ready_versions(model)]
        return _answer(_json({"name": metadata.pop("name"), "versions": versions, **metadata}))

    async def config(self, request: Request) -> Response:
        return _answer(self._table.find(*_target(request)).config)

    async def infer(self, request: Request) -> Response:
        """Only for its place in the table: a connection takes every infer request the short way."""
        raise NotFound("Not Found")

    async def statistics(self, request: Request) -> Response:
        model, version = _target(request) if "model" in request.path_params else ("", 0)
        return _answer(await self._calls.ask(ModelStatistics(model, version)))

    # -------------------------------------------------------------------------------------------- repository

    async def index(self, request: Request) -> Response:
        fields = await _fields(request)
        return _answer(await self._calls.ask(RepositoryIndex(bool(fields.get("ready", False)))))

    async def load(self, request: Request) -> Response:
        parameters = (await _fields(request)).get("parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidArgument("'parameters' should be an object")
        config = parameters.pop("config", "")
        if not isinstance(config, str):
            raise InvalidArgument("load parameter 'config' should be a string with a JSON object")
        files = {key: _base64(key, value) for key, value in parameters.items() if key.startswith("file:")}
        if unknown := parameters.keys() - files.keys():
            raise InvalidArgument(f"unrecognized load parameter '{min(unknown)}'")
        await self._calls.ask(LoadModel(request.path_params["model"], config, files))
        return Response()

    async def unload(self, request: Request) -> Response:
        parameters = (await _fields(request)).get("parameters", {})
        dependents = parameters.get("unload_dependents", False) if isinstance(parameters, dict) else None
        if not isinstance(dependents, bool):
            raise InvalidArgument("unload parameter 'unload_dependents' should be a boolean")
        await self._calls.ask(UnloadModel(request.path_params["model"], dependents))
        return Response()

    # ----------------------------------------------------------------------------------------------- regions

    async def register(self, request: Request) -> Response:
        fields = await _fields(request)
        key = fields.get("key")
        if not isinstance(key, str):
            raise InvalidArgument("Shared memory register request has no 'key' field")
        if "byte_size" not in fields:
            raise InvalidArgument("Shared memory register request has no 'byte_size' field")
        name = request.path_params["region"]
        offset, size = (_region_number(fields, field, name) for field in ("offset", "byte_size"))
        await self._calls.ask(RegisterSystemRegion(name, key, offset, size))
        return Response()

    async def register_cuda(self, request: Request) -> Response:
        await _fields(request)
        name = request.path_params["region"]
        raise InvalidArgument(f"failed to register shared memory region '{name}': this server has no CUDA device")

    async def unregister(self, request: Request) -> Response:
        await self._calls.ask(UnregisterRegion(_kind(request), request.path_params.get("region", "")))
        return Response()

    async def region_status(self, request: Request) -> Response:
        return _answer(await self._calls.ask(RegionStatus(_kind(request), request.path_params.get("region", ""))))


def _exactly(method: str, handler: Handler) -> Handler:
    """Starlette lets a GET route answer HEAD; Triton refuses it, and a body-less 200 would say too much."""

    async def handle(request: Request) -> Response:
        if request.method != method:
            raise HTTPException(405)
        return await handler(request)

    return handle


def _target(request: Request) -> tuple[str, int]:
    model = request.path_params["model"]
    text = request.path_params.get("version")
    if text is None:
        return model, 0
    if not (text.isascii() and text.isdigit()):
        raise NotFound("Not Found")
    return model, parse_version(model, text)


def _kind(request: Request) -> str:
    return "system" if request.url.path.startswith("/v2/system") else "cuda"


def _region_number(fields: dict[str, Any], field: str, region: str) -> int:
    value = fields.get(field, 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _INT64:
        raise InvalidArgument(
            f"failed to register shared memory region '{region}': '{field}' should be an unsigned integer, got {value!r:.40}"
        )
    return value


async def _fields(request: Request) -> dict[str, Any]:
    """The JSON object of a control request; an empty body is an empty object."""
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > _MAX_BODY:
            raise HTTPException(
                413, f"the request body has more than {_MAX_BODY} bytes, at most {_MAX_BODY} are allowed"
            )
        pieces.append(piece)
    body = b"".join(pieces)
    if not body.strip():
        return {}
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"failed to parse the request JSON buffer: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidArgument("failed to parse the request JSON buffer: an object is expected")
    return fields


def _base64(key: str, value: Any) -> bytes:
    try:
        content: bytes = msgspec.convert(value, bytes)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"load parameter '{key}' should be base64 text") from error
    return content


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _answer(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


async def _serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    return _answer(_json({"error": error.message}), http_status(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _answer(_json({"error": error.detail}), error.status_code)


async def _unexpected(request: Request, error: Exception) -> Response:
    return _answer(_json({"error": "internal error; the server's log has the details"}), 500)
