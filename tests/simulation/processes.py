"""The simulated processes of a daemon: supervisor, fronts and workers, as they are."""

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
import weakref
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec

from tensord.config.layers import Configured
from tensord.config.options import Options
from tensord.daemon.control.shared_counters import SharedCounters
from tensord.daemon.front.endpoints import Endpoints
from tensord.daemon.front.process import Front, FrontPlace
from tensord.daemon.grpc.server import GrpcFront
from tensord.daemon.http.server import HttpFront
from tensord.daemon.processes import child
from tensord.daemon.processes.spawned import Spawned
from tensord.daemon.processes.watchdog import Watchdog
from tensord.daemon.supervisor import Supervisor
from tensord.shm import descriptors
from tensord.shm.channel import Channel, ChannelClosed
from tensord.shm.control_records import Start, ToWorkerControl
from tensord.shm.record import decoder
from tensord.workers.devices.device import DeviceName
from tensord.workers.dispatch.poller import Poller, Woken
from tensord.workers.imports.model_imports import ModelImports
from tensord.workers.worker import Worker
from tests.simulation.scheduler import SECOND, Death, Loop, Process, eventfd, shuffled

if TYPE_CHECKING:
    from tests.simulation.daemon import Daemon

_log = logging.getLogger(__name__)
_NUMBERS = itertools.count()
DEVICE_NAME = DeviceName("cpu", 0)
DEVICE = DEVICE_NAME.open()


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
        self.close_sockets()
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


class Muted:
    """Stands for the status page of a process that is dying, and for the epoll of one whose sockets the kernel has closed."""

    def begin(self, *_: Any) -> None: ...
    def end(self, *_: Any) -> None: ...
    def modify(self, *_: Any) -> None: ...
    def unregister(self, *_: Any) -> None: ...
    def close(self, *_: Any) -> None: ...


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
        self.loop.chosen._epoll.close()
        self.loop.chosen._epoll = Muted()  # type: ignore[assignment]
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
        for thread in list(self.threads):  # one that ends leaves them
            thread.end()
        self.scheduler.current = None
        super().bury()
        # The modules of its models would go on to refer to all of it.
        for imports in self.imported:
            imports.forget()
        if self.worker is not None and self.status != 0:
            self.worker._epoll.close()
            self.worker._epoll = Muted()  # type: ignore[assignment]
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
            # A daemon that had no descriptors left when it started ends, and is started again.
            if error is not None and (self.up or not self.has_lacked):
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
