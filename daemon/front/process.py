"""Runs the process of a front, and carries out the messages that the daemon's supervisor process sends to the front.

The first message is Start. After the message Serve, the front accepts clients and sends ChildReady to the supervisor. After the
message Stop, the front accepts no more clients, answers the requests that have arrived, and exits with status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import logging
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec
import uvloop

from tensord.config import log
from tensord.config.options import Log, Options
from tensord.daemon.control.certificates import Certificates
from tensord.daemon.control.channel import ControlCalls, ControlChannel
from tensord.daemon.control.shared_counters import SharedCounters
from tensord.daemon.front.acceptor import Acceptor
from tensord.daemon.front.answered import Answered
from tensord.daemon.front.each import call_each
from tensord.daemon.front.endpoints import Endpoints
from tensord.daemon.front.lingering_close import LingeringClose
from tensord.daemon.front.opening import Opening
from tensord.daemon.submit.model_states import ModelStates
from tensord.daemon.submit.submitter import Submitter
from tensord.shm import child_process, descriptors
from tensord.shm.channel import Channel
from tensord.shm.control_records import (
    ChildReady,
    ControlCall,
    LaneClosed,
    LaneOpened,
    LogChanged,
    ModelGone,
    ModelState,
    Readiness,
    RegionPlace,
    Reply,
    RequestsRefused,
    Serve,
    Start,
    StateAcknowledged,
    StatePublished,
    Stop,
    ToFront,
    TraceChanged,
    TraceCleared,
    TracesEnded,
    WorkerFenced,
)
from tensord.shm.errors import Unsupported
from tensord.shm.extensions import missing
from tensord.shm.operations import AwaitIdle, ConnectionRecords, RecentErrors, TraceExemplars
from tensord.shm.record import decoder
from tensord.shm.running_time import RunningTime
from tensord.shm.trace_file import TraceFiles
from tensord.shm.tracer import Tracer

_log = logging.getLogger(__name__)
#: Enough for a few requests of some MiB as JSON: the text, its values, the text of the answer.
_KEPT_BYTE_SIZE = 64 << 20
#: Seconds between two looks whether anything is in flight, when the supervisor asks.
_IDLE_POLL_SECONDS = 0.02
#: Records that may wait for the supervisor before traces are dropped.
_MAX_WAITING = 64
#: The most connections that are described.
_MAX_CONNECTIONS = 1000
_CHECK_SECONDS = 1.0
#: A pause after which everything has been read that had come before it: the loop polls between any two timers.
_READ_SECONDS = 0.001
_DRAIN_POLL_SECONDS = 0.02
#: Nanoseconds in which a request may still be on its way on a connection that looks idle, once a front is to stop.
_LAST_CALL_NS = 250_000_000


@dataclass(frozen=True, slots=True)
class FrontPlace:
    """Holds a front's listening sockets, the counters of all fronts of its protocol, and ``row``, the front's index in them."""

    listeners: tuple[socket.socket, ...]
    counters: SharedCounters
    row: int


class Front(ABC):
    """Base class of the HTTP and gRPC fronts. A front serves clients from ``open`` to ``drain``."""

    #: "http" or "grpc".
    protocol: ClassVar[str]
    #: Both exist from Start on, the supervisor's first record.
    tracer: Tracer
    submitter: Submitter
    #: Exists once it is open.
    answered: Answered | None = None
    #: The clients' connections, and those that wait for their clients to close; set by ``open``.
    open_connections: Collection[Any]
    lingering: LingeringClose
    #: The time by which clients are late; set by ``open``.
    clock: RunningTime
    #: Modules written in C -> what the front does without them.
    parts: ClassVar[Mapping[str, str]] = {}

    def __init__(self, control: socket.socket, place: FrontPlace) -> None:
        self.place = place
        self.counters = place.counters.front(place.row)
        self._connection = ControlChannel(Channel(control, decoder(ToFront)), self._record, self._orphaned)
        self._started: asyncio.Future[Start] = asyncio.get_running_loop().create_future()
        self._serve: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()
        self.calls = ControlCalls(self._connection.send)
        self.table = ModelStates()

    async def run(self) -> None:
        """Serves clients until the supervisor asks the front to stop. Then sends the remaining answers, and returns."""
        self._connection.start()
        start = await self._started
        # Before it has the published state, it would refuse what another front has just answered for.
        await asyncio.wait((self._serve, self._stop), return_when=asyncio.FIRST_COMPLETED)
        if self._serve.done():
            await self._serve_until_stopped(start)
        self.submitter.close()
        self.tracer.close()
        while self._connection.waiting:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        self._connection.close()

    async def _serve_until_stopped(self, start: Start) -> None:
        options = msgspec.msgpack.decode(start.options, type=Options)
        endpoints = Endpoints(self.table, self.calls, options)
        await self.open(options, endpoints)
        # The garbage collector need not look again at what was imported and built: it lives as long as the process.
        gc.collect()
        gc.freeze()
        gc.enable()
        self._connection.send(ChildReady(start.incarnation, missing(self.parts)))
        stop = await self._stop
        endpoints.stopping = True
        await self.drain(stop.grace_ns)

    @abstractmethod
    async def open(self, options: Options, endpoints: Endpoints) -> None:
        """Starts to serve clients. ``endpoints``: answers all requests but inference."""

    def accept(
        self, certificates: Certificates, opening: Opening, open_: Callable[[socket.SocketType, str], None]
    ) -> None:
        """Starts to accept connections, and to check the deadlines of open connections.

        Args:
          certificates: the TLS certificates. Their files are read again when they change.
          opening: carries out TLS handshakes on accepted sockets, and knows how many handshakes are under way.
          open_: is called with each accepted socket and the name of the client (``Peer.owner``). It begins to serve the client.
        """
        self._certificates = certificates
        self._acceptor = Acceptor(self.place.listeners, self.counters, open_, opening.pending)
        self._acceptor.start()
        self._check = asyncio.create_task(self._check_connections())

    async def _check_connections(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now = self.clock.look()
            # What has come by now is read first: a client is not late because this process did not run.
            await asyncio.sleep(_READ_SECONDS)
            checks = (partial(each.check, now) for each in [*self.open_connections, self.lingering])
            looks = self._certificates.look, self.submitter.refusals.look
            call_each([*looks, *checks], "a check that is made each second")

    async def drain(self, grace_ns: int) -> None:
        """Stops accepting connections, and ends each open connection once its client has all answers.

        Connections that are still open after ``grace_ns`` nanoseconds are closed at once. Returns when all have ended.
        """
        now, connections = time.monotonic_ns(), self.open_connections
        deadline, last_call = now + grace_ns, now + min(_LAST_CALL_NS, grace_ns)
        await self._acceptor.close(min(_LAST_CALL_NS, grace_ns) / 1e9)
        at_once = False
        while (connections or self.lingering) and (now := time.monotonic_ns()) < deadline:
            for connection in list(connections):
                self.end(connection, at_once)
            # From the next look on: what had come by now is read before, however late this process runs.
            at_once = now >= last_call
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        if connections:
            _log.warning("%d connections were cut at the end of the grace period", len(connections))
        # Each leaves with its requests, whose traces end then, behind TLS some iterations later. A handshake may bring another.
        while connections:
            for connection in list(connections):
                connection.abort()
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        self._check.cancel()

    @abstractmethod
    def end(self, connection: Any, at_once: bool) -> None:
        """Ends a connection because the front stops. Called repeatedly until the connection has ended.

        If ``at_once`` is False, the client is told by GOAWAY, or in an HTTP response, that the connection will end.
        If ``at_once`` is True, new requests are refused, and the connection closes once all accepted requests are answered.
        """

    @abstractmethod
    def connections(self) -> Iterator[dict[str, Any]]:
        """Yields a description of each open connection for operators."""

    def _record(self, record: Any, fds: list[int]) -> None:
        """Carries out a message from the supervisor. ``fds``: the file descriptors that came with the message."""
        self.counters.read += 1
        match record:
            case Start():
                for fd in fds:
                    child_process.enable_stack_report(fd)
                options = msgspec.msgpack.decode(record.options, type=Options)
                log.configure(options.log, record.name)
                files = TraceFiles(options.trace.max_byte_size, options.trace.max_files)
                hand_over = self._hand_over if options.trace.otlp else None
                self.tracer = Tracer(record.incarnation, files, options.metrics.buckets, hand_over, self.protocol)
                self.submitter = Submitter(
                    record.incarnation,
                    options,
                    self.table,
                    self.place.row,
                    self.counters,
                    lambda worker: self._connection.send(LaneClosed(worker)),
                )
                self._started.set_result(record)
            case Serve():
                self._serve.set_result(None)
            case StatePublished(edition):
                self._connection.send(StateAcknowledged(edition))
            case Stop():
                if not self._stop.done():
                    self._stop.set_result(record)
            case Reply():
                self.calls.answered(record, fds)
            case ModelState() | ModelGone():
                self.submitter.model_changed(record)
            case Readiness():
                self.table.judge(record)
            case RegionPlace():
                self.submitter.region_placed(record)
            case RequestsRefused(refused):
                self.submitter.refuse(refused)
            case ControlCall():
                asyncio.get_running_loop().create_task(self._answer(record))
            case LaneOpened():
                self.submitter.open_lane(record, fds)
            case WorkerFenced():
                self.submitter.fence(record)
            case TraceChanged():
                self.tracer.changed(record, fds)
            case TraceCleared():
                self.tracer.cleared(record)
            case LogChanged(name, changed):
                settings = msgspec.msgpack.decode(changed, type=Log)
                log.configure(settings, name)
                if self.answered is not None:
                    self.answered.log_every(settings.access)
        self.submitter.look_again()

    async def _answer(self, call: ControlCall) -> None:
        """Carries out a call of the supervisor and sends the reply."""
        result = b""
        match call.operation:
            case ConnectionRecords():
                result = msgspec.json.encode(list(itertools.islice(self.connections(), _MAX_CONNECTIONS)))
            case RecentErrors():
                result = msgspec.json.encode([] if self.answered is None else self.answered.recent())
            case TraceExemplars():
                result = msgspec.json.encode(self.tracer.exemplars.told())
            case AwaitIdle():
                while self.submitter.in_flight() or not all(each.asks_nothing for each in self.open_connections):
                    await asyncio.sleep(_IDLE_POLL_SECONDS)
            case other:
                message = f"a front does not answer {type(other).__name__}"
                self._connection.send(Reply(call.call_id, Unsupported.code, message))
                return
        self._connection.send(Reply(call.call_id, result=result))

    def _hand_over(self, traces: TracesEnded) -> bool:
        """Sends traces to the supervisor. Returns False, and drops the traces, if too many messages wait for the supervisor."""
        if self._connection.waiting >= _MAX_WAITING:
            self.counters.drop_traces(len(traces.traces))
            return False
        self._connection.send(traces)
        return True

    def _orphaned(self) -> None:
        # Nobody else would stop this process.
        os._exit(1)


def main(program: str, description: str, make: Callable[[socket.socket, FrontPlace], Front]) -> None:
    """Runs the front process ``program`` until it stops.

    ``make``: creates the front from its socket to the supervisor and its ``FrontPlace``.
    """
    child_process.end_if_other_version()
    child_process.die_with_parent()
    descriptors.raise_limit()
    child_process.keep_freed_memory(_KEPT_BYTE_SIZE)
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--listen-fds", required=True, help="comma-separated")
    parser.add_argument("--counters-fd", type=int, required=True)
    parser.add_argument("--row", type=int, required=True)
    arguments = parser.parse_args()
    child_process.ignore_group_signals()

    async def run() -> None:
        listeners = tuple(socket.socket(fileno=int(fd)) for fd in arguments.listen_fds.split(","))
        place = FrontPlace(listeners, SharedCounters(arguments.counters_fd), arguments.row)
        await make(socket.socket(fileno=arguments.control_fd), place).run()

    uvloop.run(run())
