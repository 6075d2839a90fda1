"""Tests what may stand around a chunked body: the protocol's port and the metrics' port accept and refuse the same."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests import repositories
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


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("trailers")
    with DaemonProcess(folder, [repositories.scale_model(folder / "repository")]) as daemon:
        yield daemon


#: A request for ``scale``, behind a blank that is a chunk of its own.
BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'


def status(address: str, request: bytes, size: bytes, trailers: bytes) -> int:
    host, port = address.rsplit(":", 1)
    head = request + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), PATIENCE) as sock:
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
def test_both_ports_read_the_same(daemon: DaemonProcess, size: bytes, trailers: bytes, taken: bool) -> None:
    got = status(daemon.url, b"POST /v2/models/scale/infer", size, trailers)
    assert got == 200 if taken else got in (400, 413, 431)
    assert status(daemon.metrics_url, b"GET /metrics", size, trailers) == got
