"""Answers the RPCs of inference.GRPCInferenceService other than inference: health, metadata, statistics, repository, regions.

``tensord.daemon.front.endpoints`` finds the answers; this module converts them from and to messages. Source: grpc_service.proto.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from google.protobuf import json_format
from google.protobuf.message import Message

from tensord.daemon.control import log_settings
from tensord.daemon.front.endpoints import Endpoints
from tensord.daemon.front.peer import peer_of
from tensord.daemon.grpc.call import Call
from tensord.daemon.grpc.connection import Http2Connection
from tensord.daemon.grpc.request_codec import read_version
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.grpc.unary import Unary
from tensord.daemon.tracing import trace_settings
from tensord.protocol import grpc_service_pb2
from tensord.shm.errors import InvalidArgument, NotFound, Unsupported
from tensord.shm.operations import (
    ChangeLog,
    ModelStatistics,
    RegionStatus,
    RegisterCudaRegion,
    RegisterSystemRegion,
    RepositoryIndex,
    UnregisterRegion,
)

SERVICE = "inference.GRPCInferenceService"
#: Log setting -> field of ChangeLog, its kind of parameter, and how Triton calls that.
_LOG_KINDS = {
    "log_info": ("info", "bool_param", "boolean"),
    "log_warning": ("warning", "bool_param", "boolean"),
    "log_error": ("error", "bool_param", "boolean"),
    "log_verbose_level": ("verbose", "uint32_param", "int32"),
    "log_format": ("format", "string_param", "string"),
}
_LOG_SETTINGS = {"log_file", *_LOG_KINDS}
#: The methods whose answer depends on who asks: these get the client's connection as well.
_FOR_PEER = frozenset(
    [
        *(f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Register", "Unregister")),
        *("RepositoryModelLoad", "RepositoryModelUnload", "LogSettings", "TraceSetting"),
    ]
)


class Management:
    """Implements the RPCs other than inference, each as a method with the name of the RPC."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    def methods(self) -> Iterator[tuple[str, Callable[[Stream], Call]]]:
        """Yields the path of each RPC, with the function that makes a ``Call`` for a stream."""
        for method in grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            answer = getattr(self, method.name, None)
            if answer is not None:
                request = getattr(grpc_service_pb2, method.input_type.name)
                yield f"/{SERVICE}/{method.name}", _maker(request, answer, method.name in _FOR_PEER)

    # ------------------------------------------------------------------------------------------------ health

    async def ServerLive(self, request: Any) -> Any:
        return grpc_service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any) -> Any:
        return grpc_service_pb2.ServerReadyResponse(ready=not await self._endpoints.unreadiness())

    async def ModelReady(self, request: Any) -> Any:
        try:
            version = read_version(request.name, request.version)
        except NotFound:
            return grpc_service_pb2.ModelReadyResponse(ready=False)
        return grpc_service_pb2.ModelReadyResponse(ready=await self._endpoints.model_is_ready(request.name, version))

    # ------------------------------------------------------------------------------------------------ models

    async def ServerMetadata(self, request: Any) -> Any:
        return grpc_service_pb2.ServerMetadataResponse(**self._endpoints.server_metadata())

    async def ModelMetadata(self, request: Any) -> Any:
        version = read_version(request.name, request.version)
        return _filled(
            grpc_service_pb2.ModelMetadataResponse(), await self._endpoints.model_metadata(request.name, version)
        )

    async def ModelConfig(self, request: Any) -> Any:
        config = await self._endpoints.model_config(request.name, read_version(request.name, request.version))
        return _filled(grpc_service_pb2.ModelConfigResponse(), {"config": msgspec.json.decode(config)})

    async def ModelStatistics(self, request: Any) -> Any:
        version = read_version(request.name, request.version)
        statistics = await self._endpoints.ask(ModelStatistics(request.name, version))
        return _filled(grpc_service_pb2.ModelStatisticsResponse(), msgspec.json.decode(statistics))

    # -------------------------------------------------------------------------------------------- repository

    async def RepositoryIndex(self, request: Any) -> Any:
        _refuse_repository(request)
        models = msgspec.json.decode(await self._endpoints.ask(RepositoryIndex(request.ready)))
        return _filled(grpc_service_pb2.RepositoryIndexResponse(), {"models": models})

    async def RepositoryModelLoad(self, client: Http2Connection, request: Any) -> Any:
        _refuse_repository(request)
        await self._endpoints.load(request.model_name, _parameters(request), peer_of(client.fileno()))
        return grpc_service_pb2.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, client: Http2Connection, request: Any) -> Any:
        _refuse_repository(request)
        await self._endpoints.unload(request.model_name, _parameters(request), peer_of(client.fileno()))
        return grpc_service_pb2.RepositoryModelUnloadResponse()

    # ----------------------------------------------------------------------------------------------- regions

    async def SystemSharedMemoryStatus(self, request: Any) -> Any:
        return await self._status("system", request.name, grpc_service_pb2.SystemSharedMemoryStatusResponse())

    async def SystemSharedMemoryRegister(self, client: Http2Connection, request: Any) -> Any:
        region = RegisterSystemRegion(request.name, request.key, request.offset, request.byte_size)
        await self._endpoints.register(region, client.fileno(), client.connection_end)
        return grpc_service_pb2.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, client: Http2Connection, request: Any) -> Any:
        await self._endpoints.ask(UnregisterRegion("system", request.name), peer_of(client.fileno()))
        return grpc_service_pb2.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(self, request: Any) -> Any:
        return await self._status("cuda", request.name, grpc_service_pb2.CudaSharedMemoryStatusResponse())

    async def CudaSharedMemoryRegister(self, client: Http2Connection, request: Any) -> Any:
        region = RegisterCudaRegion(request.name, request.raw_handle, request.device_id, request.byte_size)
        await self._endpoints.register(region, client.fileno(), client.connection_end)
        return grpc_service_pb2.CudaSharedMemoryRegisterResponse()

    async def CudaSharedMemoryUnregister(self, client: Http2Connection, request: Any) -> Any:
        await self._endpoints.ask(UnregisterRegion("cuda", request.name), peer_of(client.fileno()))
        return grpc_service_pb2.CudaSharedMemoryUnregisterResponse()

    # ---------------------------------------------------------------------------------------------- settings

    async def LogSettings(self, client: Http2Connection, request: Any) -> Any:
        given = {name: value for name, value in request.settings.items() if name in _LOG_SETTINGS}
        if "log_file" in given:
            raise Unsupported(log_settings.FILE_REFUSED)
        wanted: dict[str, Any] = {}
        for name, (field, kind, word) in _LOG_KINDS.items():
            if name in given:
                if given[name].WhichOneof("parameter_choice") != kind:
                    raise InvalidArgument(f"expect {word} for '{name}'")
                wanted[field] = getattr(given[name], kind)
        if wanted.get("format", "default") not in log_settings.FORMATS:
            raise InvalidArgument(f"invalid argument for log_format, got: {wanted['format']}")
        settings = msgspec.json.decode(await self._endpoints.ask(ChangeLog(**wanted), peer_of(client.fileno())))
        answer = grpc_service_pb2.LogSettingsResponse()
        for name, value in settings.items():
            setattr(answer.settings[name], _LOG_KINDS.get(name, ("", "string_param", ""))[1], value)
        return answer

    async def TraceSetting(self, client: Http2Connection, request: Any) -> Any:
        await self._endpoints.check_traced(request.model_name)
        given = {name: list(value.value) for name, value in request.settings.items()}
        wanted = trace_settings.parse(request.model_name, given)
        settings = msgspec.json.decode(await self._endpoints.ask(wanted, peer_of(client.fileno())))
        answer = grpc_service_pb2.TraceSettingResponse()
        for name, value in settings.items():
            answer.settings[name].value.extend(value if isinstance(value, list) else [value])
        return answer

    async def _status(self, kind: str, name: str, answer: Message) -> Any:
        regions = msgspec.json.decode(await self._endpoints.ask(RegionStatus(kind, name)))
        return _filled(answer, {"regions": {region["name"]: region for region in regions}})


def _maker(request: type[Message], answer: Any, for_peer: bool) -> Callable[[Stream], Call]:
    return lambda stream: Unary(stream, request, functools.partial(answer, stream.connection) if for_peer else answer)


def _filled(message: Message, fields: dict[str, Any]) -> Any:
    return json_format.ParseDict(fields, message, ignore_unknown_fields=True)


def _refuse_repository(request: Any) -> None:
    if request.repository_name:
        raise Unsupported("'repository_name' specification is not supported")


def _parameters(request: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in request.parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidArgument(f"parameter '{key}' has no value")
        found[key] = getattr(value, kind)
    return found
