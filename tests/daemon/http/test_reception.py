"""Bodies while they arrive: they wait for room in the arena, and ordinary memory is bounded. Each test has a front of its own."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.fakes import MIB, Client, EchoWorker, binary_request, in_service, json_request, post, serving, until

#: All clients here are one, and it may have all.
WHOLE = {"connection_share": 1.0, "client_share": 1.0, "arriving_share": 1.0}


@pytest.mark.parametrize("make", [json_request, binary_request])
def test_requests_wait_for_room_and_get_it(make: Any) -> None:
    arenas = {"byte_size": MIB, "max_byte_size": MIB, "wait": 60.0, **WHOLE}
    with serving(arenas=arenas) as (front, (worker,)), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(front.client()) for _ in range(12)]
        for number, client in enumerate(clients):
            client.send(make(bytes([number + 1]) * 200_000))
        front.sync()
        first = [worker.next() for _ in range(4)]  # four blocks of 256 KiB
        assert worker.idle()
        for request in first:
            worker.answer(request, worker.content(request)[:1])
        for _ in range(8):
            request = worker.next()
            worker.answer(request, worker.content(request)[:1])
        for number, client in enumerate(clients):
            answer = client.answer()
            assert (answer.parts if make is binary_request else answer.values) == bytes([number + 1])


def test_no_room_is_said_with_both_numbers() -> None:
    arenas = {"byte_size": MIB, "max_byte_size": MIB, "wait": 0.2, **WHOLE}
    with serving(arenas=arenas) as (front, (worker,)), contextlib.ExitStack() as stack:
        busy = [stack.enter_context(front.client()) for _ in range(4)]
        for client in busy:
            client.send(binary_request(bytes(200_000)))
        held = [worker.next() for _ in busy]
        for make in (json_request, binary_request):
            with front.client() as client:
                client.send(make(bytes(200_000)) + post(b"{"))
                answer = client.answer()
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert f"{MIB} of {MIB} are in use" in answer.error
                assert client.answer().status == 400  # the connection goes on
        for request in held:
            worker.answer(request, b"\1")
        for client in busy:
            assert client.answer().status == 200
        with front.client() as client:
            client.send(binary_request(bytes(200_000)))
            worker.echo(worker.next())
            assert client.answer().status == 200


def test_bodies_of_refused_requests_do_not_add_up() -> None:
    """Requests for a model that is not there are answered so, also when their bodies together exceed what one may have."""
    with serving(http={"port": 0, "max_body_byte_size": MIB}) as (front, (worker,)), front.client() as client:
        missing = binary_request(bytes(300_000), model="missing")
        for _ in range(6):
            client.send(missing)
            assert client.answer().status == 404
        client.send(binary_request(bytes(300_000)))
        worker.echo(worker.next())
        assert client.answer().status == 200


def test_who_leaves_while_waiting_for_room_keeps_none() -> None:
    arenas = {"byte_size": MIB, "max_byte_size": MIB, "wait": 60.0, **WHOLE}
    with serving(arenas=arenas) as (front, (worker,)), contextlib.ExitStack() as stack:
        busy = [stack.enter_context(front.client()) for _ in range(4)]
        for client in busy:
            client.send(binary_request(bytes(200_000)))
        held = [worker.next() for _ in busy]
        for make in (json_request, binary_request):
            for part in (0, 1000):
                request = make(bytes(200_000))
                with front.client() as client:
                    client.send(request[: len(request) - part])
                    front.sync()
        with front.client() as last:
            last.send(binary_request(bytes(200_000)))
            front.sync()
            for request_ in held:
                worker.answer(request_, b"\1")
            answer_all_until_answered(worker, last)
        for _ in range(8):
            with front.client() as client:
                client.send(binary_request(bytes(200_000)))
                answer_all_until_answered(worker, client)


def answer_all_until_answered(worker: EchoWorker, client: Client) -> None:
    """Answers requests until this client's is answered.

    Requests of clients that have left may still arrive, because connections are not read while they wait.
    """
    worker.echo_until(client)
    assert len(client.answer().parts) == 200_000


def test_what_could_never_fit_is_refused_at_once() -> None:
    arenas = {"byte_size": MIB, "max_byte_size": 2 * MIB, "wait": 60.0}
    with serving(arenas=arenas) as (front, (worker,)), front.client() as client:
        client.send(binary_request(bytes(3 * MIB)))
        answer = client.answer()
        assert (answer.status, "cannot fit" in answer.error) == (400, True)
        in_service(front, worker, client)


def test_bodies_of_all_connections_together_are_bounded() -> None:
    whole = json_request(bytes(200_000))
    head, _, body = json_request(bytes(200_000), "Expect: 100-continue").partition(b"\r\n\r\n")
    size = len(body)
    limit = size + 100_000
    with serving(http={"max_collected_byte_size": limit}) as (front, (worker,)), front.client() as first:
        first.send(head + b"\r\n\r\n")
        assert first.answer().status == 100
        first.send(body[:-1000])  # what has come counts
        front.sync()
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        chunked = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

        def counted(request: bytes) -> int:
            """The bytes that the front has of the first one's body, as it says to who is refused for them."""
            with front.client() as other:
                other.send(request)
                answer = other.answer()
                assert answer.status == 503
                assert answer.error.endswith(f"more came, at most {limit} are allowed")
                in_service(front, worker, other)
                return int(answer.error.split()[0])

        for request in (whole, chunked + chunk * 4 + b"0\r\n\r\n"):
            # What was sent may still be in sockets.
            until(lambda request=request: counted(request) >= size - 1000)  # type: ignore[misc]
        first.send(whole[-1000:])
        worker.echo(worker.next())
        assert first.answer().values == bytes(200_000)
        for _ in range(3):
            with front.client() as client:
                client.send(whole[:-1])

        def admitted() -> bool:
            with front.client() as client:
                client.send(whole)
                worker.echo_until(client)
                answer = client.answer()
            assert answer.status in (200, 503)
            return answer.status == 200 and answer.values == bytes(200_000)

        until(admitted)  # once the front has seen that those three are gone
