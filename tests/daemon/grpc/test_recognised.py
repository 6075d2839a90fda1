"""What is remembered of messages: heads by their bytes, whole messages by their layout; the same as reading each anew."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.grpc.recognised import Recognised
from daemon.grpc.request_fields import RefusedRequest
from shm.errors import NotFound
from shm.messages import ModelState
from tests.daemon.grpc.requests import REQUESTS
from tests.daemon.grpc.test_request_codec import message, table, tensor


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
    recognised, contents = Recognised(table()), []
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


def test_a_known_layout_whose_id_is_no_text() -> None:
    recognised = Recognised(table())
    content = message(tensor(), raw=(b"ab",), id="xx")
    recognised.decode(content)
    with pytest.raises(RefusedRequest, match="the request id is not UTF-8 text"):
        recognised.decode(content.replace(b"xx", b"\xff\xff"))


def test_a_known_layout_of_a_model_that_is_another_now() -> None:
    models = table()
    recognised = Recognised(models)
    content = message(tensor(), raw=(b"ab",))
    assert not recognised.decode(content)[2].decoupled
    models.update(ModelState("m", 1, "READY", workers=(1,), decoupled=True))
    assert recognised.decode(content)[2].decoupled
