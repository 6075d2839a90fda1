"""Serves every HTTP endpoint but inference, as a Starlette application: health, metadata, statistics, repository, regions.

``tensord.daemon.front.endpoints`` finds the answers; this module has the paths, methods, bodies and statuses. Every error is
answered with a JSON object with ``error``. Source: KServe V2 REST and Triton's extensions, and the answers of a real Triton.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from tensord.daemon.control import push_fields
from tensord.daemon.control.log_settings import FILE_REFUSED, FORMATS, MAX_VERBOSE
from tensord.daemon.front.access import Access, Rule
from tensord.daemon.front.endpoints import Endpoints
from tensord.daemon.front.peer import peer_of
from tensord.daemon.front.status import http_status
from tensord.daemon.http import control_fields, json_values
from tensord.daemon.http.arriving_parameters import ArrivingParameters, whole_body
from tensord.daemon.submit.model_states import parse_version
from tensord.daemon.tracing import trace_settings
from tensord.shm.errors import DEFECT, InvalidArgument, NotFound, ServingError, Unavailable, Unsupported
from tensord.shm.operations import (
    ChangeLog,
    ChangeTrace,
    DropParameters,
    ListParameters,
    ModelStatistics,
    Peer,
    RegionStatus,
    RegisterCudaRegion,
    RegisterSystemRegion,
    RepositoryIndex,
    RevertParameters,
    UnregisterRegion,
)

Handler = Callable[[Request], Awaitable[Response]]
Endpoint = tuple[str, str, Handler, str]
#: The calls whose paths answer HEAD as well.
_HEADS = ("ServerLive", "ServerReady", "ModelReady", "OpenApi")
#: The most bytes of a control request's body.
MAX_BODY = 1 << 20
#: Settings a trace request may name; others are ignored.
TRACE_SETTINGS = ("trace_file", "trace_level", "trace_rate", "trace_count", "log_frequency")


class Routes:
    """Answers all requests to an HTTP front that are no inference requests."""

    def __init__(self, endpoints: Endpoints, access: Access) -> None:
        self._endpoints = endpoints
        self._access = access
        self._arriving = ArrivingParameters()

    def table(self) -> list[Endpoint]:
        """Returns (method, path, handler, call) for each documented route. ``call``: the route's name in the access rules."""
        model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
        repository = "/v2/repository"
        table: list[Endpoint] = [
            ("GET", "/v2/health/live", self.live, "ServerLive"),
            ("GET", "/v2/health/ready", self.ready, "ServerReady"),
            ("GET", "/v2", self.server_metadata, "ServerMetadata"),
            ("GET", "/v2/models/stats", self.statistics, "ModelStatistics"),
            ("POST", f"{repository}/index", self.index, "RepositoryIndex"),
            ("POST", f"{repository}/models/{{model}}/load", self.load, "RepositoryModelLoad"),
            ("POST", f"{repository}/models/{{model}}/unload", self.unload, "RepositoryModelUnload"),
            ("GET", "/v2/logging", self.log_settings, "LogSettings"),
            ("POST", "/v2/logging", self.change_log_settings, "LogSettings"),
        ]
        for prefix in ("/v2", model):
            table += [
                ("GET", f"{prefix}/trace/setting", self.trace_settings, "TraceSetting"),
                ("POST", f"{prefix}/trace/setting", self.change_trace_settings, "TraceSetting"),
            ]
        for prefix in (model, version):
            table += [
                ("GET", prefix, self.metadata, "ModelMetadata"),
                ("GET", f"{prefix}/ready", self.model_ready, "ModelReady"),
                ("GET", f"{prefix}/config", self.config, "ModelConfig"),
                ("GET", f"{prefix}/stats", self.statistics, "ModelStatistics"),
                ("POST", f"{prefix}/infer", self.infer, "ModelInfer"),
                ("POST", f"{prefix}/infer_stream", self.infer, "InferStream"),
                ("POST", f"{prefix}/generate", self.infer, "Generate"),
                ("POST", f"{prefix}/generate_stream", self.infer, "GenerateStream"),
                ("GET", f"{prefix}/parameters", self.parameters, "ListParameters"),
                ("GET", f"{prefix}/parameters/{{set}}", self.parameters, "ListParameters"),
                ("POST", f"{prefix}/parameters/{{set}}", self.push_parameters, "PushParameters"),
                ("DELETE", f"{prefix}/parameters/{{set}}", self.drop_parameters, "DropParameters"),
                ("POST", f"{prefix}/parameters/{{set}}/revert", self.revert_parameters, "RevertParameters"),
            ]
        for kind, register in (("System", self.register), ("Cuda", self.register_cuda)):
            regions = f"/v2/{kind.lower()}sharedmemory"
            table.append(("POST", f"{regions}/region/{{region}}/register", register, f"{kind}SharedMemoryRegister"))
            for prefix in (regions, f"{regions}/region/{{region}}"):
                table += [
                    ("GET", f"{prefix}/status", self.region_status, f"{kind}SharedMemoryStatus"),
                    ("POST", f"{prefix}/unregister", self.unregister, f"{kind}SharedMemoryUnregister"),
                ]
        return table

    def refused(self) -> list[Endpoint]:
        """Returns the routes whose handlers answer every request with an error."""
        repository = "/v2/repository/{repository}/models/{model}"
        return [
            ("POST", f"{repository}/load", self.named_repository, "RepositoryModelLoad"),
            ("POST", f"{repository}/unload", self.named_repository, "RepositoryModelUnload"),
            ("POST", "/v2/systemsharedmemory/register", self.register_nameless, "SystemSharedMemoryRegister"),
            ("POST", "/v2/cudasharedmemory/register", self.register_nameless, "CudaSharedMemoryRegister"),
        ]

    def undescribed(self) -> list[Endpoint]:
        """Returns the routes that the OpenAPI description omits. The only such route serves the description itself."""
        return [("GET", "/v2/openapi.yaml", self.openapi, "OpenApi")]

    def application(self) -> Starlette:
        """Creates the ASGI application that serves all routes."""
        routes = [
            self._route(endpoint, served)
            for served, table in ((True, self.table()), (False, [*self.refused(), *self.undescribed()]))
            for endpoint in table
        ]
        application = Starlette(
            routes=routes,
            exception_handlers={
                ServingError: _serving_error,
                HTTPException: _http_error,
                ClientDisconnect: _gone,
                Exception: _unexpected,
            },
        )
        application.router.redirect_slashes = False
        return application

    def _route(self, endpoint: Endpoint, served: bool) -> Route:
        method, path, handler, call = endpoint
        rule = self._access.rule(call)
        route = Route(path, handler if rule is None else _guarded(handler, rule), include_in_schema=served)
        # Starlette would take HEAD wherever it takes GET.
        route.methods = {method, "HEAD"} if call in _HEADS else {method}
        return route

    # ------------------------------------------------------------------------------------------------ health

    async def live(self, request: Request) -> Response:
        """Answers that the server is alive, with the body ``{"live": true}``, which KServe's client reads."""
        return _answer({"live": True})

    async def ready(self, request: Request) -> Response:
        if reason := await self._endpoints.unreadiness():
            return _answer({"ready": False, "error": reason}, 400)
        return _answer({"ready": True})

    # ------------------------------------------------------------------------------------------------ models

    async def server_metadata(self, request: Request) -> Response:
        return _answer(self._endpoints.server_metadata())

    async def openapi(self, request: Request) -> Response:
        """Answers with the OpenAPI description of the endpoints.

        Answers 304 if the client already has the description (If-None-Match).
        """
        content, tag = await asyncio.to_thread(_description)
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        known = request.headers.get("If-None-Match", "")
        if known.strip() == "*" or tag in [each.strip().removeprefix("W/") for each in known.split(",")]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type="application/yaml")

    async def model_ready(self, request: Request) -> Response:
        _check_version_text(request)
        try:
            ready = await self._endpoints.model_is_ready(*_target(request))
        except NotFound:
            ready = False
        if ready:
            return _answer({"name": request.path_params["model"], "ready": True})
        return _answer({"error": "Model version not ready"}, 400)

    async def metadata(self, request: Request) -> Response:
        answer = _answer(await self._endpoints.model_metadata(*_target(request)))
        if self._endpoints.is_pure(*_target(request)):
            answer.headers["Tensord-Pure"] = "1"
        return answer

    async def config(self, request: Request) -> Response:
        return _answer(await self._endpoints.model_config(*_target(request)))

    async def infer(self, request: Request) -> Response:
        """Raises NotFound. The front answers inference requests without calling this method."""
        raise NotFound("Not Found")

    async def statistics(self, request: Request) -> Response:
        model, version = _target(request) if "model" in request.path_params else ("", 0)
        return _answer(await self._endpoints.ask(ModelStatistics(model, version)))

    # -------------------------------------------------------------------------------------------- repository

    async def index(self, request: Request) -> Response:
        ready = json_values.boolean((await _fields(request)).get("ready", False))
        return _answer(await self._endpoints.ask(RepositoryIndex(ready)))

    async def load(self, request: Request) -> Response:
        # The one control request that carries files.
        body = await whole_body(request, self._endpoints.max_body_byte_size)
        parameters = _parameters(control_fields.read(body))
        for key, value in parameters.items():
            if key.startswith("file:"):
                parameters[key] = control_fields.base64_content(key, value)
        await self._endpoints.load(request.path_params["model"], parameters, _peer(request))
        return Response()

    async def unload(self, request: Request) -> Response:
        parameters = _parameters(await _fields(request))
        await self._endpoints.unload(request.path_params["model"], parameters, _peer(request))
        return Response()

    async def named_repository(self, request: Request) -> Response:
        raise Unsupported("'repository_name' specification is not supported")

    # -------------------------------------------------------------------------------------------- parameters

    async def push_parameters(self, request: Request) -> Response:
        async with self._arriving.receive(request, self._endpoints.max_parameter_byte_size) as (text, memory):
            byte_size = os.fstat(memory).st_size if memory >= 0 else -1
            wanted = push_fields.read(text).operation(*_target(request), request.path_params["set"], byte_size)
            return _answer(await self._endpoints.ask(wanted, _peer(request), memory))

    async def parameters(self, request: Request) -> Response:
        wanted = ListParameters(*_target(request), request.path_params.get("set", ""))
        return _answer(await self._endpoints.ask(wanted))

    async def drop_parameters(self, request: Request) -> Response:
        await self._endpoints.ask(DropParameters(*_target(request), request.path_params["set"]), _peer(request))
        return Response()

    async def revert_parameters(self, request: Request) -> Response:
        wanted = RevertParameters(*_target(request), request.path_params["set"])
        return _answer(await self._endpoints.ask(wanted, _peer(request)))

    # ---------------------------------------------------------------------------------------------- settings
    #
    # Types are strict, and wrong ones are refused in Triton's sentences. Unknown keys are ignored; null changes nothing
    # (logging), or clears a value (tracing).
    # Source: Triton docs/protocol/extension_logging.md, extension_trace.md; answers as recorded.

    async def log_settings(self, request: Request) -> Response:
        return _answer(await self._endpoints.ask(ChangeLog()))

    async def change_log_settings(self, request: Request) -> Response:
        body = control_fields.settings(await whole_body(request, MAX_BODY))
        given = {name: value for name, value in body.items() if value is not None}
        if "log_file" in given:
            raise Unsupported(FILE_REFUSED)
        info, warning, error = (
            json_values.boolean(given[name]) if name in given else None
            for name in ("log_info", "log_warning", "log_error")
        )
        verbose = json_values.unsigned(given["log_verbose_level"]) if "log_verbose_level" in given else None
        if verbose is not None and verbose > MAX_VERBOSE:
            raise InvalidArgument(f"'log_verbose_level' is {verbose}, at most {MAX_VERBOSE} is allowed")
        form = json_values.text(given["log_format"]) if "log_format" in given else None
        if form is not None and form not in FORMATS:
            raise Unavailable(f"invalid argument for --log_format, got: {form}")
        wanted = ChangeLog(info, warning, error, verbose, form)
        return _answer(await self._endpoints.ask(wanted, _peer(request)))

    async def trace_settings(self, request: Request) -> Response:
        return _answer(await self._endpoints.ask(ChangeTrace(_traced(request))))

    async def change_trace_settings(self, request: Request) -> Response:
        body = await whole_body(request, MAX_BODY)
        await self._endpoints.check_traced(_traced(request))
        wanted: dict[str, list[str]] = {}
        for name, value in control_fields.settings(body).items():
            if name not in TRACE_SETTINGS:
                continue
            if value is None:
                wanted[name] = []
            elif name == "trace_level":
                # No level at all is no change: it is null that clears.
                wanted |= {name: levels} if (levels := control_fields.texts(value)) else {}
            elif name == "trace_file":
                raise Unsupported(trace_settings.FILE_REFUSED)
            else:
                wanted[name] = [json_values.text(value)]
        changed = trace_settings.parse(_traced(request), wanted)
        return _answer(await self._endpoints.ask(changed, _peer(request)))

    # ----------------------------------------------------------------------------------------------- regions

    async def register(self, request: Request) -> Response:
        fields = await _fields(request, required=True)
        key = json_values.text(control_fields.needed(fields, "key"))
        offset = json_values.unsigned(fields.get("offset", 0))
        byte_size = json_values.unsigned(control_fields.needed(fields, "byte_size"))
        return await self._register(
            request, RegisterSystemRegion(request.path_params["region"], key, offset, byte_size)
        )

    async def register_nameless(self, request: Request) -> Response:
        raise InvalidArgument(f"'region name' is necessary to register {_kind(request)} shared memory region")

    async def register_cuda(self, request: Request) -> Response:
        registration = control_fields.cuda_registration(await _fields(request))
        return await self._register(request, RegisterCudaRegion(request.path_params["region"], *registration))

    async def _register(self, request: Request, region: RegisterSystemRegion | RegisterCudaRegion) -> Response:
        await self._endpoints.register(region, _fd(request), request.scope["tensord.end"])
        return Response()

    async def unregister(self, request: Request) -> Response:
        region = UnregisterRegion(_kind(request), request.path_params.get("region", ""))
        await self._endpoints.ask(region, _peer(request))
        return Response()

    async def region_status(self, request: Request) -> Response:
        region = RegionStatus(_kind(request), request.path_params.get("region", ""))
        return _answer(await self._endpoints.ask(region))


async def _fields(request: Request, required: bool = False) -> dict[str, Any]:
    """Returns the fields of the JSON object in the request's body. ``required``: whether an empty body is an error."""
    return control_fields.read(await whole_body(request, MAX_BODY), required)


def _answer(value: Any, status: int = 200) -> Response:
    """Returns a JSON response. ``value``: JSON as bytes, or an object to encode."""
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return Response(body, status, media_type="application/json")


@functools.cache
def _description() -> tuple[bytes, str]:
    """Returns the OpenAPI description of the endpoints and its entity tag (ETag)."""
    content = Path(__file__).with_name("openapi.yaml").read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def _traced(request: Request) -> str:
    return str(request.path_params.get("model", ""))


def _guarded(handler: Handler, rule: Rule) -> Handler:
    async def handle(request: Request) -> Response:
        rule.check(request.scope["headers"])
        return await handler(request)

    return handle


def _target(request: Request) -> tuple[str, int]:
    model = request.path_params["model"]
    text = request.path_params.get("version")
    if text is None:
        return model, 0
    _check_version_text(request)
    return model, parse_version(model, text)


def _check_version_text(request: Request) -> None:
    text = request.path_params.get("version", "0")
    if not (text.isascii() and text.isdigit()):
        raise NotFound("Not Found")


def _fd(request: Request) -> int:
    """Returns the file descriptor of the connection's socket, or -1 if the connection is already closed."""
    sock = request.scope["tensord.socket"]
    return -1 if sock is None else int(sock.fileno())


def _peer(request: Request) -> Peer:
    return peer_of(_fd(request))


def _kind(request: Request) -> str:
    return "system" if request.url.path.startswith("/v2/system") else "cuda"


def _parameters(fields: dict[str, Any]) -> dict[str, Any]:
    return control_fields.members(fields.get("parameters", {}))


async def _serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    return _answer({"error": error.message}, http_status(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = _answer({"error": error.detail}, error.status_code)
    if error.status_code == 405:
        answer.headers["Allow"] = ", ".join(_allowed(request))
    return answer


def _allowed(request: Request) -> list[str]:
    found = [route.methods for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted(set().union(*found))


async def _gone(request: Request, error: Exception) -> Response:
    """Returns a response that nobody reads, because the client has disconnected."""
    return Response(status_code=400)


async def _unexpected(request: Request, error: Exception) -> Response:
    return _answer({"error": DEFECT}, 500)
