"""Tests what a connection writes: together in one turn, large pieces as they lie, and who hears when it has left."""

from __future__ import annotations

import asyncio
from typing import cast
from unittest.mock import Mock

import pytest

from tensord.config.options import Grpc
from tensord.daemon.grpc.connection import Http2Connection
from tensord.daemon.grpc.http2 import ConnectionPhase


@pytest.fixture
def transport() -> Mock:
    """Returns a transport that notes what it is told."""
    made = Mock()
    made.is_closing.return_value = False
    return made


@pytest.fixture
async def outgoing(transport: Mock) -> Http2Connection:
    """Returns an open connection."""
    serving = Mock(options=Grpc(), compression=0)
    serving.counters.total.return_value = 0
    serving.stopping = False
    made = Http2Connection(serving, "tcp 127.0.0.1")
    made._transport = cast(asyncio.Transport, transport)
    made.http2.phase = ConnectionPhase.OPEN
    return made


async def test_blocked_streams_take_turns(outgoing: Http2Connection, transport: Mock) -> None:
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


async def test_the_last_stream_of_an_ending_connection(outgoing: Http2Connection, transport: Mock) -> None:
    outgoing.http2.phase = ConnectionPhase.ENDING
    outgoing.http2.write(b"bye")
    await asyncio.sleep(0)
    assert [name for name, _, _ in transport.mock_calls] == ["write"]
    assert outgoing.http2.phase is ConnectionPhase.CLOSED
    cast(Mock, outgoing.serving).lingering.see_out.assert_called_once_with(transport)


async def test_the_last_bytes_leave_before_the_connection_ends(outgoing: Http2Connection, transport: Mock) -> None:
    transport.write.side_effect = lambda _: outgoing.pause_writing()
    outgoing.http2.phase = ConnectionPhase.ENDING
    outgoing.http2.write(b"bye")
    await asyncio.sleep(0)
    see_out = cast(Mock, outgoing.serving).lingering.see_out
    assert (outgoing.http2.phase, see_out.call_count) == (ConnectionPhase.CLOSED, 0)
    outgoing.resume_writing()
    see_out.assert_called_once_with(transport)
