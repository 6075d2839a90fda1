"""Exchanges under stress: no worker, no time, too many; workers that die. Each test has a front of its own."""

from __future__ import annotations

import contextlib
import select
import socket

import pytest

from tensord.shm.control_records import ModelGone
from tensord.shm.messages import Slice
from tests.fakes import (
    MIB,
    SMALL_BUFFER,
    Client,
    EchoWorker,
    FrontProcess,
    binary_request,
    front_process,
    in_service,
    json_request,
    post,
    serving,
    until,
)
from tests.records import Tensor, WholeRequest

# ------------------------------------------------------------------------------------------------- times and numbers


@pytest.mark.parametrize(
    ("limit", "sent"),
    [
        ("head_timeout", b"POST /v2/models/echo/infer HTTP/1.1\r\nHo"),
        ("body_timeout", post(b"{}")[:-1]),
        ("body_timeout", binary_request(bytes(MIB))[:-1]),
    ],
)
def test_who_does_not_go_on_is_cut_off(limit: str, sent: bytes) -> None:
    with serving(http={"port": 0, limit: 0.1}) as (front, (worker,)):
        with front.client() as client:
            client.send(sent)
            answer = client.answer()
            assert (answer.status, answer.headers["connection"]) == (408, "close")
            assert "0.1 s" in answer.error
            assert client.ends()
        assert worker.idle(0.05)


def test_who_asks_nothing_is_cut_off() -> None:
    # Without a model: telling the front of one takes a connection, which would have to be quicker than the limit.
    with front_process(http={"port": 0, "keep_alive_timeout": 0.1}) as front, front.client() as client:
        assert client.ends()


def asked(front: FrontProcess, worker: EchoWorker) -> tuple[Client, WholeRequest]:
    """Returns a connection that waits for its answer, and its request at the worker."""
    client = front.client()
    client.send(json_request(b"\1"))
    return client, worker.next()


def test_too_many_connections() -> None:
    """All of them wait for answers: another one is refused."""
    with serving(http={"port": 0, "max_connections": 3}) as (front, (worker,)), contextlib.ExitStack() as stack:
        until(lambda: front.counters.connections(0) == 0)
        waiting = [asked(front, worker) for _ in range(3)]
        for client, _ in waiting:
            stack.enter_context(client)
        with front.client() as client:
            answer = client.answer()
            assert answer.status == 503
            assert answer.error == "4 connections are open, at most 3 are allowed"
            assert client.ends()
        for client, sent in waiting:
            worker.echo(sent)
            assert client.answer().values == b"\1"
            in_service(front, worker, client)


def test_too_many_requests_in_flight() -> None:
    with serving(requests={"max_in_flight": 2}) as (front, (worker,)), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(front.client()) for _ in range(2)]
        held = []
        for client in clients:
            client.send(binary_request(bytes(10_000)))
            held.append(worker.next())
        with front.client() as client:
            client.send(binary_request(bytes(10_000)))
            answer = client.answer()
            assert (answer.status, "at most 2" in answer.error) == (503, True)
            worker.echo(held[0])
            clients[0].answer()
            in_service(front, worker, client)
        worker.echo(held[1])
        assert clients[1].answer().status == 200


def test_an_answer_that_comes_too_late() -> None:
    with serving(requests={"timeout": 0.3}) as (front, (worker,)), front.client() as client:
        client.send(binary_request(bytes(10_000)))
        late = worker.next()
        answer = client.answer()
        assert (answer.status, answer.error) == (503, "no answer within 0.3 s")
        until(lambda: worker.idle(0.01) and late.request_id in worker.cancelled)
        worker.echo(late)
        until(lambda: worker.leases == 0)

        def served() -> bool:
            client.send(json_request(b"\1"))
            worker.echo(worker.next())
            return client.answer().status == 200

        until(served)  # on a busy machine the next answers may be late as well


# ---------------------------------------------------------------------------------------------------- workers that die


def test_a_dead_workers_answer_is_still_read_to_its_end() -> None:
    with serving(send_buffer=SMALL_BUFFER) as (front, (worker,)), front.client(SMALL_BUFFER) as client:
        client.send(binary_request(b"\1"))
        content = bytes(range(256)) * (16 * MIB // 256)
        worker.answer(worker.next(), content)
        client.sock.recv(1, socket.MSG_PEEK)
        worker.die()
        front.fence(worker)
        replacement = front.worker()
        front.model(replacement)
        assert client.answer().parts == content
        in_service(front, replacement, client)


def test_a_worker_that_sends_garbage_gets_nothing_more() -> None:
    with serving(2) as (front, (bad, good)), front.client() as client:
        bad.lane.channel._sock.send(b"\1garbage")
        front.sync()
        front.sync()
        for _ in range(4):
            in_service(front, good, client)


def test_requests_of_a_worker_that_sends_garbage_are_answered() -> None:
    """It may live on for long: its clients do not wait for its death. Its memory does."""
    with serving() as (front, (worker,)), front.client() as client:
        client.send(json_request(b"\1"))
        worker.next()
        worker.lane.channel._sock.send(b"\1garbage")
        answer = client.answer()
        assert (answer.status, answer.error) == (500, "the worker's answer could not be understood")
        front.fence(worker)
        fresh = front.worker()
        front.model(fresh)
        in_service(front, fresh, client)


def test_errors_of_the_worker_are_passed_on() -> None:
    with serving() as (front, (worker,)), front.client() as client:
        for code, status in (("INVALID_ARGUMENT", 400), ("UNAVAILABLE", 503), ("INTERNAL", 500), ("NOT_FOUND", 404)):
            client.send(json_request(b"\1"))
            worker.complete(worker.next().request_id, code=code, message="so it is")
            answer = client.answer()
            assert (answer.status, answer.error) == (status, "so it is")


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("y", "FP7", (1,), b"a"),
        Tensor("y", "FP32", (-1,), b"abcd"),
        Tensor("y", "FP32", (2,), b"a"),
        Tensor("y", "UINT8", (1,), Slice(7, 0, 1)),
        Tensor("y", "UINT8", (1,), Slice(0, 1 << 40, 1)),
    ],
)
def test_an_answer_that_is_none_is_an_error_and_nothing_worse(tensor: Tensor) -> None:
    with serving() as (front, (worker,)), front.client() as client:
        client.send(json_request(b"\1"))
        lease = worker.lane.loan(10)
        assert lease is not None
        worker.complete(worker.next().request_id, outputs=(tensor,), lease=lease.key)
        assert client.answer().status in (400, 500)
        until(lambda: worker.leases == 0)
        in_service(front, worker, client)


# --------------------------------------------------------------------------------------------------- models


def test_a_model_that_goes_while_its_request_waits_for_a_worker() -> None:
    with serving(0) as (front, _), front.client() as client:
        client.send(json_request(b"\1"))
        front.sync()
        front.send(ModelGone("echo", 1))
        assert client.answer().status == 404


# --------------------------------------------------------------------------------------------------- large numbers


def test_a_client_that_leaves_while_its_numbers_are_read() -> None:
    with serving() as (front, (worker,)):
        for _ in range(5):
            with front.client() as client:
                client.send(json_request(bytes(1_000_000)))
        with front.client() as client:
            client.send(json_request(b"\1\2" * 500_000))
            worker.echo_until(client)
            assert client.answer().values == b"\1\2" * 500_000
            in_service(front, worker, client)


def test_numbers_that_are_wrong_far_behind_cost_nothing() -> None:
    arenas = {"byte_size": MIB, "max_byte_size": 3 * MIB, "wait": 60.0}
    with serving(arenas=arenas) as (front, (worker,)), front.client() as client:
        good = json_request(bytes(1_000_000))
        for _ in range(5):  # room for two of them
            client.send(good.replace(b" 0]", b" x]"))
            answer = client.answer()
            assert (answer.status, "Invalid value. at " in answer.error) == (400, True)
        client.send(good)
        worker.echo(worker.next())
        assert client.answer().values == bytes(1_000_000)


def test_others_are_served_while_numbers_are_read() -> None:
    """Many pieces in, and as many out. A test that gets no processor for the while sees few of them: it looks again."""
    with serving() as (front, (worker,)), front.client() as client, front.client() as other:

        def served_between() -> int:
            client.send(json_request(bytes(6_000_000)))
            between = 0
            while client.sock not in select.select([client.sock], [], [], 0)[0]:
                other.send(binary_request(b"\1"))
                while not worker.idle(0) or other.sock not in select.select([other.sock], [], [], 0)[0]:
                    worker.poll()
                    if not worker.idle(0):
                        worker.echo(worker.next())
                assert other.answer().parts == b"\1"
                between += 1
            assert client.answer().values == bytes(6_000_000)
            return between

        until(lambda: served_between() > 10)
