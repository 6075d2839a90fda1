"""Answers all HTTP and gRPC calls other than inference, from the front's table of models or by asking the supervisor.

The HTTP and gRPC fronts decode a request to the arguments of a method here, and encode what the method returns. A method that
fails raises a ServingError. Source: KServe V2 and Triton's extensions. The texts of errors are those of a real Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tensord import __version__
from tensord.config.options import Options
from tensord.daemon.control.channel import ControlCalls
from tensord.daemon.front.peer import ConnectionEnd, end_of, peer_of
from tensord.daemon.submit.model_states import ModelStates
from tensord.shm.errors import InvalidArgument
from tensord.shm.operations import (
    ANONYMOUS,
    ChangeTrace,
    LoadModel,
    ModelReady,
    Peer,
    RegisterCudaRegion,
    RegisterSystemRegion,
    Settle,
    UnloadModel,
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
    """Carries out all requests of HTTP and gRPC clients other than inference."""

    def __init__(self, table: ModelStates, calls: ControlCalls, options: Options) -> None:
        self._table = table
        #: Has the supervisor carry out an operation; what needs no check or answer of the front's own is asked so directly.
        self.ask = calls.ask
        self._name = options.server_name
        #: When regions are reclaimed (``regions.reclaim``).
        self._reclaim = options.regions.reclaim
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
        """Returns a sentence that says why the daemon is not ready, or "" if it is ready."""
        if self.stopping:
            return "the server is stopping"
        readiness = self._table.readiness
        if not readiness.ready:
            return readiness.sentence() or "the server is starting"
        await self._everywhere()
        return ""

    async def _everywhere(self) -> None:
        # Otherwise another front might contradict the coming answer.
        edition = self._table.edition
        if self._settled < edition:
            await self.ask(Settle())
            self._settled = edition

    # ------------------------------------------------------------------------------------------------ models

    def server_metadata(self) -> dict[str, Any]:
        """Returns the ``name``, ``version`` and ``extensions`` of the server."""
        return {"name": self._name, "version": __version__, "extensions": [*EXTENSIONS]}

    async def model_is_ready(self, model: str, version: int) -> bool:
        """Returns whether requests for a model version are answered now. ``version`` 0 is the newest version.

        Returns False if the model is unknown, or if the model's own code says that the model is not ready.
        """
        if not self._table.is_ready(model, version):
            return False
        await self._everywhere()
        if self._table.is_ready(model, version) and self._table.find(model, version).judges:
            return bool(msgspec.json.decode(await self.ask(ModelReady(model, version))))
        return self._table.is_ready(model, version)

    async def model_metadata(self, model: str, version: int) -> dict[str, Any]:
        """Returns a model's ``name``, ``versions`` (as text, ascending), ``platform``, ``inputs`` and ``outputs``.

        ``versions`` has all versions that are served, or only ``version`` if it is not 0.
        Raises NotFound if the model or the version is unknown. Raises Unavailable if the model cannot be served now.
        """
        metadata = msgspec.json.decode(self._table.find(model, version).metadata)
        await self._everywhere()
        versions = [str(number) for number in ((version,) if version else self._table.ready_versions(model))]
        return {"name": metadata.pop("name"), "versions": versions, **metadata}

    def is_pure(self, model: str, version: int) -> bool:
        """Returns whether a request to a model version may be run twice without harm.

        Raises NotFound if the model or the version is unknown. Raises Unavailable if the model cannot be served now.
        """
        return self._table.find(model, version).pure

    async def model_config(self, model: str, version: int) -> bytes:
        """Returns the full ModelConfig of a model as JSON.

        Raises NotFound if the model or the version is unknown. Raises Unavailable if the model cannot be served now.
        """
        config = self._table.find(model, version).config
        await self._everywhere()
        return config

    # -------------------------------------------------------------------------------------------- repository

    async def load(self, model: str, parameters: Mapping[str, Any], peer: Peer = ANONYMOUS) -> None:
        """Loads a model, and returns once the model is loaded.

        ``parameters``: ``config`` is the model's configuration as JSON text. ``file:<version>/<name>`` is the bytes of a file.
        If files are given, ``config`` is needed as well, and the model's files in the repository are not used.
        Raises ServingError if a parameter is wrong, or if the load failed.
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
        await self.ask(LoadModel(model, config, files), peer)

    async def unload(self, model: str, parameters: Mapping[str, Any], peer: Peer = ANONYMOUS) -> None:
        """Unloads a model.

        ``parameters``: if ``unload_dependents`` is true and the model is an ensemble, this also unloads the models that only the
        ensemble uses.
        Raises ServingError if a parameter is wrong, or if the model could not be unloaded.
        """
        dependents = parameters.get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidArgument("unload parameter 'unload_dependents' should be a boolean")
        await self.ask(UnloadModel(model, dependents), peer)

    # ----------------------------------------------------------------------------------------------- regions

    async def register(
        self, region: RegisterSystemRegion | RegisterCudaRegion, fd: int, connection: ConnectionEnd
    ) -> None:
        """Registers a region for the client on the socket ``fd``. ``connection``: tells when the client's connection ends.

        If ``regions.reclaim`` says so, the region is removed when the client ends. Raises ServingError if it is refused.
        """
        if isinstance(region, RegisterSystemRegion) and max(region.offset, region.byte_size) > _INT64:
            raise InvalidArgument(
                f"failed to register shared memory region '{region.name}': offset {region.offset} and byte_size "
                f"{region.byte_size} are beyond {_INT64}"
            )
        with end_of(fd, connection, self._reclaim) as end:
            await self.ask(region, peer_of(fd), end)

    # ---------------------------------------------------------------------------------------------- settings

    async def check_traced(self, model: str) -> None:
        """Raises InvalidArgument if ``model``, whose trace settings a client asks for, is unknown. "" stands for all models."""
        if model:
            await self.ask(ChangeTrace(model))
