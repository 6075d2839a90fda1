"""Gives the loops of bench/closed_loop.py and bench/open_loop.py a gRPC client: unary calls, one at a time, on a raw socket.

    preface, SETTINGS, WINDOW_UPDATE ─▶ HEADERS, DATA ─▶ ... HEADERS, DATA, HEADERS: the trailers ─▶ the next odd stream

The frames of a request are built once; a call writes its stream's number into them. Their header block indexes nothing, and the
server is told that its blocks cannot either, so the same bytes always mean the same. What this client cannot do is refused, not
guessed: messages larger than one frame, padding, header blocks in several frames. Stream numbers last for 2^30 calls.
Source: RFC 9113, RFC 7541; gRPC's PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping

import hpack
import numpy as np
from tritonclient.grpc import service_pb2

from bench.closed_loop import Connection, Row, binary_rows
from tensord.daemon.grpc import frames

#: Bytes of answers that the server may send ahead on a connection, and how many may have come before it is granted them again.
WINDOW = 64 << 20
_GRANT = WINDOW // 4
#: What a connection begins with.
HELLO = (
    frames.PREFACE
    + frames.settings(
        (
            (frames.HEADER_TABLE_SIZE, 0),
            (frames.ENABLE_PUSH, 0),
            # A stream carries one answer: its window is never granted again.
            (frames.INITIAL_WINDOW_SIZE, frames.MAX_WINDOW),
            (frames.MAX_FRAME_SIZE, 4 << 20),
        )
    )
    + frames.window_update(0, WINDOW - frames.DEFAULT_WINDOW)
)
#: Where a frame has its stream's number.
_NUMBER_AT = 5
_put_number = struct.Struct(">I").pack_into
#: Before a message: whether it is compressed, and its length.
_prefix = struct.Struct(">BI")


def rows() -> list[Row]:
    """Returns the gRPC rows with binary tensors whose message fits into one frame."""
    return binary_rows("grpc", infer_request, GrpcConnection, (1,))


def infer_request(
    model: str,
    tensors: list[tuple[str, np.ndarray]],
    output: str,
    parameters: Mapping[str, int | bool] | None = None,
) -> bytes:
    """Builds the two frames of a unary ModelInfer call on stream 0 that asks for one output."""
    request = service_pb2.ModelInferRequest(
        model_name=model,
        inputs=[
            service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype="FP32", shape=values.shape)
            for name, values in tensors
        ],
        outputs=[service_pb2.ModelInferRequest.InferRequestedOutputTensor(name=output)],
        raw_input_contents=[values.tobytes() for _, values in tensors],
        parameters={
            name: service_pb2.InferParameter(**{"bool_param" if isinstance(value, bool) else "int64_param": value})
            for name, value in (parameters or {}).items()
        },
    ).SerializeToString()
    return call(request)


def call(request: bytes) -> bytes:
    """Builds the two frames of a unary ModelInfer call on stream 0 from a serialised ModelInferRequest."""
    return headers("ModelInfer", 0) + last_message(request)


def last_message(request: bytes) -> bytes:
    """Builds the DATA frame of a message on stream 0 that ends the stream."""
    return frames.frame(frames.DATA, frames.END_STREAM, 0, _prefix.pack(0, len(request)) + request)


def headers(method: str, stream: int) -> bytes:
    """Builds the HEADERS frame that begins a call of a method; its block does not use the HPACK table."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", f"/inference.GRPCInferenceService/{method}")]
    fields += [(":authority", "bench"), ("te", "trailers"), ("content-type", "application/grpc")]
    block = hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*field) for field in fields])
    return frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block)


class GrpcConnection(Connection):
    """An HTTP/2 connection. ``received`` is the message of the answer that is being read, with its 5-byte prefix."""

    def __init__(self, address: tuple[str, int], host: str = "") -> None:
        super().__init__(address, host)
        self.socket.sendall(HELLO)
        #: The last call's.
        self._stream = -1
        self._request = b""
        #: The request with the stream's number in it, where its DATA frame begins, and that one's size without its head.
        self._frames = bytearray()
        self._data_at = self._data_size = 0
        #: The call's frames have not been sent.
        self._waits = False
        #: Bytes that the server takes on the connection; of them in the first frame of a stream; it has said so itself.
        self._window = frames.DEFAULT_WINDOW
        self._room = frames.DEFAULT_FRAME_SIZE
        self._settled = False
        #: The beginning of a frame that is not DATA.
        self._rest = b""
        #: Bytes of a DATA frame that are still to come.
        self._data_left = 0
        self._ungranted = 0
        self._decoder = hpack.Decoder()
        #: The last trailers that said OK.
        self._good_trailers = b""
        self._answered = False

    def send(self, request: bytes) -> None:
        """Sends a new call, at once or when the server has granted a window as large as the message.

        Raises ConnectionError: the server takes only smaller frames.
        """
        if request is not self._request:
            self._request, self._frames = request, bytearray(request)
            high, low, *_ = frames.read_head(request)
            self._data_at = frames.HEAD_SIZE + (high << 16 | low)
            self._data_size = len(request) - self._data_at - frames.HEAD_SIZE
        self._stream += 2
        _put_number(self._frames, _NUMBER_AT, self._stream)
        _put_number(self._frames, self._data_at + _NUMBER_AT, self._stream)
        self.received.clear()
        self.started = time.perf_counter()
        self._waits = True
        self._send_granted()

    def _send_granted(self) -> None:
        size = self._data_size
        if size <= self._room and size <= self._window:
            self._waits = False
            self._window -= size
            self.socket.sendall(self._frames)
        elif size > self._room and self._settled:
            raise ConnectionError(f"a message of {size} bytes, the server takes {self._room} in one frame")

    def read(self) -> bool:
        """Reads what has arrived. Returns True once the answer is complete and its trailers say OK.

        Raises AssertionError: the call failed; ConnectionError: the connection ended, or this client cannot read a frame.
        """
        chunk = self.socket.recv(1 << 20)
        if not chunk:
            raise ConnectionError("the server hung up")
        self._answered = False
        chunk = self._rest + chunk
        at, end = self._take_data(chunk, 0), len(chunk)
        while end - at >= frames.HEAD_SIZE:
            high, low, kind, flags, number = frames.read_head(chunk, at)
            size = high << 16 | low
            start = at + frames.HEAD_SIZE
            if kind == frames.DATA:
                if flags or number != self._stream:
                    raise ConnectionError(f"DATA with flags {flags} on stream {number}, in call {self._stream}")
                self._data_left = size
                at = self._take_data(chunk, start)
            elif end - start >= size:
                at = start + size
                self._frame(kind, flags, number, chunk[start:at])
            else:
                break
        self._rest = chunk[at:]
        return self._answered

    def _take_data(self, chunk: bytes, at: int) -> int:
        """Takes the bytes of the current DATA frame out of a chunk; returns the position behind them."""
        if not self._data_left:
            return at
        piece = chunk[at : at + self._data_left]
        self.received += piece
        self._data_left -= len(piece)
        self._ungranted += len(piece)
        if self._ungranted >= _GRANT:
            self.socket.sendall(frames.window_update(0, self._ungranted))
            self._ungranted = 0
        return at + len(piece)

    def _frame(self, kind: int, flags: int, number: int, content: bytes) -> None:
        if kind == frames.HEADERS:
            if flags & ~frames.END_STREAM != frames.END_HEADERS or number != self._stream:
                raise ConnectionError(f"HEADERS with flags {flags} on stream {number}, in call {self._stream}")
            if flags & frames.END_STREAM:
                self._check(content)
                self._answered = True
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._settings(content)
        elif kind == frames.PING and not flags & frames.ACK:
            self.socket.sendall(frames.frame(frames.PING, frames.ACK, 0, content))
        elif kind == frames.WINDOW_UPDATE and not number:
            self._window += int.from_bytes(content, "big")
            if self._waits:
                self._send_granted()
        elif kind == frames.RST_STREAM:
            raise AssertionError(f"the call was reset with error {int.from_bytes(content, 'big')}")
        elif kind == frames.GOAWAY:
            raise ConnectionError(f"the server ends the connection: {content[8:]!r}")

    def _check(self, trailers: bytes) -> None:
        """Raises AssertionError unless the trailers say OK and the answer is exactly one message, uncompressed."""
        if trailers != self._good_trailers:
            fields = dict(self._decoder.decode(trailers))
            if fields.get("grpc-status") != "0":
                raise AssertionError(f"status {fields.get('grpc-status')}: {fields.get('grpc-message', '')}")
            self._good_trailers = trailers
        size = len(self.received) - _prefix.size
        if size < 0 or _prefix.unpack_from(self.received) != (0, size):
            raise AssertionError(f"no message of its stated length: {bytes(self.received[:300])!r}")

    def _settings(self, content: bytes) -> None:
        said = dict(frames.read_settings(content))
        window = said.get(frames.INITIAL_WINDOW_SIZE, frames.DEFAULT_WINDOW)
        self._room = min(window, said.get(frames.MAX_FRAME_SIZE, frames.DEFAULT_FRAME_SIZE))
        self._settled = True
        self.socket.sendall(frames.frame(frames.SETTINGS, frames.ACK, 0))
        if self._waits:
            self._send_granted()
