"""Large requests that repeat themselves, over sockets: their deadlines, their clients and workers that go, tracing, the end.

The head comes by itself, as libcurl sends it; the first request is read, those that follow are known.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensord.shm.control_records import TraceChanged
from tensord.shm.trace_counters import SampleCounter
from tests.daemon.http.large_client import head_size, request
from tests.fakes import MIB, PATIENCE_SECONDS, SMALL_BUFFER, Answer, Client, EchoWorker, FrontProcess, serving, until
from tests.records import is_numbered


def asked(fill: int, size: int = MIB) -> bytes:
    return request(bytes([fill]) * size, model="echo")


HEAD = head_size(asked(0))


def send(client: Client, content: bytes) -> None:
    client.send(content[:HEAD], content[HEAD:])


def exchange(client: Client, worker: EchoWorker, fill: int, size: int = MIB) -> Answer:
    send(client, asked(fill, size))
    worker.echo(worker.next())
    return client.answer()


@contextlib.contextmanager
def known(**options: Any) -> Iterator[tuple[FrontProcess, EchoWorker, Client]]:
    """Yields a connection whose requests are prepared already, with its front and worker."""
    with serving(**options) as (front, (worker, *_)), front.client() as client:
        worker.numbered = True
        if len(front.workers) > 1:
            front.model(worker)
        for fill in range(3):
            answer = exchange(client, worker, fill)
            assert (answer.status, answer.parts) == (200, bytes([fill]) * MIB)
        assert is_numbered(worker.record)
        until(lambda: worker.leases == 0)
        yield front, worker, client


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    # Longer than the three exchanges before it could take on any machine.
    with known(http={"port": 0, "body_timeout": 3.0}) as (front, worker, client):
        client.send(asked(1)[:HEAD], asked(1)[HEAD : HEAD + 100_000])
        answer = client.answer()
        assert (answer.status, "the request body was not whole within 3 s" in answer.error) == (408, True)
        client.sock.close()
        with front.client() as other:
            assert exchange(other, worker, 2).parts == bytes([2]) * MIB


def test_a_client_that_ends_in_the_middle() -> None:
    with known() as (_, worker, client):
        client.send(asked(1)[:HEAD], asked(1)[HEAD : HEAD + 100_000])
        client.sock.shutdown(socket.SHUT_WR)
        answer = client.answer()
        assert (answer.status, "in the middle of a request" in answer.error) == (400, True)
        assert client.ends()
        assert worker.idle(0.05)


def test_a_client_that_ends_behind_its_request_is_answered_where_that_is_wanted() -> None:
    with known(http={"port": 0, "answer_half_closed": True}) as (_, worker, client):
        send(client, asked(5))
        client.sock.shutdown(socket.SHUT_WR)
        worker.echo(worker.next())
        answer = client.answer()
        assert (answer.parts, answer.headers.get("connection")) == (bytes([5]) * MIB, "close")
        assert client.ends()


def test_a_client_that_leaves_while_the_worker_has_it() -> None:
    with known() as (front, worker, client):
        # Without the option it would look like a client that still reads.
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        send(client, asked(1))
        gone = worker.next()
        assert is_numbered(worker.record)
        client.sock.close()
        until(lambda: worker.poll() or worker.cancelled == [gone.request_id])
        worker.echo(gone)
        with front.client() as other:
            assert exchange(other, worker, 2).parts == bytes([2]) * MIB
        until(lambda: worker.leases == 0)


def test_arenas_that_hold_one_request_serve_one_after_the_other() -> None:
    """A request that is abandoned, late or answered makes room for the next: nothing of its body stays."""
    room = {"byte_size": MIB, "max_byte_size": 4 * MIB}
    with known(arenas=room) as (front, worker, client):
        for fill in range(4):
            with front.client() as other:
                # Room for one body of that size, and this one takes it.
                other.send(asked(9, 2 * MIB)[: head_size(asked(9, 2 * MIB))])
                front.sync()
                send(client, asked(fill))
                assert worker.idle()
            worker.echo(worker.next())
            assert client.answer().parts == bytes([fill]) * MIB
            for _ in range(2):
                assert exchange(client, worker, fill).parts == bytes([fill]) * MIB
            assert is_numbered(worker.record)


def test_a_client_that_does_not_take_its_answer_holds_the_lease() -> None:
    with serving(send_buffer=SMALL_BUFFER) as (front, (worker,)), front.client(SMALL_BUFFER) as client:
        worker.numbered = True
        for fill in range(3):
            assert exchange(client, worker, fill).parts == bytes([fill]) * MIB
        send(client, asked(7))
        worker.echo(worker.next())
        assert is_numbered(worker.record)
        front.sync()
        assert worker.leases == 1
        assert client.answer().parts == bytes([7]) * MIB
        until(lambda: worker.leases == 0)
        assert exchange(client, worker, 8).parts == bytes([8]) * MIB


def test_a_worker_that_dies_under_it() -> None:
    """Another one gets it whole, as it lies."""
    with known(workers=2) as (front, first, client):
        second = front.workers[1]
        front.model(first)
        send(client, asked(6))
        first.next()
        first.die()
        front.fence(first)
        front.model(second)
        second.echo(second.next())
        assert client.answer().parts == bytes([6]) * MIB
        second.numbered = True
        for fill in range(3):
            assert exchange(client, second, fill).parts == bytes([fill]) * MIB
        assert is_numbered(second.record)


@pytest.mark.parametrize("whole", [False, True])
def test_the_last_answer_of_a_connection_says_so(whole: bool) -> None:
    """The front stops while a known request arrives, or is with its worker."""
    with known() as (front, worker, client), front.client() as idle:
        assert exchange(idle, worker, 1).status == 200
        content = asked(4)
        client.send(content[:HEAD], content[HEAD : None if whole else HEAD + 100_000])
        if whole:
            submit = worker.next()
        front.stop(PATIENCE_SECONDS)
        assert idle.ends()
        if not whole:
            client.send(content[HEAD + 100_000 :])
            submit = worker.next()
        worker.echo(submit)
        last = client.answer()
        assert (last.headers["connection"], last.parts) == ("close", bytes([4]) * MIB)
        assert client.ends()


def test_tracing_that_begins_and_ends_in_between(tmp_path: Path) -> None:
    """A traced request says so to its worker, its trace is whole; those before and after it have none."""
    file = tmp_path / "trace.json"
    with known() as (front, worker, client):

        def ask(traced: bool) -> None:
            send(client, asked(3))
            submit = worker.next()
            assert submit.trace == int(traced)
            worker.echo(submit)
            assert client.answer().parts == bytes([3]) * MIB

        ask(False)
        turn = SampleCounter.create(1)
        front.send(TraceChanged("", 1, 2, 0, str(file)), turn.fd)
        turn.close()
        front.sync()
        ask(True)
        ask(False)  # every second one is
        front.send(TraceChanged("", 0, 1, 0, ""))
        front.sync()
        for _ in range(2):
            ask(False)
        assert is_numbered(worker.record)
        until(lambda: len(stamps(file)) == 6)
        assert stamps(file) == [
            *("HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END")
        ]


def stamps(file: Path) -> list[str]:
    """Returns the names of all stamps of all traces."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # not there yet, or being written
        entries = json.loads(file.read_text())
        return [stamp["name"] for entry in entries for stamp in entry.get("timestamps", ())]
    return []
