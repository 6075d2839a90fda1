"""The gRPC client of the loops: against a real daemon, and against a peer that sends what a daemon seldom does."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import hpack
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from bench.closed_loop import Row, connected, measure
from bench.grpc_connection import WINDOW, GrpcConnection, infer_request, rows
from bench.server import answered
from tensord.daemon.grpc import frames
from tests.daemon_process import PATIENCE, DaemonProcess

ROWS = {row.name: row for row in rows()}


def answers(address: str, row: Row, calls: int) -> int:
    """Makes calls one after the other on one connection, and checks each answer. Returns how many there were."""
    with connected(address, row.connection, 1) as (poll, (connection,)):
        for _ in range(calls):
            connection.send(row.request)
            while not (poll.select() and connection.read()):
                pass
            row.check(connection.received)
    return calls


def test_a_closed_loop_counts_right_answers(daemon: DaemonProcess) -> None:
    before = answered(daemon.url)
    seconds = 0.5
    rate, p50_us, p99_us = measure(daemon.grpc_url, ROWS["small-grpc-c4"], seconds)
    assert rate > 0
    assert 0 < p50_us <= p99_us
    assert int(rate * seconds) <= answered(daemon.url) - before


def test_more_answers_than_the_window_holds(daemon: DaemonProcess) -> None:
    """Each carries a MiB: without new windows the server would stop after so many."""
    count = (WINDOW >> 20) + 10
    assert answers(daemon.grpc_url, ROWS["1MiB-grpc-c1"], count) == count


def test_a_wrong_answer_is_noticed(daemon: DaemonProcess) -> None:
    """The last of 16 numbers differs."""
    row = ROWS["small-grpc-c1"]
    values = row.values.copy()
    values[0, -1] += 1
    with pytest.raises(AssertionError, match="small-grpc-c1: wrong answer"):
        measure(daemon.grpc_url, dataclasses.replace(row, values=values), 0.1)


def test_a_failed_call_is_noticed(daemon: DaemonProcess) -> None:
    values = np.zeros(4, np.float32)
    request = infer_request("nothing", [("INPUT0", values)], "OUTPUT0")
    with pytest.raises(AssertionError, match=r"status \d+: .*nothing"):
        measure(daemon.grpc_url, Row("failing", 1, request, values, connection=GrpcConnection), 0.1)


# ------------------------------------------------------------------------------------------------- a peer made by hand

VALUES = np.arange(4, dtype=np.float32)
ROW = Row("row", 1, infer_request("m", [("INPUT0", VALUES)], "OUTPUT0"), VALUES, connection=GrpcConnection)
#: Larger than the window that a connection begins with.
LONG = np.zeros(20_000, np.float32)
LONG_ROW = Row("long", 1, infer_request("m", [("INPUT0", LONG)], "OUTPUT0"), VALUES, connection=GrpcConnection)
MESSAGE = service_pb2.ModelInferResponse(model_name="m", raw_output_contents=[VALUES.tobytes()]).SerializeToString()
PREFIXED = b"\0" + len(MESSAGE).to_bytes(4, "big") + MESSAGE
FRAME_SIZE = frames.settings([(frames.MAX_FRAME_SIZE, 1 << 20), (frames.INITIAL_WINDOW_SIZE, 1 << 20)])


class Peer:
    """The server's end of one connection, which sends what the test tells it to."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert self.take(len(frames.PREFACE)) == frames.PREFACE
        kind, _, _, settings = self.frame()
        assert kind == frames.SETTINGS
        assert frames.read_settings(settings)[frames.HEADER_TABLE_SIZE] == 0
        assert self.frame()[0] == frames.WINDOW_UPDATE

    def take(self, size: int) -> bytes:
        taken = b""
        while len(taken) < size:
            piece = self.socket.recv(size - len(taken))
            assert piece, "the client hung up"
            taken += piece
        return taken

    def frame(self) -> tuple[int, int, int, bytes]:
        """Reads the client's next frame: type, flags, stream, content."""
        high, low, kind, flags, number = frames.read_head(self.take(frames.HEAD_SIZE))
        return kind, flags, number, self.take(high << 16 | low)

    def request(self) -> tuple[int, bytes, bytes]:
        """Reads the client's next call: stream, header block, message with its prefix."""
        kind, flags, number, block = self.frame()
        assert (kind, flags) == (frames.HEADERS, frames.END_HEADERS)
        kind, flags, of, message = self.frame()
        assert (kind, flags, of) == (frames.DATA, frames.END_STREAM, number)
        return number, block, message

    def say(self, *sent: bytes) -> None:
        self.socket.sendall(b"".join(sent))

    def ping(self) -> None:
        """Returns when the client has taken everything before; it must not have sent anything else."""
        self.say(frames.frame(frames.PING, 0, 0, b"are you?"))
        assert self.frame() == (frames.PING, frames.ACK, 0, b"are you?")


def answer(number: int, message: bytes = PREFIXED, *, status: str = "0", cut: int = 1 << 14) -> bytes:
    """Builds the frames of an answer, its message in DATA frames of at most ``cut`` bytes."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    head = encoder.encode([(":status", "200"), ("content-type", "application/grpc")])
    trailers = encoder.encode([("grpc-status", status), ("grpc-message", "so it is")])
    pieces = [message[at : at + cut] for at in range(0, len(message), cut)]
    return b"".join(
        (
            frames.frame(frames.HEADERS, frames.END_HEADERS, number, head),
            *(frames.frame(frames.DATA, 0, number, piece) for piece in pieces),
            frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, number, trailers),
        )
    )


@contextlib.contextmanager
def calling(row: Row = ROW, calls: int = 1) -> Iterator[tuple[Peer, Future[int]]]:
    """Makes calls one after the other on one connection, while the block plays the server."""
    with (
        ThreadPoolExecutor(1) as pool,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        listener.settimeout(PATIENCE)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        load = pool.submit(answers, address, row, calls)
        connection, _ = listener.accept()
        with connection:
            yield Peer(connection), load


def test_calls_are_the_same_frames_on_new_streams() -> None:
    with calling(calls=3) as (peer, load):
        seen = []
        for expected in (1, 3, 5):
            number, block, message = peer.request()
            assert number == expected
            seen.append((block, message))
            peer.say(answer(number))
        assert load.result(PATIENCE) == 3
    assert len(set(seen)) == 1
    block, message = seen[0]
    assert dict(hpack.Decoder().decode(block))[":path"] == "/inference.GRPCInferenceService/ModelInfer"
    assert message[:5] == b"\0" + (len(message) - 5).to_bytes(4, "big")
    request = service_pb2.ModelInferRequest.FromString(message[5:])
    assert (request.model_name, list(request.raw_input_contents)) == ("m", [VALUES.tobytes()])


def test_an_answer_may_come_in_any_pieces() -> None:
    with calling() as (peer, load):
        number, _, _ = peer.request()
        for byte in answer(number, cut=7):
            peer.say(bytes((byte,)))
        assert load.result(PATIENCE) == 1


def test_settings_and_pings_are_answered() -> None:
    with calling() as (peer, load):
        number, _, _ = peer.request()
        peer.say(FRAME_SIZE)
        assert peer.frame() == (frames.SETTINGS, frames.ACK, 0, b"")
        peer.ping()
        peer.say(frames.frame(frames.SETTINGS, frames.ACK, 0), answer(number))
        assert load.result(PATIENCE) == 1


def test_a_request_waits_until_it_is_granted() -> None:
    with calling(LONG_ROW) as (peer, load):
        peer.ping()
        peer.say(FRAME_SIZE)
        assert peer.frame() == (frames.SETTINGS, frames.ACK, 0, b"")
        peer.ping()
        peer.say(frames.window_update(0, 1 << 20))
        number, _, message = peer.request()
        assert len(message) > frames.DEFAULT_WINDOW
        peer.say(answer(number))
        assert load.result(PATIENCE) == 1


def test_a_request_that_never_fits_is_refused() -> None:
    with calling(LONG_ROW) as (peer, load):
        peer.say(frames.settings([(frames.INITIAL_WINDOW_SIZE, 1 << 20)]))
        with pytest.raises(ConnectionError, match=r"a message of 80\d+ bytes, the server takes 16384 in one frame"):
            load.result(PATIENCE)


def padded(number: int) -> bytes:
    return frames.frame(frames.DATA, frames.PADDED, number, b"\0" + PREFIXED)


@pytest.mark.parametrize(
    ("error", "said", "match"),
    [
        (AssertionError, answer(1, b"", status="5"), "status 5: so it is"),
        (AssertionError, answer(1, PREFIXED, status="13"), "status 13: so it is"),
        (AssertionError, answer(1, b""), "no message of its stated length"),
        (AssertionError, answer(1, PREFIXED[:-1]), "no message of its stated length"),
        (AssertionError, answer(1, PREFIXED + PREFIXED), "no message of its stated length"),
        (AssertionError, answer(1, b"\1" + PREFIXED[1:]), "no message of its stated length"),
        (AssertionError, answer(1, PREFIXED[:-1] + b"\1"), "row: wrong answer"),
        (AssertionError, frames.rst_stream(1, frames.ENHANCE_YOUR_CALM), "reset with error 11"),
        (ConnectionError, answer(3), "on stream 3, in call 1"),
        (ConnectionError, padded(1), "DATA with flags 8"),
        (ConnectionError, frames.goaway(1, frames.NO_ERROR, "going home"), "going home"),
    ],
)
def test_what_is_no_right_answer_ends_the_measurement(error: type[Exception], said: bytes, match: str) -> None:
    with calling() as (peer, load):
        peer.request()
        peer.say(said)
        with pytest.raises(error, match=match):
            load.result(PATIENCE)


def test_a_server_that_hangs_up_ends_the_measurement() -> None:
    with calling() as (peer, load):
        peer.request()
        peer.socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionError, match="the server hung up"):
            load.result(PATIENCE)
