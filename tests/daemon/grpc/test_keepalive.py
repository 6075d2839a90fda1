"""Tests how a connection finds out that its client is gone: a PING after a silence, and the end where nothing answers it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import cast
from unittest.mock import Mock

from tensord.config.options import Grpc
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.connection import Http2Connection
from tensord.daemon.grpc.http2 import ConnectionPhase
from tensord.shm.running_time import RunningTime

OPTIONS = Grpc(keepalive_time=100.0, keepalive_timeout=5.0, max_connection_idle=0, max_connection_age=0)


def connection(options: Grpc, busy: bool, test: Callable[[Http2Connection, Mock], None]) -> None:
    """Runs a test with an open connection, of which something was heard at 1000; ``busy``: it has a stream."""

    async def run() -> None:
        serving = Mock(options=options, clock=RunningTime())
        transport = Mock()
        transport.get_write_buffer_size.return_value = 0
        made = Http2Connection(serving, "tcp 127.0.0.1")
        made._transport = cast(asyncio.Transport, transport)
        made.http2.phase = ConnectionPhase.OPEN
        made.http2.heard_at = made._opened_at = made._checked_at = 1000.0
        made.http2.is_flushing = True
        if busy:
            made.http2.streams[1] = Mock()
        test(made, transport)

    asyncio.run(run())


def pings(made: Http2Connection) -> int:
    """Returns how many PINGs a connection has sent."""
    return sum(piece[3] == frames.PING for piece in made.http2.out)


def test_a_silent_client_is_asked_and_given_up() -> None:
    def test(made: Http2Connection, transport: Mock) -> None:
        made.check(1100)
        assert not pings(made)
        made.check(1101)
        made.check(1106)
        assert (pings(made), transport.abort.called) == (1, False)
        made.check(1107)
        assert (made.http2.phase, transport.abort.called) == (ConnectionPhase.CLOSED, True)

    connection(OPTIONS, True, test)


def test_any_sign_of_life_is_one() -> None:
    """An answer in the same tick of the clock is one, too."""

    def test(made: Http2Connection, transport: Mock) -> None:
        for asked in (1101, 1301):
            made.check(asked)
            made.http2.heard_at = asked if asked == 1101 else asked + 1
            made.check(asked + 6)
            assert not transport.abort.called
        assert pings(made) == 2

    connection(OPTIONS, True, test)


def test_a_client_that_takes_a_large_answer_is_not_silent() -> None:
    """Nothing is read from it meanwhile, so it cannot be heard, nor its answer to the PING."""

    def test(made: Http2Connection, transport: Mock) -> None:
        transport.get_write_buffer_size.side_effect = itertools.count(1 << 30, -(1 << 20))
        made.check(1101)
        made._paused_since = 1101.0
        for now in range(1102, 1400):
            made.check(now)
        assert (pings(made), transport.abort.called) == (1, False)
        made._paused_since = 0.0
        made.check(1500)
        assert pings(made) == 2

    connection(OPTIONS, True, test)


def test_an_old_connection_has_its_grace_also_where_its_client_ends_it() -> None:
    def test(made: Http2Connection, transport: Mock) -> None:
        made.http2.phase = ConnectionPhase.ENDING
        for now in (1011, 1016):
            made.check(now)
            assert not transport.abort.called
        made.check(1017)
        assert transport.abort.called

    connection(Grpc(max_connection_age=10.0, max_connection_age_grace=5.0), True, test)


def test_without_calls() -> None:
    def permitted(made: Http2Connection, transport: Mock) -> None:
        made.check(1101)
        assert pings(made) == 1

    def ordinary(made: Http2Connection, transport: Mock) -> None:
        made.check(1101)
        assert not pings(made)

    connection(OPTIONS, False, ordinary)
    connection(Grpc(keepalive_time=100.0, keepalive_permit_without_calls=True), False, permitted)


def test_a_preface_may_come_until_the_last_call_of_a_stop() -> None:
    """A connection that was accepted just before is not closed with the first look of a front that stops."""

    def test(made: Http2Connection, transport: Mock) -> None:
        made.http2.phase = ConnectionPhase.OPENING
        made.announce_end()
        assert not transport.abort.called
        made.stop()
        assert (made.http2.phase, transport.abort.called) == (ConnectionPhase.CLOSED, True)

    connection(OPTIONS, False, test)
