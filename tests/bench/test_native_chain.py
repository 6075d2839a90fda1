"""Tests that the server in C answers rightly and counts, however it waits; a request it cannot read ends only its connection."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from bench import native_chain
from bench.closed_loop import Connection, infer_request
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess, wait_until

#: As native_chain.c has it.
PLACES = 64


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, daemon: DaemonProcess) -> Path:
    """Returns the compiled program, with its file of answers beside it."""
    program = native_chain.compiled(tmp_path_factory.mktemp("native"))
    if program is None:
        pytest.skip("no C compiler: the chain in C cannot be built")
    program.with_name("answers").write_bytes(native_chain.answers(daemon.url))
    return program


class Chain:
    """Runs the program. Its front is ``process``."""

    def __init__(self, program: Path, spin_us: int) -> None:
        command = native_chain.command(program, 0, spin_us, program.with_name("answers"))
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        # The worker is there before the front listens.
        self.port = int(self.process.stdout.readline().removeprefix("listening on "))
        (self.worker,) = psutil.Process(self.process.pid).children()

    @contextlib.contextmanager
    def connected(self) -> Iterator[Connection]:
        connection = Connection(("127.0.0.1", self.port))
        with connection.socket:
            yield connection

    def count(self) -> int:
        url = f"http://127.0.0.1:{self.port}/v2/models/addsub/stats"
        with urllib.request.urlopen(url, timeout=60) as answer:
            (model,) = json.load(answer)["model_stats"]
        assert model["inference_count"] == model["inference_stats"]["success"]["count"]
        return int(model["inference_count"])


@pytest.fixture(params=[0, 300], ids=["sleeps", "looks"])
def chain(program: Path, request: pytest.FixtureRequest) -> Iterator[Chain]:
    chain = Chain(program, request.param)
    with chain.process:
        yield chain
        chain.process.terminate()


def _request(number: int, name: str = "addsub") -> tuple[bytes, bytes]:
    """Returns an inference request and the bytes of the answer's tensors."""
    a, b = np.arange(number, number + 16, dtype=np.float32).reshape(1, 16), np.full((1, 16), number + 0.5, np.float32)
    return infer_request(name, [("INPUT0", a), ("INPUT1", b)], "OUTPUT0"), (a + b).tobytes() + (a - b).tobytes()


def _ask(connection: Connection, request: bytes) -> bytes:
    connection.send(request)
    return _answer(connection)


def _answer(connection: Connection) -> bytes:
    while not connection.read():
        pass
    return bytes(connection.received)


def test_requests_are_computed_and_counted(chain: Chain) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(chain.connected()) for _ in range(PLACES // 2)]
        for turn in range(20):
            asked = [_request(turn * PLACES + number) for number in range(len(connections))]
            for connection, (request, _) in zip(connections, asked, strict=True):
                connection.send(request)
            for connection, (_, tensors) in zip(connections, asked, strict=True):
                answer = _answer(connection)
                assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
                assert answer.endswith(tensors)
        assert chain.count() == 20 * len(connections)


def test_stock_clients_are_answered(chain: Chain) -> None:
    native_chain.check(f"127.0.0.1:{chain.port}")
    assert chain.count() == 8


def test_the_check_notices_old_answers(daemon: DaemonProcess) -> None:
    command = [sys.executable, "-m", "bench.bare_chain", "0", daemon.url, "addsub", "front"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as front:
        try:
            assert front.stdout is not None
            port = int(front.stdout.readline().removeprefix("listening on "))
            with pytest.raises(SystemExit, match=f"127.0.0.1:{port} answers OUTPUT0"):
                native_chain.check(f"127.0.0.1:{port}")
        finally:
            front.terminate()


def test_a_connection_may_ask_one_thing_after_another_in_pieces(chain: Chain) -> None:
    with chain.connected() as connection:
        for number in range(6):
            request, tensors = _request(number)
            # With another head each time: nothing is known of it.
            request = request.replace(b"Host: bench", b"Host: " + b"x" * number)
            for size in (1, 100, len(request) - 1):
                connection.send(request[:size])
                connection.socket.sendall(request[size:])
                assert _answer(connection).endswith(tensors)
            assert b'"name":"addsub"' in _ask(connection, b"GET /v2/models/addsub/config HTTP/1.1\r\n\r\n")
            assert _ask(connection, b"GET /v2/models/mlp HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nX: " + 5000 * b"x",
        b"POST /v2/models/addsub/infer HTTP/1.1\r\nContent-Length: 5000\r\n\r\n",
        b"POST /v2/models/addsub/infer HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v2/models/addsub/infer HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /v2/models/addsub/infer HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v2/models/addsub/infer HTTP/1.1\r\nContent-Length: 130\r\n\r\n{}" + bytes(128),
        b"POST /v2/models/addsub/infer HTTP/1.1\r\nContent-Length: 130\r\nInference-Header-Content-Length: -2\r\n\r\n{}"
        + bytes(128),
        2 * b"GET /v2 HTTP/1.1\r\n\r\n",
        2 * _request(0)[0],
    ],
    ids=["head", "length", "negative", "huge", "small", "json", "negative-json", "two", "two-known"],
)
def test_what_does_not_fit_ends_its_connection_only(chain: Chain, request_: bytes) -> None:
    with chain.connected() as other, chain.connected() as connection:
        assert _ask(other, _request(1)[0]).endswith(_request(1)[1])
        with pytest.raises(ConnectionError):
            _ask(connection, request_)
        assert _ask(other, _request(2)[0]).endswith(_request(2)[1])
    with chain.connected() as connection:
        assert _ask(connection, _request(3)[0]).endswith(_request(3)[1])


def test_nobody_gets_the_answer_of_a_client_that_has_left(chain: Chain) -> None:
    with chain.connected() as other:
        for number in range(200):
            with chain.connected() as leaving:
                leaving.send(_request(1000)[0])
                other.send(_request(number)[0])
            assert _answer(other).endswith(_request(number)[1])


def test_places_are_bounded_and_free_again(chain: Chain) -> None:
    request, tensors = _request(7)
    with contextlib.ExitStack() as stack:
        first, *_ = connections = [stack.enter_context(chain.connected()) for _ in range(PLACES)]
        for connection in connections:
            assert _ask(connection, request).endswith(tensors)
        with chain.connected() as late, pytest.raises(ConnectionError):
            _ask(late, request)
        first.socket.close()

        def place() -> bool:
            with chain.connected() as next_one, contextlib.suppress(ConnectionError):
                return _ask(next_one, request).endswith(tensors)
            return False

        wait_until(place, "the place of the one that left")


def test_it_ends_when_told(chain: Chain) -> None:
    with chain.connected() as connection:
        assert _ask(connection, _request(0)[0]).endswith(_request(0)[1])
        chain.process.send_signal(signal.SIGTERM)
        assert chain.process.wait(PATIENCE) == 0
        # The front has waited for it.
        assert not chain.worker.is_running()


def test_neither_process_outlives_the_other(program: Path, chain: Chain) -> None:
    chain.process.kill()
    # Its parent is gone, and whoever inherited it may be slow to bury it.
    wait_until(lambda: _has_ended(chain.worker), "the end of the worker")
    other = Chain(program, 0)
    with other.process:
        try:
            other.worker.kill()
            assert other.process.wait(PATIENCE) == 1
        finally:
            other.process.kill()


def _has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def test_answers_that_cannot_be_read_are_refused(program: Path, tmp_path: Path) -> None:
    answers = program.with_name("answers").read_bytes()
    for broken in (b"", answers[:-1], answers + b"GET /", 17 * b"GET / 0\n", b"GET / 9000\n" + bytes(9000)):
        file = tmp_path / "answers"
        file.write_bytes(broken)
        ended = subprocess.run(native_chain.command(program, 0, 0, file), capture_output=True, text=True, check=False)
        assert ended.returncode == 1
        assert "does not hold 16 answers of 8192 bytes at most" in ended.stderr


def test_without_a_compiler_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native_chain.compiled(tmp_path) is None
