"""Three daemons behind HAProxy with the file of deploy/: one is slow, drained, replaced, killed; sequences stay in place."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tensord_client
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.daemon_process import PATIENCE, wait_until
from tests.deploy.balancer import HAPROXY, Balancer
from tests.deploy.haproxy_configuration import CONFIGURATION
from tests.deploy.hosts import Host
from tests.deploy.load import Load

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")

#: Seconds of a request; the third host is slowed to a fifth.
#: Much more than HAProxy and a busy machine add.
_WORK = 0.05
_SLOW = "c"
#: HAProxy gives up before that, at the second look that finds a host not ready.
_DRAIN_TIME = "5"
#: HAProxy keeps requests of up to 16 KiB to try them again.
_SMALL, _LARGE = 100, 20_000


@pytest.fixture(scope="module")
def hosts(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    with contextlib.ExitStack() as stack:
        made = {}
        for name in "abc":
            folder = tmp_path_factory.mktemp(name)
            made[name] = stack.enter_context(Host(folder, 5 * _WORK if name == _SLOW else _WORK))
        for host in made.values():
            host.wait_ready()
        yield made


@pytest.fixture(scope="module")
def balancer(hosts: dict[str, Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balancer]:
    with Balancer(tmp_path_factory.mktemp("haproxy"), hosts) as running:
        for name in hosts:
            running.wait_for(name, "UP")
        yield running


def clients(balancer: Balancer, count: int, size: int = _SMALL, kinds: str = "http grpc") -> list[tuple[str, int, int]]:
    ports = {"http": balancer.http_port, "grpc": balancer.grpc_port}
    return [(kind, ports[kind], size) for kind in kinds.split()] * count


def test_the_file_is_valid() -> None:
    assert HAPROXY is not None
    done = subprocess.run([HAPROXY, "-c", "-f", str(CONFIGURATION)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "Configuration file is valid"), done.stderr
    assert "WARNING" not in done.stderr


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_slow_host_is_asked_less(hosts: dict[str, Host], balancer: Balancer, kind: str) -> None:
    """It does a fifth of what the others do, so less than a third of an equal part is right for it."""
    with Load().of(clients(balancer, 6, kinds=kind)) as load:
        load.goes_on(kind)
        before = {name: host.answered("work") for name, host in hosts.items()}
        wait_until(lambda: load.answered[kind] >= 300, "answers")
    assert load.failed == []
    parts = {name: host.answered("work") - before[name] for name, host in hosts.items()}
    assert parts[_SLOW] < sum(parts.values()) / 3 / 3, parts


def test_a_drained_host_is_asked_nothing_new(hosts: dict[str, Host], balancer: Balancer) -> None:
    """Nobody notices, and what is back is asked again."""
    drained = hosts["b"]
    with Load().of(clients(balancer, 3)) as load:
        load.goes_on()
        drained.tensorctl("drain", "--time", _DRAIN_TIME, "--wait")
        assert balancer.status("b") in ("DOWN", "DRAIN (agent)")
        assert balancer.status("b", "daemons") == "DRAIN (agent)"
        before = drained.answered("work")
        load.goes_on()
        assert drained.answered("work") == before
        drained.tensorctl("undrain")
        wait_until(lambda: drained.answered("work") > before, "the host to be asked again", drained)
    assert load.failed == []
    balancer.wait_for("b", "UP")


def test_a_rolling_update_fails_nothing(hosts: dict[str, Host], balancer: Balancer) -> None:
    """Each host in its turn is drained, stopped, started, and waited for; HAProxy cannot repeat the large requests among them."""
    with Load().of(clients(balancer, 2) + clients(balancer, 1, _LARGE)) as load:
        for name, host in hosts.items():
            load.goes_on()
            host.tensorctl("drain", "--time", _DRAIN_TIME, "--wait")
            host.stop()
            load.goes_on()
            host.start()
            host.wait_ready()
            balancer.wait_for(name, "UP")
            wait_until(lambda: host.answered("work") > 0, "the new process to be asked", host)  # noqa: B023
    assert load.failed == []


def test_a_killed_host_fails_only_what_it_held(hosts: dict[str, Host], balancer: Balancer) -> None:
    """Small requests are computed by another one. Of large ones those fail that were there, and HAProxy's log names the host."""
    known = len(balancer.log)
    with Load().of(clients(balancer, 2) + clients(balancer, 2, _LARGE)) as load:
        load.goes_on()
        with killed(hosts, "a", balancer):
            balancer.wait_for("a", "DOWN")
            failed = list(load.failed)
            load.goes_on()
            log = balancer.log[known:]
    # Each of these clients waits for one answer at a time.
    assert len(failed) <= 4
    assert all(f"{_LARGE} bytes" in text for text in failed), failed
    assert load.failed == failed
    for line in log.splitlines():
        if request := re.search(r" (http|grpc)/(\w+) \d+/\d+/-?\d+/-?\d+/\d+ (-?\d+) ", line):
            assert request[3] == "200" or request[2] == "a", line


def test_bodies_that_come_after_the_death_of_a_host_are_computed_by_another(
    hosts: dict[str, Host], balancer: Balancer
) -> None:
    """Clients send the head of a request first, as many do: HAProxy has it when the host dies that is asked least."""
    body = json.dumps({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [1], "data": [7]}]}).encode()
    head = f"POST /v2/models/work/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    began, goes_on = threading.Barrier(7), threading.Event()

    def later() -> Iterator[service_pb2.ModelInferRequest]:
        """Yields the only message of a call whose head was sent before."""
        assert goes_on.wait(PATIENCE)
        request = service_pb2.ModelInferRequest(model_name="work", raw_input_contents=[b"\7"])
        request.inputs.add(name="x", datatype="UINT8", shape=[1])
        yield request

    def over_http() -> list[int]:
        with socket.create_connection(("127.0.0.1", balancer.http_port), PATIENCE) as connection:
            connection.sendall(head)
            began.wait(PATIENCE)
            assert goes_on.wait(PATIENCE)
            connection.sendall(body)
            with http.client.HTTPResponse(connection) as response:
                response.begin()
                answer = response.read()
        assert response.status == 200, answer
        return list(json.loads(answer)["outputs"][0]["data"])

    def over_grpc() -> list[int]:
        with grpc.insecure_channel(f"127.0.0.1:{balancer.grpc_port}", [("grpc.enable_retries", 0)]) as channel:
            grpc.channel_ready_future(channel).result(PATIENCE)
            answer = channel.stream_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                service_pb2.ModelInferRequest.SerializeToString,
                service_pb2.ModelInferResponse.FromString,
            ).future(later(), timeout=PATIENCE)
            began.wait(PATIENCE)
            return list(answer.result().raw_output_contents[0])

    with concurrent.futures.ThreadPoolExecutor(6) as clients, contextlib.ExitStack() as stack:
        stack.callback(goes_on.set)
        answers = [clients.submit(ask) for ask in (over_http, over_grpc) for _ in range(3)]
        began.wait(PATIENCE)
        # Until HAProxy has read the heads: nothing that it says tells when.
        time.sleep(0.5)
        with killed(hosts, "a", balancer):
            goes_on.set()
            assert [answer.result(PATIENCE) for answer in answers] == [[7]] * 6


@contextlib.contextmanager
def killed(hosts: dict[str, Host], name: str, balancer: Balancer) -> Iterator[None]:
    """Ends all processes of a host at once, without a word; afterwards, starts it again and waits until it is asked."""
    host = hosts[name]
    os.killpg(host.pid, signal.SIGSTOP)
    for process in host.everybody():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    try:
        yield
    finally:
        host.stop()
        host.start()
        host.wait_ready()
        balancer.wait_for(name, "UP")


# -------------------------------------------------------------------------------------------------------------- sequences


class Sequences:
    """Sends steps of sequences by one of tritonclient's clients, and checks their sums."""

    def __init__(self, kind: str, balancer: Balancer) -> None:
        self._module = httpclient if kind == "http" else grpcclient
        port = balancer.http_port if kind == "http" else balancer.grpc_port
        self.client = self._module.InferenceServerClient(f"127.0.0.1:{port}")
        self.sums: dict[int, int] = {}

    def step(self, who: int, x: int, start: bool = False) -> None:
        """Adds to a sum, and compares it. Raises InferenceServerException."""
        given = self._module.InferInput("x", [1, 1], "INT32")
        given.set_data_from_numpy(np.array([[x]], np.int32))
        answer = self.client.infer(
            "sums", [given], sequence_id=who, sequence_start=start, headers={"tensord-sequence": str(who)}
        )
        self.sums[who] = (0 if start else self.sums[who]) + x
        assert answer.as_numpy("y").item() == self.sums[who]


def held(hosts: dict[str, Host]) -> dict[str, float]:
    """Returns how many requests for ``sums`` each host has answered."""
    return {name: host.answered("sums") for name, host in hosts.items()}


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_sequences_stay_where_they_are(hosts: dict[str, Host], balancer: Balancer, kind: str) -> None:
    """
    1. Thirty begin, and go on while one host drains. 2. That one is killed. 3. It comes back.
    Result: each sum is right; nothing but the sequences of the killed host ends, and these begin again elsewhere, and stay there.
    """
    first = 1000 if kind == "http" else 2000
    everybody = range(first, first + 30)
    gone = "b"
    before = held(hosts)
    sequences = Sequences(kind, balancer)
    with contextlib.closing(sequences.client):
        for who in everybody:
            sequences.step(who, who, start=True)
        began = {name: count - before[name] for name, count in held(hosts).items()}
        assert all(began.values()), began
        hosts[gone].tensorctl("drain", "--time", _DRAIN_TIME)
        balancer.wait_for(gone, "DRAIN (agent)", backends=("daemons",))
        for who in everybody:
            sequences.step(who, 1)
        assert {name: count - before[name] for name, count in held(hosts).items()} == {
            name: 2 * count for name, count in began.items()
        }
        with killed(hosts, gone, balancer):
            balancer.wait_for(gone, "DOWN", "DOWN (agent)", "DRAIN", backends=("daemons",))
            lost = []
            for who in everybody:
                try:
                    sequences.step(who, 2)
                except InferenceServerException as error:
                    assert "must specify the START flag" in str(error)
                    lost.append(who)
                    sequences.step(who, 2, start=True)
            assert len(lost) == began[gone]
        for who in everybody:
            sequences.step(who, 3)
        assert hosts[gone].answered("sums") == 0
        # New ones come to it again.
        for who in range(first + 100, first + 130):
            sequences.step(who, 1, start=True)
        assert hosts[gone].answered("sums") > 0


def test_steps_of_a_stream_stay_where_it_began(hosts: dict[str, Host], balancer: Balancer) -> None:
    """The header of a stream counts for all that is sent on it."""
    sums: list[Any] = []
    with contextlib.closing(grpcclient.InferenceServerClient(f"127.0.0.1:{balancer.grpc_port}")) as client:
        client.start_stream(lambda result, error: sums.append(error or result.as_numpy("y").item()))
        for step in range(20):
            given = grpcclient.InferInput("x", [1, 1], "INT32")
            given.set_data_from_numpy(np.array([[1]], np.int32))
            client.async_stream_infer("sums", [given], sequence_id=5, sequence_start=step == 0)
        wait_until(lambda: len(sums) == 20, "answers")
        client.stop_stream()
    assert sums == list(range(1, 21))


def test_tensords_client_says_its_sequence(balancer: Balancer) -> None:
    """Nobody has to give it the header."""
    before = int(balancer.row("http_sequences", "BACKEND")["stot"])
    with tensord_client.connect(f"127.0.0.1:{balancer.http_port}") as client:
        sums = client.model("sums", timeout=PATIENCE)
        with sums.sequence("über all") as step:
            assert [step({"x": np.array([[x]], np.int32)}, end=x == 3)["y"].item() for x in (1, 2, 3)] == [1, 3, 6]
    assert int(balancer.row("http_sequences", "BACKEND")["stot"]) == before + 3


# ---------------------------------------------------------------------------------------------------- what it does not do


def test_what_concerns_one_daemon_is_refused(balancer: Balancer) -> None:
    with contextlib.closing(httpclient.InferenceServerClient(f"127.0.0.1:{balancer.http_port}")) as client:
        assert client.is_server_ready()
        assert client.get_model_metadata("work")["name"] == "work"
        for call in (client.get_model_repository_index, client.get_system_shared_memory_status):
            with pytest.raises(InferenceServerException, match="this concerns one daemon"):
                call()
    with contextlib.closing(grpcclient.InferenceServerClient(f"127.0.0.1:{balancer.grpc_port}")) as client:
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException) as refused:
            client.load_model("work")
        assert refused.value.status() == "StatusCode.PERMISSION_DENIED"
