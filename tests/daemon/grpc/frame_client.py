"""Provides a gRPC client that sends exactly the frames it is told, and a gRPC front with a test as supervisor and worker."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import hpack
from tritonclient.grpc import service_pb2

from tensord.daemon.grpc import frames
from tensord.shm.operations import Settle
from tests.fakes import MIB, Client, EchoWorker, FrontProcess, front_process

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
STATISTICS = "/inference.GRPCInferenceService/ModelStatistics"


def request(values: bytes = b"\1", model: str = "echo", **fields: Any) -> Any:
    """Builds a ModelInferRequest with UINT8 values as raw content."""
    inputs = [service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="UINT8", shape=[len(values)])]
    return service_pb2.ModelInferRequest(model_name=model, inputs=inputs, raw_input_contents=[values], **fields)


def prefixed(message: Any, flag: int = 0) -> bytes:
    """Puts the five bytes before a message with which it stands in DATA frames."""
    content = message if isinstance(message, bytes) else message.SerializeToString()
    return struct.pack(">BI", flag, len(content)) + content


@dataclass
class Answer:
    """The messages, headers and trailers that came on one stream."""

    messages: list[bytes] = field(default_factory=list)
    #: Headers and trailers.
    headers: dict[str, str] = field(default_factory=dict)
    #: The error code of RST_STREAM, if it ended so.
    reset: int | None = None

    @property
    def status(self) -> int:
        return int(self.headers["grpc-status"])

    @property
    def text(self) -> str:
        return self.headers.get("grpc-message", "")

    @property
    def values(self) -> bytes:
        """Returns output ``y`` of the first message."""
        content: bytes = service_pb2.ModelInferResponse.FromString(self.messages[0]).raw_output_contents[0]
        return content

    def streamed(self) -> list[Any]:
        return [service_pb2.ModelStreamInferResponse.FromString(message) for message in self.messages]


class FrameClient:
    """One connection.

    ``settings``: pairs for the first SETTINGS frame. ``receive_buffer``: see ``Client``.
    """

    def __init__(
        self, port: int, settings: tuple[tuple[int, int], ...] = (), hello: bool = True, receive_buffer: int = 0
    ) -> None:
        self.sock = Client(port, receive_buffer).sock
        self._buffer = b""
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()
        self._pieces: dict[int, bytes] = {}
        self.answers: dict[int, Answer] = {}
        self.goaways: list[tuple[int, int, bytes]] = []
        self._next = -1
        if hello:
            self.send(frames.PREFACE + frames.settings(settings) + frames.window_update(0, frames.MAX_WINDOW - 65535))

    def __enter__(self) -> FrameClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, content: bytes) -> None:
        self.sock.sendall(content)

    def block(self, path: str, **headers: str) -> bytes:
        """Encodes a header block; underscores in names stand for dashes, but in Triton's own."""
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
        fields += [("content-type", "application/grpc")]
        own = ("triton_grpc_error",)
        fields += [(name if name in own else name.replace("_", "-"), value) for name, value in headers.items()]
        return bytes(self._encoder.encode(fields))

    def open(self, path: str = INFER, **headers: str) -> int:
        """Begins a call; returns its stream's number."""
        self._next += 2
        self.send(frames.frame(frames.HEADERS, frames.END_HEADERS, self._next, self.block(path, **headers)))
        return self._next

    def data(self, stream: int, content: bytes, end: bool = False) -> None:
        for at in range(0, max(1, len(content)), 16384):
            piece = content[at : at + 16384]
            flags = frames.END_STREAM if end and at + 16384 >= len(content) else 0
            self.send(frames.frame(frames.DATA, flags, stream, piece))

    def call(self, message: Any, path: str = INFER, **headers: str) -> int:
        """Sends a whole unary request; returns its stream's number."""
        stream = self.open(path, **headers)
        self.data(stream, prefixed(message), end=True)
        return stream

    def take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            piece = self.sock.recv(1 << 20)
            if not piece:
                raise EOFError
            self._buffer += piece
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def frame(self) -> tuple[int, int, int, bytes]:
        """Reads the next frame: type, flags, stream, payload."""
        high, low, kind, flags, number = frames.read_head(self.take(frames.HEAD_SIZE))
        return kind, flags, number, self.take(high << 16 | low)

    def peek(self) -> tuple[int, int, int, bytes]:
        """Returns the next frame as ``frame`` does, and leaves it to be read again."""
        kind, flags, number, payload = self.frame()
        self._buffer = frames.frame(kind, flags, number, payload) + self._buffer
        return kind, flags, number, payload

    def step(self) -> int:
        """Reads one frame and notes what it says; returns its type."""
        kind, flags, number, payload = self.frame()
        answer = self.answers.setdefault(number, Answer())
        if kind == frames.DATA:
            whole = self._pieces.get(number, b"") + payload
            while len(whole) >= 5 and len(whole) >= 5 + (size := struct.unpack_from(">I", whole, 1)[0]):
                answer.messages.append(whole[5 : 5 + size])
                whole = whole[5 + size :]
            self._pieces[number] = whole
        elif kind == frames.HEADERS:
            answer.headers |= {str(name): str(value) for name, value in self._decoder.decode(payload)}
        elif kind == frames.RST_STREAM:
            answer.reset = int.from_bytes(payload, "big")
        elif kind == frames.GOAWAY:
            self.goaways.append((*struct.unpack_from(">II", payload), payload[8:]))
        elif kind == frames.PING and not flags & frames.ACK:
            self.send(frames.frame(frames.PING, frames.ACK, 0, payload))
        return kind

    def answer(self, stream: int) -> Answer:
        """Waits for the whole answer to a call and returns it."""
        while True:
            got = self.answers.get(stream)
            if got is not None and ("grpc-status" in got.headers or got.reset is not None):
                return got
            self.step()

    def synchronise(self) -> None:
        """Waits until the server has read everything sent so far, and what it sent before that was read here."""
        self.send(frames.frame(frames.PING, 0, 0, b"are you?"))
        while True:
            kind, flags, _, payload = self.peek()
            self.step()
            if kind == frames.PING and flags & frames.ACK and payload == b"are you?":
                return

    def goaway(self) -> tuple[int, int, bytes]:
        """Waits for the first GOAWAY; returns its last stream, error code and reason."""
        while not self.goaways:
            self.step()
        return self.goaways[0]

    def ends(self) -> bool:
        """Reads until the connection ends; returns True then."""
        try:
            while True:
                self.step()
        except (EOFError, ConnectionError):
            return True


class GrpcFrontProcess(FrontProcess):
    """A real gRPC front process, with the test as its supervisor."""

    program = "tensord.daemon.grpc"

    def frames(self, settings: tuple[tuple[int, int], ...] = ()) -> FrameClient:
        """Opens a new client connection."""
        return FrameClient(self.port, settings)

    def sync(self) -> None:
        with self.frames() as client:
            stream = client.call(b"", STATISTICS)
            self.answer_call(result=b'{"model_stats":[]}')
            assert client.answer(stream).status == 0

    def settle(self, name: str, version: int) -> None:
        with self.frames() as client:
            # message ModelConfigRequest { string name = 1; string version = 2; }
            asked = b"\n" + bytes((len(name),)) + name.encode() + b"\x12\x01" + str(version).encode()
            stream = client.call(asked, STATISTICS.replace("ModelStatistics", "ModelConfig"))
            assert self.answer_call().operation == Settle()
            assert client.answer(stream).status == 0


@contextlib.contextmanager
def serving(
    workers: int = 1, send_buffer: int = 0, **options: Any
) -> Iterator[tuple[GrpcFrontProcess, list[EchoWorker]]]:
    """Runs a gRPC front with ``workers`` workers that have the model ``echo``; yields them."""
    with front_process(GrpcFrontProcess, send_buffer, **{"arenas": {"byte_size": MIB}, **options}) as front:
        made = [front.worker() for _ in range(workers)]
        front.model(*made)
        yield front, made
