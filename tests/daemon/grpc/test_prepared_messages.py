"""A message read as a prepared request and one read exactly give the same request, or the same refusal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.grpc.prepared import PreparedMessage, PreparedMessages
from tensord.daemon.grpc.request_fields import RefusedRequest
from tensord.daemon.grpc.walk import walk
from tensord.daemon.submit.model_states import ModelStates
from tensord.shm.common.scheduling import UNSCHEDULED, Scheduling
from tensord.shm.control_records import ModelState
from tensord.shm.errors import NotFound
from tensord.shm.messages import Buffer, RequestRecord
from tensord.shm.prepared import MAX_NUMBERS
from tests.daemon.grpc.requests import REQUESTS, Parameter
from tests.daemon.grpc.test_request_codec import forms_of, message, read, reader, request_of, table, tensor
from tests.records import whole_request


class Front:
    """Looks messages up as a front does, without sending any."""

    def __init__(self, models: ModelStates | None = None) -> None:
        models = models or table()
        self.messages: PreparedMessages = forms_of(models)

    def formed(self, content: bytes) -> tuple[PreparedMessage, bytes, tuple[Buffer, ...], Scheduling] | None:
        """Returns a message's prepared part, id, tensors and scheduling; None: it is not known and has to be read."""
        walked = walk(content, 0, len(content), 4096)
        if walked is None:
            return None
        rest, client_id, parameters, raws, _ = walked
        form, scheduling = self.messages[rest], self.messages.scheduling(parameters)
        if form is None or scheduling is None or not self.messages.is_usable(form, len(raws)):
            return None
        return form, client_id, raws, scheduling


def meaning(reader: PreparedMessages, content: bytes | memoryview) -> Any:
    """Reads a message; returns the request that it is, or the error that refuses it."""
    try:
        understood = read(reader, content)
        request, state = request_of(understood), understood.state
    except RefusedRequest as refused:
        return type(refused.error), refused.error.message, refused.client_id
    whole = request.prepared
    inputs = [
        (tensor.name, tensor.datatype, tensor.shape, bytes(raw) if isinstance(raw, bytes | memoryview) else raw)
        for tensor, raw in zip(whole.inputs, request.contents, strict=True)
    ]
    said = whole.outputs, repr(whole.parameters), request.scheduling
    return whole.model, whole.version, request.id, inputs, *said, state


@given(st.lists(REQUESTS, min_size=1, max_size=3), st.data())
def test_whichever_way_a_message_goes(requests: list[Any], data: st.DataObject) -> None:
    """Generated and mutated ones, in turn, with other ids and tensors each time: a request is never decided differently."""
    front, contents = Front(), []
    for _ in range(3):
        for request_ in requests:
            request_.id = data.draw(st.text(st.characters(codec="ascii"), max_size=9))
            raws = [data.draw(st.binary(max_size=300)) for _ in request_.raw_input_contents]
            request_.ClearField("raw_input_contents")
            request_.raw_input_contents.extend(raws)
            content = request_.SerializeToString()
            contents.append(content)
            at = data.draw(st.integers(0, len(content)))
            contents.append(content[:at] + data.draw(st.binary(max_size=2)) + content[at + 2 :])
    for content in (*contents, *contents):
        expected = meaning(reader(), content)
        found = front.formed(content)
        assert meaning(front.messages, content) == expected
        assert meaning(front.messages, memoryview(content)) == expected
        if found is None:
            continue
        form, client_id, raws, scheduling = found
        try:
            text = client_id.decode()
        except UnicodeDecodeError:
            assert "UTF-8" in expected[1]
            continue
        assert form.numbered is not None
        own = RequestRecord.scheduled(scheduling, 1, 0, raws, text, 0, 0)  # type: ignore[arg-type]
        whole = whole_request(form.numbered.prepared, own)
        inputs = [tuple(tensor) for tensor in whole.inputs]
        fields = (
            whole.priority,
            whole.timeout_us,
            whole.sequence_id,
            whole.sequence_start,
            whole.sequence_end,
            whole.replace_key,
            whole.parameter_set,
        )
        model, state = whole.model, expected[-1]
        assert form.decoupled == state.streams
        assert expected == (
            *(model, whole.version, whole.client_id, inputs, whole.outputs, repr(whole.parameters), fields, state),
        )


@pytest.mark.parametrize("client_id", ["", "id-0"])
def test_the_second_is_of_a_form_whatever_its_id_and_tensors(client_id: str) -> None:
    front = Front()
    for number in range(4):
        given_ = client_id + "0" * number
        content = message(tensor(), raw=(bytes([number] * (number + 1)),), id=given_)
        found = front.formed(content)
        assert (found is not None) == (number > 0)
        if found is None:
            read(front.messages, content)
        else:
            assert found[1:3] == (given_.encode(), (bytes([number] * (number + 1)),))
    # The same rest without tensors is another request.
    without = message(tensor(), id="late")
    assert front.formed(without) is None
    with pytest.raises(RefusedRequest, match="unable to find data") as caught:
        read(front.messages, without)
    assert caught.value.client_id == "late"


def test_ids_of_sequences_priorities_timeouts_and_sets_are_each_message_s_own() -> None:
    """Messages that differ only in these share one prepared request; so does a message that sets none of them."""
    front = Front()
    for number in range(100):
        sequence = {"string_param": f"s{number}"} if number % 2 else {"int64_param": number}
        given_ = {
            "priority": Parameter(int64_param=number % 7),
            "timeout": Parameter(int64_param=number * 11),
            "sequence_id": Parameter(**sequence),
            "sequence_start": Parameter(bool_param=number % 3 == 0),
            "sequence_end": Parameter(bool_param=number % 5 == 0),
            "tensord_replace": Parameter(string_param=f"camera {number}"),
            "parameter_set": Parameter(string_param=f"customer-{number}"),
            "x": Parameter(int64_param=1),
        }
        content = message(tensor(), raw=(b"ab",), parameters=given_)
        found = front.formed(content)
        request = request_of(read(front.messages, content))
        sequence_id = f"s{number}" if number % 2 else number
        names = f"camera {number}", f"customer-{number}"
        wanted = (number % 7, number * 11, sequence_id, number % 3 == 0, number % 5 == 0, *names)
        assert request.scheduling == wanted
        assert request.prepared.parameters == {"x": 1}
        assert (found is not None) == (number > 0)
        if found is not None:
            assert found[3] == wanted
            assert found[0].decoded.scheduling == UNSCHEDULED
    assert front.formed(message(tensor(), raw=(b"ab",), parameters={"x": Parameter(int64_param=1)}))
    assert repr(front.messages._submitter.numbers) == "<Numbers 1, 1 assigned, 0 evicted>"


@pytest.mark.parametrize("name", ["priority", "timeout", "sequence_id"])
def test_parameters_that_schedule_as_no_client_writes_them(name: str) -> None:
    """A value before its key, a key twice, or both ways in one message are read as protobuf reads them, and never prepared."""
    key, value = b"\x0a%c%s" % (len(name), name.encode()), b"\x12\x02\x10\x07"
    written = message(tensor(), raw=(b"ab",))
    other = b"\x0a\x01x"
    entries = {
        value + key: {"scheduled": 7},
        other + key + value: {"scheduled": 7},
        key + other + value: {"x": 7},
        key + b"\x12\x02\x10\x05" + value: {"scheduled": 7},
    }
    for entry, meant in entries.items():
        front, content = Front(), written + b"\x22" + bytes((len(entry),)) + entry
        for _ in range(3):
            request = request_of(read(front.messages, content))
            assert getattr(request.scheduling, {"timeout": "timeout_us"}.get(name, name)) == meant.get("scheduled", 0)
            assert request.prepared.parameters == ({"x": 7} if "x" in meant else {})
            found = front.formed(content)
            assert found is None or found[3] == request.scheduling
        # Whoever says nothing of it is not taken for one that does.
        assert read(front.messages, written).scheduling == UNSCHEDULED
        assert (found := front.formed(written)) is None or found[3] == UNSCHEDULED


def test_what_comes_once_has_no_number() -> None:
    """Nobody can use up the numbers of prepared requests with requests that never repeat."""
    front = Front()
    for number in range(20):
        read(front.messages, message(tensor(name=f"x{number}"), raw=(b"ab",)))
    assert repr(front.messages._submitter.numbers) == "<Numbers 0, 0 assigned, 0 evicted>"
    assert front.formed(message(tensor(name="x7"), raw=(b"cd",)))
    assert repr(front.messages._submitter.numbers) == "<Numbers 1, 1 assigned, 0 evicted>"


def test_forms_are_bounded() -> None:
    """Prepared requests that repeat stay, and others are dropped."""
    front = Front()
    used = message(tensor(name="used"), raw=(b"ab",))
    read(front.messages, used)
    for number in range(3 * MAX_NUMBERS):
        read(front.messages, message(tensor(name=f"x{number}"), raw=(b"ab",)))
        if number % 100 == 0:
            assert front.formed(used)
    assert 0 < len(front.messages) <= MAX_NUMBERS
    assert 0 < len(front.messages._old) <= MAX_NUMBERS
    assert front.formed(message(tensor(name="x0"), raw=(b"ab",))) is None
    read(front.messages, message(tensor(name="y" * 2048), raw=(b"ab",)))
    assert front.formed(message(tensor(name="y" * 2048), raw=(b"ab",))) is None


def test_an_id_that_is_no_text() -> None:
    front = Front()
    content = message(tensor(), raw=(b"ab",), id="xx")
    read(front.messages, content)
    assert front.formed(content)
    with pytest.raises(RefusedRequest, match="the request id is not UTF-8 text"):
        read(front.messages, content.replace(b"xx", b"\xff\xff"))


def test_a_model_that_changes() -> None:
    models = table()
    front = Front(models)
    content = message(tensor(), raw=(b"ab",))

    def decoupled() -> bool | None:
        found = front.formed(content)
        return None if found is None else found[0].decoupled

    read(front.messages, content)
    for value in (False, True, False):
        models.update(ModelState("m", 1, "READY", workers=(1,), streams=value, metadata=b"{}"))
        assert decoupled() is value
        assert read(front.messages, content).state.streams is value
        models.update(ModelState("m", 1, "UNLOADING"))
        assert decoupled() is None
        assert decoupled() is None
        with pytest.raises(RefusedRequest) as caught:
            read(front.messages, content)
        assert isinstance(caught.value.error, NotFound)
