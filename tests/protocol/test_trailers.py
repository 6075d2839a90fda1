"""Tests what may stand around a chunked body."""

from __future__ import annotations

import socket

import pytest

from tests.daemon_process import PATIENCE, DaemonProcess

#: Behind the last chunk, and whether it is read.
TRAILERS = {
    b"": True,
    b"X: y\r\n": True,
    b"X:\r\n": True,
    b"Host: x\r\n": True,
    b"X: \xe9\r\n": True,
    b"Connection: close\r\n": True,
    b"Expect: 100-continue\r\n": True,
    b"X : y\r\n": False,
    b"X\r\n": False,
    b": y\r\n": False,
    b"X(: y\r\n": False,
    b"X: y\r\n z\r\n": False,
    b" X: y\r\n": False,
    b"X: a\0b\r\n": False,
    b"X: a\x01b\r\n": False,
    b"X: a\rb\r\n": False,
    b"X: y\n": False,
    b"Content-Length: 5\r\n": False,
    b"Transfer-Encoding: chunked\r\n": False,
    b"Transfer-Encoding: gzip\r\n": False,
    b"X: " + b"a" * 70_000 + b"\r\n": False,
}
#: Instead of "1\r\n" before the first byte of the body.
SIZES = {
    b"1;a=b\r\n": True,
    b'1;a="b c"\r\n': True,
    b"0001\r\n": True,
    b"1 \r\n": False,
    b"+1\r\n": False,
    b"0x1\r\n": False,
    b"\r\n": False,
    b"1\n": False,
    b"1;a\n": False,
    b"1;a\0b\r\n": False,
    b"FFFFFFFFFFFFFFFFF\r\n": False,
    b"1;" + b"a" * 70_000 + b"\r\n": False,
}


#: A request for ``scale``, behind a blank that is a chunk of its own.
BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'


def status(daemon: DaemonProcess, size: bytes, trailers: bytes) -> int:
    head = b"POST /v2/models/scale/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", daemon.port), PATIENCE) as sock:
        sock.sendall(head + size + b" \r\n%x\r\n%b\r\n0\r\n" % (len(BODY), BODY) + trailers + b"\r\n")
        answer = sock.makefile("rb").readline()
    return int(answer.split()[1])


@pytest.mark.parametrize(
    ("size", "trailers", "taken"),
    [
        *((b"1\r\n", trailers, taken) for trailers, taken in TRAILERS.items()),
        *((size, b"", taken) for size, taken in SIZES.items()),
    ],
)
def test_what_is_read(daemon: DaemonProcess, size: bytes, trailers: bytes, taken: bool) -> None:
    got = status(daemon, size, trailers)
    assert got == 200 if taken else got in (400, 413, 431)
