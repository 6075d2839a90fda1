"""The processes of the daemon as they are, but for what starts them and for their threads."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import select
import signal
import socket
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import msgspec

from tensord.config import log as log_settings
from tensord.config.layers import Configured
from tensord.config.options import Options
from tensord.daemon.clients import client_socket
from tensord.daemon.clients.client_socket import ClientSocket
from tensord.daemon.control.shared_counters import SharedCounters
from tensord.daemon.front import acceptor, opening
from tensord.daemon.front import process as front_module
from tensord.daemon.front.endpoints import Endpoints
from tensord.daemon.front.process import Front, FrontPlace
from tensord.daemon.grpc import infer
from tensord.daemon.grpc import server as grpc_server
from tensord.daemon.grpc.connection import Http2Connection
from tensord.daemon.grpc.server import GrpcFront
from tensord.daemon.http import compression, exchange
from tensord.daemon.http import server as http_server
from tensord.daemon.http.connection import Http1Connection
from tensord.daemon.http.server import HttpFront
from tensord.daemon.operator.audit import Audit
from tensord.daemon.processes import child, fronts, process_slots, worker_pool
from tensord.daemon.processes.devices import Device
from tensord.daemon.processes.spawned import Spawned
from tensord.daemon.processes.watchdog import Watchdog
from tensord.daemon.submit.sequences import SequenceRouting
from tensord.daemon.submit.submitter import Submitter
from tensord.daemon.supervisor import Supervisor
from tensord.shm import child_process, descriptors, running_time
from tensord.shm.channel import Channel, ChannelClosed, pair
from tensord.shm.common.descriptors import descriptors_in
from tensord.shm.control_records import ModelState, Start, ToWorkerControl, WorkerFenced
from tensord.shm.operations import StageParameters
from tensord.shm.record import decoder
from tensord.shm.seldom import LineRate, Seldom
from tensord.workers import worker as worker_module
from tensord.workers.devices.device import DeviceName
from tensord.workers.dispatch.poller import Poller, Woken
from tensord.workers.imports import import_system
from tensord.workers.imports.model_imports import ModelImports
from tensord.workers.loading import loader as loader_module
from tensord.workers.loading.target import LoadTarget
from tensord.workers.models import author_error, host_model
from tensord.workers.models import instance as instance_module
from tensord.workers.models.execution import run as execution_run
from tensord.workers.models.loaded_model import LoadedModel
from tensord.workers.parameter_pushes import ParameterPushes
from tensord.workers.programs.executable_cache import ExecutableCache
from tensord.workers.requests.response_sender import ResponseSender
from tensord.workers.threads import work_thread
from tensord.workers.worker import Worker
from tests.simulation.scheduler import SECOND, Death, Loop, Process, Scheduler, Thread, eventfd, shuffled
from tests.simulation.sockets import AcceptedSocket, OpenedSocket, scheduler_of_fronts

_log = logging.getLogger(__name__)
#: What has taken the functions of the clock out of ``time``.
_CLOCKS_NS = (exchange, infer)
_NUMBERS = itertools.count()
DEVICE_NAME = DeviceName("cpu", 0)
DEVICE = DEVICE_NAME.open()
_FIRST_PID = 1 << 28
#: So many bytes are compressed or decompressed in a step, that the small bodies here take several.
_STEP = 4096


class Popen:
    """Stands for ``subprocess.Popen``."""

    def __init__(self, process: ChildProcess, pid: int) -> None:
        self.pid = pid
        self._process = process

    def wait(self) -> int:
        return self._process.status

    def kill(self) -> None:
        self._process.end(-signal.SIGKILL)


class ChildProcess(Process):
    """A front or a worker."""

    def __init__(self, world: Daemon, name: str, control: socket.socket) -> None:
        super().__init__(world.scheduler, name)
        self.world = world
        self.control = control
        self.dead_fd = eventfd()
        self.started_ns = world.scheduler.clock.now_ns
        self.pid = 0
        self.status = 0
        self.ended_ns = 0

    def end(self, status: int) -> None:
        """Ends the process: nothing of it runs any more, its sockets close, and its pidfd says so."""
        if not self.alive:
            return
        # What its threads would have done may own descriptors, which only the kernel closes.
        self.scheduler.cut_short |= any(thread.is_busy for thread in self.threads)
        self.alive, self.status, self.ended_ns = False, status, self.scheduler.clock.now_ns
        for sock in self.sockets():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        # What it had not read yet closes with it, and the sockets therein.
        with contextlib.suppress(OSError):
            while received := self.control.recvmsg(1 << 20, socket.CMSG_SPACE(253 * 4), socket.MSG_DONTWAIT):
                descriptors.close(descriptors_in(received[1]))
                if not received[0]:
                    break
        os.eventfd_write(self.dead_fd, 1)
        self.scheduler.tell(f"{self} has ended ({child.describe_exit(status)})")
        self.world.ended(self)
        self.scheduler.wake()

    @property
    def has_begun(self) -> bool:
        """Returns whether the kernel kills it when its parent dies, as it has asked for at its start."""
        raise NotImplementedError

    def dies_sending(self, chance: random.Random) -> None:
        """Has it die before or after it sends one of its next datagrams."""
        self.sends_left, self.dies_sent = chance.randrange(6), chance.random() < 0.5

    def bury(self) -> None:
        os.close(self.dead_fd)
        self.threads.clear()
        self.jobs.clear()


class Simulated(Front):
    """What a simulated front does besides."""

    process: FrontProcess

    async def open(self, options: Options, endpoints: Endpoints) -> None:
        await super().open(options, endpoints)  # type: ignore[safe-super]
        self.process.opens = True
        self.process.world.on_open(self.process)

    async def drain(self, grace_ns: int) -> None:
        self.process.opens = False
        await super().drain(grace_ns)

    def _orphaned(self) -> None:
        raise Death


class SimulatedHttpFront(Simulated, HttpFront):
    """A front for HTTP."""


class SimulatedGrpcFront(Simulated, GrpcFront):
    """A front for gRPC."""


class FrontLoop(Loop):
    """Looks at timers before it polls, once each, as uvloop does."""

    def iterate(self) -> bool:
        self.chosen.polls = False
        did = super().iterate()
        self.chosen.polls = True
        return super().iterate() or did


class FrontProcess(ChildProcess):
    def __init__(
        self, world: Daemon, name: str, protocol: str, control: socket.socket, counters: int, row: int
    ) -> None:
        super().__init__(world, name, control)
        self.protocol = protocol
        self.loop = FrontLoop(self)
        self.front: Simulated | None = None
        self.task: asyncio.Task[None] | None = None
        #: Where clients connect to this front and no other.
        self.path = f"\0tensord simulation {os.getpid()} {next(_NUMBERS)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path)
        listener.listen(socket.SOMAXCONN)
        #: It serves clients, and was not told to stop.
        self.opens = False
        #: Its sockets to clients.
        self.accepted: list[Any] = []
        #: When it has given requests of dead workers to others.
        self.fenced: list[int] = []
        self._place = FrontPlace((listener,), SharedCounters(counters), row)

    @property
    def serves(self) -> bool:
        return self.alive and self.opens

    @property
    def has_begun(self) -> bool:
        return self.task is not None

    def iterate(self) -> bool:
        if self.task is None:
            self.task = self.loop.create_task(self._run())
        did = self.loop.iterate()
        if self.task.done():
            error = self.task.exception()
            if error is not None:
                self.scheduler.defect(f"{self} ends with {error!r}")
            self.end(0 if error is None else 1)
        return did

    async def _run(self) -> None:
        kind = SimulatedHttpFront if self.protocol == "http" else SimulatedGrpcFront
        self.front = kind(self.control, self._place)
        self.front.process = self
        await self.front.run()

    def due_ns(self) -> int | None:
        return self.loop.due_ns()

    def end(self, status: int) -> None:
        if self.alive:
            self._place.listeners[0].close()
        super().end(status)

    def sockets(self) -> list[socket.socket]:
        found = [self.control, *(each for each in self.accepted if each.fileno() >= 0)]
        submitter = getattr(self.front, "submitter", None)
        if submitter is not None:
            found += [worker.lane.channel._sock for worker in submitter._routing.workers.values()]
        return found

    def bury(self) -> None:
        super().bury()
        if self.front is not None:
            self.front._connection.close()
            if (submitter := getattr(self.front, "submitter", None)) is not None and (
                self.task is None or not self.task.done()
            ):
                submitter.close()
            if hasattr(self.front, "tracer"):
                self.front.tracer.close()
            if hasattr(self.front, "_sockets"):
                self.front._sockets.close()
        for sock in self.accepted:
            sock.close()
        self.accepted.clear()
        self.control.close()
        self._place.counters.close()
        self.loop.bury()
        self.front = self.task = None


class SimulatedPoller(Poller):
    """Never waits, and says what is ready in an order that is drawn."""

    process: WorkerProcess

    def wait(self, timeout_ns: int, idle: bool, sleeps: bool = False) -> Woken:
        events = shuffled(self.process.scheduler.chance, self._epoll.poll(0))
        self.process.found = bool(events)
        return Woken(events, [], [])


class Muted:
    """Stands for the status page of a process that is dying."""

    def begin(self, *_: Any) -> None: ...
    def end(self, *_: Any) -> None: ...


class WorkerProcess(ChildProcess):
    def __init__(self, world: Daemon, name: str, control: socket.socket) -> None:
        super().__init__(world, name, control)
        self.channel = Channel(control, decoder(ToWorkerControl))
        self.worker: Worker | None = None
        self.found = False
        #: The imports of the models that it has begun to load.
        self.imported: list[ModelImports] = []
        self._iterated_ns = 0

    @property
    def has_begun(self) -> bool:
        return self.worker is not None

    def iterate(self) -> bool:
        now_ns = self.scheduler.clock.now_ns
        if self.worker is None:
            return now_ns >= self.world.absent_until_ns and self._start()
        self._iterated_ns = now_ns
        next_ns = self.worker._next_ns
        due = next_ns is not None and next_ns <= now_ns
        if not self.worker.iterate():
            self.worker.close()
            self.end(0)
            return True
        if self.worker._gone or 0 < self.worker._free_again_ns <= now_ns:
            self.worker._free_gone()
        return due or self.found

    def _start(self) -> bool:
        try:
            if (received := self.channel.receive()) is None:
                return False
        except ChannelClosed:  # its supervisor has died
            self.end(1)
            return True
        (start,), fds = received
        assert isinstance(start, Start)
        descriptors.close(fds)
        options = msgspec.msgpack.decode(start.options, type=Options)
        self.worker = Worker(self.channel, options, DEVICE_NAME, DEVICE)
        assert isinstance(self.worker._poller, SimulatedPoller)
        self.worker._poller.process = self
        with mock.patch.object(self.worker, "iterate", return_value=False):
            self.worker.run(start.incarnation)
        self.worker._flush_control()
        return True

    def due_ns(self) -> int | None:
        if self.worker is None:
            return self.world.absent_until_ns or None
        beat_ns = self._iterated_ns + SECOND
        stop_ns = self.worker._stop_ns or beat_ns
        next_ns = self.worker._next_ns
        return min(beat_ns, stop_ns, beat_ns if next_ns is None else next_ns)

    def instances(self) -> list[Any]:
        return [thread._owner for thread in self.threads if thread._is_instance]

    def dies_running(self) -> None:
        """Ends the process while it runs a batch, as its status page goes on to say."""
        for instance in self.instances():
            instance._page = Muted()
        # What runs batches makes an answer of whatever is raised.
        self.dies = True
        raise Death

    def sockets(self) -> list[socket.socket]:
        lanes = self.worker._submitters.values() if self.worker is not None else ()
        return [self.control, *(submitter.lane.channel._sock for submitter in lanes)]

    def bury(self) -> None:
        for instance in self.instances():
            instance._page = Muted()
        self.dies, self.scheduler.current = True, self
        for thread in self.threads:
            thread.end()
        self.scheduler.current = None
        super().bury()
        if self.worker is not None and self.status != 0:
            # The modules of its models would go on to refer to all of it.
            for imports in self.imported:
                imports.forget()
            self.worker.close()
            # Requests that it had use programs' segments, which the kernel unmaps.
            for region in self.worker._regions.leaving:
                region.close()
        self.channel.close()
        self.worker = None


class SupervisorProcess(Process):
    """The supervisor. When it ends, so does the daemon."""

    def __init__(self, world: Daemon, options: Options) -> None:
        super().__init__(world.scheduler, "supervisor")
        self.world = world
        #: What it has started, and its sockets to programs.
        self.spawned: list[Spawned] = []
        self.accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self.status = 0
        #: It dies when it has started so many further processes; -1: it does not.
        self.spawns_left = -1
        self.loop = Loop(self)
        self.main: asyncio.Task[None] = self.loop.create_task(self._run(world, options))
        self.supervisor: Supervisor
        self.up = False

    async def _run(self, world: Daemon, options: Options) -> None:
        configured = Configured(options, {})
        spawned = [(device, world.spawn_worker("", device)) for device in world.devices]
        supervisor = self.supervisor = Supervisor(configured, lambda: configured, world.environment, spawned)
        protocols = ("http", "grpc") if options.grpc.enabled else ("http",)
        supervisor.fronts._listeners = {protocol: [] for protocol in protocols}
        supervisor.fronts._counters = {protocol: SharedCounters.create() for protocol in protocols}
        supervisor._clients.listen()
        supervisor.workers.start_all(spawned)
        found = await supervisor.models.scan(options.repository)
        outcomes = supervisor.models.begin(found, options.repository)
        supervisor._clients.serve()
        supervisor.fronts.start_all(10)
        watchdog = Watchdog(supervisor.workers, supervisor.fronts, supervisor._notifier, lambda: options)
        supervisor.spawn(watchdog.run())
        supervisor.spawn(supervisor._become_ready(outcomes))
        self.up = True
        await supervisor._shutdown.requested.wait()
        await supervisor._drain()
        if not supervisor._shutdown.exit_status:
            supervisor.models.forget_served()
        await supervisor._bury()
        supervisor.models.close()
        supervisor.parameters.close()
        supervisor._clients.close()
        supervisor._regions.close()
        supervisor._trace_settings.close()
        supervisor.fronts.close()

    def iterate(self) -> bool:
        did = self.loop.iterate()
        if self.main.done() and self.alive:
            error = self.main.exception()
            # A daemon that has no descriptors left when it starts ends, and is started again.
            if error is not None and (self.up or not self.lack):
                self.scheduler.defect(f"the supervisor fails with {error!r}")
            self.end(self.supervisor._shutdown.exit_status if error is None else 1)
        return did

    def end(self, status: int) -> None:
        """Ends the process: nothing of it runs any more, and its sockets close."""
        if not self.alive:
            return
        self.alive, self.status, self.lack = False, status, 0.0
        self.scheduler.tell(f"{self} has ended ({child.describe_exit(status)})")
        # What else it has open only the kernel would close.
        self.scheduler.cut_short |= status < 0
        supervisor = getattr(self, "supervisor", None)
        for each in () if supervisor is None else (*supervisor.fronts, *supervisor.workers):
            each._connection.close()
            os.close(each._pidfd)
            os.close(each._stack_fd)
        for spawned in self.spawned:
            if spawned.channel.fileno() >= 0:
                spawned.channel.close()
        for sock in self.accepted:
            sock.close()
        if supervisor is not None:
            if supervisor._clients._listener is not None:
                supervisor._clients._listener.close()
            supervisor._regions.close()
            supervisor._trace_settings.close()
            supervisor.fronts.close()
        self.world.on_supervisor_end(status)
        self.scheduler.wake()

    def due_ns(self) -> int | None:
        return self.loop.due_ns()

    def answers(self, connections: int) -> bool:
        """Returns whether it carries out what a front or a program has asked that has died, or has yet to read that.

        ``connections``: how many the living programs have to it. One that it has not accepted yet may be anybody's.
        """
        known = {front.pid for front in self.supervisor.fronts if front.alive}
        living = {front.pid for front in self.scheduler.processes if isinstance(front, FrontProcess) and front.alive}
        tasks = (str(task.get_coro()) for task in asyncio.all_tasks(self.loop))
        gone = len(self.supervisor._clients._clients) > connections
        listener, unaccepted = self.supervisor._clients._listener, select.poll()
        assert listener is not None
        unaccepted.register(listener, select.POLLIN)
        return (
            gone or bool(unaccepted.poll(0)) or known != living or any("Supervisor._answer" in task for task in tasks)
        )

    def sockets(self) -> list[socket.socket]:
        return []

    def bury(self) -> None:
        # What its coroutines still do when they are closed comes of nothing, but that they close what they have open.
        self.dies, self.scheduler.current = True, self
        for task in asyncio.all_tasks(self.loop):
            with contextlib.suppress(Death, Exception):
                task.get_coro().close()
        self.scheduler.current = None
        self.loop.bury()


class Daemon:
    """The processes of a daemon, and what stands for the kernel that starts and ends them."""

    def __init__(self, scheduler: Scheduler, options: Options, devices: Sequence[str]) -> None:
        self.scheduler = scheduler
        self.devices = [Device(name) for name in devices]
        self._started = 0
        self._children: dict[int, ChildProcess] = {}
        #: The processes by the pidfd that was opened last under that number.
        self._opened: dict[int, ChildProcess] = {}
        #: Called with each process that has ended.
        self.on_end: Callable[[ChildProcess], None] = lambda process: None
        scheduler.on_death = lambda process: process.end(-signal.SIGKILL)  # type: ignore[attr-defined]
        #: Called with each front that begins to serve.
        self.on_open: Callable[[FrontProcess], None] = lambda front: None
        #: Called when the supervisor has told fronts that a worker is dead.
        self.on_fence: Callable[[], None] = lambda: None
        #: Called with the client's id of each request that a worker runs.
        self.on_run: Callable[[str], None] = lambda client_id: None
        #: Returns whether the request of this client's id ends the worker that runs it.
        self.is_deadly: Callable[[str], bool] = lambda client_id: False
        #: Called with a model, a push of it and the worker that stages it. Returns whether the worker dies of it.
        self.dies_of: Callable[[str, int, WorkerProcess], bool] = lambda model, push, worker: False
        #: No worker that is started begins before that time.
        self.absent_until_ns = 0
        #: Until when workers die as soon as they load a model, by its name.
        self.deadly_loads: dict[str, int] = {}
        #: The models whose requests clients may send again.
        self.pure: Sequence[str] = ()
        #: Called with the exit status of each supervisor that has ended.
        self.on_supervisor_end: Callable[[int], None] = lambda status: None
        #: Called with each model and state that the supervisor tells fronts.
        self.on_state: Callable[[str, str], None] = lambda model, state: None
        self.environment: dict[str, str] = {}
        self.supervisor: SupervisorProcess
        #: All supervisors, the one of now as well.
        self.supervisors: list[SupervisorProcess] = []
        self._options = options

    def begin(self) -> None:
        """Starts a daemon, in the place of one that has ended."""
        for ended in self.supervisors[-1:]:
            self.scheduler.processes.remove(ended)
        self.supervisor = SupervisorProcess(self, self._options)
        self.supervisors.append(self.supervisor)
        self.scheduler.processes.append(self.supervisor)

    # ------------------------------------------------------------------------------------------------- the kernel's part

    def spawn_worker(self, module: str, device: Device) -> Spawned:
        return self._spawn(lambda control: WorkerProcess(self, f"worker {self._started} on {device.name}", control))

    def spawn_front(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> Spawned:
        row = int(arguments[-1])
        protocol = module.rpartition(".")[2]

        def make(control: socket.socket) -> FrontProcess:
            name = f"{protocol} front {self._started}"
            return FrontProcess(self, name, protocol, control, os.dup(pass_fds[-1]), row)

        return self._spawn(make)

    def _spawn(self, make: Callable[[socket.socket], ChildProcess]) -> Spawned:
        stack_fd = os.memfd_create("stack", os.MFD_CLOEXEC)
        try:
            ours, theirs = pair()
        except OSError:
            os.close(stack_fd)
            raise
        self._started += 1
        # What it has is its own.
        process = self.scheduler.given(lambda: make(theirs))
        pid = process.pid = _FIRST_PID + self._started
        self._children[pid] = process
        self.scheduler.processes.append(process)
        self.scheduler.tell(f"{process} is started")
        spawned = Spawned(Popen(process, pid), ours, stack_fd)  # type: ignore[arg-type]
        supervisor = self.supervisor
        supervisor.spawned = [each for each in supervisor.spawned if each.channel.fileno() >= 0] + [spawned]
        if supervisor.spawns_left == 0:
            raise Death
        supervisor.spawns_left -= supervisor.spawns_left > 0
        return spawned

    def pidfd_open(self, pid: int, flags: int = 0) -> int:
        fd = os.dup(self._children[pid].dead_fd)
        self._opened[fd] = self._children[pid]
        return fd

    def send_signal(self, pidfd: int, number: int, *_: Any) -> None:
        if number == signal.SIGKILL:
            self._opened[pidfd].end(-signal.SIGKILL)

    def ended(self, process: ChildProcess) -> None:
        self.on_end(process)

    def children(self, kind: type[ChildProcess]) -> list[Any]:
        return [process for process in self._children.values() if process.alive and isinstance(process, kind)]

    def bury(self, lasting_ns: int = 0) -> None:
        """Frees the dead that nobody can refer to any more: those that ended ``lasting_ns`` ago."""
        before = self.scheduler.clock.now_ns - lasting_ns
        for pid, process in list(self._children.items()):
            if not process.alive and process.ended_ns <= before:
                del self._children[pid]
                self.scheduler.processes.remove(process)
                process.bury()

    # --------------------------------------------------------------------------------------------------- what is replaced

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the simulation in the place of clocks, threads and processes, as long as the block runs."""
        scheduler, clock = self.scheduler, self.scheduler.clock
        import_system.prepare()

        def thread(target: Callable[[], None], name: str = "", daemon: bool = False) -> Thread:
            assert scheduler.current is not None
            return Thread(scheduler.current, target)

        threads = types.SimpleNamespace(
            Thread=thread, Event=threading.Event, Lock=threading.Lock, get_ident=threading.get_ident
        )

        def run(model: Any, execution: Any, check: Any) -> None:
            process = scheduler.current
            for request in execution.requests:
                self.on_run(request.own.client_id)
            deadly = any(self.is_deadly(request.own.client_id) for request in execution.requests)
            if isinstance(process, WorkerProcess) and (process.dies_in_run or deadly):
                process.dies_running()
            pause()
            execution_run(model, execution, check)

        def pause() -> None:
            process = scheduler.current
            if process is not None and process.running is not None and scheduler.chance.random() < 0.3:
                process.running.pause()

        def paused(call: Callable[..., None]) -> Callable[..., None]:
            def around(*words: Any, **named: Any) -> None:
                process = scheduler.current
                pause()
                if isinstance(process, WorkerProcess) and process.dies_in_run and scheduler.chance.random() < 0.3:
                    process.dies_running()
                call(*words, **named)
                pause()

            return around

        original_publish = fronts.Fronts.publish

        def publish(told: fronts.Fronts, record: Any, *fds: int) -> None:
            original_publish(told, record, *fds)
            if isinstance(record, WorkerFenced):
                self.on_fence()
            elif isinstance(record, ModelState):
                self.on_state(record.name, record.state)

        original_fence = Submitter.fence

        def fence(submitter: Submitter, record: WorkerFenced) -> None:
            if isinstance(scheduler.current, FrontProcess):
                scheduler.current.fenced.append(clock.now_ns)
            original_fence(submitter, record)

        original_flush, original_alone = Channel.flush, Channel.send_alone

        def flush(channel: Channel) -> bool:
            if scheduler.current is None or not channel.waiting:
                return original_flush(channel)
            if scheduler.is_full():
                return False
            return bool(scheduler.current.sends(lambda: original_flush(channel)))

        def send_alone(channel: Channel, record: Any) -> bool:
            if scheduler.current is None:
                return original_alone(channel, record)
            if scheduler.is_full():
                channel.put(record)
                return False
            return bool(scheduler.current.sends(lambda: original_alone(channel, record)))

        original_serve, original_answer = ClientSocket._serve, client_socket._send

        def serve(socket_of_clients: ClientSocket, client: socket.socket, connection: Any) -> Any:
            assert isinstance(scheduler.current, SupervisorProcess)
            scheduler.current.accepted.add(client)
            return original_serve(socket_of_clients, client, connection)

        async def answer(client: socket.socket, content: bytes, fds: list[int]) -> None:
            process = scheduler.current
            assert isinstance(process, SupervisorProcess)
            if process.sends_left == 0 and not process.dies_sent:
                raise Death
            await original_answer(client, content, fds)
            if process.sends_left == 0:
                raise Death
            process.sends_left -= process.sends_left > 0

        original_imports = ModelImports.of_version

        def of_version(*words: Any) -> ModelImports:
            imports, process = original_imports(*words), scheduler.current
            if isinstance(process, WorkerProcess):
                process.imported.append(imports)
                if clock.now_ns < self.deadly_loads.get(words[0], 0):
                    process.end(-signal.SIGKILL)
                    raise Death
            return imports

        checked = ParameterPushes._checked

        def staged(pushes: ParameterPushes, fd: int, sets: Any, operation: StageParameters, what: str) -> Any:
            leaves, process = checked(pushes, fd, sets, operation, what), scheduler.current
            assert isinstance(process, WorkerProcess)
            if self.dies_of(operation.model, int(leaves[0]), process):  # type: ignore[arg-type]
                process.end(-signal.SIGSEGV)
                raise Death
            return leaves

        def loaded(name: str, *words: Any, **named: Any) -> LoadedModel:
            # Only a jitted model is called pure otherwise, and these are not compiled.
            return LoadedModel(name, *words, **{**named, "pure": name in self.pure})

        collector = types.SimpleNamespace(freeze=_nothing, enable=_nothing, collect=_nothing)
        seeded = random.Random(scheduler.chance.random())
        monotonic_ns = ((owner, "monotonic_ns", clock.nanoseconds) for owner in _CLOCKS_NS)
        scheduler_of_fronts.append(scheduler)
        with contextlib.ExitStack() as stack:
            stack.callback(scheduler_of_fronts.clear)
            for owner, name, value in (
                (running_time, "monotonic", clock.seconds),
                *monotonic_ns,
                (acceptor, "socket", types.SimpleNamespace(SocketType=AcceptedSocket)),
                (opening, "socket", types.SimpleNamespace(socket=OpenedSocket)),
                (compression, "_INFLATE_OUT", _STEP),
                (compression, "_DEFLATE_IN", _STEP),
                (http_server, "Http1Connection", numbered(Http1Connection)),
                (grpc_server, "Http2Connection", numbered(Http2Connection)),
                (os, "pidfd_open", self.pidfd_open),
                (signal, "pidfd_send_signal", self.send_signal),
                (fronts, "spawn", self.spawn_front),
                (fronts.Fronts, "publish", publish),
                (Submitter, "fence", fence),
                (worker_pool, "spawn_worker", self.spawn_worker),
                (child_process, "enable_stack_report", lambda *fds: descriptors.close(fds)),
                (log_settings, "configure", lambda *_, **__: None),
                (process_slots, "random", types.SimpleNamespace(Random=lambda: seeded)),
                (instance_module, "threading", threads),
                (instance_module, "run", run),
                (host_model, "precision", lambda _: contextlib.nullcontext()),
                (ResponseSender, "send", paused(ResponseSender.send)),
                (ResponseSender, "finish", paused(ResponseSender.finish)),
                (work_thread, "threading", threads),
                (worker_module, "Poller", SimulatedPoller),
                (worker_module, "extensions", types.SimpleNamespace(available=False, missing=lambda: ())),
                (worker_module, "gc", collector),
                (child_process, "gc", collector),
                (author_error, "gc", collector),
                (front_module, "gc", collector),
                (LoadTarget, "configured", _target),
                (ParameterPushes, "_checked", staged),
                (loader_module, "LoadedModel", loaded),
                (ModelImports, "of_version", of_version),
                (Channel, "flush", flush),
                (Channel, "send_alone", send_alone),
                (ClientSocket, "_serve", serve),
                (client_socket, "_send", answer),
                (Audit.__init__, "__defaults__", (clock.nanoseconds,)),
                (LineRate.__init__, "__defaults__", (clock.nanoseconds,)),
                (Seldom.__init__, "__defaults__", (clock.seconds,)),
                (SequenceRouting.__init__, "__defaults__", (clock.seconds,)),
                (time, "monotonic_ns", clock.nanoseconds),
                (time, "monotonic", clock.seconds),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            yield


def numbered(kind: type[Any]) -> type[Any]:
    """Returns a class of connections that stand in a set as they came: then each run of a seed is the same."""
    numbers = itertools.count()

    class Numbered(kind):  # type: ignore[misc]
        __slots__ = ("number",)

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.number = next(numbers)

        def __hash__(self) -> int:
            return self.number

    return Numbered


def _nothing() -> None:
    pass


def _target(options: Options, device: Any, gpu: int | None, *_: Any) -> LoadTarget:
    return LoadTarget.borrowed(options, device, gpu, ExecutableCache(None))
