"""Answers the RPCs of inference.GRPCInferenceService other than inference: health, metadata, statistics, repository, regions.

``tensord.daemon.front.endpoints`` finds the answers; this module converts them from and to messages. Source: grpc_service.proto.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
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
Fields = dict[str, Any]
#: Log setting -> field of ChangeLog, its kind of parameter, and how Triton calls that.
_LOG_KINDS = {
    "log_info": ("info", "bool_param", "boolean"),
    "log_warning": ("warning", "bool_param", "boolean"),
    "log_error": ("error", "bool_param", "boolean"),
    "log_verbose_level": ("verbose", "uint32_param", "int32"),
    "log_format": ("format", "string_param", "string"),
}
_LOG_SETTINGS = {"log_file", *_LOG_KINDS}


class Management:
    """Implements the RPCs other than inference, each as a method with the name of the RPC.

    A method takes the client's connection and the request. It returns the fields of the response as JSON has them, or None.
    """

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    def methods(self) -> Iterator[tuple[str, Callable[[Stream], Call]]]:
        """Yields the path of each RPC, with the function that makes a ``Call`` for a stream."""
        for method in grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            answer = getattr(self, method.name, None)
            if answer is not None:
                yield f"/{SERVICE}/{method.name}", _maker(method, answer)

    # ------------------------------------------------------------------------------------------------ health

    async def ServerLive(self, client: Http2Connection, request: Any) -> Fields:
        return {"live": True}

    async def ServerReady(self, client: Http2Connection, request: Any) -> Fields:
        return {"ready": not await self._endpoints.unreadiness()}

    async def ModelReady(self, client: Http2Connection, request: Any) -> Fields:
        try:
            version = read_version(request.name, request.version)
        except NotFound:
            return {"ready": False}
        return {"ready": await self._endpoints.model_is_ready(request.name, version)}

    # ------------------------------------------------------------------------------------------------ models

    async def ServerMetadata(self, client: Http2Connection, request: Any) -> Fields:
        return self._endpoints.server_metadata()

    async def ModelMetadata(self, client: Http2Connection, request: Any) -> Fields:
        return await self._endpoints.model_metadata(request.name, read_version(request.name, request.version))

    async def ModelConfig(self, client: Http2Connection, request: Any) -> Fields:
        config = await self._endpoints.model_config(request.name, read_version(request.name, request.version))
        return {"config": msgspec.json.decode(config)}

    async def ModelStatistics(self, client: Http2Connection, request: Any) -> Fields:
        version = read_version(request.name, request.version)
        return _decoded(await self._endpoints.ask(ModelStatistics(request.name, version)))

    # -------------------------------------------------------------------------------------------- repository

    async def RepositoryIndex(self, client: Http2Connection, request: Any) -> Fields:
        _refuse_repository(request)
        return {"models": msgspec.json.decode(await self._endpoints.ask(RepositoryIndex(request.ready)))}

    async def RepositoryModelLoad(self, client: Http2Connection, request: Any) -> None:
        _refuse_repository(request)
        await self._endpoints.load(request.model_name, _parameters(request), peer_of(client.fileno()))

    async def RepositoryModelUnload(self, client: Http2Connection, request: Any) -> None:
        _refuse_repository(request)
        await self._endpoints.unload(request.model_name, _parameters(request), peer_of(client.fileno()))

    # ----------------------------------------------------------------------------------------------- regions

    async def SystemSharedMemoryStatus(self, client: Http2Connection, request: Any) -> Fields:
        return await self._status("system", request.name)

    async def SystemSharedMemoryRegister(self, client: Http2Connection, request: Any) -> None:
        region = RegisterSystemRegion(request.name, request.key, request.offset, request.byte_size)
        await self._endpoints.register(region, client.fileno(), client.connection_end)

    async def SystemSharedMemoryUnregister(self, client: Http2Connection, request: Any) -> None:
        await self._endpoints.ask(UnregisterRegion("system", request.name), peer_of(client.fileno()))

    async def CudaSharedMemoryStatus(self, client: Http2Connection, request: Any) -> Fields:
        return await self._status("cuda", request.name)

    async def CudaSharedMemoryRegister(self, client: Http2Connection, request: Any) -> None:
        region = RegisterCudaRegion(request.name, request.raw_handle, request.device_id, request.byte_size)
        await self._endpoints.register(region, client.fileno(), client.connection_end)

    async def CudaSharedMemoryUnregister(self, client: Http2Connection, request: Any) -> None:
        await self._endpoints.ask(UnregisterRegion("cuda", request.name), peer_of(client.fileno()))

    # ---------------------------------------------------------------------------------------------- settings

    async def LogSettings(self, client: Http2Connection, request: Any) -> Fields:
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
        settings = _decoded(await self._endpoints.ask(ChangeLog(**wanted), peer_of(client.fileno())))
        kinds = {name: _LOG_KINDS.get(name, ("", "string_param", ""))[1] for name in settings}
        return {"settings": {name: {kinds[name]: value} for name, value in settings.items()}}

    async def TraceSetting(self, client: Http2Connection, request: Any) -> Fields:
        await self._endpoints.check_traced(request.model_name)
        given = {name: list(value.value) for name, value in request.settings.items()}
        wanted = trace_settings.parse(request.model_name, given)
        settings = _decoded(await self._endpoints.ask(wanted, peer_of(client.fileno())))
        lists = {name: value if isinstance(value, list) else [value] for name, value in settings.items()}
        return {"settings": {name: {"value": value} for name, value in lists.items()}}

    async def _status(self, kind: str, name: str) -> Fields:
        regions = msgspec.json.decode(await self._endpoints.ask(RegionStatus(kind, name)))
        return {"regions": {region["name"]: region for region in regions}}


def _maker(method: MethodDescriptor, answer: Callable[..., Any]) -> Callable[[Stream], Call]:
    request, response = (getattr(grpc_service_pb2, each.name) for each in (method.input_type, method.output_type))

    async def filled(client: Http2Connection, asked: Any) -> Message:
        fields = await answer(client, asked)
        made: Message = json_format.ParseDict(fields or {}, response(), ignore_unknown_fields=True)
        return made

    return lambda stream: Unary(stream, request, functools.partial(filled, stream.connection))


def _decoded(content: bytes) -> Fields:
    fields: Fields = msgspec.json.decode(content)
    return fields


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
