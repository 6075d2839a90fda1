"""Attacks on the gateway for robots, which is the target in the place of the HTTP front."""

from __future__ import annotations

import contextlib
import os
import random
import socket

import msgpack
import numpy as np

from bench.attackers.target import Target, drain, hold, pile_up

_MIB = 1 << 20
_HANDSHAKE = (
    b"GET /scale HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def _frame(content: bytes, opcode: int = 2, byte_size: int | None = None) -> bytes:
    """Returns a frame whose mask is 0. ``byte_size``: what its head says, if that is not its content's."""
    size = len(content) if byte_size is None else byte_size
    head = bytes([0x80 | opcode, 0x80 | size]) if size < 126 else bytes([0x80 | opcode, 0xFF]) + size.to_bytes(8, "big")
    return head + bytes(4) + content


def _array(content: object, dtype: object, shape: object) -> bytes:
    return msgpack.packb({"x": {b"__ndarray__": True, b"data": content, b"dtype": dtype, b"shape": shape}})


_ORDINARY = _frame(_array(np.ones(4, np.float32).tobytes(), "<f4", [4]))
#: Messages that are no observations, or that claim more bytes than they have.
_HOSTILE = (
    b"\x81\xa1x" + b"\x91" * 100_000,
    b"\x81\xa1x" + b"\xdd\x00\x00\x10\x00" * 900,
    b"\x81\xa1x" + b"\xdd\xff\xff\xff\xff" * 900,
    b"\x81\xa1x" + b"\xdf\x00\x00\x10\x00\xa1x" * 900,
    b"\x81\xa1x" + b"\xc9\x00\x01\x00\x00\x05" * 900,
    b"\xc1" * 1000,
    *(_array(b"", "<f4", shape) for shape in ([1 << 30] * 8, [0] * 8, [0, 1 << 62], [-1], [[1]], {}, "shape")),
    *(_array(b"\xff" * 16, dtype, [4]) for dtype in ("|O", "O", "<M8[ns]", "f4,f4", "|V4", "<U1", "(4,4)f4", b"<f4")),
    _array(b"\xff" * 400, "<U100", [1]),
    _array("text", "<f4", [1]),
    _array([1.0] * 4096, "<f4", [4096]),
    msgpack.packb({"x": [[0.5] * 4000] * 100}),
    msgpack.packb({str(number): {b"__npgeneric__": True, b"data": 1, b"dtype": "<f4"} for number in range(4000)}),
    msgpack.packb({"x": {b"__npgeneric__": True, b"data": 1 << 63, b"dtype": "|i1"}}),
)


def _connected(target: Target) -> socket.socket:
    connection = target.http_socket()
    try:
        connection.sendall(_HANDSHAKE)
        connection.recv(1 << 16)
    except OSError:
        connection.close()
        raise
    return connection


def half_messages(target: Target) -> None:
    """Begins messages of 30 MiB on thirty-two connections, and sends 100 KB of each now and then."""

    def begin() -> socket.socket:
        connection = _connected(target)
        connection.sendall(_frame(b"", byte_size=30 * _MIB))
        target.count("messages")
        return connection

    def go_on(connection: socket.socket) -> None:
        connection.sendall(bytes(100_000))
        drain(connection)

    hold(target, 32, begin, go_on)


def half_handshakes(target: Target) -> None:
    """Opens connections that send half of a handshake."""

    def half_open() -> socket.socket:
        connection = target.http_socket()
        connection.sendall(_HANDSHAKE[:40])
        return connection

    pile_up(target, half_open, 1000)


def hostile_observations(target: Target) -> None:
    """Sends one observation after the other that is none: too deep, too many, of objects, of other lengths than they say."""
    _each(target, [_frame(content) for content in _HOSTILE])


def random_observations(target: Target) -> None:
    """Sends observations in which some bytes were exchanged, and random bytes in the place of frames."""
    chance = random.Random(5)
    messages = []
    for _ in range(300):
        content = bytearray(_ORDINARY)
        for _ in range(chance.randint(1, 6)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        messages.append(bytes(content) if chance.random() < 0.8 else os.urandom(200))
    _each(target, messages)


def large_observations(target: Target) -> None:
    """Sends observations as large as may be, of numbers and of arrays that the model does not take."""
    numbers = msgpack.packb({"x": [[0.5] * 4096] * 200})
    arrays = msgpack.packb({"x": {b"__ndarray__": True, b"data": bytes(4 * _MIB), b"dtype": "<f4", b"shape": [_MIB]}})
    _each(target, [_frame(numbers), _frame(arrays)])


def _each(target: Target, messages: list[bytes]) -> None:
    """Sends the messages again and again and reads what comes; connects again where the gateway has closed."""
    number = 0
    while target.going_on():
        with target.refusals(), contextlib.closing(_connected(target)) as connection:
            connection.settimeout(0.5)
            while target.going_on():
                number += 1
                connection.sendall(messages[number % len(messages)])
                target.count("messages")
                if not connection.recv(1 << 16):
                    target.count("closed")
                    break


def unread_actions(target: Target) -> None:
    """Sends observations, and pings, on eight connections, and reads no answers."""
    content = (_ORDINARY + _frame(bytes(125), 9)) * 100

    def ask(connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            target.count("bytes", connection.send(content))

    hold(target, 8, lambda: _connected(target), ask)


def robots_that_come_and_go(target: Target) -> None:
    """Connects, asks, and leaves without reading."""
    while target.going_on():
        with target.refusals(), contextlib.closing(_connected(target)) as connection:
            connection.sendall(_ORDINARY)
            target.count("robots")


ATTACKS = {
    "half-messages": half_messages,
    "half-handshakes": half_handshakes,
    "hostile-observations": hostile_observations,
    "random-observations": random_observations,
    "large-observations": large_observations,
    "unread-actions": unread_actions,
    "robots-that-come-and-go": robots_that_come_and_go,
}
