"""What is remembered of messages: heads by their bytes, whole messages by their layout; the same as reading each anew."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.grpc.recognised import Known, Recognised
from daemon.grpc.request_fields import RefusedRequest
from daemon.model_table import ModelTable
from daemon.submit import Submitter
from shm.control_records import ModelState
from shm.errors import NotFound
from shm.forms import Forms, whole_request
from shm.messages import FormSubmit, Inline, Submit
from tests.daemon.grpc.requests import REQUESTS
from tests.daemon.grpc.test_request_codec import located, message, table, tensor


def test_a_head_is_known_whatever_its_id_and_tensors() -> None:
    recognised = Recognised(table())
    given_ = [recognised.decode(message(tensor(), raw=(bytes([n, n]),), id=f"id{n}")) for n in range(3)]
    assert all(head is given_[0][0] for head, _, _ in given_)
    assert [(r.id, bytes(r.inputs[0][3])) for _, r, _ in given_] == [  # type: ignore[arg-type]
        (f"id{n}", bytes([n, n])) for n in range(3)
    ]
    # The same head without tensors is another request.
    with pytest.raises(RefusedRequest, match="unable to find data") as caught:
        recognised.decode(message(tensor(), id="late"))
    assert caught.value.client_id == "late"


def test_a_known_head_of_a_model_that_went_away() -> None:
    models = table()
    recognised = Recognised(models)
    content = message(tensor(), raw=(b"ab",))
    recognised.decode(content)
    models.update(ModelState("m", 1, "UNLOADING"))
    with pytest.raises(RefusedRequest) as caught:
        recognised.decode(content)
    assert isinstance(caught.value.error, NotFound)


def test_remembered_heads_are_bounded() -> None:
    recognised = Recognised(table())
    for number in range(Recognised.MAX_COUNT + 10):
        recognised.decode(message(tensor(name=f"x{number}"), raw=(b"ab",)))
    recognised.decode(message(tensor(name="x" * Recognised.MAX_HEAD), raw=(b"ab",)))
    assert 0 < len(recognised._decoded) <= Recognised.MAX_COUNT
    assert all(len(head) <= Recognised.MAX_HEAD for head, _ in recognised._decoded)


class Numbering:
    """What of a submitter forms are made with."""

    inline_byte_size = 200

    def __init__(self) -> None:
        self.forms: Forms[Submit] = Forms()


def recognising(models: ModelTable | None = None) -> Recognised:
    """With forms."""
    return Recognised(models or table(), cast(Submitter, Numbering()))


def meaning(recognised: Recognised, content: bytes, view: bool = False) -> Any:
    """What a message is taken for, or why it is refused."""
    try:
        _, request, state = recognised.decode(memoryview(content) if view else content)
    except RefusedRequest as refused:
        return type(refused.error), refused.error.message, refused.client_id
    inputs = [
        (name, datatype, shape, bytes(raw) if isinstance(raw, bytes | memoryview) else raw)
        for name, datatype, shape, raw in request.inputs
    ]
    return request.model, request.id, inputs, request.outputs, repr(request.parameters), state


@given(REQUESTS, st.data())
def test_the_same_message_but_for_its_id_and_tensors(request_: Any, data: st.DataObject) -> None:
    """And others of the same size among them."""
    recognised, forming, contents = Recognised(table()), recognising(), []
    for _ in range(3):
        request_.id = data.draw(
            st.text(st.characters(codec="ascii"), min_size=len(request_.id), max_size=len(request_.id))
        )
        raws = [data.draw(st.binary(min_size=len(raw), max_size=len(raw))) for raw in request_.raw_input_contents]
        request_.ClearField("raw_input_contents")
        request_.raw_input_contents.extend(raws)
        contents.append(request_.SerializeToString())
    at = data.draw(st.integers(0, len(contents[-1])))
    contents.append(contents[-1][:at] + data.draw(st.binary(max_size=2)) + contents[-1][at + 2 :])
    for content in (*contents, *contents):
        expected = meaning(Recognised(table()), content)
        assert meaning(recognised, content) == expected
        assert meaning(recognised, content, view=True) == expected
        assert recognised.known(content, 0, len(content)) is None
        assert meaning(forming, content) == expected
        known = forming.known(b"\0" + content + b"\0", 1, 1 + len(content))
        if known is None:
            continue
        layout, client_id, text, raws = known
        model, text_, inputs, outputs, _, state = expected
        assert (layout.decoded.model, client_id, text, layout.decoupled) == (
            model,
            text_.encode(),
            text_,
            state.decoupled,
        )
        assert layout.form is not None
        whole = whole_request(layout.form.template, FormSubmit(1, 0, raws))
        places = [place.content if isinstance(place := tensor.place, Inline) else place for tensor in whole.inputs]
        assert places == [place for _, _, _, place in inputs]
        assert whole.outputs == outputs


@pytest.mark.parametrize("client_id", ["", "id-0"])
def test_the_third_of_a_layout_is_known(client_id: str) -> None:
    recognised = recognising()

    def known(content: bytes) -> Known | None:
        found = recognised.known(content, 0, len(content))
        if found is None:
            recognised.decode(content)
        return found

    given_ = [known(message(tensor(), raw=(bytes([n, n]),), id=client_id)) for n in range(4)]
    assert [found is not None for found in given_] == [False, False, True, True]
    assert [found[1:] for found in given_[2:] if found] == [
        (client_id.encode(), client_id, (bytes([n, n]),)) for n in (2, 3)
    ]
    large = [known(message(tensor(shape=(300,)), raw=(bytes(300),), id=client_id)) for n in range(4)]
    assert large == [None] * 4


def test_one_in_regions_alone_is_known_too() -> None:
    recognised = recognising()
    for number in range(3):
        content = message(located(region="r", byte_size=2), id=f"id-{number}")
        known = recognised.known(content, 0, len(content))
        assert (known is not None) == (number == 2)
        recognised.decode(content)
    assert known is not None
    assert known[1:] == (b"id-2", "id-2", ())


def test_a_typed_one_is_not() -> None:
    """Its tensors are in its head."""
    recognised = recognising()
    typed = tensor(uint_contents=[1, 2])
    for _ in range(4):
        content = message(typed)
        assert recognised.known(content, 0, len(content)) is None
        recognised.decode(content)
    assert not recognised._layouts


def test_a_known_layout_whose_id_is_no_text() -> None:
    recognised = Recognised(table())
    content = message(tensor(), raw=(b"ab",), id="xx")
    recognised.decode(content)
    with pytest.raises(RefusedRequest, match="the request id is not UTF-8 text"):
        recognised.decode(content.replace(b"xx", b"\xff\xff"))
    recognised = recognising()
    recognised.decode(content)
    recognised.decode(content)
    assert recognised.known(content, 0, len(content)) is not None
    assert recognised.known(content.replace(b"xx", b"\xff\xff"), 0, len(content)) is None


def test_a_known_layout_of_a_model_that_is_another_now() -> None:
    models = table()
    recognised = Recognised(models)
    content = message(tensor(), raw=(b"ab",))
    assert not recognised.decode(content)[2].decoupled
    models.update(ModelState("m", 1, "READY", workers=(1,), decoupled=True))
    assert recognised.decode(content)[2].decoupled


def test_a_known_message_of_a_model_that_changes() -> None:
    models = table()
    recognised = recognising(models)
    content = message(tensor(), raw=(b"ab",))

    def known() -> bool | None:
        found = recognised.known(content, 0, len(content))
        return None if found is None else found[0].decoupled

    recognised.decode(content)
    recognised.decode(content)
    for decoupled in (False, True, False):
        models.update(ModelState("m", 1, "READY", workers=(1,), decoupled=decoupled))
        assert known() is decoupled
        models.update(ModelState("m", 1, "UNLOADING"))
        assert known() is None
        assert known() is None
