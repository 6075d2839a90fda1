"""Tests how many texts of answers are remembered, and how long ones; test_remembering tests that they are right."""

from __future__ import annotations

from tensord.daemon.http.decoded_request import DecodedRequest
from tensord.daemon.http.message_head import InferHead
from tensord.daemon.http.prepared import PreparedKind
from tensord.shm.messages import AnswerRecord, PreparedAnswer, Slice
from tensord.shm.prepared import Numbers
from tests.records import Tensor, WholeAnswer

#: What a worker's arena holds.
ARENA = memoryview(bytes(range(256)) * 4)


def view(place: Slice) -> memoryview:
    return ARENA[place.offset : place.offset + place.byte_size]


def known() -> PreparedKind:
    """Returns the prepared part of a request that wants two outputs as bytes, and all others in the JSON."""
    decoded = DecodedRequest("", [], (), {"y": True, "z": True}, False, {})
    return PreparedKind(InferHead("echo", 0, 10, None, True), decoded)


def test_answers_of_many_kinds_take_no_more_room() -> None:
    form, numbers = known(), Numbers[PreparedAnswer]()
    own = AnswerRecord(1, 0, (b"1",))
    for version in range(100):
        prepared = WholeAnswer(1, version=version, outputs=(Tensor("y", "UINT8", (1,), b""),)).prepared
        for _ in range(2):
            whole = form.answer(numbers.number(prepared).prepared, own, view).whole("", own)
            assert whole is not None
            assert b'"model_version":"%d"' % version in whole
    assert len(form._answers) <= 16


def test_a_long_text_is_not_remembered() -> None:
    prepared = WholeAnswer(1, version=1, outputs=(Tensor("y" * 2048, "UINT8", (1,), b""),)).prepared
    asked = DecodedRequest("", [], (), {}, True, {})
    own = AnswerRecord(1, 0, (b"1",))
    answer = PreparedKind(InferHead("echo", 0, 10, None, True), asked).answer(prepared, own, view)
    assert answer.whole("", own) is None
    assert answer.pieces("", own, view) is None
