"""Answers the endpoints of both protocols other than inference, from the front's table of models or by asking the supervisor.

Each protocol decodes a request to the arguments of a method here, and encodes the result in its own format. Errors are
ServingErrors. What a front says of a model holds for every front: its client may send the next request to another front.
Source: KServe V2 and Triton's extensions; error texts as recorded against a real Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tensord import __version__
from tensord.config.options import Options
from tensord.daemon.control.channel import ControlCalls
from tensord.daemon.submit.model_states import ModelStates
from tensord.shm.errors import InvalidArgument
from tensord.shm.operations import (
    ANONYMOUS,
    ChangeLog,
    ChangeTrace,
    DropParameters,
    ListParameters,
    LoadModel,
    ModelReady,
    ModelStatistics,
    Peer,
    PushParameters,
    RegionStatus,
    RegisterCudaRegion,
    RegisterSystemRegion,
    RepositoryIndex,
    RevertParameters,
    Settle,
    UnloadModel,
    UnregisterRegion,
)

#: The extensions that work, in Triton's order and spelling.
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
_INT64 = (1 << 63) - 1
#: The most files of one load request, and bytes of all of them: they travel in one record to the supervisor.
MAX_FILES = 256
MAX_FILES_BYTE_SIZE = 128 << 20


class Endpoints:
    """Carries out all requests of HTTP and gRPC clients but inference, mostly by calls to the supervisor.

    Results in JSON are the bytes that the supervisor sent, and are not parsed here.
    """

    def __init__(self, table: ModelStates, calls: ControlCalls, options: Options) -> None:
        self._table = table
        self._calls = calls
        self._name = options.server_name
        self._version = __version__
        #: When regions are reclaimed (``regions.reclaim``).
        self.reclaim = options.regions.reclaim
        #: The table's edition that every front is known to have acknowledged.
        self._settled = -1
        #: The most bytes of pushed parameters.
        self.max_parameter_byte_size = options.workers.max_parameter_byte_size
        #: The limit for a request that carries files.
        self.max_body_byte_size = options.http.max_body_byte_size
        #: True once the front was asked to stop: it is not ready any more.
        self.stopping = False

    # ------------------------------------------------------------------------------------------------ health

    async def unreadiness(self) -> str:
        """Returns why the daemon is not ready, naming the models; "" if it is ready (``tensord.shm.progress.Readiness``)."""
        if self.stopping:
            return "the server is stopping"
        readiness = self._table.readiness
        if not readiness.ready:
            return readiness.sentence() or "the server is starting"
        await self._everywhere()
        return ""

    async def _everywhere(self) -> None:
        """Waits until every front has acknowledged the state of the models that this front knows now."""
        edition = self._table.edition
        if self._settled < edition:
            await self._calls.ask(Settle())
            self._settled = edition

    # ------------------------------------------------------------------------------------------------ models

    def server_metadata(self) -> dict[str, Any]:
        """Returns the server's metadata: ``name``, ``version`` and ``extensions``."""
        return {"name": self._name, "version": self._version, "extensions": EXTENSIONS}

    async def model_is_ready(self, model: str, version: int) -> bool:
        """Returns whether requests for a model version are answered now; 0 is the newest version.

        False if the model is unknown, or if its own code says that it is not ready.
        """
        if not self._table.is_ready(model, version):
            return False
        await self._everywhere()
        if self._table.find(model, version).judges:
            return bool(msgspec.json.decode(await self._calls.ask(ModelReady(model, version))))
        return True

    async def model_metadata(self, model: str, version: int) -> dict[str, Any]:
        """Returns a model's ``name``, ``versions`` (as text, ascending), ``platform``, ``inputs`` and ``outputs``.

        ``versions`` are all versions that are served, or only ``version`` if it is not 0.
        Raises NotFound: the model or version is unknown, or not ready.
        """
        metadata = msgspec.json.decode(self._table.find(model, version).metadata)
        await self._everywhere()
        versions = [str(number) for number in ((version,) if version else self._table.ready_versions(model))]
        return {"name": metadata.pop("name"), "versions": versions, **metadata}

    def is_pure(self, model: str, version: int) -> bool:
        """Returns whether a request to a model version harms nobody if it is run twice; version 0 is the newest.

        Raises NotFound: the model or version is unknown, or not ready.
        """
        return self._table.find(model, version).pure

    async def model_config(self, model: str, version: int) -> bytes:
        """Returns a model's full ModelConfig as JSON. Raises NotFound: the model or version is unknown, or not ready."""
        config = self._table.find(model, version).config
        await self._everywhere()
        return config

    async def statistics(self, model: str, version: int) -> bytes:
        """Returns statistics of models as JSON, {"model_stats": [...]}; ``model`` "": all models, ``version`` 0: all versions."""
        return await self._calls.ask(ModelStatistics(model, version))

    # -------------------------------------------------------------------------------------------- repository

    async def index(self, ready: bool) -> bytes:
        """Returns the repository index, a JSON array of {name, version?, state?, reason?}; ``ready``: only of ready models."""
        return await self._calls.ask(RepositoryIndex(ready))

    async def load(self, model: str, parameters: Mapping[str, Any], peer: Peer = ANONYMOUS) -> None:
        """Loads a model. Raises ServingError: the parameters are wrong, or the model could not be loaded.

        ``parameters``: ``config`` (JSON text) and ``file:<version>/<name>`` (bytes). If files are given, the model consists of
        these alone, and ``config`` is needed.
        """
        config, files = "", {}
        for key, value in sorted(parameters.items()):
            if key == "config":
                if not isinstance(value, str):
                    raise InvalidArgument("load parameter 'config' should be a string with a JSON object")
                config = value
            elif not key.startswith("file:"):
                raise InvalidArgument(f"unrecognized load parameter '{key}'.")
            elif not isinstance(value, bytes):
                raise InvalidArgument(f"load parameter '{key}' should be the bytes of a file")
            else:
                files[key.removeprefix("file:")] = value
        total = sum(map(len, files.values()))
        if len(files) > MAX_FILES or total > MAX_FILES_BYTE_SIZE:
            raise InvalidArgument(
                f"failed to load '{model}': {len(files)} files of {total} bytes together are given, "
                f"at most {MAX_FILES} of {MAX_FILES_BYTE_SIZE} are allowed"
            )
        await self._calls.ask(LoadModel(model, config, files), peer)

    async def unload(self, model: str, parameters: Mapping[str, Any], peer: Peer = ANONYMOUS) -> None:
        """Unloads a model. Raises ServingError: a parameter is wrong, or the model could not be unloaded.

        ``parameters``: ``unload_dependents`` must be a boolean; others are ignored.
        """
        dependents = parameters.get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidArgument("unload parameter 'unload_dependents' should be a boolean")
        await self._calls.ask(UnloadModel(model, dependents), peer)

    # -------------------------------------------------------------------------------------------- parameters

    async def push_parameters(self, wanted: PushParameters, peer: Peer, memory: int = -1) -> bytes:
        """Puts pushed parameters into use as a new version (``number``) of a model's parameter set.

        ``wanted``: model, version, set and source; ``memory``: the file descriptor of the memory in which the parameters arrived;
        -1: they come from the source in ``wanted``.

        Returns {"model", "version", "set", "number", "byte_size"} as JSON.
        Raises ServingError: the parameters do not fit the model, or no worker can take them now.
        """
        return await self._calls.ask(wanted, peer, memory)

    async def parameters(self, model: str, version: int, name: str) -> bytes:
        """Returns a JSON array of a model's parameter sets; ``version`` 0: all versions, ``name`` "": all sets.

        Raises NotFound: there is no such model or set.
        """
        return await self._calls.ask(ListParameters(model, version, name))

    async def drop_parameters(self, model: str, version: int, name: str, peer: Peer) -> None:
        """Drops a parameter set: no later request finds it. Raises NotFound: there is none; InvalidArgument: it is ``main``."""
        await self._calls.ask(DropParameters(model, version, name), peer)

    async def revert_parameters(self, model: str, version: int, name: str, peer: Peer) -> bytes:
        """Puts the parameters into use again that a set had before its last push.

        Returns {"model", "version", "set", "number", "byte_size"} as JSON. Raises ServingError: there are none to go back to.
        """
        return await self._calls.ask(RevertParameters(model, version, name), peer)

    # ----------------------------------------------------------------------------------------------- regions

    async def register_system(
        self, name: str, key: str, offset: int, byte_size: int, peer: Peer = ANONYMOUS, end: int = -1
    ) -> None:
        """Registers a part of a POSIX shared-memory object as a region; ``offset`` and ``byte_size`` are unsigned.

        Args:
          name, key: the names of the region and of the object.
          peer: the client.
          end: a file descriptor that becomes readable when the region is to be removed, and that the caller closes; -1: never.
        Raises: ServingError: the region cannot be registered.
        """
        if offset > _INT64 or byte_size > _INT64:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': offset {offset} and byte_size {byte_size} "
                f"are beyond {_INT64}"
            )
        await self._calls.ask(RegisterSystemRegion(name, key, offset, byte_size), peer, end)

    async def register_cuda(
        self,
        name: str,
        raw_handle: bytes,
        device_id: int,
        byte_size: int,
        peer: Peer = ANONYMOUS,
        end: int = -1,
    ) -> None:
        """Registers an allocation of a client's GPU memory, named by its 64-byte CUDA IPC handle, as a region.

        Args:
          device_id: the number of the GPU.
          peer: the client.
          end: a file descriptor that becomes readable when the region is to be removed, and that the caller closes; -1: never.
        Raises: ServingError: the region cannot be registered.
        """
        await self._calls.ask(RegisterCudaRegion(name, raw_handle, device_id, byte_size), peer, end)

    async def unregister(self, kind: str, name: str, peer: Peer = ANONYMOUS) -> None:
        """Unregisters the region ``name``; "": all regions of ``kind`` that the client ``peer`` may unregister.

        ``kind``: "system" or "cuda". Raises ServingError: the region belongs to another user, or regions are not served.
        """
        await self._calls.ask(UnregisterRegion(kind, name), peer)

    async def region_status(self, kind: str, name: str) -> bytes:
        """Returns a JSON array that describes the region ``name``; "": all regions of ``kind``, "system" or "cuda".

        Raises NotFound: there is no such region.
        """
        return await self._calls.ask(RegionStatus(kind, name))

    # ---------------------------------------------------------------------------------------------- settings

    async def log_settings(self, wanted: ChangeLog, peer: Peer = ANONYMOUS) -> bytes:
        """Changes those log settings that ``wanted`` gives. Returns all log settings then in force, as a JSON object."""
        return await self._calls.ask(wanted, peer)

    async def check_traced(self, model: str) -> None:
        """Checks that a model ("": all models) exists, before its trace settings are read.

        Raises InvalidArgument: the model is unknown.
        """
        if model:
            await self._calls.ask(ChangeTrace(model))

    async def trace_settings(self, wanted: ChangeTrace, peer: Peer = ANONYMOUS) -> bytes:
        """Changes those trace settings that ``wanted`` gives. Returns all trace settings then in force, as JSON.

        ``wanted``: made by ``tensord.daemon.tracing.trace_settings.parse``.
        """
        return await self._calls.ask(wanted, peer)
