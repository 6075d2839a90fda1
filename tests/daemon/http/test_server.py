"""The life of a front process: told to stop it finishes what was begun."""

from __future__ import annotations

import contextlib
import time

from tests.fakes import PATIENCE_SECONDS, in_service, json_request, serving, until


def test_stop_finishes_what_was_begun() -> None:
    with serving() as (front, (worker,)), front.client() as client, front.client() as idle:
        client.send(json_request(b"\1"))
        request = worker.next()
        front.stop(PATIENCE_SECONDS)
        assert idle.ends()
        worker.echo(request)
        assert client.answer().values == b"\1"
        assert client.ends()
        assert front.process.wait(PATIENCE_SECONDS) == 0


def test_stop_answers_all_that_was_sent_ahead() -> None:
    """Three requests are on one connection when the stop comes; only the last answer ends it."""
    with serving() as (front, (worker,)), front.client() as client:
        client.send(b"".join(json_request(bytes([n])) for n in range(3)))
        request = worker.next()
        front.stop(PATIENCE_SECONDS)
        time.sleep(0.3)
        for n in range(3):
            worker.echo(request if n == 0 else worker.next())
            answer = client.answer()
            assert answer.values == bytes([n])
            assert answer.headers.get("connection") == ("close" if n == 2 else None)
        assert client.ends()
        assert front.process.wait(PATIENCE_SECONDS) == 0


def test_stop_answers_what_was_sent_behind_a_stream() -> None:
    """An answer whose head was sent before the stop cannot say that it is the last one."""
    with serving() as (front, (worker,)), front.client() as client:
        body = b'{"x":1}'
        client.send(b"POST /v2/models/echo/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\n" + body)
        request = worker.next()
        worker.respond(request.request_id, b"\1", False)
        assert "connection" not in client.answer().headers
        front.stop(PATIENCE_SECONDS)
        time.sleep(0.1)
        worker.respond(request.request_id, b"", True)
        assert len(list(client.chunks())) == 1
        client.send(json_request(b"\2"))
        worker.echo(worker.next())
        answer = client.answer()
        assert (answer.values, answer.headers["connection"]) == (b"\2", "close")
        assert client.ends()
        assert front.process.wait(PATIENCE_SECONDS) == 0


def test_stop_ends_a_connection_that_always_has_a_request_in_flight() -> None:
    """
    1. A client has a request in flight; the front is told to stop. 2. Much later it sends the next one on the same connection.
    Result: the first answer says that it is the last one, and the connection ends.
    """
    with serving() as (front, (worker,)), front.client() as client, front.client() as idle:
        client.send(json_request(b"\1"))
        request = worker.next()
        front.stop(PATIENCE_SECONDS)
        assert idle.ends()  # which is when nothing new is taken any more
        client.send(json_request(b"\2"))
        time.sleep(0.1)
        worker.echo(request)
        answer = client.answer()
        assert (answer.values, answer.headers["connection"]) == (b"\1", "close")
        assert client.ends()
        assert front.process.wait(PATIENCE_SECONDS) == 0


def test_stop_answers_what_was_on_its_way() -> None:
    """
    1. A keep-alive connection is idle, another one has sent half of a head.
    2. The front is told to stop; right after that the request comes whole.
    Result: both are answered, and told that it was the last time.

    The front waits a quarter of a second for such a request. A machine too busy for that proves nothing: another attempt.
    """
    until(lambda: answered_on_its_way(0.1, 0.4) == [b"\1", b"\2"])


def answered_on_its_way(*delays: float) -> list[bytes]:
    """Stops a front; returns the last answers on an idle connection and on one with half a request.

    Each request is sent ``delays`` seconds after the one before.
    """
    with serving() as (front, (worker,)), front.client() as idle, front.client() as half:
        for client in (idle, half):
            in_service(front, worker, client)
        whole = json_request(b"\2")
        half.send(whole[:30])
        front.sync()
        front.stop(PATIENCE_SECONDS)
        found: list[bytes] = []
        for client, rest, delay in ((idle, json_request(b"\1"), delays[0]), (half, whole[30:], delays[1])):
            time.sleep(delay)
            with contextlib.suppress(ConnectionError, EOFError):
                client.send(rest)
                worker.echo_until(client)
                answer = client.answer()
                assert answer.headers["connection"] == "close"
                assert client.ends()
                found.append(answer.values)
        assert front.process.wait(PATIENCE_SECONDS) == 0
        return found


def test_stop_cuts_what_does_not_end() -> None:
    with serving() as (front, (worker,)), front.client() as client:
        client.send(json_request(b"\1"))
        worker.next()
        front.stop(0.2)
        assert client.ends()
        assert front.process.wait(PATIENCE_SECONDS) == 0
