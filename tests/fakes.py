"""Provides a front process with the test as its supervisor and its workers, and a client that sends raw bytes.

Client ══ TCP ══ python -m tensord.daemon.http ══ control ══ FrontProcess (the supervisor's end)
                        ╚════════ lane ════════════ EchoWorker
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tensord.config.options import Options
from tensord.daemon.control.shared_counters import FrontCounters, SharedCounters
from tensord.daemon.submit.in_flight import InFlight
from tensord.daemon.submit.model_states import ModelStates
from tensord.daemon.submit.submitter import Submitter
from tensord.shm import child_process, descriptors
from tensord.shm.channel import Channel, pair
from tensord.shm.control_records import (
    ChildReady,
    ControlCall,
    FromFront,
    LaneOpened,
    ModelState,
    Readiness,
    Reply,
    Serve,
    Start,
    Stop,
    WorkerFenced,
)
from tensord.shm.lane import SubmitterLane, WorkerLane
from tensord.shm.messages import (
    AnswerRecord,
    Cancel,
    Prepare,
    PreparedAnswer,
    PreparedRequest,
    RegionSlice,
    RequestRecord,
    Taken,
    TraceContext,
)
from tensord.shm.operations import Settle
from tensord.shm.prepared import ReceivedNumbers
from tensord.shm.record import Record, decoder
from tensord.shm.refusals import Refusal
from tensord.shm.sequence_page import SequencePage
from tensord.shm.status_page import StatusPage
from tests import prepared
from tests.records import Tensor, WholeAnswer, WholeRequest, whole_answer, whole_request

MIB = 1 << 20
INCARNATION = 77
#: How long anything that must happen may take before a test says it does not.
PATIENCE_SECONDS = 120.0
#: Both ends of a connection with buffers of this size hold a fraction of an answer of some MiB, on whatever machine; those the
#: kernel chooses itself may take all of it before the client has read a byte.
SMALL_BUFFER = 64 << 10


def until(condition: Callable[[], object]) -> None:
    """Waits until the condition holds; fails after PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def _wait_readable(fd: int, seconds: float = PATIENCE_SECONDS) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(seconds))


class Uncounted(FrontCounters):
    """The counters of a front that counts nothing, and has read all that it was sent."""

    def __init__(self) -> None:
        pass

    def refuse(self, refusal: Refusal) -> None:
        pass

    def note_number(self, numbered: int, evicted: int) -> None:
        pass

    def is_behind(self) -> bool:
        return False


def submitter(options: Options, table: ModelStates, incarnation: int = INCARNATION) -> Submitter:
    """Makes a submitter whose front counts nothing."""
    return Submitter(incarnation, options, table, 0, Uncounted(), lambda worker: None)


class WholeRequests:
    """Reads requests from a lane, each as one value, whatever of it was prepared before."""

    def __init__(self) -> None:
        self._known: ReceivedNumbers[PreparedRequest] = ReceivedNumbers()
        #: What numbers were said to stand for, again and again ones too.
        self.told: list[Prepare] = []

    def read(self, record: Prepare | TraceContext | RequestRecord) -> WholeRequest | None:
        """Takes a record; returns the request that it is, or None if it is another kind of record."""
        if isinstance(record, TraceContext):
            return None
        if isinstance(record, Prepare):
            self.told.append(record)
            self._known.learn(record.number, record.prepared)
            return None
        prepared = record.prepared
        return whole_request(self._known[prepared] if isinstance(prepared, int) else prepared, record)


def whole_answers(received: list[tuple[PreparedAnswer, AnswerRecord]]) -> list[WholeAnswer]:
    """Returns answers that came on a lane, each as one value."""
    return [whole_answer(prepared, own) for prepared, own in received]


def complete_numbered(lane: WorkerLane, answer: WholeAnswer) -> None:
    """Queues a good answer that is sent as the number of a prepared answer."""
    assert not answer.code
    assert answer.final
    numbered = lane.number(answer.prepared)
    lane.complete(answer.of(numbered.number), numbered)


class CalledBack(InFlight):
    """A request in flight whose answers are passed to a function."""

    on_answer: Callable[[PreparedAnswer, AnswerRecord, SubmitterLane | None], None]

    def completed(self, prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
        self.on_answer(prepared, record, lane)


class EchoWorker:
    """The worker's end of a lane. It answers only when the test says so."""

    def __init__(self, sock: socket.socket, incarnation: int) -> None:
        self.incarnation = incarnation
        self.lane = WorkerLane(sock, 1 * MIB, 256 * MIB, 0)
        self.page = StatusPage.create()
        self.sequences = SequencePage.create(64)
        self.cancelled: list[int] = []
        #: What it was told that clients have taken of responses: request and bytes.
        self.taken: list[tuple[int, int]] = []
        self.requests = WholeRequests()
        #: The record in which the last of ``next`` came.
        self.record: RequestRecord | None = None
        #: Whether good answers have a number, as a real worker's are when a request repeats itself.
        self.numbered = False
        self._requests: deque[tuple[WholeRequest, RequestRecord]] = deque()

    def poll(self) -> None:
        """Reads the records that have arrived. Raises ChannelClosed: the front has closed the lane."""
        while (records := self.lane.receive()) is not None:
            for record in records:
                if isinstance(record, Cancel):
                    self.cancelled.append(record.request_id)
                elif isinstance(record, Taken):
                    self.taken.append((record.request_id, record.byte_size))
                elif (whole := self.requests.read(record)) is not None:
                    assert isinstance(record, RequestRecord)
                    self._requests.append((whole, record))

    def next(self) -> WholeRequest:
        """Waits for the next request and returns it as one value."""
        while not self._requests:
            assert _wait_readable(self.lane.fileno()), "no request came"
            self.poll()
        whole, self.record = self._requests.popleft()
        return whole

    def idle(self, seconds: float = 0.2) -> bool:
        """Returns True if no request comes within ``seconds``."""
        self.poll()
        if not self._requests and _wait_readable(self.lane.fileno(), seconds):
            self.poll()
        return not self._requests

    def content(self, request: WholeRequest, number: int = 0) -> bytes:
        """Returns the bytes of an input."""
        place = request.inputs[number].place
        assert not isinstance(place, RegionSlice)
        return place if isinstance(place, bytes) else bytes(self.lane.view(place))

    def echo(self, request: WholeRequest) -> None:
        """Answers a request with its first input, as output ``y``."""
        self.answer(request, self.content(request))

    def answer(self, request: WholeRequest, content: bytes, final: bool = True) -> None:
        """Answers a request with UINT8 content as output ``y``, in leased memory where it has more than 512 bytes."""
        shape = (len(content),)
        if len(content) <= 512:
            outputs = (Tensor("y", "UINT8", shape, content),)
            self.complete(request.request_id, outputs=outputs, final=final)
            return
        lease = self.lane.loan(len(content))
        assert lease is not None
        lease.view[:] = content
        outputs = (Tensor("y", "UINT8", shape, lease.place),)
        self.complete(request.request_id, outputs=outputs, lease=lease.key, final=final)

    def respond(self, request_id: int, content: bytes, final: bool) -> None:
        """Sends one of several responses, with UINT8 content as output ``y``, or without outputs."""
        outputs = (Tensor("y", "UINT8", (len(content),), content),) if content else ()
        self.complete(request_id, outputs=outputs, final=final, version=1 if outputs else 0)

    def echo_until(self, client: Client) -> None:
        """Answers requests until that client has something to read: clients that left may have left requests behind."""
        with selectors.DefaultSelector() as selector:
            selector.register(client.sock, selectors.EVENT_READ, client)
            selector.register(self.lane.fileno(), selectors.EVENT_READ)
            while True:
                self.poll()
                while self._requests:
                    self.echo(self.next())
                ready = selector.select(PATIENCE_SECONDS)
                assert ready, "neither a request nor an answer came"
                if any(key.data is client for key, _ in ready):
                    return

    def complete(self, request_id: int, **fields: Any) -> None:
        """Sends an answer with any fields; it is lost without an error if the lane's other end is closed."""
        completion = WholeAnswer(request_id, **{"version": 1, **fields})
        if self.numbered and completion.final and not completion.code:
            complete_numbered(self.lane, completion)
        else:
            self.lane.complete(completion.record)
        until(self.lane.flush)

    @property
    def leases(self) -> int:
        """Returns how many answers the front has not given back."""
        self.poll()
        return self.lane.arena.statistics()["leases"]

    def die(self) -> None:
        """Closes the lane and leaves the status page as it was."""
        self.lane.close()

    def close(self) -> None:
        self.lane.close()
        self.page.close()
        self.sequences.close()


class FrontProcess:
    """A real front process, with the test as its supervisor."""

    program = "tensord.daemon.http"

    def __init__(self, options: Options, send_buffer: int = 0) -> None:
        """Starts the process.

        ``send_buffer``: bytes that the front's side of a connection holds at most; 0: as the kernel chooses.
        """
        self.workers: list[EchoWorker] = []
        self._next_worker = 1000
        self.counters = SharedCounters.create()
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        if send_buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # what is accepted inherits it
        ours, theirs = pair()
        with listener, theirs:
            self.port: int = listener.getsockname()[1]
            fds = {"control-fd": theirs.fileno(), "listen-fds": listener.fileno(), "counters-fd": self.counters.fd}
            words = [self.program, "--row=0", *(f"--{name}={fd}" for name, fd in fds.items())]
            self.process = prepared.start(words, list(fds.values()))
        self._control = Channel(ours, decoder(FromFront))
        self._received: deque[Any] = deque()
        #: Descriptors that came with records.
        self.fds: list[int] = []
        stack = child_process.create_stack_report()
        self.send(Start(INCARNATION, "http-0", msgspec.Raw(msgspec.msgpack.encode(options))), stack)
        os.close(stack)
        self.send(Readiness(True))
        self.send(Serve())
        assert self.receive() == ChildReady(INCARNATION)

    def send(self, record: Record, *fds: int) -> None:
        self._control.put(record, *fds)
        until(self._control.flush)

    def receive(self) -> Any:
        """Waits for the next record from the front and returns it."""
        while not self._received:
            assert _wait_readable(self._control.fileno()), "the front says nothing"
            received = self._control.receive()
            assert received is not None
            self._received += received[0]
            self.fds += received[1]
        return self._received.popleft()

    def answer_call(self, code: str = "", message: str = "", result: bytes = b"") -> ControlCall:
        """Waits for the front's next call to the supervisor, and answers it; returns the call."""
        call = self.receive()
        assert isinstance(call, ControlCall)
        self.send(Reply(call.call_id, code, message, result))
        return call

    def sync(self) -> None:
        """Waits until the front has read everything sent before.

        It sends a reply behind all of that, and waits until the front's client has it.
        """
        with self.client() as client:
            client.send(b"GET /v2/models/stats HTTP/1.1\r\nHost: x\r\n\r\n")
            self.answer_call(result=b"{}")
            assert client.answer().status == 200

    def worker(self) -> EchoWorker:
        """Gives the front a new worker with a lane; returns the worker."""
        self._next_worker += 1
        ours, theirs = pair()
        worker = EchoWorker(ours, self._next_worker)
        with theirs:
            self.send(LaneOpened(worker.incarnation, "cpu:0"), theirs.fileno(), worker.page.fd, worker.sequences.fd)
        self.workers.append(worker)
        return worker

    def model(self, *workers: EchoWorker, name: str = "echo", version: int = 1, **fields: Any) -> None:
        """Publishes a version as ready at these workers; returns once the front knows."""
        described = {
            "name": name,
            "platform": "jax",
            "inputs": [{"name": "x", "datatype": "UINT8", "shape": [-1]}],
            "outputs": [{"name": "y", "datatype": "UINT8", "shape": [-1]}],
        }
        fields = {
            "state": "READY",
            "metadata": json.dumps(described).encode(),
            "config": json.dumps({"name": name, "max_batch_size": 0}).encode(),
            **fields,
        }
        self.send(ModelState(name, version, workers=tuple(worker.incarnation for worker in workers), **fields))
        self.sync()
        if fields["state"] == "READY":
            self.settle(name, version)

    def settle(self, name: str, version: int) -> None:
        """Answers the front that all fronts know of a version.

        After a change the front asks this once, before it first answers a question about a model that serves.
        """
        with self.client() as client:
            client.send(f"GET /v2/models/{name}/versions/{version}/config HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert self.answer_call().operation == Settle()
            assert client.answer().status == 200

    def fence(self, worker: EchoWorker) -> None:
        """Tells the front that the worker's process is certainly gone."""
        self.send(WorkerFenced(worker.incarnation))

    def stop(self, grace_seconds: float) -> None:
        self.send(Stop(int(grace_seconds * 1e9)))

    def client(self, receive_buffer: int = 0) -> Client:
        """Returns a new connection to the front.

        ``receive_buffer``: bytes that the kernel holds for it at most, 0: as it chooses.
        """
        return Client(self.port, receive_buffer)

    def close(self) -> None:
        """Ends the process if it has not ended."""
        self._control.close()
        descriptors.close(self.fds)
        try:
            self.process.wait(PATIENCE_SECONDS)
        finally:
            self.process.kill()
            self.process.wait(PATIENCE_SECONDS)
            self.counters.close()
            for worker in self.workers:
                worker.close()


Front = TypeVar("Front", bound=FrontProcess)


@contextlib.contextmanager
def front_process(
    kind: type[Front] = FrontProcess,  # type: ignore[assignment]
    send_buffer: int = 0,
    **options: Any,
) -> Iterator[Front]:
    """Runs a front with these options (section -> values) within the block.

    Its time limits are so long that a busy machine does not reach them, unless the options say otherwise.
    """
    patient: dict[str, Any] = dict.fromkeys(("head_timeout", "body_timeout", "write_timeout"), 2 * PATIENCE_SECONDS)
    patient["min_rate"] = 0
    sections: dict[str, dict[str, Any]] = {
        "http": {**patient, "keep_alive_timeout": 4 * PATIENCE_SECONDS},
        "grpc": patient,
        "arenas": {"wait": PATIENCE_SECONDS},
        "requests": {"worker_wait": PATIENCE_SECONDS},
    }
    for section, values in options.items():
        sections[section] = {**sections[section], **values} if section in sections else values
    with contextlib.closing(kind(msgspec.convert(sections, Options), send_buffer)) as front:
        yield front


@dataclass
class Answer:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        """Returns the sentence of an error answer."""
        text: str = json.loads(self.body)["error"]
        return text

    @property
    def parts(self) -> bytes:
        """Returns the bytes that follow the JSON of a binary answer."""
        return self.body[int(self.headers["inference-header-content-length"]) :]

    @property
    def values(self) -> bytes:
        """Returns output ``y`` of a JSON answer."""
        return bytes(json.loads(self.body)["outputs"][0]["data"])


class Client:
    """A TCP connection to a front that sends exactly the bytes that it is given."""

    def __init__(self, port: int, receive_buffer: int = 0) -> None:
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_SECONDS)
        if receive_buffer:
            # Before the handshake: afterwards the other side has been offered a larger window, and may have filled it.
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            self.sock.connect(("127.0.0.1", port))
        except OSError:
            self.sock.close()
            raise
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, *pieces: bytes) -> None:
        """Sends the pieces one after the other, each in a packet of its own where the network allows it."""
        for number, piece in enumerate(pieces):
            if number:
                time.sleep(0.01)
            self.sock.sendall(piece)

    def request(self, method: str, path: str, body: bytes = b"") -> None:
        """Sends a whole request to any endpoint."""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)

    def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Sends a whole request to any endpoint; returns its answer."""
        self.request(method, path, body)
        return self.answer()

    def answer(self) -> Answer:
        """Reads the next answer. Raises EOFError: the connection ends instead."""
        head = self._until(b"\r\n\r\n")
        line, *fields = head.decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        status = int(line.split(" ")[1])
        body = self.take(int(headers.get("content-length", 0)))
        return Answer(status, headers, body)

    def ends(self) -> bool:
        """Waits until the connection ends or sends a byte; returns True if it ends."""
        try:
            return not self._buffer and self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def _fill(self) -> None:
        piece = self.sock.recv(1 << 20)
        if not piece:
            raise EOFError(self._buffer)
        self._buffer += piece

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            self._fill()
        end = self._buffer.index(mark) + len(mark)
        taken, self._buffer = self._buffer[:end], self._buffer[end:]
        return taken

    def chunks(self) -> Iterator[bytes]:
        """Reads the chunks of a body, to its end."""
        while size := int(self._until(b"\r\n"), 16):
            yield self.take(size + 2)[:-2]
        self.take(2)

    def take(self, size: int) -> bytes:
        """Reads the next ``size`` bytes. Raises EOFError: the connection ends before."""
        pieces, self._buffer = [self._buffer[:size]], self._buffer[size:]
        left = size - len(pieces[0])
        while left:
            piece = self.sock.recv(min(left, 1 << 20))
            if not piece:
                raise EOFError
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)


def json_request(values: bytes, *headers: str, model: str = "echo", **fields: Any) -> bytes:
    """Builds a POST with UINT8 values as JSON."""
    head = {"inputs": [{"name": "x", "datatype": "UINT8", "shape": [len(values)], "data": list(values)}], **fields}
    return post(json.dumps(head).encode(), *headers, model=model)


def binary_request(content: bytes, *headers: str, model: str = "echo") -> bytes:
    """Builds a POST with UINT8 content as a binary part, which asks for a binary answer."""
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "x",
                    "datatype": "UINT8",
                    "shape": [len(content)],
                    "parameters": {"binary_data_size": len(content)},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    return post(head + content, f"Inference-Header-Content-Length: {len(head)}", *headers, model=model)


def post(body: bytes, *headers: str, model: str = "echo") -> bytes:
    """Builds a POST to a model's infer endpoint."""
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body


def chunked(body: bytes, size: int, *headers: str) -> bytes:
    """Builds a POST whose body is sent in chunks of a size."""
    lines = ["POST /v2/models/echo/infer HTTP/1.1", "Host: x", "Transfer-Encoding: chunked", *headers]
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return (
        "".join(f"{line}\r\n" for line in lines).encode()
        + b"\r\n"
        + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        + b"0\r\n\r\n"
    )


@contextlib.contextmanager
def serving(workers: int = 1, send_buffer: int = 0, **options: Any) -> Iterator[tuple[FrontProcess, list[EchoWorker]]]:
    """Runs an HTTP front with ``workers`` workers that have the model ``echo``; yields them."""
    options = {"http": {"port": 0}, "arenas": {"byte_size": MIB}, **options}
    with front_process(send_buffer=send_buffer, **options) as front:
        made = [front.worker() for _ in range(workers)]
        front.model(*made)
        yield front, made


def in_service(front: FrontProcess, worker: EchoWorker, client: Client) -> None:
    """Checks that the front serves: sends a request, has the worker answer it and reads the answer."""
    client.send(json_request(b"\1"))
    worker.echo_until(client)
    assert client.answer().values == b"\1"
