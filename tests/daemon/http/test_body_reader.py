"""Large bodies read past the parser: exactly their bytes go into the leases, and what lies between goes to the connection."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import pytest

from tensord.daemon.http.body import PlacedBody
from tensord.daemon.http.body_reader import BodyReader
from tensord.shm.arena import Arena

EXCHANGE = ["transport.pause_reading", "transport.set_protocol", "transport.resume_reading"]


@pytest.mark.parametrize("steps", [[100], [1, 99], [10] * 10])
def test_the_body_and_nothing_else(steps: list[int]) -> None:
    arena = Arena(1 << 20, 1 << 20, 0)
    calls = Mock()
    reader = BodyReader(calls.connection, calls.transport)
    for number in range(2):
        lease = arena.loan(PlacedBody.lease_size(103))
        assert lease is not None
        body = PlacedBody(lease, 103, 3)
        body.write(b"{ }")
        reader.receive(body.rest())
        sent = bytes(range(100))
        at = 0
        for step in steps:
            assert calls.connection.direct_body_complete.call_count == number
            room = reader.get_buffer(-1)
            assert len(room) == 100 - at
            room[:step] = sent[at : at + step]
            reader.buffer_updated(step)
            at += step
            assert reader.byte_size == at
        assert bytes(body.lease.view[61:164]) == b"{ }" + sent
        # Between bodies the connection gets what arrives, in pages of the reader's own.
        room = reader.get_buffer(-1)
        room[:5] = b"POST "
        reader.buffer_updated(5)
        lease.release()
    reader.leave()
    names = [cast(Any, call)[0] for call in calls.mock_calls]
    each = ["connection.direct_body_complete", "connection.data_received"]
    assert names == [*EXCHANGE, *each, "transport.resume_reading", *each, *EXCHANGE]
    assert [call.args[0] for call in calls.connection.data_received.mock_calls] == [b"POST ", b"POST "]
    assert [call.args[0] for call in calls.transport.set_protocol.mock_calls] == [reader, calls.connection]
    arena.close()


def test_a_body_that_will_not_be_whole_is_written_no_further() -> None:
    arena = Arena(1 << 20, 1 << 20, 0)
    lease = arena.loan(PlacedBody.lease_size(103))
    assert lease is not None
    calls = Mock()
    reader = BodyReader(calls, Mock())
    reader.receive(PlacedBody(lease, 103, 3).rest())
    reader.stop()
    reader.get_buffer(-1)[:4] = b"late"
    reader.buffer_updated(4)
    calls.data_received.assert_called_once_with(b"late")
    calls.direct_body_complete.assert_not_called()
    assert bytes(lease.view) == bytes(len(lease.view))
    lease.release()
    arena.close()


def test_what_else_happens_is_the_connections() -> None:
    calls = Mock()
    reader = BodyReader(calls, Mock())
    reader.pause_writing()
    reader.resume_writing()
    reader.eof_received()
    reader.connection_lost(None)
    assert [cast(Any, call)[0] for call in calls.mock_calls] == [
        "pause_writing",
        "resume_writing",
        "eof_received",
        "connection_lost",
    ]
