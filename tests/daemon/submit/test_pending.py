"""Requests in flight: with and without a form, and what becomes of an answer that nobody could take."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tensord.daemon.submit.pending import Calling, Pending, Worker
from tensord.shm.forms import Form
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import Completion, FormCompletion, FormSubmit, Inline, Submit, Tensor

TEMPLATE = Submit(0, "m", 0, (Tensor("x", "UINT8", (2,), Inline(b"")),))
ANSWERS = Completion(0, version=1, outputs=(Tensor("y", "UINT8", (2,), Inline(b"")),))
OWN = FormCompletion(7, 0, (b"ab",))
WHOLE = Completion(7, version=1, outputs=(Tensor("y", "UINT8", (2,), Inline(b"ab")),))


def test_one_of_a_form_can_be_made_whole() -> None:
    pending = Calling(lambda completion, lane: None, record=FormSubmit(7, 0, (b"ab",), "me"), form=Form(0, TEMPLATE))
    assert pending.submit is TEMPLATE
    whole = Submit(7, "m", 0, (Tensor("x", "UINT8", (2,), Inline(b"ab")),), client_id="me")
    assert pending.unform() == whole
    assert (pending.form, pending.submit, pending.unform()) == (None, whole, whole)


def test_an_answer_of_a_form_comes_whole_to_who_knows_no_other() -> None:
    lane = cast(SubmitterLane, object())
    got: list[Any] = []
    plain = Calling(lambda completion, lane: got.append((completion, lane)), record=Submit(7, "m", 0, ()))
    plain.worker = Worker(1, "cpu:0", lane, *cast(Any, (None, None)))
    plain.formed(ANSWERS, OWN)
    assert got == [(WHOLE, lane)]


def test_a_defect_of_the_owner_is_the_owners(caplog: pytest.LogCaptureFixture) -> None:
    def broken(completion: Completion, lane: SubmitterLane | None) -> None:
        raise ValueError("no")

    Calling(broken).tell(WHOLE, None)
    # It is told of that, which meets the same defect.
    assert [record.message for record in caplog.records] == [
        "an answer could not be delivered",
        "nor could that be said",
    ]


def test_each_is_itself() -> None:
    """They are told apart by what they are, not by what they say, and are in sets."""
    assert len({Pending(), Pending()}) == 2


def test_its_tensors_are_in_no_log() -> None:
    pending = Calling(lambda completion, lane: None, record=FormSubmit(7, 0, (b"secret",)))
    assert repr(pending) == "<Calling 7>"
    pending.cancelled = True
    assert repr(pending) == "<Calling 7, cancelled>"
