"""Runs one child process of the supervisor: exchanges records with it, stops or kills it, and cleans up after its death.

The process may close its socket to the supervisor before it ends. Only its pidfd proves that it has ended and writes to no
shared memory any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tensord import __version__
from tensord.daemon.control.channel import ControlCalls, ControlChannel
from tensord.daemon.control.shared_counters import SharedCounters
from tensord.daemon.processes.spawned import Spawned
from tensord.shm import child_process, descriptors, device_names
from tensord.shm.channel import Channel
from tensord.shm.control_records import ChildReady, FromFront, FromWorker, Load, Loading, Start, StatePublished, Stop
from tensord.shm.errors import Unavailable
from tensord.shm.operations import Operation
from tensord.shm.record import Record, decoder
from tensord.shm.sequence_page import SequencePage, SequenceState
from tensord.shm.status_page import StatusPage

#: Begins the line in the log on ``ChildReady.missing``, and on ``ChildReady.jax_lacks``.
IN_C = "parts of tensord that are written in C are off"
OF_JAX = "this JAX lacks interfaces that are not public"

#: The reasons why a process died, as a label of metrics: closed, so that each count exists before the first death. "signal":
#: another signal.
CAUSES = (
    *("memory", "hung", "version", "exit", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGKILL", "SIGSEGV", "SIGTERM"),
    "signal",
)
#: Signals that a process's own code brings about; any other one was sent by somebody else.
_OWN_SIGNALS = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
)
_RESTART = "restart the daemon (systemctl restart tensord)"
_log = logging.getLogger(__name__)
#: Seconds in which a process that is about to be killed may write its stack.
_STACK_SECONDS = 0.2


class Child:
    """A child process of the supervisor, as the supervisor sees it: a front or a worker."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        incoming: Any,
        on_record: Callable[[Any, Any, list[int]], None],
        on_exit: Callable[[Any], None],
    ) -> None:
        """Stores the arguments. No process runs before ``adopt`` is called.

        Args:
          name: the name of the process, such as "http-0". A process that replaces a dead one has the same name.
          incarnation: the number of the process, which no other process ever has.
          incoming: the union of the record types that the process may send.
          on_record: called with this object, a record from the process and the record's descriptors.
          on_exit: called with this object once the process is gone.
        """
        self.name = name
        self.incarnation = incarnation
        #: True once it has reported ChildReady.
        self.ready = False
        #: The parts that it goes without, as it reported: a sentence each.
        self.missing: tuple[str, ...] = ()
        #: True once it was asked to stop, so that its death is no accident.
        self.stopping = False
        self.started_ns = 0
        #: Marks what it starts, see ``Spawned``.
        self.mark = ""
        #: The exit status as Popen has it; None while it runs.
        self.returncode: int | None = None
        self._incoming = incoming
        self._on_record = on_record
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        #: Memory into which it writes its stack when it dies.
        self._stack_fd = -1
        self._killing = False
        #: True once it was sent SIGKILL from here.
        self._killed = False
        #: True if the kernel killed it for want of memory.
        self.out_of_memory = False
        self._connection: ControlChannel | None = None
        #: The calls of the process's operations; gets its replies.
        self.calls = ControlCalls(self.send)

    def adopt(self, spawned: Spawned, options: bytes) -> None:
        """Takes over a process that ``spawn`` has started, and sends it a Start record.

        ``options``: the daemon's options as msgpack. If no file descriptor is free, kills the process and raises OSError.
        """
        channel = Channel(spawned.channel, decoder(self._incoming))
        self._connection = ControlChannel(channel, self._received, self._channel_closed)
        self._connection.start()
        try:
            self.send(Start(self.incarnation, self.name, msgspec.Raw(options)), spawned.stack_fd)
            self._pidfd = os.pidfd_open(spawned.process.pid)
        except OSError:
            self._connection.close()
            os.close(spawned.stack_fd)
            spawned.process.kill()
            spawned.process.wait()
            raise
        self._process, self._stack_fd, self.mark = spawned.process, spawned.stack_fd, spawned.mark
        self.started_ns = time.monotonic_ns()
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self.returncode is None

    def send(self, record: Record, *fds: int) -> None:
        """Queues a record for the process, with duplicates of the descriptors. If the process is gone, the record is lost."""
        if self._connection is not None:
            self._connection.send(record, *fds)

    def stop(self, grace_ns: int) -> None:
        """Asks the process to finish its work within ``grace_ns`` nanoseconds and to exit."""
        self.stopping = True
        self.send(Stop(max(0, grace_ns)))

    def kill(self, reason: str = "") -> None:
        """Kills the process with SIGKILL, without waiting for its end. ``on_exit`` is called when the process is gone.

        ``reason``: for the log, or "" to log nothing. With a reason, a ready process first gets 0.2 s to write its stack.
        """
        if not self.alive or (reason and self._killing):
            return
        if reason:
            self._killing = True
            _log.error("%s (process %d) %s: killing it", self.name, self.pid, reason)
            if self.ready:
                self._signal(child_process.STACK_SIGNAL)
                asyncio.get_running_loop().call_later(_STACK_SECONDS, self.kill)
                return
        self._killed = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # The pidfd is used: the pid may belong to another process by now.
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
        # An orderly child closes its channel by exiting, a moment before the pidfd is readable. Without the channel it is of
        # no use.
        if not self.stopping:
            asyncio.get_running_loop().call_later(1.0, self.kill, "closed its control channel")

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        if self._connection is not None:
            # What it said last may lie there still.
            self._connection.finish()
        os.close(self._pidfd)
        assert self._process is not None
        self.returncode = self._process.wait()
        for line in child_process.read_stack_report(self._stack_fd):
            _log.error("%s (process %d) died: %s", self.name, self.pid, line)
        os.close(self._stack_fd)
        self.release()
        self._on_exit(self)

    async def call(self, operation: Operation, *fds: int) -> tuple[bytes, list[int]]:
        """Calls an operation of the process. Returns the result, and the file descriptors that come with the result.

        The caller must close the returned descriptors. ``fds``: descriptors that are sent with the call.
        Raises Unavailable if the process is not ready or has ended, or dies before it answers. Raises ServingError if the
        operation fails.
        """
        if not self.ready or not self.alive:
            raise Unavailable(f"{self.name} is not running")
        return await self.calls.call(operation, *fds)

    async def result_of(self, operation: Operation, *fds: int, seconds: float | None = None) -> bytes:
        """Asks the process to run ``operation`` and returns the result. Closes any file descriptors that come with the result.

        ``fds``: descriptors that are sent with the call.
        ``seconds``: how long to wait at most. If it is None, the wait ends with the process.
        Raises Unavailable if the process died, or has not answered in time. Raises ServingError if the operation fails.
        """
        try:
            async with asyncio.timeout(seconds):
                result, received = await self.call(operation, *fds)
        except TimeoutError:
            raise Unavailable(f"{self.name} did not answer within {seconds:g} s") from None
        descriptors.close(received)
        return result

    def release(self) -> None:
        """Makes every call that waits for a reply raise Unavailable, because the process is dead."""
        self.calls.fail(Unavailable(f"{self.name} stopped before it answered"))

    @property
    def killed_by_others(self) -> bool:
        """Returns whether the process was ended by a SIGKILL that this object did not send."""
        return self.returncode == -signal.SIGKILL and not self._killed

    @property
    def ended_by_itself(self) -> bool:
        """Returns whether nobody killed the process: it exited, or its own code caused its final signal, such as SIGSEGV."""
        return self.returncode is not None and (self.returncode >= 0 or -self.returncode in _OWN_SIGNALS)

    @property
    def ended_by_work(self) -> bool:
        """Returns whether the work of the process may have ended it: it ended by itself, hung, or ran out of memory.

        Returns False while the process runs, and if the process had been asked to stop.
        """
        return not self.alive and not self.stopping and (self.ended_by_itself or self._killing or self.out_of_memory)

    @property
    def is_of_other_version(self) -> bool:
        """Returns whether the process ended at its start because another version of tensord was installed meanwhile."""
        return self.returncode == child_process.OTHER_VERSION and not self.ready

    @property
    def cause(self) -> str:
        """Returns why the process died, one of ``CAUSES``.

        "memory": the kernel killed the process for want of memory. "hung": ``kill`` was called with a reason. "version":
        another version of tensord was installed. "exit": the process exited by itself. The name of a signal, such as "SIGSEGV":
        this signal ended the process. "signal": a signal that is not in ``CAUSES`` ended the process.
        """
        if self.out_of_memory:
            return "memory"
        if self._killing:
            return "hung"
        if self.is_of_other_version:
            return "version"
        if (self.returncode or 0) >= 0:
            return "exit"
        name = _signal_name(-(self.returncode or 0))
        return name if name in CAUSES else "signal"

    def describe_exit(self) -> str:
        """Returns how the process ended, such as "was killed by SIGSEGV"."""
        if self.is_of_other_version:
            ours = __version__
            return f"is of another version of tensord, installed since this daemon ({ours}) was started: {_RESTART}"
        for_memory = ", for want of memory (its control group's limit, or the host's)" if self.out_of_memory else ""
        return describe_exit(self.returncode or 0) + for_memory

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} pid={self.pid} ready={self.ready} returncode={self.returncode}>"


class FrontProcess(Child):
    """A front process as the supervisor sees it.

    The supervisor numbers the records that it publishes to all fronts. Such a number is an "edition", which a front acknowledges.
    """

    def __init__(
        self,
        protocol: str,
        row: int,
        counters: SharedCounters,
        incarnation: int,
        on_record: Callable[[FrontProcess, Any, list[int]], None],
        on_exit: Callable[[FrontProcess], None],
    ) -> None:
        """Stores the arguments. No process runs yet.

        Args:
          protocol: "http" or "grpc".
          row: the number of the front, from 0, among the fronts of this protocol.
          counters: the counters of these fronts.
          incarnation: the number of the process, which no other process ever has.
          on_record: called with this object, a record from the front and the record's descriptors.
          on_exit: called with this object once the process is gone.
        """
        super().__init__(front_name(protocol, row), incarnation, FromFront, on_record, on_exit)
        self.protocol = protocol
        self.row = row
        self._counters = counters
        self._sent = 0
        #: True once it was asked to take clients.
        self.serves = False
        #: The edition it acknowledged last, and the one it was last asked about.
        self.acknowledged = 0
        self._asked = -1
        #: When it was last asked, and since when it owes an answer; 0: it owes none (ns).
        self.asked_ns = 0
        self.owes_since_ns = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def send(self, record: Record, *fds: int) -> None:
        super().send(record, *fds)
        # Before it leaves, and before any other process can know of it. The row of a dead front is its replacement's.
        if self.returncode is None:
            self._sent += 1
            self._counters.note_sent(self.row, self._sent)

    def ask(self, edition: int) -> None:
        """Asks the front to acknowledge all published records up to the number ``edition``. Call this after they were sent."""
        self.asked_ns = time.monotonic_ns()
        self.owes_since_ns = self.owes_since_ns or self.asked_ns
        self._asked = edition
        self.send(StatePublished(edition))

    def acknowledge(self, edition: int) -> None:
        """Notes that the front has applied all published records up to the number ``edition``."""
        self.acknowledged = max(self.acknowledged, edition)
        if edition >= self._asked:
            self.owes_since_ns = 0
        for waited in [waited for waited in self._waiting if waited <= edition]:
            self._waiting.pop(waited).set_result(None)

    async def wait_acknowledged(self, edition: int) -> None:
        """Waits until the front has acknowledged all published records up to the number ``edition``, or is dead."""
        if self.acknowledged >= edition or not self.alive:
            return
        waiting = self._waiting.get(edition)
        if waiting is None:
            waiting = self._waiting[edition] = asyncio.get_running_loop().create_future()
            self.ask(edition)
        # The future is shared by all who wait: none of them may cancel it.
        await asyncio.shield(waiting)

    def release(self) -> None:
        super().release()
        for waiting in self._waiting.values():
            waiting.set_result(None)
        self._waiting.clear()


class WorkerProcess(Child):
    """A worker process as the supervisor sees it."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        device: str,
        on_record: Callable[[WorkerProcess, Any, list[int]], None],
        on_exit: Callable[[WorkerProcess], None],
    ) -> None:
        super().__init__(name, incarnation, FromWorker, on_record, on_exit)
        self.device = device
        #: The isolated model that it is for; "": models share it.
        self.model = device_names.model_of(device)
        #: The part of its GPU's memory, as in ``Device``.
        self.memory_fraction = 0.0
        self.page: StatusPage | None = None
        #: True once every front has a lane to it.
        self.joined = False
        #: The page by which fronts find its sequences.
        self.sequences: SequencePage | None = None
        #: The number of sequences that had begun there when it died.
        self.lost_sequences = 0
        #: Loads that it has not answered, as name and version, in the order in which it loads them.
        self.owed: list[tuple[str, int]] = []
        #: When it last answered a load, or began the first one (ns).
        self.load_progress_ns = 0
        #: The progress of its load that it last reported.
        self.loading: Loading | None = None
        #: Loads that it has begun: name and version, and since when (ns).
        self._begun: list[tuple[str, int, int]] = []

    def send(self, record: Record, *fds: int) -> None:
        if isinstance(record, Load):
            # A load behind others waits: its clock runs from the last answer then.
            if not self.owed:
                self.load_progress_ns = time.monotonic_ns()
            self.owed.append((record.name, record.version))
        super().send(record, *fds)

    def load_progressed(self, at: Loading) -> None:
        """Stores the progress of a load, as the worker reported it."""
        if not at.total and (at.name, at.version) not in {begun[:2] for begun in self._begun}:
            self._begun.append((at.name, at.version, time.monotonic_ns()))
        self.loading = at

    @property
    def oldest_load(self) -> tuple[str, int, int] | None:
        """Returns the load that has run for longest: model, version, and its start in ns of CLOCK_MONOTONIC.

        Returns None if no load runs.
        """
        return self._begun[0] if self._begun else None

    def load_answered(self, name: str, version: int) -> None:
        """Notes that the load of this model version has ended, with success or failure."""
        if (name, version) in self.owed:
            self.owed.remove((name, version))
        self._begun = [begun for begun in self._begun if begun[:2] != (name, version)]
        self.loading = None
        self.load_progress_ns = time.monotonic_ns()

    def describe_load(self) -> str:
        """Describes how far the worker has come with loading a model, such as ``compiling digits 3/16, 4 s``.

        Returns "" if the worker is loading no model.
        """
        if not self.owed:
            return ""
        seconds = (time.monotonic_ns() - self.load_progress_ns) / 1e9
        return f"{self.loading or Loading(*self.owed[0])}, {seconds:.0f} s"

    def release(self) -> None:
        super().release()
        if self.sequences is not None:
            states = [state for _, state, _ in self.sequences.sequences()]
            self.lost_sequences = states.count(SequenceState.BEGUN)
        for page in (self.page, self.sequences):
            if page is not None:
                page.close()
        self.page = self.sequences = None


def describe_exit(returncode: int) -> str:
    """Describes a return code of ``subprocess.Popen``, such as ``was killed by SIGSEGV`` or ``exited with status 1``."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    return f"was killed by {_signal_name(-returncode)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def front_name(protocol: str, row: int) -> str:
    """Returns the name of the front number ``row`` of a protocol, such as "http-0"."""
    return f"{protocol}-{row}"


class MissingParts:
    """Logs warnings about optional parts of the program, such as a C extension, that are missing in a child process."""

    def __init__(self, what: str = IN_C) -> None:
        """Makes an object that logs warnings about parts of the program that could not be imported.

        ``what``: the beginning of each warning, before the list of parts that are missing.
        """
        self._what = what
        self._said: tuple[str, ...] = ()

    def say(self, missing: tuple[str, ...]) -> None:
        """Logs the optional parts that a child process lacks, unless the last warning was the same. ``missing``: the parts."""
        if missing and missing != self._said:
            self._said = missing
            _log.warning("%s: %s", self._what, "; ".join(missing))
