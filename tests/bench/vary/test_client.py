"""The client in C: what it counts was right, what is wrong it notices, and it goes round with whatever a pool has."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bench.server import answered
from bench.vary.answers import WrongAnswer
from bench.vary.client import Client
from bench.vary.pools import KINDS, Pool, pool
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.scrapes import scrape

_EVERY = [(protocol, kind) for protocol, kinds in KINDS.items() for kind in kinds]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: the client cannot be built")
    return Client(tmp_path_factory.mktemp("client"))


def _address(daemon: DaemonProcess, protocol: str) -> str:
    return daemon.url if protocol == "http" else daemon.grpc_url


@pytest.mark.parametrize(("protocol", "kind"), _EVERY, ids=map("-".join, _EVERY))
def test_every_answer_is_counted_here_and_there(
    daemon: DaemonProcess, client: Client, protocol: str, kind: str
) -> None:
    # Each connection has a sequence, or the calls of a table, for itself.
    belong_together = kind == "rnn" or (protocol, kind) == ("grpc", "trace")
    requests = pool(protocol, kind, 600 if belong_together else 48)
    before = answered(daemon.url)
    file = client.record(_address(daemon, protocol), requests)
    asked = len(requests.exchanges)
    # The daemon counts an answer when it has left.
    wait_until(lambda: answered(daemon.url) - before == asked, "the count of what was recorded")
    figures = client.measure(protocol, _address(daemon, protocol), file, 5, 0.3, kind == "new")
    assert 0 < figures.answers < figures.total
    assert not figures.lost
    asked += figures.total
    wait_until(lambda: answered(daemon.url) - before == asked, "the count of what was measured")
    assert 0 < figures.p50_us <= figures.p99_us <= figures.worst_us
    assert figures.rate == figures.answers / figures.seconds


def test_more_connections_than_requests(daemon: DaemonProcess, client: Client) -> None:
    file = client.record(daemon.url, pool("http", "all", 8))
    assert client.measure("http", daemon.url, file, 100, 0.1).answers > 0


def test_each_request_has_its_connection(daemon: DaemonProcess, client: Client) -> None:
    """A server made by hand gives the daemon's answer, one to each connection, until one says nothing."""
    requests = pool("http", "new", 1)
    (exchange,) = requests.exchanges
    file = client.record(daemon.url, requests)
    answer = file.read_bytes().partition(exchange.request)[2][4:-16]

    def serve() -> int:
        ended = 0
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(PATIENCE)
                request = connection.recv(len(exchange.request), socket.MSG_WAITALL)
                if not request:
                    return ended
                assert request == exchange.request
                connection.sendall(answer)
                assert connection.recv(1) == b""
                ended += 1

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        listener.settimeout(PATIENCE)
        served = threads.submit(serve)
        address = listener.getsockname()
        figures = client.measure("http", f"127.0.0.1:{address[1]}", file, 1, 0.2, renews=True)
        socket.create_connection(address).close()
        # The first one starts the clock.
        assert 0 < figures.answers < served.result(PATIENCE)


@pytest.mark.parametrize("protocol", ["http", "stream"])
def test_steps_of_a_sequence_are_sent_in_order_and_to_its_end(
    daemon: DaemonProcess, client: Client, protocol: str
) -> None:
    """More than ten times round, on more connections than record: each answer is checked, so the order was right."""
    requests = pool(protocol, "rnn", 400)
    before = live(daemon)
    ends = [not one.goes_on for one in requests.exchanges]
    file = client.record(_address(daemon, protocol), requests)
    figures = client.measure(protocol, _address(daemon, protocol), file, 5, 2)
    assert figures.total >= 5
    assert not figures.lost
    assert 10 < sum(ends) < 100
    # None is cut off, but the last of the pool, of which no END is sent.
    assert live(daemon) <= before + 1


def live(daemon: DaemonProcess) -> float:
    return scrape(daemon.metrics_url).model("tensord_model_sequences", "rnn", state="slot")


def test_a_step_out_of_its_order_is_noticed(daemon: DaemonProcess, client: Client) -> None:
    requests = pool("http", "rnn", 60)
    number = next(n for n, one in enumerate(requests.exchanges) if one.goes_on and requests.exchanges[n + 1].goes_on)
    exchanges = list(requests.exchanges)
    exchanges[number + 1] = exchanges[number]
    with pytest.raises(WrongAnswer, match="output 'y' of 'rnn' is"):
        client.record(daemon.url, dataclasses.replace(requests, exchanges=exchanges))


def test_fewer_sequences_than_connections(daemon: DaemonProcess, client: Client) -> None:
    requests = pool("http", "rnn", 60)
    file = client.record(daemon.url, requests)
    with pytest.raises(RuntimeError, match="a pool of 60 requests has nothing for each of 50 connections"):
        client.measure("http", daemon.url, file, 50, 1)


def _with_one_outputs_value_changed(requests: Pool, number: int) -> Pool:
    exchanges = list(requests.exchanges)
    asked = exchanges[number].asked
    name, values = next(iter(asked.outputs.items()))
    values = values.copy()
    values.flat[-1] += 0.125
    exchanges[number] = dataclasses.replace(
        exchanges[number], asked=dataclasses.replace(asked, outputs={**asked.outputs, name: values})
    )
    return dataclasses.replace(requests, exchanges=exchanges)


@pytest.mark.parametrize(("protocol", "kind"), _EVERY, ids=map("-".join, _EVERY))
def test_a_wrong_value_is_noticed(daemon: DaemonProcess, client: Client, protocol: str, kind: str) -> None:
    """One of the last request's, so all before it were found right."""
    requests = _with_one_outputs_value_changed(pool(protocol, kind, 12), 11)
    with pytest.raises(WrongAnswer, match=r"request 11 to .*: output '.*' of '.*' is"):
        client.record(_address(daemon, protocol), requests)


@pytest.mark.parametrize(
    ("protocol", "kind", "change"),
    [
        ("http", "id", lambda answer: answer.replace(b'"id":"4"', b'"id":"5"')),
        ("http", "all", lambda answer: answer[:-1] + bytes([answer[-1] ^ 1])),
        ("http", "models", lambda answer: answer.replace(b"200 OK", b"201 OK")),
        ("grpc", "id", lambda answer: answer[:-1] + bytes([answer[-1] ^ 1])),
        ("grpc", "trace", lambda answer: answer[:-1] + bytes([answer[-1] ^ 1])),
        ("grpc", "models", lambda answer: answer + b"\0"),
        ("stream", "all", lambda answer: answer[:-1] + bytes([answer[-1] ^ 1])),
    ],
)
def test_an_answer_that_differs_from_the_recorded_one_is_noticed(
    daemon: DaemonProcess, client: Client, protocol: str, kind: str, change: Callable[[bytes], bytes]
) -> None:
    """The recorded one is changed, in one byte of one request."""
    requests = pool(protocol, kind, 12)
    file = client.record(_address(daemon, protocol), requests)
    content = file.read_bytes()
    # The fourth request's answer stands behind it: a size, and its bytes.
    at = content.index(requests.exchanges[3].request) + len(requests.exchanges[3].request)
    size = int.from_bytes(content[at : at + 4], "little")
    answer = content[at + 4 : at + 4 + size]
    changed = change(answer)
    assert changed != answer
    file.write_bytes(content[:at] + len(changed).to_bytes(4, "little") + changed + content[at + 4 + size :])
    with pytest.raises((WrongAnswer, RuntimeError), match=r"wrong answer to request 3|ended before its answer"):
        client.measure(protocol, _address(daemon, protocol), file, 1, 60)


def test_small_differences_of_what_is_computed_together_are_right(daemon: DaemonProcess, client: Client) -> None:
    """The recorded probabilities of `post` are changed in their last bits."""
    requests = pool("http", "models", 3)
    file = client.record(daemon.url, requests)
    content = bytearray(file.read_bytes())
    # The file ends with post's tensor, the numbers that say how large it is and how exact, and that nothing belongs to it.
    assert content[-16:] == struct.pack("<IffI", 40, *requests.exchanges[2].asked.rounded, 0)
    values = np.frombuffer(content, np.float32, 10, len(content) - 56)
    values *= np.float32(1 + 1e-6)
    file.write_bytes(content)
    assert client.measure("http", daemon.url, file, 2, 0.2).answers > 0
    values *= np.float32(1.01)
    file.write_bytes(content)
    with pytest.raises(WrongAnswer, match="wrong answer to request 2"):
        client.measure("http", daemon.url, file, 1, 60)


@pytest.mark.parametrize(("protocol", "kind"), [("http", "id"), ("grpc", "id"), ("grpc", "trace"), ("stream", "all")])
def test_errors_of_the_server_are_said(daemon: DaemonProcess, client: Client, protocol: str, kind: str) -> None:
    requests = pool(protocol, kind, 4)
    exchanges = [
        dataclasses.replace(one, request=one.request.replace(b"addsub", b"nobody")) for one in requests.exchanges
    ]
    with pytest.raises(WrongAnswer, match=r"nobody|call ended"):
        client.record(_address(daemon, protocol), dataclasses.replace(requests, exchanges=exchanges))


def test_a_server_that_is_not_there(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    with pytest.raises(RuntimeError, match="no connection: Connection refused"):
        client.record(address, pool("http", "id", 1))


def test_a_pool_that_is_cut_off(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "pool"
    file.write_bytes(b"\1\0\0\0")
    with pytest.raises(RuntimeError, match="cut off"):
        client.measure("http", "127.0.0.1:1", file, 1, 1)
