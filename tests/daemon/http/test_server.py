"""The life of a front process: told to stop it finishes what was begun,."""

from __future__ import annotations

import time

from tests.fakes import in_service, json_request, serving


def test_stop_finishes_what_was_begun() -> None:
    with serving() as (front, (worker,)), front.client() as client, front.client() as idle:
        client.send(json_request(b"\1"))
        request = worker.next()
        front.stop(30)
        assert idle.ends()
        worker.echo(request)
        assert client.answer().values == b"\1"
        assert client.ends()
        assert front.process.wait(30) == 0


def test_stop_answers_all_that_was_sent_ahead() -> None:
    """Three requests are on one connection when the stop comes; only the last answer ends it."""
    with serving() as (front, (worker,)), front.client() as client:
        client.send(b"".join(json_request(bytes([n])) for n in range(3)))
        request = worker.next()
        front.stop(30)
        time.sleep(0.3)
        for n in range(3):
            worker.echo(request if n == 0 else worker.next())
            answer = client.answer()
            assert answer.values == bytes([n])
            assert answer.headers.get("connection") == ("close" if n == 2 else None)
        assert client.ends()
        assert front.process.wait(30) == 0


def test_stop_answers_what_was_on_its_way() -> None:
    """
    1. A keep-alive connection is idle, another one has sent half of a head.
    2. The front is told to stop; right after that the request comes whole.
    Result: both are answered, and told that it was the last time.
    """
    with serving() as (front, (worker,)), front.client() as idle, front.client() as half:
        for client in (idle, half):
            in_service(front, worker, client)
        half.send(json_request(b"\2")[:30])
        # The front has it for sure.
        front.sync()
        front.stop(30)
        time.sleep(0.1)
        idle.send(json_request(b"\1"))
        time.sleep(0.4)
        half.send(json_request(b"\2")[30:])
        for _ in range(2):
            worker.echo(worker.next())
        for client, values in ((idle, b"\1"), (half, b"\2")):
            answer = client.answer()
            assert (answer.values, answer.headers["connection"]) == (values, "close")
            assert client.ends()
        assert front.process.wait(30) == 0


def test_stop_cuts_what_does_not_end() -> None:
    with serving() as (front, (worker,)), front.client() as client:
        client.send(json_request(b"\1"))
        worker.next()
        front.stop(0.2)
        assert client.ends()
        assert front.process.wait(30) == 0
