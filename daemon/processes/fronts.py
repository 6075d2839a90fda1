"""Starts the front processes, and publishes the state of the daemon to all of them. A protocol may have several fronts.

A client that asked a front for a change, such as a load, gets the answer only after every serving front has acknowledged the
change. A new front serves clients only once it has acknowledged the whole state of the daemon.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensord.config.options import Grpc, Http, Options
from tensord.daemon.control.shared_counters import SharedCounters
from tensord.daemon.processes import listening
from tensord.daemon.processes.child import FrontProcess, MissingParts, front_name
from tensord.daemon.processes.listening import Listener, ListenError
from tensord.daemon.processes.process_slots import retried
from tensord.daemon.processes.spawned import spawn
from tensord.shm import descriptors
from tensord.shm.control_records import ChildReady, ControlCall, Reply, Serve, StateAcknowledged
from tensord.shm.record import Record

_log = logging.getLogger(__name__)
#: The most fronts of a protocol, unless more are asked for: each needs memory, and a place in every worker.
_MOST_AUTOMATIC = 8


class Fronts:
    """Owns the listening sockets and the front processes, and publishes the daemon's state to them."""

    def __init__(
        self,
        programs: Mapping[str, str],
        devices: Sequence[str],
        options: Callable[[], Options],
        next_incarnation: Callable[[], int],
        started: Callable[[FrontProcess], None],
        said: Callable[[FrontProcess, Record, list[int]], None],
        died: Callable[[FrontProcess], None],
    ) -> None:
        """Stores the arguments. No front runs yet.

        Args:
          programs: the Python module that a front runs, by protocol.
          devices: the workers' devices when the daemon starts, to choose the number of fronts if ``processes`` is "auto".
          options: returns the options that apply now.
          next_incarnation: returns a number that no process has had, for a new process.
          started: called with each new front, so that the caller can send it the daemon's state.
          said: called with a front, a record from this front and the record's descriptors, which ``said`` must close. Not
          called for the records Reply and StateAcknowledged.
          died: called with each front that has ended.
        """
        self._options = options
        self._next_incarnation = next_incarnation
        self._started, self._said, self._died = started, said, died
        #: The number of fronts of a protocol that is to have as many as suit the host.
        self._automatic = automatic(len(os.sched_getaffinity(0)), devices)
        self.by_incarnation: dict[int, FrontProcess] = {}
        self._programs = programs
        #: The listening sockets of each protocol.
        self._listeners: dict[str, list[Listener]] = {}
        self._counters: dict[str, SharedCounters] = {}
        self._missing = MissingParts()
        #: First fronts that are still to be started, by protocol and row.
        self._unstarted: list[tuple[str, int]] = []
        #: Counts everything that was published.
        self._edition = 0

    # --------------------------------------------------------------------------------------------------------- starting

    def listen(self, environment: Mapping[str, str], beside: Path | None = None) -> None:
        """Binds the listening sockets of each protocol, or takes over the sockets that the service manager passed.

        Args:
          environment: holds the variables with which the service manager passes sockets, such as LISTEN_FDS.
          beside: the path of a further Unix socket for HTTP, or None. If it cannot be bound, a warning is logged.
        Raises ListenError if another socket cannot be bound or taken over. Raises OSError if no memory or no file descriptor
        is free for the ``SharedCounters`` of the fronts. Then ``close`` must be called.
        """
        options = self._options()
        self._listeners = listening.inherited(environment)
        listening.bind_each(
            functools.partial(self._listen, "http", options.http),
            functools.partial(self._listen, "grpc", options.grpc),
        )
        if beside is not None and "http" in self._listeners:
            self._listen_beside(beside)
        for protocol in self._listeners:
            self._counters[protocol] = SharedCounters.create()

    def _listen(self, protocol: str, section: Http | Grpc) -> None:
        """Binds the sockets of a protocol, unless the service manager passed some."""
        if not section.enabled and protocol in self._listeners:
            raise ListenError(f"socket activation: a socket for {protocol} was passed, but {protocol}.enabled is false")
        if section.enabled and protocol not in self._listeners:
            with listening.named(protocol):
                self._listeners[protocol] = listening.listen_all(
                    section.address, section.port, protocol, section.socket_mode
                )

    def _listen_beside(self, path: Path) -> None:
        address = f"unix:{path}"
        if address in self.urls("http"):
            return
        try:
            self._listeners["http"].append(listening.listen(address, 0, "http", self._options().http.socket_mode))
        except ListenError as error:
            _log.warning("clients find no HTTP beside their socket: %s", error)

    def start_all(self, at_once: int) -> None:
        """Starts the fronts of every protocol, ``at_once`` at a time.

        The next front is started when a front is ready or has died.
        Raises OSError if no memory, process id or file descriptor is free.
        """
        self._unstarted = [(protocol, row) for protocol in self._listeners for row in range(self._rows(protocol))]
        for _ in range(at_once):
            self._start_next()

    def _start_next(self) -> None:
        if self._unstarted:
            self.start(*self._unstarted[0])
            del self._unstarted[0]

    def _go_on(self) -> None:
        retried("another front cannot be started", self._start_next)

    def _rows(self, protocol: str) -> int:
        options = self._options()
        asked = options.http.processes if protocol == "http" else options.grpc.processes
        return self._automatic if asked == "auto" else asked

    def start(self, protocol: str, row: int) -> None:
        """Starts the front number ``row`` of a protocol. Raises OSError if no memory, process id or file descriptor is free."""
        counters = self._counters[protocol]
        front = FrontProcess(protocol, row, counters, self._next_incarnation(), self._received, self._exited)
        sockets = [listener.socket.fileno() for listener in self._listeners[protocol]]
        words = ["--listen-fds", ",".join(map(str, sockets)), "--counters-fd", str(counters.fd), "--row", str(row)]
        process = spawn(self._programs[protocol], words, {}, [*sockets, counters.fd])
        front.adopt(process, msgspec.msgpack.encode(of_one(self._options(), self._rows(protocol))))
        self.by_incarnation[front.incarnation] = front
        self._started(front)
        front.ask(self._edition)

    # ---------------------------------------------------------------------------------------------------------- telling

    def publish(self, record: Record, *fds: int) -> None:
        """Sends every front a record, with duplicates of ``fds``. ``settled`` waits until the fronts have acknowledged it."""
        self.publish_each(lambda front: front.send(record, *fds))

    def publish_each(self, send: Callable[[FrontProcess], None]) -> None:
        """Calls ``send`` with each front, to send one record to all. Counts this as one published record."""
        self._edition += 1
        for front in self.by_incarnation.values():
            send(front)

    async def settled(self) -> None:
        """Waits until every serving front has acknowledged all records that the daemon published to fronts before this call."""
        edition = self._edition
        behind = [front for front in self.by_incarnation.values() if front.serves and front.acknowledged < edition]
        await asyncio.gather(*(front.wait_acknowledged(edition) for front in behind))

    def ask_idle(self, now_ns: int, interval_ns: int) -> None:
        """Asks each front for an acknowledgement, so that the watchdog notices a front whose event loop hangs.

        A front is not asked while it owes an acknowledgement, or within ``interval_ns`` after it was asked. If ``interval_ns`` is
        0, no front is asked. ``now_ns``: the time of CLOCK_MONOTONIC.
        """
        for front in self.by_incarnation.values():
            if interval_ns and front.serves and not front.owes_since_ns and now_ns - front.asked_ns > interval_ns:
                front.ask(front.acknowledged)

    def _received(self, front: FrontProcess, record: Any, fds: list[int]) -> None:
        if isinstance(record, ControlCall):
            return self._said(front, record, fds)
        if isinstance(record, Reply):
            return front.calls.answered(record, fds)
        descriptors.close(fds)
        match record:
            case StateAcknowledged(edition):
                front.acknowledge(edition)
                if front.serves:
                    return None
                if edition < self._edition:
                    front.ask(self._edition)
                else:
                    front.serves = True
                    front.send(Serve())
            case ChildReady(missing=missing):
                self._said(front, record, [])
                self._missing.say(missing)
                urls = " and ".join(self.urls(front.protocol))
                _log.info("%s (process %d) is up, serving %s on %s", front.name, front.pid, front.protocol, urls)
                self._go_on()
            case _:
                self._said(front, record, [])
        return None

    # ----------------------------------------------------------------------------------------------------------- ending

    def _exited(self, front: FrontProcess) -> None:
        del self.by_incarnation[front.incarnation]
        self._counters[front.protocol].clear(front.row)
        self._died(front)
        if not front.ready:
            self._go_on()

    def stop_listening(self) -> None:
        """Closes the supervisor's listening sockets. Fronts have duplicates, and accept connections until they stop."""
        self._unstarted.clear()
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.close()

    def close(self) -> None:
        """Closes the listening sockets and the ``SharedCounters``. Call when all fronts have ended. May be called again."""
        self.stop_listening()
        for counters in self._counters.values():
            counters.close()
        self._counters.clear()

    # ------------------------------------------------------------------------------------------------------------ others

    def missing(self) -> list[str]:
        """Returns the names of the fronts that are not ready, or that died and are not replaced yet."""
        return sorted(self.slots().keys() - {front.name for front in self if front.ready})

    def __iter__(self) -> Iterator[FrontProcess]:
        return iter(self.by_incarnation.values())

    def slots(self) -> dict[str, str]:
        """Returns the name ("http-0") and the protocol of every front that should run."""
        return {
            front_name(protocol, row): protocol for protocol in self._listeners for row in range(self._rows(protocol))
        }

    def urls(self, protocol: str) -> list[str]:
        """Returns the URLs of a protocol as clients see them. The list is empty if the protocol is not served."""
        urls = [listener.url for listener in self._listeners.get(protocol, ()) if listener.url is not None]
        http = self._options().http
        if http.use_tls or http.mutual_tls:
            urls = [url.replace("http://", "https://", 1) for url in urls]
        return urls

    def counters(self, name: str) -> tuple[SharedCounters, int]:
        """Returns the ``SharedCounters`` with the front ``name`` ("http-0"), and the number of the row with its counts."""
        protocol, _, row = name.rpartition("-")
        return self._counters[protocol], int(row)

    def connections(self, front: FrontProcess) -> int:
        """Returns how many client connections a front has now."""
        return self._counters[front.protocol].connections(front.row)


def automatic(cores: int, devices: Sequence[str]) -> int:
    """Returns how many fronts a protocol has if the option ``processes`` is "auto".

    ``cores``: how many cores the daemon may use. ``devices``: the devices of the workers.
    """
    gpus = sum(device.startswith("cuda") for device in devices)
    wanted = (cores - gpus) // 8 if gpus else cores // 16
    return max(1, min(_MOST_AUTOMATIC, wanted))


def of_one(options: Options, count: int) -> Options:
    """Returns the options for one of ``count`` fronts of a protocol.

    The limits on requests in flight and on bytes of requests are divided by ``count``. The divided limit on bytes has room for
    the largest allowed request if the undivided limit has room for this request.
    """
    http, grpc = options.http, options.grpc
    if count == 1:
        return options
    replace = msgspec.structs.replace
    return replace(
        options,
        requests=replace(options.requests, max_in_flight=_part(options.requests.max_in_flight, count, 1)),
        http=replace(http, max_collected_byte_size=_part(http.max_collected_byte_size, count, http.max_body_byte_size)),
        grpc=replace(
            grpc, max_receiving_byte_size=_part(grpc.max_receiving_byte_size, count, grpc.max_message_byte_size)
        ),
    )


def _part(total: int, count: int, least: int) -> int:
    return min(total, max(-(-total // count), least))
