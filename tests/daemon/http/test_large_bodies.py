"""Large requests that repeat themselves, over sockets: their deadlines, their clients and workers that go, tracing, the end.

The head comes by itself, as libcurl sends it; the first request is read, those that follow are known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tests.daemon.http.large_client import head_size, request
from tests.fakes import MIB, SMALL_BUFFER, Answer, Client, EchoWorker, FrontProcess, serving, until
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
