"""Tests what a connection writes: together in one turn, large pieces as they lie, and who hears when it has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock

from tensord.config.options import Grpc
from tensord.daemon.grpc.connection import Http2Connection
from tensord.daemon.grpc.http2 import WRITE_BUFFER, ConnectionPhase


def connection(test: Callable[[Http2Connection, Mock], Any]) -> None:
    """Runs a test with an open connection whose transport notes what it is told."""

    async def run() -> None:
        transport = Mock()
        transport.is_closing.return_value = False
        serving = Mock(options=Grpc(), compression=0)
        serving.counters.total.return_value = 0
        serving.stopping = False
        outgoing = Http2Connection(serving, "tcp 127.0.0.1")
        outgoing._transport = cast(asyncio.Transport, transport)
        outgoing.http2.phase = ConnectionPhase.OPEN
        await test(outgoing, transport)

    asyncio.run(run())


def test_one_turn_is_one_write() -> None:
    async def test(outgoing: Http2Connection, transport: Mock) -> None:
        for piece in (b"ab", memoryview(b"cd"), b"ef"):
            outgoing.http2.write(piece)
        assert not transport.mock_calls
        assert outgoing.http2.room == WRITE_BUFFER - 6
        await asyncio.sleep(0)
        transport.write.assert_called_once_with(b"abcdef")
        outgoing.http2.write(b"g")
        await asyncio.sleep(0)
        assert [call.args for call in transport.write.mock_calls] == [(b"abcdef",), (b"g",)]

    connection(test)


def test_large_pieces_are_not_joined() -> None:
    async def test(outgoing: Http2Connection, transport: Mock) -> None:
        large = memoryview(bytes(100_000))
        outgoing.http2.write(b"head")
        outgoing.http2.write(large)
        await asyncio.sleep(0)
        ((pieces,),) = [call.args for call in transport.writelines.mock_calls]
        assert pieces[0] == b"head"
        assert pieces[1] is large

    connection(test)


def test_who_waits_for_it_to_leave() -> None:
    """At once if nothing is unsent; when it was handed over; when the kernel has taken it; when the client is gone."""

    async def test(outgoing: Http2Connection, transport: Mock) -> None:
        heard: list[str] = []
        outgoing.when_written(lambda: heard.append("nothing"))
        assert heard == ["nothing"]
        outgoing.http2.write(b"a")
        outgoing.when_written(lambda: heard.append("written"))
        assert heard == ["nothing"]
        await asyncio.sleep(0)
        assert heard == ["nothing", "written"]

        transport.write.side_effect = lambda _: outgoing.pause_writing()
        outgoing.http2.write(b"b")
        outgoing.when_written(lambda: heard.append("taken"))
        await asyncio.sleep(0)
        assert (heard[2:], outgoing.http2.room) == ([], 0)
        transport.pause_reading.assert_called_once()
        outgoing.resume_writing()
        assert heard[2:] == ["taken"]
        transport.resume_reading.assert_called_once()

    connection(test)


def test_what_is_lent_is_given_back_when_it_has_left() -> None:
    """At once where the kernel takes it; when it has, where it does not."""

    async def test(outgoing: Http2Connection, transport: Mock) -> None:
        heard: list[str] = []
        large = memoryview(bytes(100_000))
        outgoing.http2.write_pieces(b"head", large, b"end")
        outgoing.when_written(lambda: heard.append("written"))
        assert outgoing.http2.room == WRITE_BUFFER - 100_007
        assert heard == []
        await asyncio.sleep(0)
        ((pieces,),) = [call.args for call in transport.writelines.mock_calls]
        assert pieces[1] is large
        assert heard == ["written"]
        transport.writelines.side_effect = lambda _: outgoing.pause_writing()
        outgoing.http2.write_pieces(b"head", large)
        outgoing.when_written(lambda: heard.append("taken"))
        await asyncio.sleep(0)
        assert heard == ["written"]
        outgoing.resume_writing()
        assert heard == ["written", "taken"]

    connection(test)


def test_blocked_streams_take_turns() -> None:
    async def test(outgoing: Http2Connection, transport: Mock) -> None:
        pumped: list[int] = []

        def pump(number: int) -> None:
            pumped.append(number)
            outgoing.http2.send_window -= 10

        for number in (1, 3, 5):
            stream = Mock(id=number)
            stream.pump.side_effect = lambda number=number: pump(number)
            outgoing.http2.blocked[number] = stream
        outgoing.http2.send_window = 20
        outgoing.resume_writing()
        assert pumped == [1, 3]
        outgoing.http2.send_window = 20
        outgoing.resume_writing()
        assert pumped == [1, 3, 5, 1]

    connection(test)


def test_the_last_stream_of_an_ending_connection() -> None:
    async def test(outgoing: Http2Connection, transport: Mock) -> None:
        outgoing.http2.phase = ConnectionPhase.ENDING
        outgoing.http2.write(b"bye")
        await asyncio.sleep(0)
        assert [name for name, _, _ in transport.mock_calls] == ["write"]
        assert outgoing.http2.phase is ConnectionPhase.CLOSED
        cast(Mock, outgoing.serving).lingering.see_out.assert_called_once_with(transport)

    connection(test)


def test_the_last_bytes_leave_before_the_connection_ends() -> None:
    async def test(outgoing: Http2Connection, transport: Mock) -> None:
        transport.write.side_effect = lambda _: outgoing.pause_writing()
        outgoing.http2.phase = ConnectionPhase.ENDING
        outgoing.http2.write(b"bye")
        await asyncio.sleep(0)
        see_out = cast(Mock, outgoing.serving).lingering.see_out
        assert (outgoing.http2.phase, see_out.call_count) == (ConnectionPhase.CLOSED, 0)
        outgoing.resume_writing()
        see_out.assert_called_once_with(transport)

    connection(test)
