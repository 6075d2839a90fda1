"""Tests that a prepared part and a request's own part make the whole record, and that a number means what was last said of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.channel import Channel, pair
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import (
    LAST,
    AnswerRecord,
    Content,
    Prepare,
    PreparedAnswer,
    PreparedRequest,
    RegionSlice,
    RequestedOutput,
    RequestRecord,
    Slice,
    ToWorker,
    is_mark,
    placed,
)
from tensord.shm.prepared import MAX_NUMBERS, Numbered, Numbers, PublishedNumbers, ReceivedNumbers
from tensord.shm.record import decoder, encoder
from tests.records import Tensor, WholeAnswer, WholeRequest, whole_answer, whole_request

NUMBERS = st.integers(0, (1 << 63) - 1)
NAMES = st.text(max_size=4)
REGIONS = st.builds(RegionSlice, NAMES, NUMBERS, NUMBERS)
PARAMETERS = st.dictionaries(
    NAMES,
    st.one_of(st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(allow_nan=False), NAMES),
    max_size=2,
)
TENSORS = st.lists(
    st.builds(
        Tensor,
        NAMES,
        NAMES,
        st.lists(NUMBERS, max_size=3).map(tuple),
        st.one_of(st.binary(max_size=9), REGIONS, st.builds(Slice, NUMBERS, NUMBERS, NUMBERS)),
    ),
    max_size=4,
).map(tuple)
REQUESTS = st.builds(
    WholeRequest,
    NUMBERS,
    NAMES,
    NUMBERS,
    TENSORS,
    st.lists(st.builds(RequestedOutput, NAMES, st.none() | REGIONS, NUMBERS), max_size=2).map(tuple),
    PARAMETERS,
    NAMES,
    strikes=st.integers(0, 2),
    deadline_ns=NUMBERS,
    received_ns=NUMBERS,
    priority=NUMBERS,
    timeout_us=NUMBERS,
    sequence_id=st.one_of(NUMBERS, NAMES),
    sequence_start=st.booleans(),
    sequence_end=st.booleans(),
    trace=st.integers(0, 3),
)
ANSWERS = st.builds(
    WholeAnswer,
    NUMBERS,
    version=NUMBERS,
    outputs=TENSORS,
    lease=st.none() | st.tuples(NUMBERS, NUMBERS, NUMBERS),
    parameters=PARAMETERS,
    final=st.booleans(),
)


#: What a record says besides what was prepared.
OWN = set(RequestRecord.__struct_fields__) - {"prepared", "contents"}


def sent(record: Any) -> Any:
    """Encodes and decodes a record, as it arrives at the other end of a lane."""
    return msgspec.msgpack.decode(encoder.encode(record), type=type(record))


# ------------------------------------------------------------------------------------------------------- whole records


@given(REQUESTS, st.booleans())
def test_a_request_is_whole_again(request: WholeRequest, numbered: bool) -> None:
    prepared = sent(request.prepared)
    own = sent(request.of(7) if numbered else request.record)
    assert own.prepared == (7 if numbered else prepared)
    assert whole_request(prepared, own) == request


@given(ANSWERS, st.booleans())
def test_an_answer_is_whole_again(answer: WholeAnswer, numbered: bool) -> None:
    prepared = sent(answer.prepared)
    own = sent(answer.of(7) if numbered else answer.record)
    assert own.prepared == (7 if numbered else prepared)
    assert whole_answer(prepared, own) == answer


@given(REQUESTS, REQUESTS)
def test_what_is_a_request_s_own_is_not_prepared(request: WholeRequest, other: WholeRequest) -> None:
    """Two that differ in nothing else have one number; and no number stands for two kinds."""
    own = {name: getattr(other, name) for name in OWN}
    tensors = tuple(
        tensor
        if isinstance(tensor.place, RegionSlice)
        else tensor._replace(place=tensor.place + b"+" if isinstance(tensor.place, bytes) else b"")
        for tensor in request.inputs
    )
    alike = dataclasses.replace(request, inputs=tensors, **own)
    numbers: Numbers[PreparedRequest] = Numbers()
    kind = numbers.number(request.prepared)
    assert numbers.number(alike.prepared) is kind
    if numbers.number(other.prepared) is kind:
        assert repr(other.prepared) == repr(request.prepared)


def test_values_that_only_compare_equal_are_of_two_kinds() -> None:
    numbers: Numbers[PreparedRequest] = Numbers()
    values: list[Any] = [True, 1, 1.0, "1", 0.0, -0.0]
    made = [numbers.number(PreparedRequest("m", parameters={"p": value})) for value in values]
    assert len(set(made)) == len(values)
    for kind, value in zip(made, values, strict=True):
        assert repr(sent(kind.prepared).parameters["p"]) == repr(value)


@given(REQUESTS, st.lists(st.one_of(st.binary(max_size=3), st.builds(Slice, NUMBERS, NUMBERS, NUMBERS)), max_size=5))
def test_another_number_of_tensors_is_refused(request: WholeRequest, contents: list[Content]) -> None:
    tensors, wanted = request.prepared.inputs, len(request.contents)
    if len(contents) == wanted:
        places = [place for _, place in placed(tensors, tuple(contents))]
        assert [place for place in places if not isinstance(place, RegionSlice)] == contents
        return
    with pytest.raises(
        InvalidArgument, match=f"^{len(contents)} tensors came in a record that was prepared for {wanted}$"
    ):
        placed(tensors, tuple(contents))


def test_what_says_that_it_is_over_is_small() -> None:
    assert len(encoder.encode(AnswerRecord(1 << 40, LAST))) < 32
    assert is_mark(LAST, AnswerRecord(1, LAST))
    not_last = PreparedAnswer(final=False)
    assert not is_mark(not_last, AnswerRecord(1, not_last))
    assert not is_mark(LAST, AnswerRecord(1, LAST, code="INTERNAL"))


# -------------------------------------------------------------------------------------------------------------- numbers


def kind_of(number: int) -> PreparedRequest:
    return PreparedRequest(f"m{number}")


def test_numbers_begin_again() -> None:
    numbers: Numbers[PreparedRequest] = Numbers()
    made = [numbers.number(kind_of(number)) for number in range(MAX_NUMBERS)]
    assert [each.number for each in made] == list(range(MAX_NUMBERS))
    assert [numbers.number(kind_of(number)) for number in range(MAX_NUMBERS)] == made
    again = [numbers.number(kind_of(MAX_NUMBERS + number)) for number in range(2 * MAX_NUMBERS)]
    assert [each.number for each in again] == 2 * list(range(MAX_NUMBERS))
    assert len({*made, *again}) == 3 * MAX_NUMBERS
    # What was forgotten is another one when it comes again.
    late = numbers.number(kind_of(0))
    assert late is not made[0]
    assert late.prepared == made[0].prepared
    assert 0 <= late.number < MAX_NUMBERS


class Published:
    """The two ends of a lane, as far as numbers of prepared requests are concerned."""

    def __init__(self) -> None:
        ours, theirs = pair()
        self.channel, self._there = Channel(ours, decoder(ToWorker)), Channel(theirs, decoder(ToWorker))
        self.numbers: PublishedNumbers[PreparedRequest] = PublishedNumbers(self.channel, Prepare)

    def publish(self, kind: Numbered[PreparedRequest]) -> list[Prepare]:
        """Publishes a prepared request; returns the records that reach the other end."""
        if kind not in self.numbers:
            self.numbers.publish(kind)
        self.channel.flush()
        received = self._there.receive()
        if received is None:
            return []
        records: Any = received[0]
        return list(records)

    def close(self) -> None:
        self.channel.close()
        self._there.close()


def test_a_lane_is_told_once_and_again_when_the_number_stood_for_another_kind() -> None:
    first, same_number, other = Numbered(0, kind_of(1)), Numbered(0, kind_of(2)), Numbered(1, kind_of(3))
    equal = Numbered(0, kind_of(1))
    lane, second = Published(), Published()
    try:
        told = [
            len(lane.publish(kind)) for kind in (first, first, other, first, same_number, same_number, other, first)
        ]
        assert told == [1, 0, 1, 0, 1, 0, 0, 1]
        # Equal is not the same: whoever made it may have told others something else of the number meanwhile.
        assert lane.publish(equal) == [Prepare(0, kind_of(1))]
        assert second.publish(first) == [Prepare(0, kind_of(1))]
    finally:
        lane.close()
        second.close()


@given(st.lists(st.integers(0, 12), max_size=40))
def test_a_number_means_what_was_said_of_it_last(order: list[int]) -> None:
    """Kinds of few numbers in any order: each record is read as one of the kind it was sent as."""
    kinds = [Numbered(number % 4, kind_of(number)) for number in range(13)]
    lane, known = Published(), ReceivedNumbers[PreparedRequest]()
    try:
        for number in order:
            for record in lane.publish(kinds[number]):
                known.learn(record.number, record.prepared)
            assert known[kinds[number].number] == kinds[number].prepared
    finally:
        lane.close()


@pytest.mark.parametrize("number", [-1, MAX_NUMBERS, 1 << 40])
def test_numbers_that_nobody_gives(number: int) -> None:
    known: ReceivedNumbers[PreparedRequest] = ReceivedNumbers()
    with pytest.raises(InvalidArgument, match=f"number {number} was prepared, numbers are below {MAX_NUMBERS}"):
        known.learn(number, kind_of(0))
    with pytest.raises(InvalidArgument, match=f"number {number} was never prepared"):
        known[number]


def test_unknown_numbers() -> None:
    known: ReceivedNumbers[PreparedRequest] = ReceivedNumbers()
    known.learn(3, kind_of(3))
    known.learn(MAX_NUMBERS - 1, kind_of(4))
    assert known[3] == kind_of(3)
    known.learn(3, kind_of(5))
    assert known[3] == kind_of(5)
    with pytest.raises(InvalidArgument, match="number 4 was never prepared"):
        known[4]
