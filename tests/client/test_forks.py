"""Processes that are forked off a program with requests under way: these are the parent's, and the child has its own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.client.fake_service import FakeService
from tests.client.test_client import ANSWER, Server, usual
from tests.daemon_process import PATIENCE, ROOT, wait_until

#: Requests of its parent that end in the child, or are sent or called back by it, show in what either prints, or in the server.
PROGRAM = """
import os, sys, threading
import numpy as np, tensord_client

X = {"x": np.array([7], np.int32)}
client = tensord_client.connect(sys.argv[1], patience=1000)
model = client.model("m", timeout=1000)
call = model.prepare(X)
assert call()["y"].tolist() == [7]
lock, called = threading.Lock(), []

def call_back(future):
    with lock:
        called.append(os.getpid())

def hold():
    with lock:
        held.set()
        over.wait()

print("ready", flush=True)
input()
live = model.latest()
for _ in range(3):
    live.put(X)
futures = [model.submit(X) for _ in range(3)]
for future in futures:
    future.add_done_callback(call_back)
stream = model.stream(X)
held, over = threading.Event(), threading.Event()
threading.Thread(target=hold).start()
held.wait()
print("asked", flush=True)
input()
child = os.fork()
if not child:
    status = 1
    try:
        print("forked", flush=True)
        sys.stdin.readline()
        for _ in range(2):
            assert model(X)["y"].tolist() == [7]
        assert model.submit(X).result(1000)["y"].tolist() == [7]
        assert call()["y"].tolist() == [7]
        live.put(X)
        assert live.get(1000)["y"].tolist() == [7]
        try:
            next(stream)
            raise AssertionError("the child has its parent's answer")
        except tensord_client.Unavailable as error:
            assert "forked" in str(error), error
        assert not any(future.done() for future in futures)
        client.close()
        assert not any(future.done() for future in futures) and not called
        print("answered", flush=True)
        status = 0
    finally:
        os._exit(status)
status = os.waitpid(child, 0)[1]
over.set()
print("waits", flush=True)
assert [future.result(1000)["y"].tolist() for future in futures] == [[7]] * 3
while live.behind:
    assert live.get(1000)["y"].tolist() == [7]
assert next(stream)["y"].tolist() == [7]
client.close()
assert called == [os.getpid()] * 3
os._exit(status)
"""

_TEXT = json.dumps(ANSWER).encode()
STREAMED = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAMED += b"%x\r\n%b\r\n0\r\n\r\n" % (12 + len(_TEXT), struct.pack("<IQ", len(_TEXT), 0) + _TEXT)


class Program:
    """Runs the program, and gives it lines as it says lines."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, address]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT / "client",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._thread.start()

    def _read(self, said: IO[str]) -> None:
        for line in said:
            self._said.put(line.strip())

    def says(self, line: str) -> None:
        assert self._said.get(timeout=PATIENCE) == line

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def ends(self) -> None:
        assert self._process.wait(PATIENCE) == 0

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # also a child that hangs
        self._process.wait()
        self._thread.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def run() -> Iterator[Callable[[str], Program]]:
    begun: list[Program] = []

    def begin(address: str) -> Program:
        begun.append(Program(address))
        return begun[-1]

    yield begin
    for program in begun:
        program.close()


@pytest.mark.parametrize("state", ["in flight", "astray"])
def test_over_lanes(tmp_path: Path, run: Callable[[str], Program], state: str) -> None:
    """Requests that a worker has, and those that wait for a daemon to come back; none is asked twice."""
    with contextlib.closing(FakeService(str(tmp_path / "s"))) as service:
        program = run(service.path)
        program.says("ready")
        (service.silent if state == "in flight" else service.stop)()
        program.go()
        program.says("asked")
        program.go()
        program.says("forked")
        if state == "in flight":
            service.hears()
        else:
            service.back()
        program.go()
        program.says("answered")
        program.says("waits")
        service.back()
        program.ends()
        # One before, what is under way (of the third input of latest, too), and five of the child.
        assert service.received == 1 + 3 + 3 + 1 + 5


def test_over_http(run: Callable[[str], Program]) -> None:
    go = threading.Event()
    infers = [0]

    def answer(path: str, connection: Any) -> bytes | None:
        if path.endswith(("/infer", "/infer_stream")):
            infers[0] += 1
            if 1 < infers[0] <= 1 + 2 + 3 + 1:
                go.wait(PATIENCE)
        return STREAMED if path.endswith("/infer_stream") else usual(path, connection)

    with tempfile.TemporaryDirectory(prefix="tensord-test-") as folder:
        server = Server(Path(folder) / "http.sock", answer)
        try:
            program = run(server.address.path)
            program.says("ready")
            program.go()
            program.says("asked")
            wait_until(lambda: infers[0] == 1 + 2 + 3 + 1, "all to be asked")
            program.go()
            program.says("forked")
            program.go()
            program.says("answered")
            program.says("waits")
            go.set()
            program.ends()
            assert infers[0] == 1 + 3 + 3 + 1 + 5
        finally:
            go.set()
            server.close()
