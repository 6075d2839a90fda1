"""Provides a front's connection without client sockets: bytes that arrive are passed to it, bytes that leave are kept.

    test ─▶ Connection ─▶ Submitter ══ lane ══ WorkerLane, answered by the test     (of gRPC: tests.work.grpc_connection)

All but the transport is real. The event loop is asyncio's, so that every step can be taken by itself.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tensord.config.options import Expert, Options
from tensord.daemon.control.shared_counters import SharedCounters
from tensord.daemon.http.connection import Http1Connection
from tensord.daemon.http.serving import HttpServing
from tensord.daemon.submit.model_states import ModelStates
from tensord.shm.channel import pair
from tensord.shm.control_records import LaneOpened, ModelState
from tensord.shm.lane import WorkerLane
from tensord.shm.messages import Prepare, RequestRecord, TraceContext
from tensord.shm.sequence_page import SequenceKeys, SequencePage
from tensord.shm.status_page import StatusPage
from tensord.shm.trace_file import TraceFiles
from tensord.shm.tracer import Tracer
from tests.fakes import CalledBack, WholeRequests, complete_numbered, submitter
from tests.records import WholeAnswer, WholeRequest
from tests.work.counter import Work

MIB = 1 << 20
#: The worker has so many sequences of the model ``sumseq``, with ids from there on.
SEQUENCES, FIRST_SEQUENCE = 16, 1000
#: The front never looks for an answer instead of sleeping: how often it would look depends on the machine.
OPTIONS = Options(expert=Expert(spin_us=0))
#: What a read of the transport takes at most, as uvloop's.
_READ = 256_000
#: Turns of the loop that are more than enough for anything here.
_TURNS = 8


class KeptTransport(asyncio.Transport):
    """A transport that keeps what is written, and passes bytes to its protocol as uvloop does."""

    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self._protocol = protocol
        #: Pieces of each write; one write is one system call.
        self.writes: list[list[bytes | memoryview]] = []
        self.reads = 0

    def arrive(self, content: bytes) -> None:
        """Passes bytes from the client to the protocol, in as many reads as its buffers need."""
        left = memoryview(content)
        while len(left):
            self.reads += 1
            if isinstance(self._protocol, asyncio.BufferedProtocol):
                room = memoryview(self._protocol.get_buffer(-1)).cast("B")
                size = min(len(room), len(left))
                room[:size] = left[:size]
                left = left[size:]
                self._protocol.buffer_updated(size)
            else:
                piece, left = bytes(left[:_READ]), left[_READ:]
                self._protocol.data_received(piece)

    def write(self, data: Any) -> None:
        self.writes.append([data])

    def writelines(self, list_of_data: Any) -> None:
        self.writes.append(list(list_of_data))

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class LaneBench(ABC):
    """A front, one worker's end of a lane, and connections. Made and used inside a running event loop."""

    #: What connections are made with.
    transport: type[KeptTransport] = KeptTransport

    def __init__(self, options: Options = OPTIONS) -> None:
        self.table = ModelStates()
        self.submitter = submitter(options, self.table, 1)
        self.page = StatusPage.create()
        self.sequences = SequencePage.create(SEQUENCES)
        ours, theirs = pair()
        arenas = options.arenas
        self.worker = WorkerLane(theirs, arenas.byte_size, arenas.max_byte_size, arenas.keep_byte_size)
        self._whole = WholeRequests()
        pages = [os.dup(self.page.fd), os.dup(self.sequences.fd)]
        self.submitter.open_lane(LaneOpened(7, "cpu:0"), [ours.detach(), *pages])
        for name in ("addsub", "identity", "subadd"):
            self.submitter.model_changed(ModelState(name, 1, "READY", workers=(7,), metadata=b"{}", config=b"{}"))
        # A name as long as another one's.
        self.submitter.model_changed(
            ModelState("sumseq", 1, "READY", workers=(7,), metadata=b"{}", config=b"{}", sticky=True)
        )
        for number in range(SEQUENCES):
            key = SequenceKeys("sumseq", 1).key(FIRST_SEQUENCE + number)
            self.sequences.begin(key, self.sequences.admit(key, 1))
        self.counters = SharedCounters.create()
        self.transports: list[KeptTransport] = []
        #: Requests that a datagram brought, by number or as they are, of all that were answered.
        self.by_number: list[bool] = []

    @abstractmethod
    def connect(self) -> KeptTransport:
        """Returns the transport of a new connection, and adds it to ``transports``."""

    def answers(self, transport: KeptTransport) -> int:
        """Returns how many writes with answers a transport has kept."""
        return len(transport.writes)

    async def occupy(self) -> None:
        """Gives the worker a request that it does not answer."""
        record = WholeRequest(self.submitter.next_id(), "addsub", 0, ()).record
        self.submitter.send(CalledBack(on_answer=lambda *_: None, record=record))
        await asyncio.sleep(0)
        assert self.worker.receive() == [record]

    async def answer(
        self,
        work: Work,
        requests: list[tuple[KeptTransport, bytes]],
        complete: Callable[[WorkerLane, WholeRequest], WholeAnswer],
        each: int = 1,
    ) -> int:
        """Has all requests arrive in one iteration of the event loop, and answers them.

        Returns, once all are answered, in how many datagrams the requests were sent to the worker. A request with a number is
        answered with one, as the worker does. Only what the front does is counted.

        Args:
          each: how many requests arrive at a connection at once; their answers are one write.
        """
        written = [self.answers(transport) for transport, _ in requests]
        with work.counting():
            for transport, content in requests:
                transport.arrive(content)
        datagrams, got = 0, 0
        for _ in range(_TURNS):
            if got == each * len(requests):
                break
            with work.counting():
                await asyncio.sleep(0)
            while (records := self.worker.receive()) is not None:
                submits = [record for record in records if isinstance(record, RequestRecord)]
                datagrams += bool(submits)
                got += len(submits)
                self.by_number += [isinstance(submit.prepared, int) for submit in submits]
                for record in records:
                    if isinstance(record, TraceContext):
                        continue
                    assert isinstance(record, Prepare | RequestRecord)
                    whole = self._whole.read(record)
                    if whole is None:
                        continue
                    completion = complete(self.worker, whole)
                    if isinstance(record, RequestRecord) and isinstance(record.prepared, int):
                        complete_numbered(self.worker, completion)
                    else:
                        self.worker.complete(completion.record)
        assert self.worker.flush()
        # Some turns more: what is given back to the worker leaves at the end of the one in which the answer left.
        for _ in range(_TURNS):
            with work.counting():
                await asyncio.sleep(0)
        assert [self.answers(transport) for transport, _ in requests] == [before + 1 for before in written]
        while self.worker.receive() is not None:
            pass
        return datagrams

    async def come_and_go(self, content: bytes = b"") -> bytes:
        """Has a client connect, send bytes and leave. Returns what was written to it; nothing else of it is kept here."""
        transport = self.connect()
        for at in range(0, len(content), 256 << 10):
            transport.arrive(content[at : at + (256 << 10)])
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        transport._protocol.connection_lost(None)
        written = b"".join(b"".join(map(bytes, each)) for each in transport.writes)
        transport.set_protocol(None)
        self.transports.clear()
        await asyncio.sleep(0)
        return written

    def close(self) -> None:
        for transport in self.transports:
            transport.writes.clear()  # they are views of what is closed now
        self.submitter.close()
        self.worker.close()
        self.page.close()
        self.sequences.close()
        self.counters.close()


class Bench(LaneBench):
    """The HTTP front's bench."""

    def __init__(self, options: Options = OPTIONS, tracer: Tracer | None = None) -> None:
        super().__init__(options)
        tracer = tracer or Tracer(1, TraceFiles())
        self.serving = HttpServing(options, self.table, self.submitter, self.counters.front(0), tracer)
        self.connections = self.serving.connections

    def connect(self) -> KeptTransport:
        connection = Http1Connection(self.serving, "tcp 127.0.0.1")
        transport = self.transport(connection)
        connection.connection_made(transport)
        self.transports.append(transport)
        return transport
