"""HTTP/2 frames made by hand against a real front: what is served however it is cut, and what ends a stream or a connection."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from tensord.daemon.front.status import DEADLINE_EXCEEDED, INTERNAL, NOT_FOUND, UNIMPLEMENTED
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.stream import STREAM_WINDOW
from tests.daemon.grpc.frame_client import INFER, STREAM, FrameClient, GrpcFrontProcess, prefixed, request, serving
from tests.fakes import PATIENCE_SECONDS, EchoWorker, front_process, until

END = frames.END_HEADERS


def echoed(client: FrameClient, worker: EchoWorker, stream: int) -> bytes:
    worker.echo(worker.next())
    answer = client.answer(stream)
    assert answer.status == 0
    return answer.values


def test_whole_calls() -> None:
    with serving() as (front, (worker,)), front.frames() as client:
        for n in range(5):
            assert echoed(client, worker, client.call(request(bytes([n])))) == bytes([n])


def test_a_flooded_stream_is_held_and_then_ended() -> None:
    """
    1. A stream may have one request in flight; the client sends many large ones without looking at its window.
    Result: those that fit the window wait, the connection is ended where the window is overrun, the worker saw one request.
    """
    with serving(grpc={"max_stream_requests": 1}) as (front, (worker,)), front.frames() as client:
        stream = client.open(STREAM)
        flood = frames.frame(frames.DATA, 0, stream, prefixed(request(bytes(15_000))))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(400):
                client.send(flood)
        worker.next()
        assert client.ends()
        until(lambda: worker.poll() or len(worker.cancelled) == 1)
        assert worker.idle()


def test_a_held_stream_goes_on() -> None:
    """More requests than may be in flight, and far more than a window: as they are answered, the client may send the others."""
    with serving(grpc={"max_stream_requests": 2}) as (front, (worker,)), front.frames() as client:
        stream = client.open(STREAM)
        window, sent, answered = 4 << 20, 0, 0
        content = prefixed(request(bytes(15_000)))
        while answered < 500:
            while sent < 500 and window >= len(content):
                client.data(stream, content, end=sent == 499)
                window -= len(content)
                sent += 1
            worker.answer(worker.next(), bytes([answered % 256]))
            answered += 1
            while len(client.answers[stream].messages if stream in client.answers else ()) < answered:
                kind, _, number, payload = client.peek()
                if kind == frames.WINDOW_UPDATE and number == stream:
                    window += int.from_bytes(payload, "big")
                client.step()
        answer = client.answer(stream)
        assert answer.status == 0
        got = [each.infer_response.raw_output_contents[0] for each in answer.streamed()]
        assert got == [bytes([n % 256]) for n in range(500)]


def test_answers_nobody_reads_stop_the_stream() -> None:
    """
    1. A client with no window asks on a stream again and again for large answers.
    Result: when some megabytes wait for it, no more of its requests are taken; another connection does not notice.
    """
    settings = ((frames.INITIAL_WINDOW_SIZE, 0),)
    with serving() as (front, (worker,)), front.frames(settings) as client, front.frames() as other:
        stream = client.open(STREAM)
        answered = held = 0
        while held < 3:
            assert answered < 50, "nothing stops it"
            client.data(stream, prefixed(request(b"\1")))
            call = other.call(request(b"\3"))
            # Three times in a row only the other one's comes through: not by chance.
            held += 1
            while worker.content(asked := worker.next()) != b"\3":
                worker.answer(asked, bytes(1 << 20))
                answered += 1
                held = 0
            worker.echo(asked)
            assert other.answer(call).values == b"\3"
        assert answered >= 4
        client.sock.close()
        until(lambda: not worker.leases)


def test_no_grpc_call() -> None:
    with serving() as (front, _), front.frames() as client:
        stream = client.open(content_type="text/html")
        client.data(stream, b"", end=True)
        while client.step() != frames.HEADERS:
            pass
        assert client.answers[stream].headers[":status"] == "415"


def test_an_unknown_model_and_method() -> None:
    with serving() as (front, _), front.frames() as client:
        answer = client.answer(client.call(request(model="no\u00e9")))
        assert (answer.status, answer.text) == (NOT_FOUND, "Request for unknown model: 'no%C3%A9' is not found")
        assert client.answer(client.call(b"", "/a/b")).status == UNIMPLEMENTED


def test_reserved_bits_are_ignored() -> None:
    """The reserved bits of stream ids and of window increments change nothing."""
    reserved = 1 << 31
    with serving() as (front, (worker,)), FrameClient(front.port, hello=False) as client:
        client.send(frames.PREFACE + frames.settings(((frames.INITIAL_WINDOW_SIZE, 0),)))
        stream = client.open()
        client.data(reserved | stream, prefixed(request(b"\1")), end=True)
        worker.echo(worker.next())
        # The window would be too large with that bit.
        client.send(frames.window_update(reserved, reserved | 1))
        client.send(frames.window_update(reserved | stream, reserved | 1000))
        assert client.answer(stream).values == b"\1"


def test_a_larger_initial_window_lets_waiting_answers_go() -> None:
    with serving() as (front, (worker,)), front.frames(((frames.INITIAL_WINDOW_SIZE, 0),)) as client:
        stream = client.call(request(b"\1"))
        worker.echo(worker.next())
        client.send(frames.settings(((frames.INITIAL_WINDOW_SIZE, 1 << 20), (frames.MAX_FRAME_SIZE, 1 << 20))))
        assert client.answer(stream).values == b"\1"


def test_a_reset_cancels() -> None:
    with serving() as (front, (worker,)), front.frames() as client:
        stream = client.call(request())
        sent = worker.next()
        client.send(frames.rst_stream(stream, frames.CANCEL))
        until(lambda: worker.poll() or worker.cancelled == [sent.request_id])
        worker.echo(sent)
        assert echoed(client, worker, client.call(request(b"\2"))) == b"\2"


def test_a_client_that_vanishes_cancels_everything() -> None:
    with serving() as (front, (worker,)):
        with front.frames() as client:
            client.call(request())
            stream = client.open(STREAM)
            client.data(stream, prefixed(request(b"\2")) + prefixed(request(b"\3")))
            sent = {worker.next().request_id for _ in range(3)}
        until(lambda: worker.poll() or set(worker.cancelled) == sent)


def test_a_deadline_cancels() -> None:
    with serving() as (front, (worker,)), front.frames() as client:
        # In one packet: the call is at the worker before the front looks at the time again.
        block, content = client.block(INFER, grpc_timeout="50m"), prefixed(request())
        stream = 1
        client.send(frames.frame(frames.HEADERS, END, stream, block) + frames.frame(frames.DATA, 1, stream, content))
        sent = worker.next()
        assert sent.deadline_ns > 0
        assert client.answer(stream).status == DEADLINE_EXCEEDED
        until(lambda: worker.poll() or worker.cancelled == [sent.request_id])


@pytest.mark.parametrize("messages", [0, 2])
def test_a_unary_call_has_one_message(messages: int) -> None:
    with serving() as (front, _), front.frames() as client:
        stream = client.open()
        client.data(stream, prefixed(request()) * messages, end=True)
        assert client.answer(stream).status == INTERNAL


def test_too_many_streams() -> None:
    with serving(grpc={"max_concurrent_streams": 2}) as (front, (worker,)), front.frames() as client:
        first, second, third = (client.call(request(bytes([n]))) for n in range(3))
        assert client.answer(third).reset == frames.REFUSED_STREAM
        for stream in (first, second):
            worker.echo(worker.next())
            assert client.answer(stream).status == 0


def test_too_many_connections() -> None:
    """All of them wait for answers: another one is refused."""
    with serving(grpc={"max_connections": 2}) as (front, (worker,)), contextlib.ExitStack() as stack:
        asked: list[tuple[FrameClient, int]] = []

        def let_in() -> bool:
            """Another connection may count until the front has seen its end, which it may do later than its client."""
            client = stack.enter_context(front.frames())
            with contextlib.suppress(EOFError, ConnectionError):
                stream = client.call(request(bytes([len(asked)])))
                client.synchronise()
                asked.append((client, stream))
            return len(asked) == 2

        until(let_in)
        with front.frames() as other:
            assert other.ends()
        for n, (client, stream) in enumerate(asked):
            sent = worker.next()
            assert worker.content(sent) == bytes([n])
            worker.echo(sent)
            assert client.answer(stream).values == bytes([n])


def test_those_idle_longest_make_room() -> None:
    """
    1. As many connections as there may be: one asks, one waits for an answer, one asked before, one has an idle stream.
    2. New ones come. Result: the connection that has asked nothing for longest goes, then the next one; never one that waits.
    """
    with serving(grpc={"max_connections": 4}) as (front, (worker,)), contextlib.ExitStack() as stack:
        until(lambda: front.counters.connections(0) == 0)
        waits, idle, streams, asks = (stack.enter_context(front.frames()) for _ in range(4))
        waiting = waits.call(request(b"\1"))
        sent = worker.next()
        time.sleep(0.01)  # the front's clock has moved on
        assert idle.answer(idle.call(b"", "/a/b")).status == UNIMPLEMENTED
        quiet = streams.open(STREAM)
        streams.synchronise()
        time.sleep(0.01)
        assert asks.answer(asks.call(b"", "/a/b")).status == UNIMPLEMENTED
        # The stream was of no use yet, but to open the connection.
        order = [streams, idle, asks]
        for gone in order[:2]:
            new = stack.enter_context(front.frames())
            assert gone.goaway()[1] == frames.NO_ERROR
            assert gone.ends()
            assert new.answer(new.call(b"", "/a/b")).status == UNIMPLEMENTED
        assert quiet not in streams.answers
        assert asks.answer(asks.call(b"", "/a/b")).status == UNIMPLEMENTED
        worker.echo(sent)
        assert waits.answer(waiting).values == b"\1"


def test_a_connection_without_calls_is_ended() -> None:
    """max_connection_idle: with GOAWAY, and not before the last call has its answer."""
    with serving(grpc={"max_connection_idle": 0.2}) as (front, (worker,)), front.frames() as client:
        stream = client.call(request(b"\1"))
        sent = worker.next()
        with front.frames() as other:
            assert other.ends()
            assert other.goaways[-1][1] == frames.NO_ERROR
        assert not client.goaways
        worker.echo(sent)
        assert client.answer(stream).values == b"\1"
        assert client.ends()


def test_silence_is_ended() -> None:
    """A connection that does not open, and half a message that does not go on. Nobody else has to be as quick as that."""
    with (
        front_process(GrpcFrontProcess, grpc={"head_timeout": 0.1}) as front,
        FrameClient(front.port, hello=False) as silent,
    ):
        assert silent.ends()
    with front_process(GrpcFrontProcess, grpc={"body_timeout": 0.1}) as front, front.frames() as client:
        stream = client.open()
        client.data(stream, prefixed(request())[:7])
        assert "did not arrive within 0.1 s" in client.answer(stream).text


def test_a_message_is_not_late_while_the_front_does_not_run() -> None:
    with serving(grpc={"body_timeout": 3.0}) as (front, (worker,)), front.frames() as client:
        content, stream = prefixed(request(b"\1")), client.open()
        client.data(stream, content[:-1])
        front.sync()
        os.kill(front.process.pid, signal.SIGSTOP)
        time.sleep(3.5)
        os.kill(front.process.pid, signal.SIGCONT)
        for _ in range(3):
            front.sync()  # meanwhile it looks who is late
        client.data(stream, content[-1:], end=True)
        assert echoed(client, worker, stream) == b"\1"


def test_a_message_is_not_late_while_its_stream_is_held() -> None:
    """
    1. A stream may have one request in flight; the client sends others until its window ends in the middle of one.
    2. Another call's message begins later, and is refused after ``body_timeout``: so long the stream has waited, too.
    3. The requests are answered. Result: the client gets window, sends the rest, and every request has its answer.
    """
    with serving(grpc={"max_stream_requests": 1, "body_timeout": 3.0}) as (front, (worker,)), front.frames() as client:
        content, stream = prefixed(request(bytes(15_000))), client.open(STREAM)
        count, begun = divmod(STREAM_WINDOW, len(content))
        for part in (*[content] * count, content[:begun]):
            client.data(stream, part)
        client.synchronise()
        late = client.open()
        client.data(late, content[:100])
        assert "did not arrive within 3 s" in client.answer(late).text
        for number in range(count):
            worker.answer(worker.next(), bytes([number % 256]))
        while client.peek()[::2] != (frames.WINDOW_UPDATE, stream):
            client.step()
        client.data(stream, content[begun:], end=True)
        worker.answer(worker.next(), b"the last")
        answers = client.answer(stream).streamed()
        assert [each.infer_response.raw_output_contents[0] for each in answers] == [
            *(bytes([number % 256]) for number in range(count)),
            b"the last",
        ]


def test_stop_finishes_what_was_begun() -> None:
    with serving() as (front, (worker,)), front.frames() as client, front.frames() as idle:
        assert echoed(idle, worker, idle.call(request(b"\0"))) == b"\0"
        stream = client.call(request(b"\1"))
        sent = worker.next()
        front.stop(PATIENCE_SECONDS)
        assert idle.ends()
        assert idle.goaways[0][1] == frames.NO_ERROR
        worker.echo(sent)
        assert client.answer(stream).values == b"\1"
        assert client.ends()
        assert front.process.wait(PATIENCE_SECONDS) == 0


def test_stop_cuts_what_does_not_end() -> None:
    with serving() as (front, (worker,)), front.frames() as client:
        client.call(request())
        worker.next()
        front.stop(0.2)
        assert client.ends()
        assert front.process.wait(PATIENCE_SECONDS) == 0
