"""A simulated daemon: its processes, and what takes the place of the kernel and of threads for them."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from tensord.config import log as log_settings
from tensord.config.options import Options
from tensord.daemon.clients import client_socket
from tensord.daemon.clients.client_socket import ClientSocket
from tensord.daemon.front import acceptor, opening
from tensord.daemon.front import process as front_module
from tensord.daemon.grpc import infer
from tensord.daemon.grpc import server as grpc_server
from tensord.daemon.grpc.connection import Http2Connection
from tensord.daemon.http import compression, exchange
from tensord.daemon.http import server as http_server
from tensord.daemon.http.connection import Http1Connection
from tensord.daemon.operator.audit import Audit
from tensord.daemon.processes import fronts, process_slots, worker_pool
from tensord.daemon.processes.devices import Device
from tensord.daemon.processes.spawned import Spawned
from tensord.daemon.submit.sequences import SequenceRouting
from tensord.daemon.submit.submitter import Submitter
from tensord.shm import child_process, descriptors, running_time
from tensord.shm.channel import Channel, pair
from tensord.shm.control_records import ModelState, WorkerFenced
from tensord.shm.operations import StageParameters
from tensord.shm.seldom import LineRate, Seldom
from tensord.workers import worker as worker_module
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
from tests.simulation.processes import (
    ChildProcess,
    FrontProcess,
    Popen,
    SimulatedPoller,
    SupervisorProcess,
    WorkerProcess,
)
from tests.simulation.scheduler import Death, Scheduler, Thread
from tests.simulation.sockets import AcceptedSocket, OpenedSocket, scheduler_of_fronts

#: Modules that import functions of ``time`` by name, and so need the simulated clock by themselves.
_CLOCKS_NS = (exchange, infer)
_FIRST_PID = 1 << 28
#: So many bytes are compressed or decompressed in a step, that the small bodies here take several.
_STEP = 4096


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
                (compression, "DEFLATE_IN", _STEP),
                (exchange, "DEFLATE_IN", _STEP),
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
                (process_slots, "random", seeded),
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
