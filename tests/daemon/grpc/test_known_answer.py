"""Answers that are written at once: the bytes that would be written otherwise."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from daemon.grpc import frames, response_codec
from daemon.grpc.known_answer import KnownAnswer, View
from shm.datatypes import ELEMENT_SIZES
from shm.forms import no_view, whole_answer
from shm.messages import Completion, Content, FormCompletion, Inline, RegionSlice, Slice, Tensor
from tests.daemon.grpc.test_response_codec import PARAMETERS, SHAPES, TEXT
from tests.daemon.grpc.test_stream import opened

#: Some of what is written stands in a pattern, where a percent sign means something.
_TEXT = TEXT | st.just("100%b%")
TENSORS = st.lists(
    st.builds(
        Tensor,
        _TEXT,
        st.sampled_from(sorted(ELEMENT_SIZES)),
        SHAPES,
        st.just(Inline(b"")) | st.just(RegionSlice("r", 0, 5)),
    ),
    max_size=4,
)


def written(
    template: Completion, answer: FormCompletion, model: str, client_id: str, streamed: bool, view: View = no_view
) -> bytes:
    """What a call on stream 1 sends otherwise."""
    wire, stream, _ = opened()
    stream.half_closed = True
    whole = whole_answer(template, answer)
    parts = response_codec.encode(whole, model, client_id, view, True if streamed else None)
    if streamed:
        stream.send([])  # the head
        wire.out.clear()
        stream.send(response_codec.streamed(parts))
    else:
        stream.answer(parts)
    return bytes(wire.out)


@given(_TEXT, st.integers(1, (1 << 63) - 1), TENSORS, PARAMETERS, _TEXT, st.booleans(), st.data())
def test_they_are_what_each_would_be(
    model: str,
    version: int,
    outputs: list[Tensor],
    parameters: Any,
    client_id: str,
    streamed: bool,
    data: st.DataObject,
) -> None:
    template = Completion(0, version=version, outputs=tuple(outputs), parameters=parameters)
    sizes = [data.draw(st.integers(0, 300)) for tensor in outputs if isinstance(tensor.place, Inline)]
    known: KnownAnswer | None = None
    for _ in range(3):
        contents = tuple([data.draw(st.binary(min_size=size, max_size=size)) for size in sizes])
        # Another id of that size: of the same layout.
        client_id = client_id[::-1]
        own_id, answer = client_id.encode(), FormCompletion(1, 0, contents)
        known = known or KnownAnswer(template, answer, model, own_id, streamed)
        assert known.fits(template, contents)
        write = known.streamed if streamed else known.unary
        expected = written(template, answer, model, client_id, streamed)
        assert write(frames.number(1), own_id, contents) == expected
    assert known is not None
    # Of the frames, DATA alone takes windows.
    assert known.framed + (frames.HEAD_SIZE if streamed else 0) <= len(expected)
    same = Completion(0, version=version, outputs=tuple(outputs), parameters=parameters)
    assert not known.fits(same, contents)
    if sizes:
        assert not known.fits(template, (*contents[:-1], contents[-1] + b"x"))
    if len(set(sizes)) > 1:
        assert not known.fits(template, tuple(sorted(contents, key=len, reverse=sizes == sorted(sizes))))


ARENA = memoryview(bytes(range(251)) * 40)


def view(place: Slice) -> memoryview:
    return ARENA[place.offset : place.offset + place.byte_size]


@given(_TEXT, TENSORS, PARAMETERS, _TEXT, st.booleans(), st.data())
def test_what_lies_in_a_lease_is_left_there(
    model: str, outputs: list[Tensor], parameters: Any, client_id: str, streamed: bool, data: st.DataObject
) -> None:
    template = Completion(0, version=1, outputs=tuple(outputs), parameters=parameters)
    kinds = [
        (data.draw(st.booleans()), data.draw(st.integers(0, 300)))
        for tensor in outputs
        if isinstance(tensor.place, Inline)
    ]
    known: KnownAnswer | None = None
    for _ in range(3):
        contents: tuple[Content, ...] = tuple(
            [
                Slice(1, data.draw(st.integers(0, 9000)), size)
                if lent
                else data.draw(st.binary(min_size=size, max_size=size))
                for lent, size in kinds
            ]
        )
        own_id, answer = client_id.encode(), FormCompletion(1, 0, contents, (1, 0, 5))
        known = known or KnownAnswer(template, answer, model, own_id, streamed)
        assert known.fits_lent(template, contents)
        write = known.streamed if streamed else known.unary
        pieces = known.around(write(frames.number(1), own_id, known.inside(contents)), contents, view)
        assert b"".join(pieces) == written(template, answer, model, client_id, streamed, view)
        assert sum(type(piece) is memoryview for piece in pieces) == sum(lent for lent, _ in kinds)
    assert known is not None
    assert not known.fits_lent(Completion(0, version=1, outputs=tuple(outputs), parameters=parameters), contents)
    for number, (lent, size) in enumerate(kinds):
        others: list[Content] = [Slice(1, 0, size + 1), bytes(size + 1), bytes(size) if lent else Slice(1, 0, size)]
        for other in others:
            assert not known.fits_lent(template, (*contents[:number], other, *contents[number + 1 :]))
    if any(lent for lent, _ in kinds):
        assert not known.fits(template, tuple([bytes(size) for _, size in kinds]))


def test_a_streams_number_is_its_own() -> None:
    template = Completion(0, version=1, outputs=(Tensor("y", "UINT8", (1,), Inline(b"")),))
    answer = FormCompletion(1, 0, (b"a",))
    for streamed in (True, False):
        known = KnownAnswer(template, answer, "m", b"", streamed)
        write = known.streamed if streamed else known.unary
        first, other = (write(frames.number(number), b"", answer.contents) for number in (1, 0x01020304))
        assert len(first) == len(other)
        changed = [at for at in range(len(first)) if first[at] != other[at]]
        assert len(changed) == (4 if streamed else 12)
