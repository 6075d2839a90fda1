"""A large body read past the parser: exactly its own bytes go into the lease, then the connection has its transport back."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import pytest

from daemon.direct_body import DirectBody
from daemon.http.body import PlacedBody
from shm.arena import Arena


@pytest.mark.parametrize("steps", [[100], [1, 99], [10] * 10])
def test_the_body_and_nothing_else(steps: list[int]) -> None:
    arena = Arena(1 << 20, 1 << 20, 0)
    lease = arena.loan(PlacedBody.lease_size(103))
    assert lease is not None
    body = PlacedBody(lease, 103, 3)
    body.write(b"{ }")
    calls = Mock()
    direct = DirectBody(calls.connection, calls.transport, body)
    direct.start()
    sent = bytes(range(100))
    at = 0
    for step in steps:
        calls.connection.direct_body_complete.assert_not_called()
        room = direct.get_buffer(-1)
        assert len(room) == 100 - at
        room[:step] = sent[at : at + step]
        direct.buffer_updated(step)
        at += step
    assert bytes(body.lease.view[61:164]) == b"{ }" + sent
    names = [cast(Any, call)[0] for call in calls.mock_calls]
    exchange = ["transport.pause_reading", "transport.set_protocol", "transport.resume_reading"]
    assert names == [*exchange, *exchange, "connection.direct_body_complete"]
    assert [call.args[0] for call in calls.transport.set_protocol.mock_calls] == [direct, calls.connection]
    lease.release()
    arena.close()


def test_what_else_happens_is_the_connections() -> None:
    calls = Mock()
    direct = DirectBody(calls, Mock(), Mock())
    direct.pause_writing()
    direct.resume_writing()
    direct.eof_received()
    direct.connection_lost(None)
    assert [cast(Any, call)[0] for call in calls.mock_calls] == [
        "pause_writing",
        "resume_writing",
        "eof_received",
        "connection_lost",
    ]
