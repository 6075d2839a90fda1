"""Exchanges under stress: no worker, no time, too many; workers that die. Each test has a front of its own."""

from __future__ import annotations

import contextlib
import select
import socket
import time

import pytest

from tensord.shm.control_records import ModelGone
from tensord.shm.messages import Slice
from tensord.shm.sequence_keys import SequenceKeys
from tests.fakes import (
    INCARNATION,
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


def test_an_idle_connection_ends_and_a_waiting_one_does_not() -> None:
    # A limit that no connection of the test's own reaches before it asks, be the machine as busy as it likes.
    with serving(http={"port": 0, "keep_alive_timeout": 3.0}) as (front, (worker,)), front.client() as client:
        client.send(json_request(b"\1"))
        request = worker.next()
        time.sleep(4)
        worker.echo(request)
        assert client.answer().status == 200
        assert client.ends()


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    http = {"port": 0, "write_timeout": 0.5}
    with serving(http=http, send_buffer=SMALL_BUFFER) as (front, (worker,)), front.client(SMALL_BUFFER) as client:
        client.send(binary_request(b"\1"))
        worker.answer(worker.next(), bytes(16 * MIB))
        until(lambda: worker.leases == 0)
        with pytest.raises((EOFError, ConnectionResetError)):
            client.answer()


def test_a_client_that_takes_a_little_is_not() -> None:
    http = {"port": 0, "write_timeout": 4.0}
    with serving(http=http, send_buffer=SMALL_BUFFER) as (front, (worker,)), front.client(SMALL_BUFFER) as client:
        client.send(binary_request(b"\1"))
        worker.answer(worker.next(), bytes(16 * MIB))
        for _ in range(6):
            time.sleep(1)
            assert len(client.take(MIB)) == MIB
        client.take(4 * MIB)


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


def test_those_idle_longest_make_room() -> None:
    """
    1. One connection waits for its answer, one was answered, one has half a head, one is answered last.
    2. New ones come. Result: those that have asked nothing for longest go, the one that waits does not.
    """
    with serving(http={"port": 0, "max_connections": 4}) as (front, (worker,)), contextlib.ExitStack() as stack:
        until(lambda: front.counters.connections(0) == 0)
        waits, sent = asked(front, worker)
        stack.enter_context(waits)
        answered, half, last = (stack.enter_context(front.client()) for _ in range(3))
        in_service(front, worker, answered)
        half.send(b"GET /v2/health/live HTTP/1.1\r\nHo")
        in_service(front, worker, last)
        in_service(front, worker, last)
        gone = {answered, half}
        for _ in range(2):
            new = stack.enter_context(front.client())
            assert new.ask("GET", "/v2/health/live").status == 200
        for client in gone:
            assert client.ends()
        in_service(front, worker, last)
        worker.echo(sent)
        assert waits.answer().values == b"\1"


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


def test_a_request_of_a_dead_worker_runs_again_once_it_is_fenced() -> None:
    with serving(2) as (front, workers), front.client() as client:
        client.send(binary_request(bytes(range(250)) * 100))
        until(lambda: not (workers[0].idle(0.01) and workers[1].idle(0.01)))
        dead, other = workers if not workers[0].idle(0.01) else workers[::-1]
        request = dead.next()
        content = dead.content(request)
        dead.die()
        assert other.idle()
        front.fence(dead)
        again = other.next()
        assert (again.request_id, again.strikes) == (request.request_id, 0)
        assert other.content(again) == content
        other.echo(again)
        assert client.answer().parts == content


def test_a_request_that_kills_two_workers_is_given_up() -> None:
    with serving() as (front, (first,)), front.client() as client:
        client.send(json_request(b"\1") + json_request(b"\2"))
        request = first.next()
        first.page.begin(0, [(INCARNATION, request.request_id), (INCARNATION + 1, 5)], 1, 1)
        first.die()
        front.fence(first)
        second = front.worker()
        front.model(second)
        request = second.next()
        assert request.strikes == 1
        second.page.begin(0, [(INCARNATION, request.request_id)], 1, 1)
        second.die()
        front.fence(second)
        answer = client.answer()
        assert (answer.status, "2 worker processes ended" in answer.error) == (500, True)
        third = front.worker()
        front.model(third)
        request = third.next()
        assert (third.content(request), request.strikes) == (b"\2", 0)
        third.echo(request)
        assert client.answer().values == b"\2"


def test_a_sequence_is_not_run_twice() -> None:
    with serving(2) as (front, workers), front.client() as client:
        front.model(*workers, repeatable=False, sticky=True)
        keys = SequenceKeys("echo", 1)
        workers[0].sequences.publish_slots(keys.slots, 1, 0)
        client.send(json_request(b"\1", parameters={"sequence_id": 5, "sequence_start": True}))
        dead, other = workers
        assert dead.next().sequence_id == 5
        dead.sequences.begin(keys.key(5), dead.sequences.admit(keys.key(5), 1))
        dead.die()
        front.fence(dead)
        answer = client.answer()
        assert answer.status == 503
        assert answer.error == (
            "sequence 5 of model 'echo' was lost when its worker died; start it again with the START flag"
        )
        assert other.idle()


def test_what_a_worker_answered_before_it_died_counts() -> None:
    """More answers than the front takes at one go."""
    with serving() as (front, (worker,)), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(front.client()) for _ in range(100)]
        for client in clients:
            client.send(json_request(b"\1"))
        requests = [worker.next() for _ in clients]
        for request in requests:
            worker.page.begin(0, [(INCARNATION, request.request_id)], 1, 1)
            worker.answer(request, b"\2")
        worker.die()
        front.fence(worker)
        for client in clients:
            assert client.answer().values == b"\2"


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


def test_no_worker_for_too_long() -> None:
    with serving(0, requests={"worker_wait": 0.2}) as (front, _), front.client() as client:
        client.send(json_request(b"\1"))
        answer = client.answer()
        assert (answer.status, answer.error) == (503, "no worker was ready for model 'echo' within 0.2 s")
        worker = front.worker()
        front.model(worker)
        in_service(front, worker, client)


def test_a_worker_that_sends_garbage_gets_nothing_more() -> None:
    with serving(2) as (front, (bad, good)), front.client() as client:
        bad.lane._channel._sock.send(b"\1garbage")
        front.sync()
        front.sync()
        for _ in range(4):
            in_service(front, good, client)


def test_requests_of_a_worker_that_sends_garbage_are_answered() -> None:
    """It may live on for long: its clients do not wait for its death. Its memory does."""
    with serving() as (front, (worker,)), front.client() as client:
        client.send(json_request(b"\1"))
        worker.next()
        worker.lane._channel._sock.send(b"\1garbage")
        answer = client.answer()
        assert (answer.status, answer.error) == (500, "the worker's answer could not be understood")
        front.fence(worker)
        fresh = front.worker()
        front.model(fresh)
        in_service(front, fresh, client)


def test_late_and_unknown_completions_are_ignored() -> None:
    with serving() as (front, (worker,)), front.client() as client:
        lease = worker.lane.loan(10)
        assert lease is not None
        worker.complete(999, lease=lease.key)
        until(lambda: worker.leases == 0)
        client.send(json_request(b"\1"))
        request = worker.next()
        worker.echo(request)
        worker.echo(request)
        assert client.answer().values == b"\1"
        in_service(front, worker, client)


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


def test_models_come_and_go() -> None:
    with serving() as (front, (worker,)), front.client() as client:
        other = front.worker()
        front.model(other, version=2)
        for version, at in ((0, other), (1, worker), (2, other)):
            target = f"/versions/{version}/infer".encode() if version else b"/infer"
            client.send(json_request(b"\1").replace(b"/infer", target))
            at.echo(at.next())
            assert client.answer().status == 200
        front.send(ModelGone("echo", 2))
        front.sync()
        in_service(front, worker, client)
        front.model(worker, state="UNAVAILABLE", reason="unloaded")
        client.send(json_request(b"\1"))
        answer = client.answer()
        assert (answer.status, "has no available versions" in answer.error) == (404, True)


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
    """Two hundred pieces in, and as many out. A test that gets no processor for the while sees few of them: it looks again."""
    with serving() as (front, (worker,)), front.client() as client, front.client() as other:

        def served_between() -> int:
            client.send(json_request(bytes(16_000_000)))
            between = 0
            while client.sock not in select.select([client.sock], [], [], 0)[0]:
                other.send(binary_request(b"\1"))
                while not worker.idle(0) or other.sock not in select.select([other.sock], [], [], 0)[0]:
                    worker.poll()
                    if not worker.idle(0):
                        worker.echo(worker.next())
                assert other.answer().parts == b"\1"
                between += 1
            assert client.answer().values == bytes(16_000_000)
            return between

        until(lambda: served_between() > 10)
