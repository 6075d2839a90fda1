"""Tests which server a client finds, and what happens to calls when it goes away, is busy, or the process is forked."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensord_client
from tensord_client import client as finding
from tensord_client.asynchronous import AsyncModel
from tensord_client.http import HttpConnection
from tensord_client.http_channel import Address

from tests.daemon_process import PATIENCE, DaemonProcess, descriptors, wait_until
from tests.repositories import deadly_model, scale_model, write_model


class Server:
    """An HTTP server on a unix socket that answers each request by a function of its path, and counts connections."""

    def __init__(self, path: Path, answer: Callable[[str, socket.socket], bytes | None]) -> None:
        self.address = Address(str(path))
        self.connections = 0
        self.asked: list[str] = []
        self._answer = answer
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._open: list[socket.socket] = []
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as reading:
            while line := reading.readline():
                fields = {}
                while field := reading.readline().strip().lower():
                    name, _, value = field.partition(b":")
                    fields[name] = value
                reading.read(int(fields.get(b"content-length", b"0")))
                path = line.decode().split()[1]
                self.asked.append(path)
                answer = self._answer(path, connection)
                if answer is None:
                    return
                try:
                    connection.sendall(answer)
                except OSError:  # the client has gone
                    return

    def close(self) -> None:
        if self._listening.fileno() < 0:
            return
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in self._open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join()
        Path(self.address.path).unlink()


def said(content: Any, status: str = "200 OK", fields: bytes = b"") -> bytes:
    body = json.dumps(content).encode()
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n" % (status.encode(), fields, len(body)) + body


METADATA = {
    "name": "m",
    "versions": ["1"],
    "inputs": [{"name": "x", "datatype": "INT32", "shape": [1]}],
    "outputs": [{"name": "y", "datatype": "INT32", "shape": [1]}],
}
ANSWER = {
    "model_name": "m",
    "model_version": "1",
    "outputs": [{"name": "y", "datatype": "INT32", "shape": [1], "data": [7]}],
}


def usual(path: str, connection: socket.socket) -> bytes | None:
    if path.endswith("/m"):
        return said(METADATA, fields=b"Tensord-Pure: 1\r\n")
    return said(ANSWER if path.endswith("/infer") else {})


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tensord-test-") as short:
        yield Path(short)


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(answer: Callable[[str, socket.socket], bytes | None] = usual, name: str = "http.sock") -> Server:
        started.append(Server(folder / name, answer))
        return started[-1]

    yield start
    for server in started:
        server.close()


def clients_socket(path: Path, told: dict[str, Any]) -> tuple[socket.socket, threading.Thread]:
    """Listens as a daemon's socket for clients does, and answers each connection."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(str(path))
    listening.listen()

    def main() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                while connection.recv(4096):
                    connection.send(json.dumps(told).encode())

    thread = threading.Thread(target=main)
    thread.start()
    return listening, thread


# --------------------------------------------------------------------------------------------------------------- finding


def test_addresses(serve: Callable[..., Server], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a socket, a path after unix:, and the same from the environment."""
    server = serve()
    path = str(folder / "http.sock")
    for address in (folder, str(folder), path, f"unix:{path}"):
        with tensord_client.connect(address) as client:
            assert client.model("m")({"x": [1]})["y"].tolist() == [7]
        monkeypatch.setenv("TENSORD", str(address))
        with tensord_client.connect() as client:
            assert client.model("m")({"x": [1]})["y"].tolist() == [7]
    assert server.connections == 8


def test_the_socket_for_clients_says_where_http_is(serve: Callable[..., Server], folder: Path) -> None:
    server = serve(name="elsewhere.sock")
    told = {"server": "tensord", "wire": 3, "lanes": False, "http": ["127.0.0.1:1", f"unix:{server.address.path}"]}
    listening, thread = clients_socket(folder / "clients.sock", told)
    for address in (folder, folder / "clients.sock"):
        with tensord_client.connect(address) as client:
            assert client.model("m")({"x": [1]})["y"].tolist() == [7]
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


def test_the_usual_places(serve: Callable[..., Server], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service, then the user's own, where nobody else could have made it."""
    monkeypatch.delenv("TENSORD", raising=False)
    monkeypatch.setattr(finding, "SERVICE", str(folder / "service"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    (folder / "tensord").mkdir(mode=0o700)
    assert list(finding._usual())[:2] == [f"{folder}/service/clients.sock", f"{folder}/tensord/clients.sock"]
    assert list(finding._usual())[-1] == "localhost:8000"
    (folder / "tensord").chmod(0o770)
    assert f"{folder}/tensord/clients.sock" not in finding._usual()


def test_nobody_is_there(folder: Path) -> None:
    with pytest.raises(tensord_client.Unavailable, match=r"no tensord was found: .*/none: No such file or directory"):
        tensord_client.connect(folder / "none")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(tensord_client.Unavailable, match=rf"no server answers at http://127.0.0.1:{port}"):
            tensord_client.connect(f"127.0.0.1:{port}")
    (folder / "file").touch()
    with pytest.raises(tensord_client.Unavailable, match="file: Connection refused"):
        tensord_client.connect(folder / "file")
    for text in (
        "localhost:x",
        "localhost:99999",
        "localhost:0",
        "https://localhost:8000",
        "http://localhost:8000/v2",
        "ftp://x",
    ):
        with pytest.raises(tensord_client.InvalidArgument, match=f"'{text}' is no address of a server"):
            tensord_client.connect(text)


#: What it imports, also for its sentence, may be root's.
_CONNECTS_AS_NOBODY = """
import os, sys
import grp, pwd, tensord_client

os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    tensord_client.connect(sys.argv[1])
except tensord_client.Unavailable as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("modes", "address", "said"),
    [
        ((0o755, 0o700, 0o666), "", r"{}: Permission denied; {} is for user '\w+' alone$"),
        ((0o755, 0o750, 0o666), "", r"{}: Permission denied; {} is for members of group '\w+': join it .*$"),
        (
            (0o755, 0o710, 0o666),
            "/http.sock",
            r"{}/http.sock: Permission denied; {} is for members of group '\w+': .*$",
        ),
        (
            (0o755, 0o755, 0o660),
            "",
            r"{}/http.sock: Permission denied; {}/http.sock is for members of group '\w+': .*$",
        ),
        (
            (0o755, 0o755, 0o600),
            "/http.sock",
            r"{}/http.sock: Permission denied; {}/http.sock is for user '\w+' alone$",
        ),
        ((0o755, 0o711, 0o666), "", r"^$"),
        ((0o755, 0o711, 0o600), "/none", r"{}/none: No such file or directory$"),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_server_of_others_says_who_may(
    serve: Callable[..., Server], folder: Path, modes: tuple[int, int, int], address: str, said: str
) -> None:
    serve()
    inner, sock = folder / "run", folder / "run" / "http.sock"
    inner.mkdir()
    (folder / "http.sock").rename(sock)
    for path, mode in zip((folder, inner, sock), modes, strict=True):
        path.chmod(mode)
    command = [sys.executable, "-c", _CONNECTS_AS_NOBODY, str(inner) + address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    sock.rename(folder / "http.sock")
    assert re.search(said.format(*[re.escape(str(inner))] * 2), done.stdout.strip()), done
    assert not done.stderr


@pytest.mark.parametrize("address", ["http.sock", ""])
def test_waiting_for_a_server(serve: Callable[..., Server], folder: Path, address: str) -> None:
    """A folder that is there before the server's socket, as in a pod or a job, is waited for too."""
    made: list[tensord_client.Client] = []
    waiting = threading.Thread(target=lambda: made.append(tensord_client.connect(folder / address, wait=PATIENCE)))
    waiting.start()
    time.sleep(0.2)
    assert not made
    server = serve()
    waiting.join()
    made[0].close()
    assert server.connections


@pytest.mark.parametrize(
    ("answered", "why"),
    [
        (None, "ended before it answered"),
        (said("<html>", "502 Bad Gateway"), "http.sock: the server answered with status 502"),
        (said({"error": "no healthy upstream"}, "503 Service Unavailable"), "http.sock: no healthy upstream"),
        (said({"error": "the server is stopping"}, "503 Service Unavailable"), "the server is stopping"),
        (said({}, "504 Gateway Timeout"), "http.sock: the server answered with status 504"),
    ],
)
def test_a_proxy_whose_server_is_not_there_yet_is_waited_for(
    serve: Callable[..., Server], answered: bytes | None, why: str
) -> None:
    """A proxy takes connections and ends them, or says that its server is not there: ``connect(wait=...)`` tries again."""
    left = [3]

    def answer(path: str, connection: socket.socket) -> bytes | None:
        left[0] -= 1
        return answered if left[0] > 0 else usual(path, connection)

    server = serve(answer)
    with pytest.raises(tensord_client.Unavailable, match=f"no tensord was found: .*{why}"):
        tensord_client.connect(server.address.path)
    with tensord_client.connect(server.address.path, wait=PATIENCE):
        assert server.asked == ["/v2/health/live"] * 3


def test_a_folder_is_a_repository_if_a_model_lies_in_it(folder: Path) -> None:
    """Else it is one in which a daemon's sockets do not lie yet, which this process must not serve for good."""
    (folder / "10").mkdir()
    for name in ("notes/old", "notes/1st", ".git/1", "file/x"):
        (folder / name).mkdir(parents=True)
    (folder / "notes/1").touch()
    with pytest.raises(
        tensord_client.Unavailable, match=rf"{folder}: it holds neither a daemon's sockets nor a model$"
    ):
        tensord_client.connect(folder)
    for name in ("model/1", "ensemble/config.pbtxt"):
        (folder / name).parent.mkdir()
        (folder / name).mkdir() if name.endswith("1") else (folder / name).touch()
        tensord_client.connect(folder).close()
        (folder / name).parent.rename(folder / ".gone")
        shutil.rmtree(folder / ".gone")


# ------------------------------------------------------------------------------------------------------------ connections


@pytest.mark.parametrize("address", ["http.sock", "clients.sock"])
def test_a_model_whose_configuration_cannot_be_had_now_is_not_ready(
    serve: Callable[..., Server], folder: Path, address: str
) -> None:
    """Such as one whose load begins behind its metadata: without it, it would be taken for one without rows and sequences."""
    status = ["200 OK"]

    def answer(path: str, connection: socket.socket) -> bytes | None:
        if not path.endswith("/config"):
            return usual(path, connection)
        return said({"max_batch_size": 8} if status[0] == "200 OK" else {"error": "not ready"}, status[0])

    http = serve(answer).address
    listening, thread = clients_socket(folder / "clients.sock", {"hello": 1, "lanes": False, "http": [str(http)]})
    with listening, tensord_client.connect(folder / address) as client:
        model = client.model("m")
        assert (model.max_batch_size, model.config) == (8, {"max_batch_size": 8})
        status[0] = "503 Service Unavailable"
        for ask in (lambda: client.model("m"), lambda: model.config):
            with pytest.raises(tensord_client.Unavailable, match="not ready"):
                ask()
        status[0] = "403 Forbidden"  # an operator may keep it for those with a key
        assert (client.model("m").max_batch_size, model.config) == (0, {})
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_shapes_of_arrays(serve: Callable[..., Server]) -> None:
    tensor = tensord_client.Tensor("x", "FP32", (-1, 4))
    with tensord_client.connect(serve().address.path) as client:
        assert client.empty(tensor).shape == (1, 4)
        assert client.empty(tensor, shape=(3, 4)).shape == (3, 4)
        assert client.empty(5, np.int8).shape == (5,)
        for shape in ((3, 5), (4,)):
            with pytest.raises(tensord_client.InvalidArgument, match=r"'x' is FP32\[-1, 4\], not \["):
                client.empty(tensor, shape=shape)
        with pytest.raises(tensord_client.InvalidArgument, match="needs a dtype"):
            client.empty((3, 4))
        with pytest.raises(tensord_client.InvalidArgument, match="negative dimension"):
            client.empty((-1, 4), np.int8)


def test_a_connection_is_kept_and_an_ended_one_is_noticed(serve: Callable[..., Server]) -> None:
    """A call of a model that may not run twice goes on where the connection ended between two calls."""
    closing = threading.Event()

    def answer(path: str, connection: socket.socket) -> bytes | None:
        if path.endswith("/m"):
            return said(METADATA)
        if closing.is_set() and path.endswith("/infer"):
            closing.clear()
            connection.sendall(said(ANSWER))
            return None
        return usual(path, connection)

    server = serve(answer)
    with tensord_client.connect(server.address.path) as client:
        model = client.model("m")
        for _ in range(5):
            model({"x": [1]})
        assert server.connections == 1
        closing.set()
        model({"x": [1]})
        wait_until(lambda: len([t for t in server._threads if t.is_alive()]) == 1, "the connection to end")
        for _ in range(5):
            model({"x": [1]})
        assert server.connections == 2


@pytest.mark.parametrize(
    ("pure", "deaths", "text"),
    [
        (True, 1, ""),
        (True, 2, "ended twice before it answered"),
        (False, 1, "the request may have run, and is not sent again"),
    ],
)
def test_a_server_that_ends_under_a_request(serve: Callable[..., Server], pure: bool, deaths: int, text: str) -> None:
    """A pure request is sent again, once; for any other the caller gets an error."""
    left = [deaths]

    def answer(path: str, connection: socket.socket) -> bytes | None:
        if path.endswith("/m") and not pure:
            return said(METADATA)
        if path.endswith("/infer") and left[0]:
            left[0] -= 1
            return None
        return usual(path, connection)

    server = serve(answer)
    with tensord_client.connect(server.address.path) as client:
        model = client.model("m")
        if text:
            with pytest.raises(tensord_client.Unavailable, match=text):
                model({"x": [1]})
        else:
            assert model({"x": [1]})["y"].tolist() == [7]
        assert server.asked.count("/v2/models/m/infer") == (2 if pure else 1)
        assert model.submit({"x": [1]}).result(PATIENCE)["y"].tolist() == [7]


def test_a_server_that_is_restarted(serve: Callable[..., Server]) -> None:
    """Calls wait for the next one, whatever they are of: none of them has left."""
    stopping = said({"error": "Server is stopping, scheduler for model has stopped"}, "503 Service Unavailable")
    state = {"stops": True}

    def answer(path: str, connection: socket.socket) -> bytes | None:
        if path.endswith("/infer") and state["stops"]:
            return stopping
        return said(METADATA) if path.endswith("/m") else usual(path, connection)

    server = serve(answer)
    with tensord_client.connect(server.address.path) as client:
        model = client.model("m")
        got = [model.submit({"x": [i]}) for i in range(3)]
        wait_until(lambda: server.asked.count("/v2/models/m/infer") >= 3, "requests to be refused")
        server.close()
        state["stops"] = False
        serve()
        assert [each.result(PATIENCE)["y"].tolist() for each in got] == [[7]] * 3
    with pytest.raises(tensord_client.Unavailable, match="the client was closed"):
        model({"x": [1]})


def test_a_server_that_does_not_come_back(serve: Callable[..., Server]) -> None:
    server = serve()
    with tensord_client.connect(server.address.path, patience=0.1) as client:
        model, hurried = client.model("m"), client.model("m", timeout=0.05)
        server.close()
        with pytest.raises(
            tensord_client.Unavailable, match=r"no server answers at unix:.*: No such file or directory"
        ):
            model({"x": [1]})
        with pytest.raises(tensord_client.DeadlineExceeded):
            hurried({"x": [1]})
        serve()


def test_so_many_requests_wait_for_a_connection_and_one_more_is_told(serve: Callable[..., Server]) -> None:
    go = threading.Event()

    def answer(path: str, connection: socket.socket) -> bytes | None:
        if path.endswith("/infer"):
            go.wait(PATIENCE)
        return usual(path, connection)

    connection = HttpConnection(serve(answer).address, limit=1, max_waiting=2)
    text = "^2 requests wait in this process to be sent, at most 2 may: wait for answers first$"
    with tensord_client.Client(connection) as client:
        model = client.model("m")
        futures = [model.submit({"x": [i]}) for i in range(3)]
        for ask in (model, model.submit):
            with pytest.raises(tensord_client.Unavailable, match=text):
                ask({"x": [1]})
        go.set()
        assert [each.result(PATIENCE)["y"].tolist() for each in futures] == [[7]] * 3


def test_connections_have_a_bound(serve: Callable[..., Server]) -> None:
    """Callers of every kind wait in line while all connections are in use; a cancelled one leaves the line."""
    go = threading.Event()

    def answer(path: str, connection: socket.socket) -> bytes | None:
        if path.endswith("/infer"):
            go.wait(PATIENCE)
        return usual(path, connection)

    server = serve(answer)
    connection = HttpConnection(server.address, limit=2)
    with tensord_client.Client(connection) as client:
        model = client.model("m")
        futures = [model.submit({"x": [i]}) for i in range(20)]
        assert futures[-1].cancel()
        called: list[list[int]] = []
        thread = threading.Thread(target=lambda: called.append(model({"x": [1]})["y"].tolist()))
        thread.start()
        wait_until(lambda: server.asked.count("/v2/models/m/infer") == 2, "both connections to be in use")
        go.set()
        assert [each.result(PATIENCE)["y"].tolist() for each in futures[:-1]] == [[7]] * 19
        thread.join()
        assert called == [[7]]
        assert server.connections == 2


FRAMINGS = ("chunks", "a length", "the end")


def framed(body: bytes, framing: str, kind: bytes = b"application/octet-stream", status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\n" % (status, kind)
    if framing == "chunks":
        return head + b"Transfer-Encoding: chunked\r\n\r\n1\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (
            body[:1],
            len(body) - 1,
            body[1:],
        )
    if framing == "a length":
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    return head + b"Connection: close\r\n\r\n" + body


def ways_to_stream(model: Any) -> list[Callable[[], list[Any]]]:
    """Returns what reads a model's responses: a thread, and an event loop."""

    async def awaited() -> list[Any]:
        asynchronous = AsyncModel(model._connection, model._description, 0, PATIENCE)
        return [answer["y"].tolist() async for answer in asynchronous.stream({"x": [1]})]

    return [lambda: [answer["y"].tolist() for answer in model.stream({"x": [1]})], lambda: asyncio.run(awaited())]


@pytest.mark.parametrize("framing", FRAMINGS)
def test_bodies_of_any_framing(serve: Callable[..., Server], framing: str) -> None:
    """As proxies between change it: responses, an answer, and errors."""
    text = json.dumps(ANSWER).encode()
    body = 3 * (struct.pack("<IQ", len(text), 0) + text)
    answers = {"/infer_stream": framed(body, framing), "/infer": framed(text, framing, b"application/json")}

    def answer(path: str, connection: socket.socket) -> bytes | None:
        kind = path[path.rindex("/") :]
        if kind not in answers:
            return usual(path, connection)
        connection.sendall(answers[kind])
        return None if framing == "the end" else b""

    with tensord_client.connect(serve(answer).address.path) as client:
        model = client.model("m", timeout=PATIENCE)
        for _ in range(2):
            assert model({"x": [1]})["y"].tolist() == [7]
            for stream in ways_to_stream(model):
                assert stream() == 3 * [[7]]
        answers["/infer_stream"] = framed(body[:-1], framing)
        for stream in ways_to_stream(model):
            with pytest.raises(tensord_client.Unavailable, match="ended in the middle of the responses"):
                stream()
        for kind in answers:
            answers[kind] = framed(b'{"error": "it is not"}', framing, b"application/json", b"404 Not Found")
        for ask in (*ways_to_stream(model), lambda: model({"x": [1]})):
            with pytest.raises(tensord_client.NotFound, match=r"^it is not$"):
                ask()


@pytest.mark.parametrize("framing", FRAMINGS)
def test_content_of_another_type(serve: Callable[..., Server], framing: str) -> None:
    """Whoever answers in a server's place is told by what it says, and futures go on to end."""
    page = framed(b"<html>log in", framing, b"text/html; charset=utf-8")

    def answer(path: str, connection: socket.socket) -> bytes | None:
        if not path.endswith(("/infer", "/infer_stream")):
            return usual(path, connection)
        connection.sendall(page)
        return None if framing == "the end" else b""

    with tensord_client.connect(serve(answer).address.path) as client:
        model = client.model("m", timeout=PATIENCE)
        text = r"^the server answered with text/html; charset=utf-8, b'<html>log in', where .* expected$"
        for ask in (
            *ways_to_stream(model),
            lambda: model({"x": [1]}),
            *2 * [lambda: model.submit({"x": [1]}).result(PATIENCE)],
        ):
            with pytest.raises(tensord_client.Internal, match=text):
                ask()


def test_a_thousand_clients_leave_nothing(serve: Callable[..., Server]) -> None:
    server = serve()
    counts = []
    for i in range(300):
        with tensord_client.connect(server.address.path) as client:
            client.model("m").submit({"x": [1]}).result(PATIENCE)
        if i % 100 == 50:
            gc.collect()
            wait_until(lambda: len([t for t in server._threads if t.is_alive()]) == 1, "connections to end")
            wait_until(lambda: not any(t.name == "tensord-client" for t in threading.enumerate()), "threads to end")
            counts.append(len(descriptors()) - len([each for each in server._open if each.fileno() >= 0]))
    assert len(set(counts)) == 1, counts


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork(serve: Callable[..., Server]) -> None:
    """The child connects anew, with threads or without, and what the parent has under way stays the parent's."""
    go = threading.Event()

    def answer(path: str, connection: socket.socket) -> bytes | None:
        if path.endswith("/infer"):
            go.wait(PATIENCE)
        return usual(path, connection)

    server = serve(answer)
    with tensord_client.connect(server.address.path) as client:
        model = client.model("m")
        under_way = model.submit({"x": [1]})
        wait_until(lambda: server.asked.count("/v2/models/m/infer") == 1, "the request to be asked")
        before = server.connections
        child = os.fork()
        if not child:
            status = 1
            try:
                client.model("m")
                waiting = [model.submit({"x": [1]}) for _ in range(3)]
                status = int([each.result(PATIENCE)["y"].tolist() for each in waiting] != [[7]] * 3)
            finally:
                os._exit(status)
        wait_until(lambda: server.asked.count("/v2/models/m/infer") == 4, "the child to ask")
        go.set()
        assert os.waitpid(child, 0)[1] == 0
        assert under_way.result(PATIENCE)["y"].tolist() == [7]
        assert model({"x": [1]})["y"].tolist() == [7]
        assert server.connections == before + 3


# -------------------------------------------------------------------------------------------------------------- a daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    repository = tmp_path_factory.mktemp("models")
    scale_model(repository)
    deadly_model(repository)
    write_model(
        repository,
        "counts",
        """
        import os
        inputs, outputs, host = {"x": "INT32[1]"}, {"y": "INT32[1]"}, True

        def create(path, config, device):
            def apply(params, inputs):
                while True:
                    yield {"y": inputs["x"]}
            return apply, None
        """,
    )
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository]) as daemon:
        yield daemon


def test_a_worker_that_is_killed(daemon: DaemonProcess) -> None:
    with tensord_client.connect(f"127.0.0.1:{daemon.port}") as client:
        model, counts = client.model("scale"), client.model("counts")
        call = model.prepare({"x": np.ones((1, 4), np.float32)})
        responses = counts.stream({"x": [1]})
        next(responses)
        assert call()["y"].tolist() == [[4.0] * 4]
        (worker,) = daemon.workers
        os.kill(worker.pid, signal.SIGKILL)
        assert call()["y"].tolist() == [[4.0] * 4]
        with pytest.raises(tensord_client.ServingError):
            for _ in responses:
                pass
        with pytest.raises(tensord_client.Internal):
            client.model("deadly")({"x": [-1]})


def test_a_stream_that_is_left_ends_on_the_server(daemon: DaemonProcess) -> None:
    """Nobody else waits for it: the model has one instance."""
    with tensord_client.connect(f"127.0.0.1:{daemon.port}") as client:
        model = client.model("counts")
        for _ in range(3):
            responses = model.stream({"x": [5]})
            assert [int(next(responses)["y"][0]) for _ in range(50)] == [5] * 50
            responses.close()  # type: ignore[attr-defined]
