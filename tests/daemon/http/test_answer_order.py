"""Answers in the order of their requests, and clients that are slow to take them or do not take them at all."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.daemon.http.conftest import Served
from tests.fakes import (
    MIB,
    SMALL_BUFFER,
    Client,
    EchoWorker,
    binary_request,
    in_service,
    json_request,
    post,
    serving,
    until,
)

GET = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Runs a front whose sockets cannot hold an answer of some MiB, so that a part of it waits for the client."""
    with serving(send_buffer=SMALL_BUFFER) as (front, (worker,)):
        yield front, worker


def test_pipelined_requests_are_answered_in_order(client: Client, worker: EchoWorker) -> None:
    client.send(b"".join(json_request(bytes([n])) if n % 3 else GET for n in range(1, 40)))
    for n in range(1, 40):
        if n % 3:
            worker.echo(worker.next())
            assert client.answer().values == bytes([n])
        else:
            answer = client.answer()
            assert (answer.status, answer.body) == (200, b'{"live":true}')


def test_a_pipelined_error_waits_for_its_turn(client: Client, worker: EchoWorker) -> None:
    client.send(json_request(b"\1") + json_request(b"\1", model="nope") + post(b"{") + json_request(b"\2"))
    worker.echo(worker.next())
    assert client.answer().values == b"\1"
    assert [client.answer().status for _ in range(2)] == [404, 400]
    worker.echo(worker.next())
    assert client.answer().values == b"\2"


def test_a_refusal_waits_for_the_answers_before_it(served: Served) -> None:
    front, worker = served
    with front.client() as client:
        client.send(json_request(b"\1") + json_request(b"\2") + b"GARBAGE\r\n\r\n")
        for n in (1, 2):
            worker.echo(worker.next())
            assert client.answer().values == bytes([n])
        assert client.answer().status == 400
        assert client.ends()


def test_a_client_that_ends_its_sending_side_gets_its_answers_where_that_is_wanted() -> None:
    with serving(send_buffer=SMALL_BUFFER, http={"port": 0, "answer_half_closed": True}) as (front, (worker,)):
        for content in (b"\1", bytes(3 * MIB)):
            with front.client() as client:
                client.send(binary_request(content) + GET + binary_request(b"\2"))
                client.sock.shutdown(socket.SHUT_WR)
                worker.answer(worker.next(), content)
                assert client.answer().parts == content
                assert client.answer().status == 200
                worker.echo(worker.next())
                assert client.answer().parts == b"\2"
                assert client.ends()
        until(lambda: worker.leases == 0)


@pytest.mark.parametrize("how", ["ends its sending side", "closes"])
def test_a_client_that_is_gone_cancels_what_it_asked(served: Served, how: str) -> None:
    front, worker = served
    with front.client() as client:
        client.send(binary_request(bytes(3 * MIB)))
        gone = worker.next()
        if how == "closes":
            client.sock.close()
        else:
            client.sock.shutdown(socket.SHUT_WR)
            assert client.ends()
        until(lambda: worker.poll() or gone.request_id in worker.cancelled)
        worker.echo(gone)
    until(lambda: worker.leases == 0)


def test_a_client_that_is_gone_when_its_answer_comes(served: Served) -> None:
    front, worker = served
    for size in (1, 3 * MIB):
        with front.client() as client:
            client.send(binary_request(b"\1"))
            request = worker.next()
        worker.answer(request, bytes(size))
        until(lambda: worker.leases == 0)
    with front.client() as client:
        in_service(front, worker, client)


def test_a_client_that_leaves_with_half_of_its_answer(served: Served) -> None:
    """A binary answer: it leaves from where the worker put it. One in JSON is text of the front's own before a byte leaves."""
    front, worker = served
    with front.client(SMALL_BUFFER) as client:
        client.send(binary_request(b"\1"))
        worker.answer(worker.next(), bytes(16 * MIB))
        assert client.sock.recv(1000)
        front.sync()
        assert worker.leases == 1
    until(lambda: worker.leases == 0)


def test_a_slow_reader_keeps_its_lease_until_it_has_read(served: Served) -> None:
    front, worker = served
    with front.client(SMALL_BUFFER) as client:
        content = bytes(range(256)) * (16 * MIB // 256)
        client.send(binary_request(b"\1") + binary_request(b"\2"))
        worker.answer(worker.next(), content)
        client.sock.recv(1, socket.MSG_PEEK)
        front.sync()
        assert worker.leases == 1
        # The second one's turn comes when the first answer has left; no more of its requests are read meanwhile.
        client.send(binary_request(b"\3"))
        assert worker.idle()
        assert client.answer().parts == content
        until(lambda: worker.leases == 0)
        worker.answer(worker.next(), b"\2")
        assert client.answer().parts == b"\2"
        worker.answer(worker.next(), b"\3")
        assert client.answer().parts == b"\3"


def test_a_slow_reader_with_half_a_request_behind(served: Served) -> None:
    front, worker = served
    with front.client(SMALL_BUFFER) as client:
        second = json_request(b"\2")
        client.send(binary_request(b"\1") + second[:-5])
        worker.answer(worker.next(), bytes(16 * MIB))
        client.sock.recv(1, socket.MSG_PEEK)
        front.sync()
        assert len(client.answer().parts) == 16 * MIB
        client.send(second[-5:])
        worker.echo(worker.next())
        assert client.answer().values == b"\2"


@pytest.mark.parametrize("model", ["echo", "nothing"])
def test_many_refused_requests_behind_one_that_takes_time(model: str) -> None:
    """The client sends as many ahead as it may: none of them is handled by a call nested in the one before."""
    with serving() as (front, (worker,)), front.client() as client:
        client.send(json_request(b"\1") + post(b"{}", model=model) * 255)
        worker.echo(worker.next())
        assert client.answer().values == b"\1"
        assert {client.answer().status for _ in range(255)} == {400 if model == "echo" else 404}
        in_service(front, worker, client)
