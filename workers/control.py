"""Carries out the records that the supervisor sends to a worker. Runs in the worker's event loop.

LaneOpened + fd                 opens a lane to one more submitter
LaneClosed                      ends a client's lane; the worker sends LaneClosed when one has ended or was not opened
Load, Unload                    loads or unloads a model version; the worker sends Loaded or Unloaded at the end
CancelLoad                      cancels all loads of a model version; the worker sends Loaded for each load
ControlCall                     asks for an operation, such as a parameter change; the worker sends the result in a Reply
Reply                           has the result of a ControlCall that the worker has sent for a model's code
LogChanged                      changes the settings of the log
TraceChanged, TraceCleared      change which requests of clients on the host are traced
Stop                            ends the worker once all requests are answered, or when the record's time limit is over
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import msgspec

from tensord.config import log
from tensord.config.options import Log
from tensord.shm import descriptors
from tensord.shm.channel import Channel, DescriptorsLost
from tensord.shm.control_records import (
    CancelLoad,
    ControlCall,
    Derivative,
    LaneClosed,
    LaneOpened,
    Load,
    Loaded,
    Loading,
    LogChanged,
    Reply,
    Stop,
    TraceChanged,
    TraceCleared,
    Unload,
    Unloaded,
)
from tensord.shm.cuda_regions import DeviceLost
from tensord.shm.errors import Internal, InvalidArgument, ServingError, Unsupported
from tensord.shm.figures import Figures
from tensord.shm.operations import (
    AwaitRegion,
    EndIdleLanes,
    ModelReady,
    ModelStatistics,
    RecentErrors,
    RegionRecords,
    RegisterCudaRegion,
    RegisterSystemRegion,
    SequenceRecords,
    ServeLoaded,
    Settle,
    TakeProfile,
    UnregisterRegion,
    WorkerFigures,
)
from tensord.workers.daemon_operations import DaemonOperations
from tensord.workers.loading.ensemble_declaration import joined
from tensord.workers.loading.loader import Loader
from tensord.workers.models.loaded_model import LoadedModel
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.parameter_pushes import ParameterOperation, ParameterPushes
from tensord.workers.regions.region_table import RegionTable
from tensord.workers.threads.cancellation import REASON, Cancellation
from tensord.workers.threads.inbox import Inbox
from tensord.workers.threads.work_thread import WorkThread

if TYPE_CHECKING:
    from tensord.workers.worker import Worker

_log = logging.getLogger(__name__)
#: The most sequences of a model version that are described.
_MAX_SEQUENCES = 1000
#: The longest profile: all of it is in memory before it is written.
_MAX_PROFILE_SECONDS = 60.0


class Control:
    """Carries out the supervisor's orders to one worker, such as loading a model, and answers them."""

    def __init__(
        self,
        worker: Worker,
        channel: Channel,
        models: ModelTable,
        regions: RegionTable,
        loader: Loader,
        thread: WorkThread,
        operations: DaemonOperations,
        pushes: ParameterPushes,
        inbox: Inbox,
    ) -> None:
        self._worker = worker
        self._channel = channel
        self._models = models
        self._regions = regions
        self._loader = loader
        self._thread = thread
        self._operations = operations
        self._pushes = pushes
        self._profiler = _Profiler(inbox)
        #: (name, version) -> what cancels and begins its unanswered loads, the running one first: answers keep their order.
        self._running: dict[tuple[str, int], deque[tuple[Cancellation, Callable[[], None]]]] = {}

    def handle(self, record: Any, fds: list[int]) -> None:
        """Does what a record from the supervisor asks.

        The descriptors ``fds`` came with the record. Each is either put to use or closed. Raises InvalidArgument if a worker
        does not take such a record, or if the record has a wrong number of descriptors.
        """
        try:
            if isinstance(record, LaneOpened) and len(fds) == 1:
                self._worker.open_lane(record.peer, socket.socket(fileno=fds.pop()), record)
            elif isinstance(record, LaneClosed):
                self._worker.end_lane(record.peer)
            elif isinstance(record, Load):
                self._load(record)
            elif isinstance(record, CancelLoad):
                self._cancel((record.name, record.version))
            elif isinstance(record, Unload):
                self._cancel((record.name, record.version))
                gone = Unloaded(record.name, record.version)
                self._models.remove(record.name, record.version, lambda: self._channel.put(gone))
            elif isinstance(record, ControlCall):
                self._call(record, fds)
            elif isinstance(record, Reply):
                self._operations.answered(record)
            elif isinstance(record, LogChanged):
                settings = msgspec.msgpack.decode(record.options, type=Log)
                log.configure(settings, record.name)
                self._worker.lanes.log_every(settings.access)
            elif isinstance(record, TraceChanged | TraceCleared):
                self._worker.lanes.trace(record, fds[:])
                fds.clear()
            elif isinstance(record, Stop):
                self._worker.stop(record.grace_ns)
            else:
                raise InvalidArgument(f"{type(record).__name__} with {len(fds)} descriptors is not expected here")
        finally:
            descriptors.close(fds)

    # ----------------------------------------------------------------------------------------------------------- models

    def _load(self, record: Load) -> None:
        key = record.name, record.version
        self._cancel(key)
        self._models.discard_held(*key)
        cancellation = Cancellation()

        def tell(number: int, total: int, compiled: int) -> None:
            at = Loading(record.name, record.version, number, total, compiled)
            self._thread.tell(lambda: self._channel.put(at))

        def load(serving: ModelVersion | None) -> LoadedModel:
            tell(0, 0, 0)
            if serving is not None:
                regrouped = self._loader.regrouped(record, serving.loaded, cancellation)
                if regrouped is not None:
                    return regrouped
            return self._loader.load(record, tell, cancellation)

        def begin() -> None:
            serving = self._models.serving(*key)
            self._thread.do(lambda: load(serving), made)

        def made(outcome: LoadedModel | Exception) -> None:
            if isinstance(outcome, Exception) and descriptors.lacked(outcome) and not cancellation.cancelled:
                # Nothing is known of the model by that.
                self._worker.load_waits(record, outcome, begin)
                return
            if not isinstance(outcome, Exception) and outcome.ensemble is not None:
                try:
                    outcome = joined(outcome, self._models)
                except ServingError as error:
                    outcome.imports.forget()
                    outcome = error
            running = self._running[key]
            running.popleft()
            self._answer(record, outcome, cancellation)
            self._models.load_ended(*key)
            if running:
                running[0][1]()
            else:
                del self._running[key]

        running = self._running.setdefault(key, deque())
        running.append((cancellation, begin))
        self._models.coming[key] += 1
        if len(running) == 1:
            begin()

    def _answer(self, record: Load, outcome: LoadedModel | Exception, cancellation: Cancellation) -> None:
        """Reports the outcome of a load to the supervisor. Discards the loaded version if the load was cancelled.

        Otherwise keeps a loaded version, which gets no requests before a ServeLoaded.
        Does nothing if ``outcome`` is the error DeviceLost.
        """
        if isinstance(outcome, DeviceLost):
            return  # nothing is said of the model: this process ends, and its replacement loads it
        if cancellation.cancelled:
            if not isinstance(outcome, Exception):
                self._models.discard(self._worker.adopt(outcome))
            self._channel.put(Loaded(record.name, record.version, reason=REASON, cancelled=True))
            return
        if isinstance(outcome, Exception):
            known = outcome.message if isinstance(outcome, ServingError) else ""
            reason = known or f"loading failed with {type(outcome).__name__}"
            self._channel.put(Loaded(record.name, record.version, reason=reason))
            return
        self._models.hold(self._worker.adopt(outcome))
        _log.info("model '%s' version %d is ready", record.name, record.version)
        self._channel.put(
            Loaded(
                record.name,
                record.version,
                metadata=outcome.metadata,
                config=outcome.config,
                repeatable=outcome.repeatable,
                sticky=outcome.sticky,
                streams=outcome.streams,
                joins=outcome.stepped is not None and outcome.stepped.gather == "concat",
                judges=outcome.is_ready_calls is not None,
                has_parameters=outcome.sets is not None,
                footprint=outcome.footprint,
                pure=outcome.pure,
                derivatives=tuple(Derivative(each.name, each.metadata, each.config) for each in outcome.derivatives),
                lacking=outcome.lacking,
            )
        )

    def _cancel(self, key: tuple[str, int]) -> None:
        """Cancels all running and waiting loads of a model version. ``key`` is the model's name and the version's number."""
        for cancellation, _ in self._running.get(key, ()):
            cancellation.cancel()

    # ------------------------------------------------------------------------------------------------------------ calls

    def _call(self, call: ControlCall, fds: list[int]) -> None:
        operation, reply = call.operation, functools.partial(self._reply, call.call_id)
        try:
            if isinstance(operation, RegisterSystemRegion):
                # Without a descriptor this is the first worker asked: it opens the shared memory object by its key, and its reply
                # carries the descriptor for the other workers.
                given = fds.pop(0) if fds else None
                region, access = self._regions.register(operation, given)
                if given is None:
                    reply(json.dumps({"access": access}).encode(), region.fd)
                else:
                    reply()
            elif isinstance(operation, RegisterCudaRegion):
                self._regions.register_cuda(operation)
                reply()
            elif isinstance(operation, UnregisterRegion):
                reply(json.dumps(self._regions.unregister(operation.kind, operation.name)).encode())
            elif isinstance(operation, AwaitRegion):
                self._regions.when_closed(operation.name, reply)
            elif isinstance(operation, RegionRecords):
                reply(json.dumps(self._regions.uses(operation.name)).encode())
            elif isinstance(operation, Settle):
                reply()
            elif isinstance(operation, ServeLoaded):
                self._models.serve_held(operation.model, operation.version)
                reply(b"{}")
            elif isinstance(operation, ModelReady):
                found = self._models.find(operation.name, operation.version).loaded.is_ready_calls
                if found is None:
                    reply(b"true")
                else:
                    found.ask(lambda ready: reply(b"true" if ready else b"false"))
            elif isinstance(operation, ModelStatistics):
                reply(self._statistics(operation))
            elif isinstance(operation, EndIdleLanes):
                reply(json.dumps(self._worker.end_idle_lanes()).encode())
            elif isinstance(operation, SequenceRecords):
                reply(json.dumps(self._sequences()).encode())
            elif isinstance(operation, TakeProfile):
                self._profiler.take(operation.seconds, operation.folder, lambda error: reply(error or b""))
            elif isinstance(operation, RecentErrors):
                reply(msgspec.json.encode(self._worker.lanes.recent()))
            elif isinstance(operation, WorkerFigures):
                reply(self._figures())
            elif isinstance(operation, ParameterOperation):
                self._pushes.carry_out(operation, fds, reply)
            else:
                raise Unsupported(f"a worker does not answer {type(operation).__name__}")
        except ServingError as error:
            reply(error)
        except Exception as error:  # a defect of ours, and one call's
            _log.exception("%s failed", type(operation).__name__)
            reply(Internal(f"the call failed with {type(error).__name__}"))

    def _reply(self, call_id: int, outcome: bytes | ServingError = b"", fd: int | None = None) -> None:
        if isinstance(outcome, ServingError):
            self._channel.put(Reply.refusing(call_id, outcome))
        else:
            reply = Reply(call_id, result=outcome)
            try:
                self._channel.put(reply, *(() if fd is None else (fd,)))
            except OSError:
                # Whoever asked knows a reply that has lost its descriptor.
                self._channel.put(reply)

    def refuse(self, lost: DescriptorsLost) -> None:
        """Handles records of the supervisor whose file descriptors were lost, because this process has too many files open.

        Answers a ControlCall with the error Unavailable. Opens no lane for a LaneOpened. After a TraceChanged, requests
        for the record's model are no longer sampled for traces.
        """
        for record in lost.records:
            if isinstance(record, LaneOpened):
                self._worker.lane_refused(record, descriptors.none_left("this process"))
            elif isinstance(record, ControlCall):
                self._reply(record.call_id, descriptors.none_left("a worker"))
            else:
                self.handle(record, [])

    def _sequences(self) -> list[dict[str, Any]]:
        """Returns a description of each live sequence, for at most 1000 sequences of each model version."""
        now_ns = time.monotonic_ns()
        return [
            {"model": version.name, "version": version.version, **record}
            for version in self._models
            if version.sequences is not None
            for record in version.sequences.table.records(now_ns, _MAX_SEQUENCES)
        ]

    def _statistics(self, operation: ModelStatistics) -> bytes:
        found: list[dict[str, Any]] = []
        for version in self._models:
            if operation.name in ("", version.name) and operation.version in (0, version.version):
                # A copy, because models' threads open further senders meanwhile.
                for sender in list(version.senders.values()):
                    sender.catch_up()
                found.append(version.statistics.to_dict())
        return json.dumps({"model_stats": found}, separators=(",", ":")).encode()

    def _figures(self) -> bytes:
        now_ns = time.monotonic_ns()
        versions = tuple(version.figures(now_ns) for version in self._models)
        worker = self._worker
        lanes = worker.lane_requests, self._regions.private_byte_size
        own, compiles = self._loader.metrics.figures(), self._loader.compiles.figures()
        return msgspec.json.encode(
            Figures(versions, self._regions.leases(), own, *lanes, compiles, worker.lane_answers)
        )


class _Profiler:
    """Records profiles with ``jax.profiler``, one at a time, in a thread."""

    def __init__(self, inbox: Inbox) -> None:
        self._thread = WorkThread("profiler", inbox)

    def take(self, seconds: float, folder: str, done: Callable[[ServingError | None], None]) -> None:
        """Begins to record a profile of ``seconds`` seconds in the directory ``folder``.

        The worker's event loop later calls ``done`` with None, or with an error if the profile failed.
        Raises InvalidArgument: ``seconds`` is above 60 or not above 0, or another profile is being recorded.
        """
        if not 0 < seconds <= _MAX_PROFILE_SECONDS:
            raise InvalidArgument(
                f"a profile of {seconds:g} s is asked for, at most {_MAX_PROFILE_SECONDS:g} s are recorded"
            )
        if self._thread.pending:
            raise InvalidArgument("a profile of this worker is being taken")

        def finished(outcome: Exception | None) -> None:
            if isinstance(outcome, OSError):
                done(InvalidArgument(f"'{folder}' cannot be written: {outcome.strerror or outcome}"))
            elif outcome is not None:
                done(InvalidArgument(f"the profile failed: {outcome}"))
            else:
                done(None)

        self._thread.do(lambda: _record(seconds, folder), finished)


def _record(seconds: float, folder: str) -> None:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    jax.profiler.start_trace(folder)
    try:
        time.sleep(seconds)
    finally:
        jax.profiler.stop_trace()
