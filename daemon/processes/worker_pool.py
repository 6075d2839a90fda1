"""Starts, replaces and stops the worker processes of the daemon, and receives the records that the workers send.

Each device has one worker that models share. The worker named "worker-0#m" serves only the isolated model "m".
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tensord.config.options import Options
from tensord.daemon.control import open_files
from tensord.daemon.processes.child import OF_JAX, Child, MissingParts, WorkerProcess
from tensord.daemon.processes.devices import Device
from tensord.daemon.processes.process_slots import retried
from tensord.daemon.processes.spawned import Spawned, spawn_worker
from tensord.shm import child_process, descriptors, device_names, marked_processes
from tensord.shm.control_records import ChildReady, Loaded, Loading, Reply
from tensord.shm.errors import InvalidArgument, ServingError, Unavailable
from tensord.shm.operations import Operation, Settle
from tensord.shm.record import Record
from tensord.shm.sequence_page import SequencePage
from tensord.shm.status_page import StatusPage

_log = logging.getLogger(__name__)
#: A device is broken when so many workers in a row ended by themselves before they could use it; one that says so is enough.
_DEATHS_WITHOUT_USE = 3
#: A dismissed worker is killed when it has not ended so many seconds after its time.
_LATE_SECONDS = 2.0
#: Seconds between two looks whether a worker that is restarted has ended, or come up.
_LOOK_SECONDS = 0.05
#: Seconds until a look again behind a child that its owner has yet to wait for.
_REAP_SECONDS = 0.05


class WorkerPool:
    """Starts, replaces and stops the worker processes."""

    def __init__(
        self,
        program: str,
        options: Callable[[], Options],
        next_incarnation: Callable[[], int],
        said: Callable[[WorkerProcess, Record], None],
        died: Callable[[WorkerProcess, Device], None],
        dismissed: Callable[[WorkerProcess], None],
        loads: Callable[[WorkerProcess], bool],
        closed: Callable[[], bool],
    ) -> None:
        """Stores the arguments. No worker runs yet.

        Args:
          program: the Python module that the workers run.
          options: returns the options that apply now.
          next_incarnation: returns a number for a new process.
          said: called with a worker and a record that the worker has sent. Not called for the record Reply.
          died: called with a worker and the worker's device after the worker has ended for any reason.
          dismissed: called with a worker when ``isolate`` or ``restart`` begins to stop the worker.
          loads: returns whether a ready worker has yet to serve a model, or to fail to load it.
          closed: returns whether the daemon stops and needs no further worker.
        """
        self._options = options
        self._next_incarnation = next_incarnation
        self._said, self._died, self._dismissed, self._loads, self._closed = said, died, dismissed, loads, closed
        self.by_incarnation: dict[int, WorkerProcess] = {}
        #: The name of every slot that models share, whether it is filled now or not -> its device.
        self._shared_slots: dict[str, Device] = {}
        #: The name of every slot of an isolated model -> its device.
        self._isolated: dict[str, Device] = {}
        #: Name of a slot -> sequences that had begun on the workers that died there.
        self.lost_sequences: Counter[str] = Counter()
        #: Device -> workers in a row that could not use it; ``_DEATHS_WITHOUT_USE`` mean that it is broken.
        self._without_use: Counter[str] = Counter()
        self._program = program
        self._missing = MissingParts()
        self._jax_lacks = MissingParts(OF_JAX)

    def start_all(self, spawned: Sequence[tuple[Device, Spawned]]) -> None:
        """Adds the first workers, which the caller has started. Raises OSError if no file descriptor is free."""
        self._shared_slots = {f"worker-{index}": device for index, (device, _) in enumerate(spawned)}
        for name, (device, process) in zip(self._shared_slots, spawned, strict=True):
            self._adopt(name, device, process)

    @property
    def slots(self) -> dict[str, str]:
        """Returns the name and the device of every worker that should run, even if no such worker runs now."""
        return {name: device.name for name, device in (self._shared_slots | self._isolated).items()}

    @property
    def devices(self) -> list[str]:
        """Returns the device name of each worker that models share. Workers that run one isolated model are left out."""
        return [device.name for device in self._shared_slots.values()]

    @property
    def usable(self) -> list[str]:
        """Returns the devices of all workers that should run, except broken devices.

        A device is broken if a worker reports so at its start, or if three workers in a row ended by themselves before they were
        ready.
        """
        return [device for device in self.slots.values() if self._without_use[device] < _DEATHS_WITHOUT_USE]

    def is_vacant(self, name: str) -> bool:
        """Returns True if a worker of this name should run, none but a stopping one runs, and the daemon does not stop."""
        there = any(worker.name == name and not worker.stopping for worker in self)
        return name in self.slots and not there and not self._closed()

    def isolate(self, wanted: Mapping[str, float]) -> None:
        """Starts the workers for ``wanted`` that do not run yet, and stops all other workers that serve only one model.

        ``wanted``: names of devices, made by ``tensord.shm.device_names.alone``, each with the fraction (0 to 1) of a GPU's
        memory that the device's worker may take.
        """
        known = {device.name: name for name, device in self._isolated.items()}
        for name in [name for device, name in known.items() if device not in wanted]:
            self._dismiss(name)
        beside = {device.name: (name, device) for name, device in self._shared_slots.items()}
        for device in [device for device in wanted if device not in known]:
            slot, shared = beside[device_names.shared(device)]
            name = device_names.alone(slot, device_names.model_of(device))
            self._isolated[name] = shared.alone(device, wanted[device])
            retried(f"{name} cannot be started", self._fill, name)

    def _fill(self, name: str) -> None:
        """Starts the worker ``name`` if it should run and does not.

        Raises OSError if no memory, process id or file descriptor is free.
        """
        if self.is_vacant(name):
            self.start(name, (self._shared_slots | self._isolated)[name])

    def _dismiss(self, name: str) -> None:
        device = self._isolated.pop(name)
        self._without_use.pop(device.name, None)
        for worker in [worker for worker in self if worker.name == name and not worker.stopping]:
            _log.info("%s (process %d) ends: its model needs it no more", worker.name, worker.pid)
            self._end(worker)

    def named(self, name: str) -> WorkerProcess:
        """Returns the worker of this name that is ready and is not stopping. Raises InvalidArgument if there is none."""
        for worker in self.ready():
            if worker.name == name and not worker.stopping:
                return worker
        raise InvalidArgument(f"no worker '{name}' is up; there are {', '.join(sorted(self.slots)) or 'none'}")

    async def restart(self, name: str) -> None:
        """Replaces a worker, and waits until the new worker is ready and serves its models.

        The old worker first finishes the requests that it accepted. Later requests for its models wait for the new worker.
        Raises InvalidArgument if no worker of this name is ready. Raises Unavailable if the new worker dies before that, or if
        none is needed any more.
        """
        old = self.named(name)
        _log.info("%s (process %d) is restarted on request", name, old.pid)
        self._end(old)
        while old.alive:
            await asyncio.sleep(_LOOK_SECONDS)
        retried(f"{name} cannot be started", self._fill, name)
        while self.is_vacant(name):
            await asyncio.sleep(_LOOK_SECONDS)
        new = next((worker for worker in self if worker.name == name), None)
        while new is not None and new.alive and not (new.ready and not self._loads(new)):
            await asyncio.sleep(_LOOK_SECONDS)
        if new is None or not new.alive:
            raise Unavailable(f"the new {name} {'is needed no more' if new is None else new.describe_exit()}")

    def _end(self, worker: WorkerProcess) -> None:
        """Asks a worker to finish its requests and to exit, or kills it if it is not ready."""
        grace = self._options().supervisor.exit_timeout
        worker.stop(int(grace * 1e9))
        if worker.ready:
            asyncio.get_running_loop().call_later(grace + _LATE_SECONDS, worker.kill)
        else:
            worker.kill()
        self._dismissed(worker)

    def start(self, name: str, device: Device) -> None:
        """Starts the worker ``name`` on ``device``. Raises OSError if no memory, process id or file descriptor is free."""
        self._adopt(name, device, spawn_worker(self._program, device))

    def _adopt(self, name: str, device: Device, spawned: Spawned) -> None:
        def exited(worker: WorkerProcess) -> None:
            del self.by_incarnation[worker.incarnation]
            if not worker.ready and not worker.stopping and worker.ended_by_itself:
                at_once = worker.returncode in (child_process.NO_DEVICE, child_process.OTHER_VERSION)
                self._without_use[device.name] += _DEATHS_WITHOUT_USE if at_once else 1
            self.lost_sequences[name] += worker.lost_sequences
            self._died(worker, device)

        worker = WorkerProcess(name, self._next_incarnation(), device.name, self._received, exited)
        worker.memory_fraction = device.memory_fraction
        worker.adopt(spawned, msgspec.msgpack.encode(self._shared()))
        self.by_incarnation[worker.incarnation] = worker

    def _shared(self) -> Options:
        """Returns the options for a worker. Divides the response cache's bytes by the number of workers that models share."""
        options = self._options()
        cache = msgspec.structs.replace(
            options.response_cache, byte_size=options.response_cache.byte_size // max(1, len(self._shared_slots))
        )
        return msgspec.structs.replace(options, response_cache=cache)

    def missing(self) -> list[str]:
        """Returns the names of workers that are not ready, and of ready workers that do not serve all their models yet.

        A worker that runs only one model (a model with the parameter ``isolated``) is left out until it is ready.
        """
        ready = [worker for worker in self if worker.ready]
        loading = {worker.name for worker in ready if self._loads(worker)}
        return sorted(loading | self._shared_slots.keys() - {worker.name for worker in ready})

    def ready(self) -> list[WorkerProcess]:
        """Returns the workers that can answer calls now."""
        return [worker for worker in self if worker.ready and worker.alive]

    async def settled(self) -> None:
        """Waits until every ready worker has acted on all records that it was sent before this call, or is dead."""
        await self.results_of(Settle())

    async def results_of(self, operation: Operation) -> list[bytes]:
        """Calls an operation of every ready worker, and returns the workers' results.

        Leaves out workers that die or answer with Unavailable. Raises ServingError if a worker answers with another error.
        """
        calls = (worker.result_of(operation) for worker in self.ready())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, Unavailable):
                raise answer
        return [answer for answer in answers if isinstance(answer, bytes)]

    def _received(self, worker: WorkerProcess, record: Any, fds: list[int]) -> None:
        match record:
            case ChildReady():
                return self._reported(worker, record, fds)
            case Reply():
                return worker.calls.answered(record, fds)
            case Loaded():
                worker.load_answered(record.name, record.version)
            case Loading():
                worker.load_progressed(record)
        descriptors.close(fds)
        return self._said(worker, record)

    def _reported(self, worker: WorkerProcess, record: ChildReady, fds: list[int]) -> None:
        if len(fds) != 2:
            descriptors.close(fds)
            return worker.kill("reported without its pages")
        try:
            worker.page = StatusPage.attach(fds.pop(0))
            worker.sequences = SequencePage.attach(fds.pop(0))
        except ServingError as error:
            descriptors.close(fds)
            return worker.kill(f"reported with a page that cannot be used ({error.message})")
        self._missing.say(record.missing)
        self._jax_lacks.say(record.jax_lacks)
        self._without_use.pop(worker.device, None)
        _log.info("%s (process %d) is up on %s", worker.name, worker.pid, worker.device)
        return self._said(worker, record)

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(self.by_incarnation.values())


class Leftovers:
    """Kills the processes that the models of dead workers have started and left running.

    Such a process is found by a variable in its environment, whose value identifies the worker
    (``tensord.shm.marked_processes``).
    """

    def __init__(self) -> None:
        self._looks: set[asyncio.Task[None]] = set()

    def end(self, worker: str, mark: str) -> None:
        """Begins to kill the processes that the models of a dead worker have started and left running.

        ``worker``: the name of the worker, for the log. ``mark``: how the variable ``_TENSORD_MARK`` in the environment of
        these processes begins. If ``mark`` is "", no process is killed.
        """
        if mark:
            task = asyncio.get_running_loop().create_task(self._end(worker, mark))
            self._looks.add(task)
            task.add_done_callback(self._looks.discard)

    async def ended(self) -> None:
        """Waits until the processes that ``end`` has begun to kill are gone."""
        await asyncio.gather(*self._looks)

    async def _end(self, worker: str, mark: str) -> None:
        if count := await open_files.awaited(lambda: asyncio.to_thread(marked_processes.kill_all, mark)):
            _log.warning("%s left %d processes behind that its models had started: they are killed", worker, count)

    def __repr__(self) -> str:
        return f"<Leftovers of {len(self._looks)} workers>"


class Orphans:
    """Reaps the orphaned processes that the daemon inherits as process 1 of a container, so that no orphan stays a zombie.

    ``own``: returns the fronts and workers. They are not reaped, because other code waits for them.
    """

    def __init__(self, own: Callable[[], Iterable[Child]]) -> None:
        self._own = own

    def watch(self) -> None:
        """Reaps the zombie processes that this process, as process 1, has inherited. Does so now and at every later SIGCHLD."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        self._reap()

    def _reap(self) -> None:
        while (pid := _ended()) and pid not in {child.pid for child in self._own()}:
            os.waitpid(pid, 0)
        if pid:
            # The kernel shows one at a time: those behind it are seen when it is gone.
            asyncio.get_running_loop().call_later(_REAP_SECONDS, self._reap)

    def __repr__(self) -> str:
        return f"<Orphans beside {sum(1 for _ in self._own())} children>"


def _ended() -> int:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return 0 if found is None else found.si_pid
