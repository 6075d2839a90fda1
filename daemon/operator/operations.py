"""Carries out control operations, such as to load a model, for a client, for an operator with tensorctl, or for a model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from tensord.daemon.models.changes import Models
from tensord.daemon.models.versions import IndexState
from tensord.daemon.operator import listings
from tensord.daemon.operator.audit import Audit
from tensord.daemon.operator.configuration import Configuration
from tensord.daemon.parameters.pushes import Parameters
from tensord.daemon.processes.child import WorkerProcess
from tensord.daemon.processes.fronts import Fronts
from tensord.daemon.processes.worker_pool import WorkerPool
from tensord.daemon.regions.region_registry import RegionRegistry
from tensord.daemon.tracing.trace_settings import TraceSettings
from tensord.shm import descriptors
from tensord.shm.common.derivatives import original
from tensord.shm.control_records import ControlCall, Reply
from tensord.shm.errors import Internal, InvalidArgument, ServingError, Unavailable, Unsupported
from tensord.shm.figures import Figures, SlowReason
from tensord.shm.operations import (
    ANONYMOUS,
    FAILED,
    ChangeLog,
    ChangeTrace,
    DropParameters,
    ListParameters,
    LoadModel,
    ModelReady,
    ModelStatistics,
    Operation,
    Peer,
    PushParameters,
    RegionRecords,
    RegionStatus,
    RegisterCudaRegion,
    RegisterSystemRegion,
    RepositoryIndex,
    RevertParameters,
    Settle,
    UnloadModel,
    UnregisterRegion,
    WorkerFigures,
)

_log = logging.getLogger(__name__)
#: Seconds to wait for a worker's statistics; it answers later if its loop is busy for longer.
_STATISTICS_TIMEOUT = 30.0

#: Seconds to wait for a model's readiness; a worker answers within five, unless its loop is stuck.
_READY_SECONDS = 10.0
_NOT_READY = "the model's is_ready() does not say that it is"


@dataclass(slots=True)
class Operations:
    """Carries out what clients and models ask for besides inference: to load a model, to push parameters, to change a setting."""

    _models: Models
    _parameters: Parameters
    _regions: RegionRegistry
    _configuration: Configuration
    _traces: TraceSettings
    _workers: WorkerPool
    _fronts: Fronts
    _audit: Audit

    async def reply(self, call: ControlCall, peer: Peer | None, end: int = -1) -> Reply:
        """Carries out the operation that ``call`` asks for. Returns a reply with the operation's result, or with an error.

        ``peer``: the client or operator that asks, or None if the code of a model does.
        ``end``: the file descriptor that the asker sent with ``call``, or -1 if there is none. The caller closes the descriptor.
        """
        call_id, operation = call.call_id, call.operation
        _log.debug("operation %s %s", type(operation).__name__, getattr(operation, "name", ""))
        try:
            return Reply(call_id, result=await self.answer(operation, peer, end))
        except ServingError as error:
            return Reply.refusing(call_id, error)
        except Exception:
            _log.exception("%s failed", type(operation).__name__)
            return Reply(call_id, Internal.code, FAILED)

    async def reply_to_model(self, call: ControlCall, worker: int) -> Reply:
        """Carries out a model's call to load or unload a model, or to ask whether one is ready. Other calls get an error.

        ``worker``: the number of the process of the worker that asks.
        """
        operation = call.operation
        if isinstance(operation, LoadModel | UnloadModel | ModelReady):
            if isinstance(operation, ModelReady) and operation.awaits:
                asked = worker, original(operation.name)[0], operation.version
                await self._models.sent(*asked)
                try:
                    self._models.lifecycle.check_given_up(*asked)
                except Unavailable as error:
                    return Reply.refusing(call.call_id, error)
            return await self.reply(call, None)
        return Reply(call.call_id, Unsupported.code, f"a model may not ask for {type(call.operation).__name__}")

    async def answer(self, operation: Operation, peer: Peer | None, end: int = -1) -> bytes:
        """Carries out an operation and waits until all fronts know of it. Returns JSON, or b"" if the operation has no result.

        Args:
          peer: the client or operator that asks, or None if the code of a model does.
          end: a file descriptor that was sent with the operation, or -1. The caller closes it. For a push: the memory with the
          parameters. For a registration of a region: the descriptor becomes readable when the region is to be unregistered.
        Raises ServingError if the operation was refused or failed.
        """
        try:
            with descriptors.needed("this operation"):
                result = await self._carry_out(operation, peer or ANONYMOUS, end)
        except ServingError as error:
            self._audit.note(operation, peer, error)
            # A load that failed has changed something, too.
            await self._settled(operation)
            raise
        self._audit.note(operation, peer, result=result)
        await self._settled(operation)
        return result

    async def _settled(self, operation: Operation) -> None:
        """Waits for all fronts to act on an operation. For a load, an unload or changed settings, waits for all workers too."""
        # A worker that has yet to read that it is to unload something would go on answering for it.
        if isinstance(operation, LoadModel | UnloadModel) or (
            isinstance(operation, ChangeLog | ChangeTrace) and operation.changes()
        ):
            await self._workers.settled()
        await self._fronts.settled()

    async def _carry_out(self, operation: Operation, peer: Peer, end: int) -> bytes:
        match operation:
            case LoadModel():
                with self._models.ensembles.waits.waiting(operation.within, operation.name):
                    await self._models.load(operation)
            case ModelReady(name, version, _):
                return msgspec.json.encode(await self._is_ready(name, version))
            case UnloadModel(name, dependents):
                self._models.unload(name, dependents)
            case RepositoryIndex(ready, detailed):
                index = await self._models.index(ready, detailed)
                return msgspec.json.encode(await self._listed(index, ready))
            case ModelStatistics():
                return await self._statistics(operation)
            case RegisterSystemRegion() | RegisterCudaRegion():
                await self._regions.register(operation, peer, end)
            case UnregisterRegion():
                await self._regions.unregister(operation, peer)
            case RegionStatus():
                return self._regions.status(operation)
            case ChangeLog():
                return self._configuration.change_log(operation)
            case ChangeTrace():
                return self._traces.change(operation)
            case RegionRecords(name):
                return await self._regions.records(name)
            case PushParameters(model):
                with descriptors.needed(f"parameters of model '{model[:255]}'"):
                    return await self._parameters.push(operation, peer, end)
            case ListParameters():
                return self._parameters.listed(operation)
            case DropParameters():
                return await self._parameters.drop(operation, peer)
            case RevertParameters():
                return await self._parameters.revert(operation, peer)
            case Settle():
                pass  # what every answer waits for
        return b""

    async def describe_model(self, name: str) -> bytes:
        """Returns the versions of a model as JSON, each with its state, workers, folder, metadata and configuration.

        Raises InvalidArgument if there is no such model.
        """
        index = await self._models.index(ready=False, detailed=True)
        workers = {worker.incarnation: worker.name for worker in self._workers}
        asked = self._workers.ready()
        found = await asyncio.gather(*(self._slow_counts(worker, name) for worker in asked))
        slow = {worker.name: why for worker, why in zip(asked, found, strict=True)}
        return listings.of_model(self._models, name, index, workers, slow)

    async def _slow_counts(self, worker: WorkerProcess, name: str) -> dict[int, dict[str, int]]:
        try:
            figures = msgspec.json.decode(await worker.result_of(WorkerFigures(), seconds=_READY_SECONDS), type=Figures)
        except ServingError:
            return {}
        return {
            of.version: {SlowReason[label.upper()].value: count for label, count in of.counts.slow.items()}
            for of in figures.versions
            if of.name == name
        }

    async def _statistics(self, operation: ModelStatistics) -> bytes:
        name, version = operation.name, operation.version
        lifecycle, model = self._models.lifecycle, original(name)[0]
        if name and not lifecycle.is_ready(model):
            raise InvalidArgument(f"requested model '{name}' is not available")
        if name and version and not lifecycle.is_ready(model, version):
            raise InvalidArgument(f"requested model version is not available for model '{name}'")
        try:
            async with asyncio.timeout(_STATISTICS_TIMEOUT):
                # The counters of a worker that has died are lost.
                return merge_statistics(await self._workers.results_of(operation))
        except TimeoutError:
            raise Unavailable("a worker is too busy to give its statistics") from None

    # Every worker that serves a Triton Python model is asked for its ``is_ready()``, and all must say that it is.

    async def _is_ready(self, name: str, number: int = 0) -> bool:
        """Returns whether the version ``number`` of a model is served and ready. 0 means the newest version that is served.

        If the model's code has ``is_ready()``, every worker that serves the version calls it, and each call must return True.
        """
        name = original(name)[0]
        versions = self._models.lifecycle.models[name].versions if self._models.lifecycle.is_ready(name, number) else {}
        ready = [n for n, version in versions.items() if version.state is IndexState.READY]
        if not ready:
            return False
        number = number or max(ready)
        version = versions[number]
        if version.described is None or not version.described.judges:
            return True
        asked = [worker for worker in self._workers.ready() if worker.incarnation in version.ready]
        answers = await asyncio.gather(*(self._says_ready(worker, name, number) for worker in asked))
        return bool(answers) and all(answers)

    async def _listed(self, index: list[dict[str, str | int]], ready: bool) -> list[dict[str, str | int]]:
        served = [entry for entry in index if entry.get("state") == IndexState.READY.value]
        answers = await asyncio.gather(*(self._is_ready(str(e["name"]), int(e["version"])) for e in served))
        for entry, answer in zip(served, answers, strict=True):
            if not answer:
                entry["state"], entry["reason"] = IndexState.UNAVAILABLE.value, _NOT_READY
        return [entry for entry in index if not ready or entry["state"] == IndexState.READY.value]

    async def _says_ready(self, worker: WorkerProcess, name: str, number: int) -> bool:
        try:
            return await worker.result_of(ModelReady(name, number), seconds=_READY_SECONDS) == b"true"
        except ServingError:
            return False


def merge_statistics(answers: Iterable[bytes]) -> bytes:
    """Adds up the statistics of several workers, and returns the sums as JSON, sorted by model name and version.

    ``answers``: the statistics of each worker, {"model_stats": [...]} in JSON.
    Source: Triton docs/protocol/extension_statistics.md.
    """
    models: dict[tuple[str, int], dict[str, Any]] = {}
    for answer in answers:
        for entry in msgspec.json.decode(answer)["model_stats"]:
            key = (entry["name"], int(entry["version"]))
            models[key] = _sum(models[key], entry) if key in models else entry
    return msgspec.json.encode({"model_stats": [entry for _, entry in sorted(models.items())]})


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _sum_field(key, one[key], other[key]) if key in one and key in other else {**other, **one}[key]
        for key in one | other
    }


def _sum_field(key: str, one: Any, other: Any) -> Any:
    if key in ("name", "version", "batch_size"):
        return one
    if key == "last_inference":
        return max(one, other)
    if isinstance(one, dict):
        return _sum(one, other)
    if key == "batch_stats":
        sizes: dict[int, dict[str, Any]] = {}
        for entry in [*one, *other]:
            size = entry["batch_size"]
            sizes[size] = _sum(sizes[size], entry) if size in sizes else entry
        return [entry for _, entry in sorted(sizes.items())]
    # Numbers add; the remaining list, memory_usage, names its devices, which differ between workers.
    return one + other
