"""The gateway as a program beside a real daemon, asked by the real ``openpi-client``, and by clients that no robot has."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import random
import re
import signal
import socket
import ssl
import sys
import time
import types
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import trustme
import websockets.exceptions
import websockets.sync.client as websocket
from tensord_client import openpi
from tensord_client.common.results import Answer
from tensord_client.errors import ResultsHeld
from tensord_client.gateway import options

from tests import openpi_gateway
from tests.client.conftest import clients_socket, write_models
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.generated import times
from tests.openpi_gateway import GatewayProcess, observation
from tests.repositories import faulty_models, scale_model, write_model

# openpi-client connects as websockets before 17.1 wants it.
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")
X = np.arange(4, dtype=np.float32)
#: Models that load, and do not do what they say.
FAULTY = ("raises", "wrong_shape", "missing_output")


HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    """Lets this process import ``openpi_client``."""
    folder = str(openpi_gateway.package())
    sys.path.append(folder)
    yield
    sys.path.remove(folder)


def _write(folder: Path) -> Path:
    models = folder / "models"
    write_models(models)
    scale_model(models)
    scale_model(models, factor=5.0, version=2)
    (models / "scale" / "config.pbtxt").write_text(
        'max_batch_size: 8 version_policy { all {} } parameters { key: "openpi_metadata" '
        'value { string_value: "{\\"reset_pose\\": [0.5, 1]}" } }'
    )
    scale_model(models, "other name")
    (models / "other name").rename(models / "a+b")
    write_model(
        models,
        "fragile",
        """
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def initialize(self, args):
                self.sums = {}

            def execute(self, requests):
                return [self.answer(request) for request in requests]

            def answer(self, request):
                (x,) = pb_utils.get_input_tensor_by_name(request, "x").as_numpy().reshape(-1)
                if x < 0:
                    return pb_utils.InferenceResponse(error=pb_utils.TritonError("negative"))
                if request.flags() & 1:
                    self.sums[request.correlation_id()] = 0
                self.sums[request.correlation_id()] += x
                made = np.array([[self.sums[request.correlation_id()]]], np.int32)
                return pb_utils.InferenceResponse([pb_utils.Tensor("sum", made)])
        """,
        """
        backend: "python"
        max_batch_size: 4
        input { name: "x" data_type: TYPE_INT32 dims: 1 }
        output { name: "sum" data_type: TYPE_INT32 dims: 1 }
        sequence_batching { max_sequence_idle_microseconds: 600000000 direct { } }
        """,
    )
    faulty_models(tmp := folder / "faulty")
    for name in FAULTY:
        (tmp / name).rename(models / name)
    return models


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("robots")
    options = {"clients": {"socket": clients_socket(folder)}, "workers": {"cpu": 2}}
    with DaemonProcess(folder, [_write(folder)], options) as started:
        yield started


@pytest.fixture(scope="module")
def gateway(daemon: DaemonProcess) -> Iterator[GatewayProcess]:
    with GatewayProcess(
        daemon.folder, "--model", "scale", "--episodes", "--ignore", "debug/*", "--max-message-bytes", "1000000"
    ) as started:
        yield started


@pytest.fixture
def robot(gateway: GatewayProcess) -> Iterator[Callable[..., Any]]:
    """Yields a function that connects a robot with openpi-client; it is given a path, or the address of another gateway."""
    with contextlib.ExitStack() as opened:

        def connect(path: str = "", url: str = "", **own: Any) -> Any:
            from openpi_client.websocket_client_policy import WebsocketClientPolicy

            made = WebsocketClientPolicy((url or gateway.url) + path, **own)
            opened.callback(made._ws.close)
            return made

        yield connect


@contextlib.contextmanager
def connected(url: str, **own: Any) -> Iterator[websocket.ClientConnection]:
    """Connects any client, and takes the metadata."""
    with websocket.connect(url, compression=None, max_size=None, **own) as connection:
        connection.recv(PATIENCE)
        yield connection


def y_of(answer: bytes | str) -> Any:
    return openpi_gateway.actions(answer)["y"]


def health(gateway: GatewayProcess) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{gateway.port}/healthz", timeout=PATIENCE) as answer:
        return bytes(answer.read())


def check(robot: websocket.ClientConnection) -> None:
    """Has model ``scale`` answer."""
    robot.send(observation(x=X))
    assert y_of(robot.recv(PATIENCE)).tolist() == (5 * X + 1).tolist()


# ------------------------------------------------------------------------------------------------------------- the wire


def test_a_robot(robot: Callable[..., Any]) -> None:
    made = robot()
    assert made.get_server_metadata() == {
        "reset_pose": [0.5, 1],
        "tensord": {
            "model": "scale",
            "version": 2,
            "inputs": {"x": {"datatype": "FP32", "shape": [4]}},
            "outputs": {"y": {"datatype": "FP32", "shape": [4]}},
        },
    }
    first, second = made.infer({"x": X}), made.infer({"x": X.astype(np.float64), "debug": {"t": 3}})
    for answer in (first, second):
        assert answer["y"].dtype == np.float32
        assert answer["y"].tolist() == (5 * X + 1).tolist()
        assert answer["server_timing"]["infer_ms"] > 0
    assert "prev_total_ms" not in first["server_timing"]
    assert second["server_timing"]["prev_total_ms"] >= first["server_timing"]["infer_ms"]
    made.reset()


@pytest.mark.parametrize(
    ("path", "factor"),
    [("/scale", 5), ("/scale/versions/1", 3), ("/scale/versions/2/", 5), ("/a%2Bb?x=1", 3), ("/a+b/", 3)],
)
def test_the_path_chooses_the_model(robot: Callable[..., Any], path: str, factor: int) -> None:
    assert robot(path).infer({"x": X})["y"].tolist() == (factor * X + 1).tolist()


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/nothing", 404, "unknown model"),
        ("/scale/versions/7", 404, "unknown model"),
        ("/scale/versions/0x", 404, "a model is at /MODEL or /MODEL/versions/N"),
        ("/v2/models/scale", 404, "a model is at /MODEL or /MODEL/versions/N"),
        ("//", 404, "a model is at"),
    ],
)
def test_a_path_without_a_model_is_refused_before_the_handshake(
    gateway: GatewayProcess, path: str, status: int, said: str
) -> None:
    with pytest.raises(websockets.exceptions.InvalidStatus) as refused, connected(gateway.url + path):
        pass
    response = refused.value.response
    text = response.body.decode()
    assert response.status_code == status
    assert said in text


def test_health_and_no_compression(gateway: GatewayProcess) -> None:
    assert health(gateway) == b"OK\n"
    with websocket.connect(gateway.url, max_size=None) as asked_for_it:
        assert "Sec-WebSocket-Extensions" not in asked_for_it.response.headers


# -------------------------------------------------------------------------------------------------------------- errors


def test_an_error_is_a_text_and_the_connection_stays(robot: Callable[..., Any]) -> None:
    made = robot()
    for wrong, said in (
        ({"x": X.astype(int)}, r"'x' is int64\[4\], and the model takes FP32\[4\]"),
        ({"x": X[:3]}, r"'x' is float32\[3\], and the model takes FP32\[4\]"),
        ({"x": X, "z": 1}, r"the observation has 'z', the model takes \['x'\]"),
        ({}, r"the observation lacks \['x'\], the model takes \['x'\]"),
        ({"x": [[X] * 20] * 20}, "at most 256 may be"),
    ):
        with pytest.raises(RuntimeError, match=said) as error:
            made.infer(wrong)
        assert "Traceback" not in str(error.value)
        assert made.infer({"x": X})["y"].tolist() == (5 * X + 1).tolist()


@pytest.mark.parametrize("name", FAULTY)
def test_a_model_that_fails(robot: Callable[..., Any], gateway: GatewayProcess, name: str) -> None:
    made = robot(f"/{name}")
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            made.infer({"x": np.ones(2, np.float32)})
        for secret in ("Traceback", "/models", ".py"):
            assert secret not in str(error.value)
    assert "Traceback" not in gateway.log


@pytest.mark.parametrize(
    ("sent", "code", "said"),
    [
        ("{}", 1007, "an observation is a map in msgpack"),
        (b"", 1007, "an observation is a map in msgpack"),
        (b"\x93\x01", 1007, "an observation is a map in msgpack"),
        (b"\x01", 1007, "an observation is a map in msgpack: int came"),
        (b"\x81\xa1x\xc4\xff", 1007, "an observation is a map in msgpack"),
        (b"a" * 1_000_001, 1009, r"1000001 bytes?.* 1000000|1000001 > 1000000"),
    ],
)
def test_what_is_not_this_wire_is_closed_with_a_code_and_a_reason(
    gateway: GatewayProcess, sent: bytes | str, code: int, said: str
) -> None:
    with connected(gateway.url) as connection:
        connection.send(sent)
        with pytest.raises(websockets.exceptions.ConnectionClosedError):
            connection.recv(PATIENCE)
        assert connection.close_code == code
        assert re.search(said, str(connection.close_reason)), connection.close_reason


def test_observations_that_are_sent_at_once_are_answered_one_after_the_other(gateway: GatewayProcess) -> None:
    with connected(gateway.url) as connection:
        for number in range(40):
            connection.send(observation(x=X + number))
        for number in range(40):
            assert y_of(connection.recv(PATIENCE)).tolist() == (5 * (X + number) + 1).tolist()


def test_an_observation_in_fragments(gateway: GatewayProcess) -> None:
    message = observation(x=X)
    with connected(gateway.url) as connection:
        connection.send([message[at : at + 1] for at in range(len(message))])
        assert y_of(connection.recv(PATIENCE)).tolist() == (5 * X + 1).tolist()


# -------------------------------------------------------------------------------------------------------------- bounds


def half_sent(url: str, byte_size: int, sent: int) -> websocket.ClientConnection:
    """Connects, and sends the beginning of a message of ``byte_size`` bytes. To be closed by ``socket.close()``."""
    connection = websocket.connect(url, compression=None, close_timeout=1)
    connection.recv(PATIENCE)
    connection.socket.sendall(b"\x82\xff" + byte_size.to_bytes(8, "big") + bytes(4) + bytes(sent))
    return connection


def closed_with(connection: websocket.ClientConnection) -> tuple[int | None, str | None]:
    with pytest.raises(websockets.exceptions.ConnectionClosed):
        connection.recv(PATIENCE)
    connection.close()
    return connection.close_code, connection.close_reason


def test_a_message_that_does_not_end(daemon: DaemonProcess) -> None:
    arguments = ("--model", "scale", "--message-timeout", "0.5")
    with GatewayProcess(daemon.folder, *arguments) as gateway, connected(gateway.url) as silent:
        code, reason = closed_with(half_sent(gateway.url, 100_000, 4_000))
        assert (code, reason) == (1008, "4000 bytes of a message came in 0.5 s, and no end")
        check(silent)


def test_pings_are_no_messages(daemon: DaemonProcess) -> None:
    """A robot may be idle for as long as it likes, and its pings are answered meanwhile."""
    arguments = ("--model", "scale", "--message-timeout", "0.1")
    with GatewayProcess(daemon.folder, *arguments) as gateway, connected(gateway.url) as robot:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            assert robot.ping().wait(PATIENCE)
        check(robot)


def test_a_robot_that_leaves_before_its_pings_are_answered_is_not_logged(daemon: DaemonProcess) -> None:
    """Each answer to one that has left would be a line of asyncio's."""
    with GatewayProcess(daemon.folder, "--model", "scale") as gateway:
        before = gateway.log
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE) as leaving:
                leaving.sendall(HANDSHAKE)
                leaving.recv(1 << 16)
                leaving.sendall((b"\x89\x80" + bytes(4)) * 10_000)
        with websocket.connect(gateway.url) as robot:
            robot.recv(PATIENCE)  # it has gone through what the others have sent
        assert gateway.log == before


def test_answers_to_pings_that_nobody_reads(daemon: DaemonProcess) -> None:
    pings = (b"\x89\xfd" + bytes(4) + bytes(125)) * 1000
    with GatewayProcess(daemon.folder, "--model", "scale") as gateway, connected(gateway.url) as other:
        with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE) as flood:
            flood.sendall(HANDSHAKE)
            assert flood.recv(12) == b"HTTP/1.1 101"
            with pytest.raises(ConnectionError):
                sent_for_ever(flood, pings)
        check(other)


def sent_for_ever(connection: socket.socket, content: bytes) -> None:
    while True:
        connection.sendall(content)


def test_what_all_send_is_bounded_together(daemon: DaemonProcess) -> None:
    """The robot that has sent most loses its connection, and one with a small observation is answered."""
    arguments = ("--model", "scale", "--max-unread-bytes", "100000", "--message-timeout", "3600")
    with contextlib.ExitStack() as ends:
        gateway = ends.enter_context(GatewayProcess(daemon.folder, *arguments))
        small = ends.enter_context(connected(gateway.url))
        for sent in (30_000, 31_000, 32_000):
            ends.callback(half_sent(gateway.url, 1 << 20, sent).socket.close)
        code, reason = closed_with(half_sent(gateway.url, 1 << 20, 33_000))
        assert code == 1013
        assert reason is not None
        assert re.fullmatch(r"1\d{5} bytes of all robots are unread, 100000 may be", reason)
        check(small)


def test_more_robots_than_may_be(daemon: DaemonProcess) -> None:
    with GatewayProcess(daemon.folder, "--model", "scale", "--max-connections", "2") as gateway:
        with connected(gateway.url), connected(gateway.url):
            with pytest.raises(websockets.exceptions.InvalidStatus) as refused, connected(gateway.url):
                pass
            assert refused.value.response.status_code == 503
            assert refused.value.response.body == b"3 robots are connected, at most 2 may be\n"

        def again() -> bool:
            with contextlib.suppress(websockets.exceptions.InvalidStatus), connected(gateway.url):
                return True
            return False

        wait_until(again, "room for a robot")
        # Those that say nothing are bounded, too.
        half_open = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(80)]
        try:
            wait_until(lambda: sum(is_closed(each) for each in half_open) >= 14, "connections to be refused")
            assert not is_closed(half_open[0])
        finally:
            for each in half_open:
                each.close()


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_who_does_not_read_holds_nobody_up(daemon: DaemonProcess) -> None:
    """A robot that sends and never reads has one observation under way; the bytes that it may send meanwhile are bounded."""
    with GatewayProcess(daemon.folder) as gateway, connected(f"{gateway.url}/identity") as other:
        greedy = websocket.connect(f"{gateway.url}/identity", compression=None, max_queue=1, close_timeout=1)
        message = observation(INPUT0=np.zeros(200_000, np.float32))
        greedy.socket.settimeout(2)
        many = (b"\x82\xff" + len(message).to_bytes(8, "big") + bytes(4) + message) * 100
        with pytest.raises(TimeoutError):
            greedy.socket.sendall(many)
        other.send(observation(INPUT0=X))
        assert isinstance(other.recv(PATIENCE), bytes)
        greedy.socket.close()


def test_two_hundred_robots_of_which_half_are_silent(daemon: DaemonProcess) -> None:
    with contextlib.ExitStack() as opened:
        gateway = opened.enter_context(GatewayProcess(daemon.folder, "--model", "scale"))
        pool = opened.enter_context(concurrent.futures.ThreadPoolExecutor(16))
        robots = list(pool.map(lambda _: opened.enter_context(connected(gateway.url)), range(200)))

        def ask(number: int) -> None:
            for turn in range(3):
                robots[number].send(observation(x=X + number + turn))
                assert y_of(robots[number].recv(PATIENCE)).tolist() == (5 * (X + number + turn) + 1).tolist()

        for done in [pool.submit(ask, number) for number in range(0, 200, 2)]:
            done.result()


async def test_what_has_no_room_for_its_answer_is_asked_again_when_others_have_read_theirs() -> None:
    """More large answers than a process may hold have come, and the tasks that read them run next."""
    held = [ResultsHeld(64, 64), ResultsHeld(64, 64)]
    others: list[str] = []

    async def ask(inputs: dict[str, Any]) -> Answer:
        if held:
            asyncio.get_running_loop().call_soon(others.append, "read")
            raise held.pop()
        return Answer(y=X)

    ask.has_sequences = False  # type: ignore[attr-defined]
    policy = types.SimpleNamespace(model=ask, inputs=dict, actions=dict)
    gateway = openpi.RobotGateway(None, options("", "", openpi.FLAGS, []))  # type: ignore[arg-type]
    robot: Any = types.SimpleNamespace(policy=policy, sequence_id=0)
    assert (await gateway._ask(robot, {}))["y"] is X
    assert others == ["read", "read"]


def test_what_robots_held_is_given_back(daemon: DaemonProcess) -> None:
    with GatewayProcess(daemon.folder, "--model", "scale", "--episodes") as gateway:

        def open_descriptors() -> int:
            return len(os.listdir(f"/proc/{gateway.pid}/fd"))

        with connected(gateway.url) as connection:
            connection.send(observation(x=X))
            connection.recv(PATIENCE)
            before = open_descriptors()
            with contextlib.ExitStack() as ends:
                for number in range(30):
                    if number % 3:
                        ends.enter_context(connected(gateway.url)).send(observation(x=X))
                    else:
                        ends.callback(half_sent(gateway.url, 1 << 20, 10_000).socket.close)
            wait_until(lambda: open_descriptors() <= before, "descriptors to be given back")


# ----------------------------------------------------------------------------------------------------- who may connect


def test_keys(daemon: DaemonProcess, robot: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    with GatewayProcess(daemon.folder, "--model", "scale", "--api-key-file", str(keys)) as gateway:
        for key in ("first", "second"):
            assert robot(url=gateway.url, api_key=key).infer({"x": X})["y"].tolist() == (5 * X + 1).tolist()
        for key in (None, "third", "firs", "first second", "\u00e9"):
            with pytest.raises(websockets.exceptions.InvalidStatus) as refused:
                robot(url=gateway.url, api_key=key)
            assert refused.value.response.status_code == 401
        assert health(gateway) == b"OK\n"
    keys.write_text("\n")
    done = openpi_gateway.ran(["--server", str(daemon.folder), "--api-key-file", str(keys)])
    assert (done.returncode, done.stderr) == (1, "tensord_client.openpi: the file of --api-key-file has no key\n")


def test_certificates(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Connections that never shake hands are among those that there may be."""
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    made.private_key_pem.write_to_path(tmp_path / "key.pem")
    for part in made.cert_chain_pems:
        part.write_to_path(tmp_path / "chain.pem", append=True)
    trusts = ssl.create_default_context()
    authority.configure_trust(trusts)
    files = ("--certificate", str(tmp_path / "chain.pem"), "--key", str(tmp_path / "key.pem"))
    with GatewayProcess(daemon.folder, "--model", "scale", "--max-connections", "8", *files) as gateway:

        def is_served() -> bool:
            with contextlib.suppress(OSError), connected(f"wss://127.0.0.1:{gateway.port}", ssl=trusts) as connection:
                check(connection)
                # While a thread of the client takes a ticket, what another one writes may be held up for ever.
                assert not connection.socket.session.has_ticket  # type: ignore[attr-defined]
                return True
            return False

        assert is_served()
        process = psutil.Process(gateway.pid)
        before, descriptors = process.memory_info().rss, process.num_fds()
        for _ in range(12):
            with contextlib.ExitStack() as opened:
                place = ("127.0.0.1", gateway.port)
                many = [opened.enter_context(socket.create_connection(place, PATIENCE)) for _ in range(8 + 64 + 4)]
                wait_until(lambda many=many: sum(map(is_closed, many)) >= 4, "connections to be refused")
                assert not all(map(is_closed, many))
                assert not is_served()
            wait_until(lambda: process.num_fds() <= descriptors, "the others to be forgotten")
            assert is_served()
        # Each has some 300 KiB while it shakes hands.
        assert process.memory_info().rss < before + (120 << 20)
        assert gateway.stop() == 0


def test_what_cannot_start_says_why(tmp_path: Path, gateway: GatewayProcess, daemon: DaemonProcess) -> None:
    done = openpi_gateway.ran(["--server", str(tmp_path), "--wait", "0.1"])
    assert done.returncode == 1
    assert done.stderr.startswith("tensord_client.openpi: no tensord was found")
    taken = ["--address", f"127.0.0.1:{gateway.port}", "--server", str(daemon.folder)]
    done = openpi_gateway.ran(taken)
    assert done.returncode == 1
    assert "Address already in use" in done.stderr
    for wrong in (["--max-connections", "0"], ["--timeout", "-1"], ["--timeout", "nan"]):
        assert openpi_gateway.ran(wrong).returncode == 2, wrong
    for wrong in ("8900", ":8900", "localhost", "localhost:x"):
        assert openpi_gateway.ran(["--address", wrong]).stderr.startswith("tensord_client.openpi: "), wrong


# ------------------------------------------------------------------------------------------------------------ episodes


def test_a_connection_is_a_sequence(robot: Callable[..., Any]) -> None:
    first, second = robot("/total"), robot("/total")
    assert [float(first.infer({"x": 1.0})["sum"][0]) for _ in range(3)] == [1, 2, 3]
    assert [float(second.infer({"x": 10.0})["sum"][0]) for _ in range(2)] == [10, 20]
    assert float(first.infer({"x": 1.0, "reset": False})["sum"][0]) == 4
    assert float(first.infer({"x": 1.0, "reset": True})["sum"][0]) == 1
    assert [float(first.infer({"x": 1.0})["sum"][0]) for _ in range(2)] == [2, 3]
    with pytest.raises(RuntimeError, match="the observation has 'z'"):
        first.infer({"x": 1.0, "z": 1})
    assert float(first.infer({"x": 1.0})["sum"][0]) == 4
    assert float(second.infer({"x": 10.0})["sum"][0]) == 30


def test_a_sequence_whose_first_observation_fails(robot: Callable[..., Any], daemon: DaemonProcess) -> None:
    """A sequence whose first observation fails takes no slot of the model; the next observation begins another sequence."""
    made = robot("/fragile")
    for number in range(1, 20):
        with pytest.raises(RuntimeError, match="negative"):
            made.infer({"x": -number})
        assert made.infer({"x": number})["sum"].tolist() == [number]
        assert made.infer({"x": 1, "reset": False})["sum"].tolist() == [number + 1]
        with pytest.raises(RuntimeError, match="negative"):
            made.infer({"x": -1})
        assert made.infer({"x": 2})["sum"].tolist() == [number + 3]
        with pytest.raises(RuntimeError, match="negative"):
            made.infer({"x": -1, "reset": True})


def test_sequences_end_with_their_connections(robot: Callable[..., Any], daemon: DaemonProcess) -> None:
    """More connections after each other than the model has slots, of which none would be free again otherwise."""
    for number in range(20):
        made = robot("/total")
        assert float(made.infer({"x": number})["sum"][0]) == number
        made._ws.close()


def test_a_model_that_keeps_state_needs_episodes(daemon: DaemonProcess) -> None:
    refuses = pytest.raises(websockets.exceptions.InvalidStatus)
    with GatewayProcess(daemon.folder) as gateway, refuses as refused, connected(f"{gateway.url}/total"):
        pass
    text = b"model 'total' keeps state, for which the gateway needs --episodes\n"
    assert (refused.value.response.status_code, refused.value.response.body) == (500, text)


@pytest.mark.parametrize("way", ["lane", "http"])
def test_the_death_of_a_worker_is_told_and_the_next_observation_begins_anew(
    tmp_path: Path, robot: Callable[..., Any], way: str
) -> None:
    folder = tmp_path
    write_models(folder / "models")
    options: dict[str, dict[str, Any]] = {"workers": {"cpu": 1}}
    if way == "lane":
        options["clients"] = {"socket": clients_socket(folder)}
    with DaemonProcess(folder, [folder / "models"], options) as daemon:
        daemon.wait_ready()
        with GatewayProcess(folder if way == "lane" else daemon.url, "--episodes") as gateway:
            made, pure = robot("/total", gateway.url), robot("/identity", gateway.url)
            assert [float(made.infer({"x": 1.0})["sum"][0]) for _ in range(2)] == [1, 2]
            (worker,) = daemon.workers
            worker.kill()
            with pytest.raises(
                RuntimeError, match=r"START flag|ended while it had the request, which may not be run twice"
            ):
                made.infer({"x": 1.0})
            assert [float(made.infer({"x": 1.0})["sum"][0]) for _ in range(2)] == [1, 2]
            assert pure.infer({"INPUT0": X})["OUTPUT0"].tolist() == X.tolist()


# ------------------------------------------------------------------------------------------------- deaths and restarts


def test_pure_policies_fail_nothing_beside_kills_of_workers_and_of_the_daemon(tmp_path: Path) -> None:
    """Each answer is the jitted function's, bit for bit."""
    import jax

    models = tmp_path / "models"
    write_model(
        models,
        "policy",
        """
        import jax, jax.numpy as jnp

        inputs = {"state": "FP32[7]", "image": "UINT8[16,16,3]"}
        outputs = {"actions": "FP32[4,7]"}

        def apply(params, inputs):
            image = inputs["image"].astype("float32").mean() / 255
            return {"actions": jnp.tanh(params["w"] * inputs["state"] + image) * jnp.arange(1.0, 5.0)[:, None]}

        def create(path, config, device):
            return apply, {"w": jnp.linspace(-2, 2, 7)}
        """,
    )
    names: dict[str, Any] = {}
    exec((models / "policy" / "1" / "model.py").read_text(), names)
    policy, params = names["create"](None, None, None)
    direct = jax.jit(policy)
    robots, each = 8, times(1250, 60)
    options = {"clients": {"socket": clients_socket(tmp_path)}, "workers": {"cpu": 2}}
    daemon = DaemonProcess(tmp_path, [models], options)
    answered = [0] * robots

    def run(number: int, url: str) -> int:
        generator = np.random.default_rng(number)
        with connected(url) as connection:
            for _ in range(each):
                values = {
                    "state": generator.standard_normal(7).astype(np.float32),
                    "image": generator.integers(0, 256, (16, 16, 3), np.uint8),
                }
                connection.send(observation(**values))
                answer = connection.recv(PATIENCE)
                expected = np.asarray(direct(params, values)["actions"])
                assert openpi_gateway.actions(answer)["actions"].tobytes() == expected.tobytes()
                answered[number] += 1
        return each

    with daemon:
        daemon.wait_ready()
        arguments = ("--model", "policy", "--timeout", str(PATIENCE), "--patience", str(PATIENCE))
        with GatewayProcess(tmp_path, *arguments) as gateway, concurrent.futures.ThreadPoolExecutor(robots) as pool:
            under_way = [pool.submit(run, number, gateway.url) for number in range(robots)]
            choice = random.Random(3)
            for kill in range(times(12, 3)):
                # A request that two workers ended with is given up, as it may have been the cause: each robot goes on between.
                before = [count + 2 for count in answered]
                wait_until(
                    lambda before=before: all(a >= min(b, each) for a, b in zip(answered, before, strict=True)),
                    "answers to all robots",
                )
                if kill % 3 == 2:
                    daemon.signal(signal.SIGKILL)
                    daemon.stop()
                    daemon.start()
                elif daemon.workers:
                    choice.choice(daemon.workers).kill()
            assert sum(done.result(PATIENCE) for done in under_way) == robots * each


def test_a_model_that_is_loaded_anew_and_takes_something_else(tmp_path: Path, robot: Callable[..., Any]) -> None:
    models = tmp_path / "models"
    source = """
        inputs = {"NAME": "FP32[SIZE]"}
        outputs = {"y": "FP32[SIZE]"}

        def create(path, config, device):
            return (lambda params, inputs: {"y": inputs["NAME"] + 1}), {}
        """
    write_model(models, "policy", source.replace("NAME", "x").replace("SIZE", "4"))
    options = {
        "clients": {"socket": clients_socket(tmp_path)},
        "repository": {"control_mode": "explicit", "load": ["*"]},
    }
    with DaemonProcess(tmp_path, [models], options) as daemon, GatewayProcess(tmp_path) as gateway:
        made = robot("/policy", gateway.url)
        assert made.infer({"x": X})["y"].tolist() == (X + 1).tolist()
        write_model(models, "policy", source.replace("NAME", "z").replace("SIZE", "2"), version=2)
        assert daemon.request("POST", "/v2/repository/models/policy/load")[0] == 200

        def fits() -> bool:
            with contextlib.suppress(RuntimeError):
                return made.infer({"z": X[:2]})["y"].tolist() == (X[:2] + 1).tolist()
            return False

        wait_until(fits, "the robot to be answered by what is loaded now")
        assert robot("/policy", gateway.url).get_server_metadata()["tensord"]["version"] == 2


# ----------------------------------------------------------------------------------------------------------------- stop


def test_it_stops_by_finishing_what_is_under_way(daemon: DaemonProcess, tmp_path: Path) -> None:
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notified.bind(str(tmp_path / "notify"))
    notified.settimeout(PATIENCE)
    gateway = GatewayProcess(daemon.folder)
    gateway.variables["NOTIFY_SOCKET"] = str(tmp_path / "notify")
    path = tmp_path / "go"
    with contextlib.closing(notified), gateway:
        assert notified.recv(100) == b"READY=1"
        with connected(f"{gateway.url}/waits") as asking, connected(f"{gateway.url}/scale") as idle:
            asking.send(observation(path=str(path)))
            wait_until(path.with_suffix(".begun").exists, "the observation to be under way")
            os.kill(gateway.pid, signal.SIGTERM)
            assert notified.recv(100) == b"STOPPING=1"
            assert closed_with(idle) == (1001, "the gateway stops")
            with pytest.raises(OSError), connected(f"{gateway.url}/scale"):
                pass
            path.touch()
            assert y_of(asking.recv(PATIENCE)).tolist() == [1]
            assert closed_with(asking) == (1001, "the gateway stops")
        gateway.wait_ended()
        assert gateway.stop() == 0
    assert "Traceback" not in gateway.log


def test_a_robot_that_leaves_cancels_its_request(daemon: DaemonProcess, tmp_path: Path) -> None:
    """The gateway can stop at once, as nothing is under way any more."""
    path = tmp_path / "go"
    with GatewayProcess(daemon.folder) as gateway:
        leaving = websocket.connect(f"{gateway.url}/waits", compression=None, close_timeout=1)
        leaving.recv(PATIENCE)
        leaving.send(observation(path=str(path)))
        wait_until(path.with_suffix(".begun").exists, "the observation to be under way")
        leaving.socket.shutdown(socket.SHUT_RDWR)
        leaving.close()
        with connected(f"{gateway.url}/scale") as other:
            check(other)
        assert gateway.stop() == 0
        assert not path.exists()
        path.touch()
