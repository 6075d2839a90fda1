"""Answers of one kind: byte for byte those that are written whole."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.grpc import response_codec
from tensord.daemon.grpc.prepared import AnswerLayout, PreparedMessage
from tensord.daemon.grpc.request_codec import DecodedHead
from tensord.shm.messages import PreparedAnswer, RegionSlice, Slice
from tests.records import Tensor, WholeAnswer, own_contents

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLACES = st.one_of(
    st.binary(max_size=300),
    st.builds(Slice, st.just(0), st.integers(0, 900), st.integers(0, 100)),
    st.just(RegionSlice("r", 0, 4)),
)
OUTPUTS = st.lists(
    st.builds(Tensor, TEXT, st.sampled_from(["FP32", "BYTES"]), st.tuples(st.integers(0, 300)), PLACES), max_size=4
)
PARAMETERS = st.dictionaries(TEXT, st.one_of(st.booleans(), st.integers(-5, 5), TEXT), max_size=2)
MEMORY = memoryview(bytes(range(256)) * 4)


def view(place: Slice) -> memoryview:
    return MEMORY[place.offset : place.offset + place.byte_size]


@given(OUTPUTS, PARAMETERS, TEXT, st.lists(TEXT, min_size=1, max_size=3), st.sampled_from([None, True]))
def test_as_those_written_whole(outputs: Any, parameters: Any, model: str, ids: list[str], final: bool | None) -> None:
    """With any id, however long."""
    completion = WholeAnswer(7, version=3, parameters=parameters, outputs=tuple(outputs))
    layout = AnswerLayout(completion.prepared, model, final)
    for client_id in ids:
        pieces = layout.pieces(client_id.encode(), own_contents(completion.outputs), view)
        assert b"".join(pieces) == b"".join(
            response_codec.encode(completion.prepared, completion.contents, model, client_id, view, final)
        )
        # What lies in the arena is not copied.
        lent = sum(type(tensor.place) is Slice for tensor in outputs)
        assert sum(isinstance(piece, memoryview) for piece in pieces) == lent


def test_layouts_of_a_message_are_bounded() -> None:
    """Of workers, and of shapes that differ."""
    message = PreparedMessage(DecodedHead("m", 0))
    kinds = [PreparedAnswer(number) for number in range(3 * PreparedMessage.MAX_ANSWERS)]
    for kind in kinds:
        for streamed in (False, True):
            known = message.answer_layout(kind, streamed)
            assert message.answer_layout(kind, streamed) is known
            assert known is not message.answer_layout(kind, not streamed)
        assert len(message.unary) <= PreparedMessage.MAX_ANSWERS >= len(message.streamed)
