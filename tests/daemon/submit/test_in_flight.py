"""Requests in flight: with and without a number, and what becomes of an answer that nobody could take."""

from __future__ import annotations

import msgspec
import pytest

from tensord.daemon.submit.in_flight import InFlight
from tensord.shm.errors import Internal
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, PreparedAnswer, PreparedRequest, RequestRecord
from tensord.shm.prepared import Numbered
from tests.fakes import CalledBack
from tests.records import Tensor, WholeRequest

REQUEST = WholeRequest(7, "m", 0, (Tensor("x", "UINT8", (2,), b"ab"),), client_id="me")


def test_what_is_asked_is_known_with_and_without_a_number() -> None:
    numbered = Numbered(0, REQUEST.prepared)
    assert CalledBack(on_answer=lambda *_: None, record=REQUEST.of(0), numbered=numbered).prepared is numbered.prepared
    assert CalledBack(on_answer=lambda *_: None, record=REQUEST.record).prepared == REQUEST.prepared


@pytest.mark.parametrize("numbered", [Numbered(3, REQUEST.prepared), None])
def test_a_strike_is_the_requests_own(numbered: Numbered[PreparedRequest] | None) -> None:
    """The next worker learns of the strike in the request's own record, whether or not the request is prepared."""
    record = REQUEST.record if numbered is None else REQUEST.of(3)
    pending = CalledBack(on_answer=lambda *_: None, record=record, numbered=numbered)
    pending.strikes += 1
    assert pending.record == msgspec.structs.replace(record, strikes=1)
    assert pending.numbered is numbered


def test_a_defect_of_the_owner_is_the_owners(caplog: pytest.LogCaptureFixture) -> None:
    def broken(prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
        raise ValueError("no")

    CalledBack(on_answer=broken).fail(Internal("its worker died"))
    # It is told of that, which meets the same defect.
    assert [record.message for record in caplog.records] == [
        "an answer could not be delivered",
        "nor could that be said",
    ]


def test_each_is_itself() -> None:
    """They are told apart by what they are, not by what they say, and are in sets."""
    assert len({InFlight(), InFlight()}) == 2


def test_its_tensors_are_in_no_log() -> None:
    pending = CalledBack(on_answer=lambda *_: None, record=RequestRecord(7, 0, (b"secret",)))
    assert repr(pending) == "<CalledBack 7>"
    pending.cancelled = True
    assert repr(pending) == "<CalledBack 7, cancelled>"
