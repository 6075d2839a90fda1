"""Defines the supervisor, the process that starts, watches, replaces and stops the daemon's fronts and workers.

    1. It opens the listening sockets, and searches the model repositories for models. The first workers start meanwhile.
    2. It starts the fronts. Each worker that is ready gets all registered regions, a lane to each front, and models to load.
    3. When all fronts and workers are up, and each model has been loaded or has failed to load, it sends READY=1 to systemd.
    4. When a front or a worker dies, it starts a new one after a delay. It tells the fronts when a worker dies.
    5. At SIGTERM it lets the fronts finish their requests, then stops the workers, and then kills all remaining processes.

The supervisor runs one event loop in one thread, and reads files in other threads. It never reads or writes a tensor.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tensord.config import log
from tensord.config.layers import Configured
from tensord.config.options import Log, Options
from tensord.daemon.clients.client_lanes import ClientLanes
from tensord.daemon.clients.client_socket import ClientSocket
from tensord.daemon.control import runtime_directory
from tensord.daemon.metrics.agent import Agent
from tensord.daemon.metrics.collection import Collection
from tensord.daemon.metrics.endpoint import Endpoint
from tensord.daemon.models.changes import Models
from tensord.daemon.models.polling import Polling
from tensord.daemon.operator import listings
from tensord.daemon.operator.audit import Audit
from tensord.daemon.operator.configuration import Configuration
from tensord.daemon.operator.control_socket import ControlSocket
from tensord.daemon.operator.drain import Drain, DrainPhase
from tensord.daemon.operator.operations import Operations
from tensord.daemon.operator.operator_commands import OperatorCommands, recent_errors
from tensord.daemon.parameters.pushes import Parameters
from tensord.daemon.processes import listening
from tensord.daemon.processes.child import Child, FrontProcess, WorkerProcess
from tensord.daemon.processes.devices import Device
from tensord.daemon.processes.fronts import Fronts
from tensord.daemon.processes.gpu_watcher import GpuWatcher
from tensord.daemon.processes.notify import Notifier
from tensord.daemon.processes.process_slots import ProcessSlots, retried
from tensord.daemon.processes.shutdown import DaemonPhase, Shutdown
from tensord.daemon.processes.signals import Signals
from tensord.daemon.processes.spawned import WORKER, Spawned
from tensord.daemon.processes.watchdog import Watchdog
from tensord.daemon.processes.worker_pool import Leftovers, Orphans, WorkerPool
from tensord.daemon.progress_bar import ProgressBar
from tensord.daemon.regions.region_registry import RegionRegistry
from tensord.daemon.tracing import span_exporter
from tensord.daemon.tracing.span_exporter import SpanCounts, SpanExporter
from tensord.daemon.tracing.trace_settings import TraceSettings
from tensord.shm import descriptors
from tensord.shm.channel import pair
from tensord.shm.control_records import (
    ChildReady,
    ControlCall,
    LaneClosed,
    LaneOpened,
    Loaded,
    Loading,
    LogChanged,
    ModelGone,
    ModelState,
    Readiness,
    RequestsRefused,
    TraceChanged,
    TraceCleared,
    TracesEnded,
    Unloaded,
    WorkerFenced,
)
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.record import Record

_log = logging.getLogger(__name__)
#: Seconds that workers get at least to exit once the fronts are done.
_WORKER_GRACE = 2.0
#: Seconds between two messages to the service manager while the start waits for processes.
_TOLD_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Programs:
    """Names the Python module that each kind of child process runs (``python -m``)."""

    http: str = "tensord.daemon.http"
    grpc: str = "tensord.daemon.grpc"
    worker: str = WORKER


class Supervisor:
    """Starts, watches and stops the daemon's fronts and workers, and owns what they share: models, regions, settings."""

    def __init__(
        self,
        configured: Configured,
        reread: Callable[[], Configured],
        environment: Mapping[str, str],
        spawned: Sequence[tuple[Device, Spawned]],
        programs: Programs = Programs(),
        signals: Signals | None = None,
    ) -> None:
        """Creates the daemon's parts, and starts no process. The daemon's first workers run already.

        Args:
          configured: the options, with the source of each value.
          reread: reads the configuration again, or raises ConfigurationError.
          environment: the environment variables.
          spawned: the first workers. The caller owns them until the daemon's sockets are bound, and the supervisor after that.
          programs: the modules that child processes run.
          signals: the object that has handled this process's signals so far. If it is None, a new one is made.
        """
        self.phase = DaemonPhase.STARTING
        options = configured.options
        self.configuration = Configuration(configured, reread, self._log_changed)
        self._shutdown = Shutdown()
        self.drain = Drain(self)
        self._tasks = Tasks(self._shutdown.fail)
        #: Starts a task on the event loop. An exception in the task stops the daemon.
        self.spawn = self._tasks.spawn
        self._environment = environment
        self._signals = signals or Signals()
        #: Returns a new incarnation: the number that identifies one child process for as long as the daemon runs.
        self.next_incarnation = itertools.count(1).__next__
        self._spawned = spawned
        self._slots = ProcessSlots(options.expert, self._needs, self._gives_up)
        self._leftovers = Leftovers()
        self._orphans = Orphans(lambda: (*self.fronts, *self.workers))
        self._notifier = Notifier(environment)
        self._bar = ProgressBar()
        devices = [device.name for device, _ in spawned]
        self.fronts = Fronts(
            {"http": programs.http, "grpc": programs.grpc},
            devices,
            lambda: self.options,
            self.next_incarnation,
            self._tell,
            self._front_said,
            self._front_died,
        )
        self.workers = WorkerPool(
            programs.worker,
            lambda: self.options,
            self.next_incarnation,
            self._worker_said,
            self._worker_died,
            lambda worker: self.models.worker_dismissed(worker.incarnation),
            lambda worker: not worker.joined or self.models.lifecycle.loading_at(worker.incarnation),
            lambda: self.phase is DaemonPhase.STOPPING,
        )
        kept, place = (runtime_directory.of_service(environment, f"{kind}_DIRECTORY") for kind in ("RUNTIME", "STATE"))
        self.models = Models(options, self, kept, place)
        self.parameters = Parameters(options, self, self.models)
        self._served_models = listings.ServedModels(self.models)
        each = options.workers.devices_per_worker
        self._regions = RegionRegistry(options.regions, self.workers, self.fronts, each)
        self.lanes = ClientLanes(options, self)
        audit = Audit()
        self._trace_settings = TraceSettings(options.trace, self.models.lifecycle.is_ready, self._traces_changed)
        #: Sends spans to a collector; None: none are sent.
        self._spans: SpanExporter | None = None
        self._span_counts = SpanCounts()
        self._operations = Operations(
            self.models,
            self.parameters,
            self._regions,
            self.configuration,
            self._trace_settings,
            self.workers,
            self.fronts,
            audit,
        )
        self._clients = ClientSocket(
            options, environment, self._regions, self.fronts, self.lanes, self._operations, audit
        )
        self._gpus = GpuWatcher()
        collection = Collection(
            self.workers,
            self.fronts,
            self._slots,
            self._regions,
            options.regions,
            self.models,
            self._gpus,
            self.lanes,
            self.configuration,
            self.parameters,
            self._trace_settings,
            self._span_counts if options.trace.otlp else None,
        )
        self._metrics = Endpoint(options.metrics, collection.snapshot, self._describe_page)
        self._agent = Agent(options.metrics, self._availability, collection.look)

    async def run(self) -> int:
        """Runs the daemon until its last child process has ended. Returns the exit status.

        Raises ListenError if a listening socket cannot be opened. Raises InvalidArgument if the configuration cannot be used.
        Raises OSError if the kernel has no file descriptor, memory or process id left when the daemon starts.
        """
        _raise_open_files(self.options)
        if self.options.trace.otlp and not span_exporter.installed():
            raise InvalidArgument(span_exporter.NOT_INSTALLED)
        self._clients.listen()
        try:
            listening.bind_each(
                lambda: self.fronts.listen(self._environment, self._clients.http_path),
                self._metrics.listen,
                self._agent.listen,
            )
        except BaseException:
            for opened in (self._clients, self.fronts, self._metrics, self._agent):
                opened.close()
            raise
        self._signals.pass_on(
            asyncio.get_running_loop(), self._shutdown.signalled, lambda: self._tasks.spawn(self._hang_up())
        )
        control = ControlSocket(self.options.supervisor, self._environment, OperatorCommands(self, self._operations))
        try:
            await self._metrics.open()
            await self._agent.open()
            await control.open()
            self.workers.start_all(self._spawned)
            if os.getpid() == 1:
                self._orphans.watch()
            if self.options.trace.otlp:
                # The libraries take long to import, as what the workers import does.
                self._spans = await asyncio.to_thread(
                    SpanExporter, self.options.trace.otlp, self.options.server_name, self._span_counts
                )
            found = await self.models.scan(self.options.repository)
            outcomes = self.models.begin(found, self.options.repository)
            # Before that a model is unknown that a client of the daemon before this one goes on to ask.
            self._clients.serve()
            self.fronts.start_all(max(1, len(os.sched_getaffinity(0)) - len(self._spawned)))
            if self.options.repository.control_mode == "poll":
                self._tasks.spawn(Polling(self.models, lambda: self.options.repository, found).run())
            if self.options.metrics.gpus and any(device.startswith("cuda") for device in self.workers.devices):
                self._tasks.spawn(self._gpus.run(self._environment))
            self._tasks.spawn(Watchdog(self.workers, self.fronts, self._notifier, lambda: self.options).run())
            self._tasks.spawn(self._become_ready(outcomes))
            await self._shutdown.requested.wait()
            await self._drain()
            if not self._shutdown.exit_status:
                self.models.forget_served()
        finally:
            self.phase = DaemonPhase.STOPPING
            await self._bury()
            self._metrics.close()
            self._agent.close()
            control.close()
            self.models.close()
            self.parameters.close()
            self._clients.close()
            self._regions.close()
            self._trace_settings.close()
            if self._spans is not None:
                await self._spans.close()
            self._notifier.close()
            self.fronts.close()
        return self._shutdown.exit_status

    # --------------------------------------------------------------------------------------------------------- starting

    def _tell(self, front: FrontProcess) -> None:
        # Lanes to the workers come before the models' states, which name workers.
        for worker in self.workers.ready():
            # One that has not joined opens lanes to all fronts when it does.
            if worker.joined:
                self._connect(front, worker)
        for place in self._regions.places():
            front.send(place)
        for state in self.models.states():
            front.send(state)
        retried("trace settings cannot be sent", self._tell_traces, front)
        if self.drain.refuses:
            front.send(RequestsRefused(True))

    def _connect(self, front: FrontProcess, worker: WorkerProcess) -> None:
        retried(f"{front.name} gets no lane to {worker.name} yet", self._open_lane, front, worker)

    def _open_lane(self, front: FrontProcess, worker: WorkerProcess) -> None:
        if not (front.alive and worker.alive):
            return
        ours, theirs = pair()
        with ours, theirs:
            pages = [page.fd for page in (worker.page, worker.sequences) if page is not None]
            # The worker's end first: if the front gets none, the lane ends there, and nothing was on it.
            worker.send(LaneOpened(front.incarnation, protocol=front.protocol), theirs.fileno())
            front.send(LaneOpened(worker.incarnation, worker.device), ours.fileno(), *pages)

    def _tell_traces(self, child: Child) -> None:
        for record, *fds in self._trace_settings.records():
            child.send(record, *fds)

    async def _join(self, worker: WorkerProcess) -> None:
        # Regions come first, so that no request can use a region that the worker lacks.
        await self._regions.restore(worker)
        if not worker.alive or worker.stopping:
            return
        worker.joined = True
        for front in self.fronts:
            self._connect(front, worker)
        retried("trace settings cannot be sent", self._tell_traces, worker)
        self.models.worker_joined(worker.incarnation, worker.device)

    async def _become_ready(self, outcomes: list[asyncio.Future[str]]) -> None:
        pending: set[asyncio.Future[str]] = set(outcomes)
        while pending:
            self._notifier.extend_timeout(30.0)
            self._notifier.status(f"loading {len(pending)} models")
            _, pending = await asyncio.wait(pending, timeout=10.0)
        failures = [error for outcome in outcomes if (error := outcome.result())]
        if failures and self.options.repository.exit_on_error is True:
            _log.critical("stopping: a model failed to load at start, and repository.exit_on_error is set")
            self._shutdown.fail()
            return
        await self._all_up()
        if self.phase is not DaemonPhase.STARTING:
            return
        self.phase = DaemonPhase.SERVING
        self._notifier.ready(self._summary())
        self._log_readiness(self._summary())
        self._metrics.prepare()
        self._served_models.change()  # which that line says
        served = self.models.lifecycle.ready_models()
        url = next((url for url in self.fronts.urls("http") if url.startswith("http:")), None)
        if url and served and not self.options.log.file and sys.stderr.isatty():
            _log.info("try: curl %s/v2/models/%s", url, next(iter(served)))

    async def _all_up(self) -> None:
        """Waits until every child has loaded its models, or the daemon stops."""
        told = 0.0
        while self.phase is DaemonPhase.STARTING and (missing := self._missing()):
            if time.monotonic() - told >= _TOLD_SECONDS:
                told = time.monotonic()
                self._notifier.extend_timeout(30.0)
                self._notifier.status(f"waiting for {', '.join(missing)}")
            await asyncio.sleep(0.05)

    def _missing(self) -> list[str]:
        """Returns the names of the processes for which the daemon's start still waits."""
        usable, slots = self.workers.usable, self.workers.slots
        lost = {name for name, device in slots.items() if device not in usable and self._slots.was_filled(name)}
        return self.fronts.missing() + [name for name in self.workers.missing() if name not in lost]

    def _summary(self) -> str:
        return listings.summary(self.models, (worker.device for worker in self.workers.ready()))

    def _log_readiness(self, line: str) -> None:
        _log.log(logging.INFO if self.models.readiness.ready else logging.WARNING, "%s", line)

    def model_changed(self, record: ModelState | ModelGone | Readiness) -> None:
        """Publishes the state of a model, or the daemon's readiness, to the fronts.

        Readiness is also shown on the terminal, in the log and to the service manager.
        """
        self.fronts.publish(record)
        self.lanes.model_changed(record)
        self.parameters.tell()
        if isinstance(record, Readiness):
            self._bar.draw(
                record.wanted - record.unserved, record.wanted, record.at
            ) if record.at else self._bar.clear()
        if isinstance(record, Readiness) and self.phase is DaemonPhase.SERVING:
            if line := self._served_models.change():
                self._log_readiness(line)
            self._notifier.status(self._summary())

    # ---------------------------------------------------------------------------------------------------------- records

    def _front_said(self, front: FrontProcess, record: Record, fds: list[int]) -> None:
        if isinstance(record, ControlCall):
            self._tasks.spawn(self._answer(front, record, fds))
        elif isinstance(record, LaneClosed):
            if (worker := self.workers.by_incarnation.get(record.peer)) is not None:
                asyncio.get_running_loop().call_later(descriptors.AGAIN_SECONDS, self._connect, front, worker)
        else:
            self._child_said(record)

    def _worker_said(self, worker: WorkerProcess, record: Record) -> None:
        match record:
            case Loading():
                self.models.loading(worker.incarnation, record)
            case Loaded():
                self.parameters.loaded(worker, record)
            case Unloaded(name, version):
                self.models.unloaded(worker.incarnation, name, version)
            case ControlCall():
                self._tasks.spawn(self._answer_worker(worker, record))
            case LaneClosed():
                self.lanes.lane_ended(worker, record.peer)
            case _:
                self._child_said(record)
                if isinstance(record, ChildReady):
                    self._tasks.spawn(self._join(worker))

    def _child_said(self, record: Record) -> None:
        if isinstance(record, TracesEnded) and self._spans is not None:
            self._spans.export(record.traces)
        elif isinstance(record, ChildReady):
            # So what is installed is of this daemon's version.
            self.models.outdated("")

    async def _answer(self, front: FrontProcess, call: ControlCall, fds: list[int]) -> None:
        try:
            front.send(await self._operations.reply(call, call.peer, fds[0] if fds else -1))
        finally:
            descriptors.close(fds)

    async def _answer_worker(self, worker: WorkerProcess, call: ControlCall) -> None:
        worker.send(await self._operations.reply_to_model(call, worker.incarnation))

    def _traces_changed(self, record: TraceChanged | TraceCleared, *fds: int) -> None:
        self.fronts.publish(record, *fds)
        for worker in self.workers:
            worker.send(record, *fds)

    def _log_changed(self, options: Log) -> None:
        """Applies changed log settings to this process and all child processes."""
        log.configure(options, "supervisor", self._environment)

        def tell(child: Child) -> None:
            child.send(LogChanged(child.name, msgspec.Raw(msgspec.msgpack.encode(options))))

        self.fronts.publish_each(tell)
        for worker in self.workers:
            tell(worker)

    # ----------------------------------------------------------------------------------------------------------- deaths

    def _worker_died(self, worker: WorkerProcess, device: Device) -> None:
        """Tells the fronts that a worker has ended. Replaces it on ``device`` after a delay, unless it was told to stop."""
        self._look(worker)
        self._regions.worker_left(worker.incarnation)
        self.lanes.worker_left(worker)
        # The fence comes first: what was in flight there may run elsewhere from now on.
        self.fronts.publish(WorkerFenced(worker.incarnation))
        self.models.worker_left(worker.incarnation, worker.describe_exit(), self.workers.usable)
        doing = " while loading model '{}' version {}".format(*worker.owed[0]) if worker.owed else ""
        self._leftovers.end(worker.name, worker.mark)
        self._slots.died(worker, lambda: self.workers.start(worker.name, device), doing)
        self._shutdown.child_died()

    def _look(self, child: Child) -> None:
        self._slots.look(child)
        if child.is_of_other_version:
            self.models.outdated(f"{child.name} {child.describe_exit()}")

    def isolate(self, wanted: Mapping[str, float]) -> None:
        """Starts the workers in ``wanted`` that do not run. Stops each worker for a single model that is not in ``wanted``.

        ``wanted``: the device and the model of a worker, such as "cuda:0#m" -> the fraction (0 to 1) of the GPU's memory that
        the worker may take.
        """
        if self.phase is DaemonPhase.STOPPING:
            return
        before = self.workers.slots.keys()
        self.workers.isolate(wanted)
        for name in before - self.workers.slots.keys():
            self._slots.forget(name)

    def _front_died(self, front: FrontProcess) -> None:
        self._look(front)
        self._slots.died(front, lambda: self.fronts.start(front.protocol, front.row))
        self._shutdown.child_died()

    def _needs(self, child: Child) -> bool:
        """Returns whether a dead child process should be replaced now."""
        if isinstance(child, WorkerProcess):
            return not child.stopping and self.workers.is_vacant(child.name)
        return self.phase not in (DaemonPhase.STOPPING, DaemonPhase.DRAINING)

    def _gives_up(self, child: Child) -> bool:
        if self.phase is not DaemonPhase.STARTING or (isinstance(child, WorkerProcess) and child.model):
            return False
        self._shutdown.fail()
        return True

    # --------------------------------------------------------------------------------------------------- reload and stop

    async def _hang_up(self) -> None:
        with contextlib.suppress(InvalidArgument):
            await self.reload()

    async def reload(self) -> list[asyncio.Future[str]]:
        """Reads the configuration and the repositories again, and applies the changes that need no restart.

        Returns a future for each load that has begun, whose result is the reason why the load failed, or "".
        Raises InvalidArgument if the new configuration cannot be used. Then nothing has changed.
        """
        while self.phase is DaemonPhase.STARTING:
            await asyncio.sleep(0.1)
        _log.info("reload: reading the configuration again")
        self._notifier.reloading()
        try:
            new = await self.configuration.read()
            found = await self.models.scan(new.options.repository)
        except (ServingError, OSError) as error:
            _log.error("reload refused, the former configuration stays in force: %s", error)
            self.configuration.refused()
            self._notifier.ready(f"reload refused: {error}")
            raise InvalidArgument(f"reload refused, the former configuration stays in force: {error}") from None
        changed = self.configuration.take(new)
        outcomes = self.models.begin(found, self.options.repository)
        settled = asyncio.gather(self.fronts.settled(), self.workers.settled())
        while not settled.done():  # a worker finishes its batch first
            self._notifier.extend_timeout(30.0)
            await asyncio.wait([settled], timeout=10.0)
        await settled
        _log.info("reload: done, %d keys changed, %d models to look at", changed, len(outcomes))
        self._notifier.ready(self._summary())
        self._tasks.spawn(self._reloaded(outcomes))
        return outcomes

    async def _reloaded(self, outcomes: Sequence[asyncio.Future[str]]) -> None:
        await asyncio.gather(*outcomes)
        self._notifier.status(self._summary())

    def refuse_requests(self, refuses: bool) -> None:
        """Sets whether the fronts refuse new requests and clients get no new lanes."""
        self.lanes.drain(refuses)
        self.fronts.publish(RequestsRefused(refuses))

    async def _drain(self) -> None:
        seconds = self.drain.time_left
        if seconds and self.phase is DaemonPhase.SERVING:
            _log.info("stopping: not ready from now on, and serving on for %g s", seconds)
            self._notifier.extend_timeout(seconds + self.options.supervisor.exit_timeout + 2 * _WORKER_GRACE)
            self.drain.announce()
            await self._shutdown.hurried(seconds)
        deadline_ns = time.monotonic_ns() + int(self.options.supervisor.exit_timeout * 1e9)
        self.phase = DaemonPhase.DRAINING
        self._notifier.stopping("finishing accepted requests")
        _log.info("stopping: finishing accepted requests, for at most %g s", self.options.supervisor.exit_timeout)
        self.fronts.stop_listening()
        self._clients.stop_accepting()
        await self._shutdown.finish(self.fronts.by_incarnation, deadline_ns)
        self.phase = DaemonPhase.STOPPING
        deadline_ns = max(deadline_ns, time.monotonic_ns() + int(_WORKER_GRACE * 1e9))
        await self._shutdown.finish(self.workers.by_incarnation, deadline_ns)

    async def _bury(self) -> None:
        """Cancels the supervisor's asyncio tasks, kills all fronts and workers, and waits until these processes are gone."""
        await self._tasks.cancel()
        await self._shutdown.bury(lambda: (*self.fronts, *self.workers))
        await self._leftovers.ended()
        _log.info("stopped")

    # ------------------------------------------------------------------------------------------------------------ others

    @property
    def options(self) -> Options:
        """Returns the options that apply now."""
        return self.configuration.options

    def describe(self) -> dict[str, Any]:
        """Returns the state of the daemon, its processes, models, regions and clients, for ``tensorctl status``."""
        now_ns = time.monotonic_ns()
        return {
            "server_name": self.options.server_name,
            "phase": self.phase.value if self.drain.phase is DrainPhase.NONE else self._drain_phase(),
            # Behind "phase", where deploy/container/healthy looks for it.
            **listings.of_models(self.models),
            "http": self.fronts.urls("http"),
            "grpc": self.fronts.urls("grpc"),
            "metrics": self._metrics.url,
            "workers": listings.of_workers(
                self.workers, self._slots, self.models.lifecycle.known_versions(), self.lanes.open_by_worker(), now_ns
            ),
            "fronts": listings.of_fronts(self.fronts, self._slots, now_ns),
            "regions": self._regions.statistics(),
            "clients": self._clients.describe(),
            "parameters": self.parameters.describe(),
        }

    async def _describe_page(self) -> dict[str, Any]:
        """Returns what the status page shows."""
        errors = await recent_errors(self.fronts, self.workers.ready())
        standings = [
            {"name": model.name, "served": list(model.served), "reason": model.reason}
            for model in self.models.standings()
        ]
        return {**self.describe(), "standings": standings, "errors": errors}

    def _availability(self) -> tuple[bool, str]:
        """Returns whether the daemon is being drained or stopped, and why the daemon is not ready ("" if it is ready)."""
        draining = self.drain.phase is not DrainPhase.NONE or self.phase not in (
            DaemonPhase.STARTING,
            DaemonPhase.SERVING,
        )
        readiness = self.models.readiness
        return draining, "" if readiness.ready else readiness.sentence() or "starting"

    def _drain_phase(self) -> str:
        if self.phase is not DaemonPhase.SERVING:
            return str(self.phase.value)
        return "drained" if self.drain.phase is DrainPhase.DRAINED else "draining"


def _raise_open_files(options: Options) -> None:
    """Raises the limit of open files, and warns if the options may need more."""
    allowed = descriptors.raise_limit()
    wanted = max(
        options.http.max_connections, options.grpc.max_connections, options.regions.max_count, options.clients.max_count
    )
    if allowed < wanted:
        _log.warning(
            "a process may have %d files open, connections or regions may be %d: raise the limit (ulimit -n, LimitNOFILE)",
            allowed,
            wanted,
        )


class Tasks:
    """Runs the supervisor's background tasks. ``failed``: called without arguments when a task has raised an exception."""

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed
        self._tasks: dict[asyncio.Task[object], None] = {}

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs ``work`` as a background task on the running event loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._done)

    async def cancel(self) -> None:
        """Cancels all background tasks, and waits until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[object]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("a task of the supervisor failed: the daemon stops", exc_info=error)
            self._failed()
