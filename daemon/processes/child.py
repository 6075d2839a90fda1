"""One child process from its supervisor's side: spawned, spoken to, watched, buried.

    spawn ─▶ Start ─▶ ChildReady (a worker: with its status page) ─▶ records, calls ─▶ Stop or kill ─▶ pidfd readable ─▶ on_exit

The control channel's end says nothing about the process: only the pidfd proves that it is gone and can write nowhere any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tensord.daemon.control.channel import ControlChannel
from tensord.daemon.processes.spawned import Spawned, spawn
from tensord.shm import descriptors, device_names, stack_report
from tensord.shm.channel import Channel
from tensord.shm.control_records import Call, ChildReady, FromFront, FromWorker, Load, Reply, Start, Stop, Told
from tensord.shm.errors import Unavailable, from_code
from tensord.shm.operations import Operation
from tensord.shm.progress import Loading
from tensord.shm.record import Record, decoder
from tensord.shm.sequence_page import SequencePage, SequenceState
from tensord.shm.status_page import StatusPage

#: Of ``ChildReady.missing`` and ``ChildReady.jax_lacks``.
IN_C = "parts of tensord that are written in C are off"
OF_JAX = "this JAX lacks interfaces that are not public"

_log = logging.getLogger(__name__)
#: For a process that is about to be killed to write where it is.
_STACK_SECONDS = 0.2


class Child:
    """Owns the process, its pidfd and its control channel."""

    def __init__(
        self,
        module: str,
        name: str,
        incarnation: int,
        incoming: Any,
        on_record: Callable[[Any, Any, list[int]], None],
        on_exit: Callable[[Any], None],
    ) -> None:
        """``incoming`` is the union of records it may send; the callbacks get this object first."""
        self.module = module
        self.name = name
        self.incarnation = incarnation
        #: It reported ChildReady.
        self.ready = False
        #: What it goes without, as it reported.
        self.missing: tuple[str, ...] = ()
        #: It was told to stop, so its death is no accident.
        self.stopping = False
        self.started_ns = 0
        #: See ``Spawned``.
        self.mark = ""
        #: As Popen: None while it runs.
        self.returncode: int | None = None
        self._incoming = incoming
        self._on_record = on_record
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        #: Where it writes its stack when it dies.
        self._stack_fd = -1
        self._killing = False
        self._connection: ControlChannel | None = None

    def spawn(
        self, options: bytes, arguments: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> None:
        """Starts the process. ``options``: ``tensord.config.options.Options`` as msgpack. Raises OSError: there is no room."""
        self.adopt(spawn(self.module, arguments, environment, pass_fds), options)

    def adopt(self, spawned: Spawned, options: bytes) -> None:
        """Owns a process that was started, and tells it to begin. ``options`` as of ``spawn``. Raises OSError as that."""
        try:
            self._pidfd = os.pidfd_open(spawned.process.pid)
        except OSError:
            spawned.channel.close()
            os.close(spawned.stack_fd)
            spawned.process.kill()
            spawned.process.wait()
            raise
        self._process, self._stack_fd, self.mark = spawned.process, spawned.stack_fd, spawned.mark
        self.started_ns = time.monotonic_ns()
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)
        channel = Channel(spawned.channel, decoder(self._incoming))
        self._connection = ControlChannel(channel, self._received, self._channel_closed)
        self._connection.start()
        self.send(Start(self.incarnation, self.name, msgspec.Raw(options)), self._stack_fd)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self.returncode is None

    def send(self, record: Record, *fds: int) -> None:
        """Queues a record; descriptors are duplicated. Lost where the process is gone, as everything said to it is."""
        if self._connection is not None:
            self._connection.send(record, *fds)

    def stop(self, grace_ns: int) -> None:
        """Asks it to finish and exit."""
        self.stopping = True
        self.send(Stop(max(0, grace_ns)))

    def kill(self, reason: str = "") -> None:
        """SIGKILL; ``on_exit`` follows. With a reason it has a moment to write its stack before."""
        if not self.alive or (reason and self._killing):
            return
        if reason:
            self._killing = True
            _log.error("%s (process %d) %s: killing it", self.name, self.pid, reason)
            if self.ready:
                self._signal(stack_report.STACK_SIGNAL)
                asyncio.get_running_loop().call_later(_STACK_SECONDS, self.kill)
                return
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # By pidfd: the number cannot have been given to another process.
        signal.pidfd_send_signal(self._pidfd, number)

    def _received(self, record: Any, fds: list[int]) -> None:
        if isinstance(record, ChildReady):
            if record.incarnation != self.incarnation or self.ready:
                descriptors.close(fds)
                return self.kill("reported as somebody else")
            self.ready, self.missing = True, (*record.missing, *record.jax_lacks)
        self._on_record(self, record, fds)
        return None

    def _channel_closed(self) -> None:
        # An orderly child closes it by exiting, a moment before the pidfd tells. Without it a child is of no use.
        if not self.stopping:
            asyncio.get_running_loop().call_later(1.0, self.kill, "closed its control channel")

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        assert self._process is not None
        self.returncode = self._process.wait()
        if self._connection is not None:
            self._connection.close()
        for line in stack_report.read(self._stack_fd):
            _log.error("%s (process %d) died: %s", self.name, self.pid, line)
        os.close(self._stack_fd)
        self.release()
        self._on_exit(self)

    def release(self) -> None:
        """What a kind of child holds besides the process; called once it is dead."""

    def describe_exit(self) -> str:
        """How it ended."""
        return describe_exit(self.returncode or 0)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} pid={self.pid} ready={self.ready} returncode={self.returncode}>"


class Front(Child):
    """A process that speaks a protocol to clients; it says how much of what it was told it acts upon."""

    def __init__(
        self,
        module: str,
        protocol: str,
        row: int,
        incarnation: int,
        on_record: Callable[[Front, Any, list[int]], None],
        on_exit: Callable[[Front], None],
    ) -> None:
        """``row``: its place among the fronts of that protocol, "http" or "grpc"."""
        super().__init__(module, front_name(protocol, row), incarnation, FromFront, on_record, on_exit)
        self.protocol = protocol
        self.row = row
        #: It was told to take clients.
        self.serves = False
        #: The edition it acts upon, and the one it was last asked about.
        self.seen = 0
        self._asked = -1
        #: When it was asked last, and since when it owes an answer; 0: it owes none (ns).
        self.asked_ns = 0
        self.owes_since_ns = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def ask(self, edition: int) -> None:
        """Asks it to say when it has seen everything sent before, which is that edition."""
        self.asked_ns = time.monotonic_ns()
        self.owes_since_ns = self.owes_since_ns or self.asked_ns
        self._asked = edition
        self.send(Told(edition))

    def saw(self, edition: int) -> None:
        """Its answer."""
        self.seen = max(self.seen, edition)
        if edition >= self._asked:
            self.owes_since_ns = 0
        for waited in [waited for waited in self._waiting if waited <= edition]:
            self._waiting.pop(waited).set_result(None)

    async def has_seen(self, edition: int) -> None:
        """Returns when it acts upon that edition, which was sent to it, or when it is dead."""
        if self.seen >= edition or not self.alive:
            return
        waiting = self._waiting.get(edition)
        if waiting is None:
            waiting = self._waiting[edition] = asyncio.get_running_loop().create_future()
            self.ask(edition)
        # Shared by all who wait: none of them may cancel it.
        await asyncio.shield(waiting)

    def release(self) -> None:
        for waiting in self._waiting.values():
            waiting.set_result(None)
        self._waiting.clear()


class Worker(Child):
    """A process that runs models on one device; it answers calls and shows a status page."""

    def __init__(
        self,
        module: str,
        name: str,
        incarnation: int,
        device: str,
        on_record: Callable[[Worker, Any, list[int]], None],
        on_exit: Callable[[Worker], None],
    ) -> None:
        super().__init__(module, name, incarnation, FromWorker, on_record, on_exit)
        self.device = device
        #: The isolated model that it is for; "": models share it.
        self.model = device_names.model_of(device)
        #: As of its ``Device``.
        self.memory_fraction = 0.0
        self.page: StatusPage | None = None
        #: What fronts look for its sequences in.
        self.sequences: SequencePage | None = None
        #: How many had begun there when it died.
        self.lost_sequences = 0
        #: Loads without an answer in their order, which is that in which it loads: name and version.
        self.owed: list[tuple[str, int]] = []
        #: Since when it has answered none (ns).
        self.load_progress_ns = 0
        #: How far it is, as it said last.
        self.loading: Loading | None = None
        #: Those that it has begun: name and version, and since when (ns).
        self._begun: list[tuple[str, int, int]] = []
        self._calls: dict[int, asyncio.Future[tuple[Reply, list[int]]]] = {}
        self._next_call = 1

    def send(self, record: Record, *fds: int) -> None:
        if isinstance(record, Load):
            # Behind others it waits its turn: the clock runs from the last answer then.
            if not self.owed:
                self.load_progress_ns = time.monotonic_ns()
            self.owed.append((record.name, record.version))
        super().send(record, *fds)

    def load_progressed(self, at: Loading) -> None:
        """A Loading came."""
        if not at.total and (at.name, at.version) not in {begun[:2] for begun in self._begun}:
            self._begun.append((at.name, at.version, time.monotonic_ns()))
        self.loading = at

    @property
    def oldest_load(self) -> tuple[str, int, int] | None:
        """What it has been loading for longest: name and version, and since when (ns)."""
        return self._begun[0] if self._begun else None

    def load_answered(self, name: str, version: int) -> None:
        """A Loaded came."""
        if (name, version) in self.owed:
            self.owed.remove((name, version))
        self._begun = [begun for begun in self._begun if begun[:2] != (name, version)]
        self.loading = None
        self.load_progress_ns = time.monotonic_ns()

    def describe_load(self) -> str:
        """``loading digits, 2 s``, ``compiling digits 3/16, 1 from the cache, 4 s``; "": it loads nothing."""
        if not self.owed:
            return ""
        seconds = (time.monotonic_ns() - self.load_progress_ns) / 1e9
        return f"{self.loading or Loading(*self.owed[0])}, {seconds:.0f} s"

    async def call(self, operation: Operation, *fds: int) -> tuple[bytes, list[int]]:
        """Asks and waits: the result and the descriptors that came with it, which the caller then owns.

        Raises: Unavailable: the worker died first.  Any ServingError that the worker answered.
        """
        if not self.ready or not self.alive:
            raise Unavailable(f"{self.name} is not running")
        call_id, self._next_call = self._next_call, self._next_call + 1
        answer = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        self.send(Call(call_id, operation), *fds)
        try:
            reply, received = await answer
        finally:
            # After a cancellation the reply may still come; ``answered`` then finds nobody and closes its descriptors.
            self._calls.pop(call_id, None)
        if reply.code:
            descriptors.close(received)
            raise from_code(reply.code, reply.message)
        return reply.result, received

    def answered(self, reply: Reply, fds: list[int]) -> None:
        """Hands a reply to whoever waits for it."""
        waiting = self._calls.get(reply.call_id)
        if waiting is None or waiting.done():
            descriptors.close(fds)
        else:
            waiting.set_result((reply, fds))

    def release(self) -> None:
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(Unavailable(f"{self.name} stopped before it answered"))
        if self.sequences is not None:
            states = [state for _, state, _ in self.sequences.sequences()]
            self.lost_sequences = states.count(SequenceState.BEGUN)
        for page in (self.page, self.sequences):
            if page is not None:
                page.close()
        self.page = self.sequences = None


def describe_exit(returncode: int) -> str:
    """``was killed by SIGSEGV``, ``exited with status 1``, of a status as Popen has it."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def front_name(protocol: str, row: int) -> str:
    """Of the post of that row."""
    return f"{protocol}-{row}"


class MissingParts:
    """What children of one kind go without: said to the log, once for all of them, as they are of one installation."""

    def __init__(self, what: str = IN_C) -> None:
        """``what``: begins the line in the log."""
        self._what = what
        self._said: tuple[str, ...] = ()

    def say(self, missing: tuple[str, ...]) -> None:
        """What a child goes without, as it reported."""
        if missing and missing != self._said:
            self._said = missing
            _log.warning("%s: %s", self._what, "; ".join(missing))
