"""Every endpoint but infer, as a Starlette application: health, metadata, configuration, generate, statistics, repository,
regions.

What they answer is the business of ``daemon.endpoints``; here stand paths, methods, JSON bodies and statuses. Errors are one JSON
object with ``error``, whatever raised them. Source: KServe V2 REST and Triton's extensions, as recorded against a real Triton.
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

from daemon.endpoints import Endpoints
from daemon.http.generate import Generation
from daemon.http.whole_body import read_body
from daemon.model_table import parse_version
from daemon.status import http_status
from shm.errors import InvalidArgument, NotFound, ServingError

_MAX_BODY = 1 << 20

Handler = Callable[[Request], Awaitable[Response]]


class Routes:
    """The HTTP form of the endpoints."""

    def __init__(self, endpoints: Endpoints, generation: Generation) -> None:
        self._endpoints = endpoints
        self._generation = generation

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
                ("POST", f"{prefix}/generate", self.generate),
                ("POST", f"{prefix}/generate_stream", self.generate_stream),
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
        """KServe's client reads the body; Triton's looks at the status alone."""
        return _answer(_json({"live": True}))

    async def ready(self, request: Request) -> Response:
        return _answer(_json({"ready": True})) if self._endpoints.is_ready() else Response(status_code=400)

    # ------------------------------------------------------------------------------------------------ models

    async def server_metadata(self, request: Request) -> Response:
        return _answer(_json(self._endpoints.server_metadata()))

    async def model_ready(self, request: Request) -> Response:
        try:
            model, version = _target(request)
        except NotFound:
            model, version = "", 0
        if self._endpoints.model_is_ready(model, version):
            return Response()
        return _answer(_json({"error": "Model version not ready"}), 400)

    async def metadata(self, request: Request) -> Response:
        return _answer(_json(self._endpoints.model_metadata(*_target(request))))

    async def config(self, request: Request) -> Response:
        return _answer(self._endpoints.model_config(*_target(request)))

    async def infer(self, request: Request) -> Response:
        """Only for its place in the table: a connection takes every infer request the short way."""
        raise NotFound("Not Found")

    async def generate(self, request: Request) -> Response:
        return await self._generation.generate(request, *_target(request))

    async def generate_stream(self, request: Request) -> Response:
        return await self._generation.generate_stream(request, *_target(request))

    async def statistics(self, request: Request) -> Response:
        model, version = _target(request) if "model" in request.path_params else ("", 0)
        return _answer(await self._endpoints.statistics(model, version))

    # -------------------------------------------------------------------------------------------- repository

    async def index(self, request: Request) -> Response:
        fields = await _fields(request)
        return _answer(await self._endpoints.index(bool(fields.get("ready", False))))

    async def load(self, request: Request) -> Response:
        parameters = _parameters(await _fields(request))
        parameters |= {key: _base64(key, value) for key, value in parameters.items() if key.startswith("file:")}
        await self._endpoints.load(request.path_params["model"], parameters)
        return Response()

    async def unload(self, request: Request) -> Response:
        await self._endpoints.unload(request.path_params["model"], _parameters(await _fields(request)))
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
        await self._endpoints.register_system(name, key, fields.get("offset", 0), fields["byte_size"])
        return Response()

    async def register_cuda(self, request: Request) -> Response:
        await _fields(request)
        await self._endpoints.register_cuda(request.path_params["region"])
        return Response()

    async def unregister(self, request: Request) -> Response:
        await self._endpoints.unregister(_kind(request), request.path_params.get("region", ""))
        return Response()

    async def region_status(self, request: Request) -> Response:
        return _answer(await self._endpoints.region_status(_kind(request), request.path_params.get("region", "")))


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


def _parameters(fields: dict[str, Any]) -> dict[str, Any]:
    parameters = fields.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidArgument("'parameters' should be an object")
    return parameters


async def _fields(request: Request) -> dict[str, Any]:
    """The JSON object of a control request; an empty body is an empty object."""
    body = await read_body(request, _MAX_BODY)
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
