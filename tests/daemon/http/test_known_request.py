"""What is remembered of a request gives what reading it again would give; and nothing is remembered that could change."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from daemon.http.decoded_request import DecodedRequest, Part
from daemon.http.known_head import learn
from daemon.http.known_request import KnownRequest, recognise
from daemon.http.message_head import InferHead
from daemon.http.request_codec import decode
from shm.control_records import ModelGone
from shm.errors import InvalidArgument
from shm.forms import MAX_FORMS, Forms, whole_request
from shm.messages import FormSubmit, Inline, RegionSlice, Submit, Tensor
from tests.fakes import Client, FrontProcess, serving

PLAIN: dict[str, Any] = {"name": "x", "datatype": "UINT8", "shape": [4], "parameters": {"binary_data_size": 4}}
REGION: dict[str, Any] = {
    "name": "r",
    "datatype": "UINT8",
    "shape": [4],
    "parameters": {"shared_memory_region": "region", "shared_memory_byte_size": 4},
}
OUTPUTS = [{"name": name, "parameters": {"binary_data": True}} for name in ("y", "z")]


def text(inputs: list[dict[str, Any]], **fields: Any) -> bytes:
    return json.dumps({"inputs": inputs, "outputs": OUTPUTS, **fields}).encode()


def head(**fields: Any) -> InferHead:
    return InferHead(
        **{"model": "echo", "version": 0, "content_length": 14, "json_size": 10, "keep_alive": True, **fields}
    )


def known(
    inputs: list[dict[str, Any]], fields: bytes = b"", meaning: InferHead | None = None, **said: Any
) -> KnownRequest | None:
    """``fields``: request line and header fields."""
    json_text = text(inputs, **said)
    sizes = [entry["parameters"].get("binary_data_size", 0) for entry in inputs if "parameters" in entry]
    decoded = decode(json_text, sum(sizes), "echo")
    return recognise(fields + json_text, len(json_text), meaning or head(), decoded, 8)


def sent(request: KnownRequest, parts: bytes, forms: Forms[Submit] | None = None) -> tuple[Submit, FormSubmit]:
    """What the worker gets of one that has those parts: its form and its record."""
    request.admitted(1, forms or Forms())
    assert request.form is not None
    assert request.request_size == len(request.start + parts)
    return request.form.template, request.record(1, request.start + parts, 4)


def inputs_of(request: KnownRequest, parts: bytes) -> tuple[Tensor, ...]:
    """As the worker gets them."""
    return whole_request(*sent(request, parts)).inputs


# --------------------------------------------------------------------------------------------------------------- inputs


def test_inputs_lie_where_they_lay_in_the_chunk() -> None:
    request = known([PLAIN, REGION, {**PLAIN, "name": "x2"}], b"abc")
    assert request is not None
    assert sent(request, b"1234" + b"5678")[1].contents == (b"1234", b"5678")
    assert inputs_of(request, b"1234" + b"5678") == (
        Tensor("x", "UINT8", (4,), Inline(b"1234")),
        Tensor("r", "UINT8", (4,), RegionSlice("region", 0, 4)),
        Tensor("x2", "UINT8", (4,), Inline(b"5678")),
    )


def test_requests_without_bytes_of_their_own() -> None:
    request = known([REGION])
    assert request is not None
    assert sent(request, b"")[1].contents == ()
    assert inputs_of(request, b"") == (Tensor("r", "UINT8", (4,), RegionSlice("region", 0, 4)),)


def test_connections_that_say_the_same_share_a_form() -> None:
    """And nothing that says anything else does: not another header that is a parameter, nor another version."""
    forms: Forms[Submit] = Forms()
    same = [known([PLAIN]), known([PLAIN], b"other header fields")]
    others = [
        known([PLAIN], b"", head(forwarded={"x": "1"})),
        known([PLAIN], b"", head(version=2)),
        known([PLAIN], b"", head(model="other")),
        known([{**PLAIN, "shape": [2, 2]}]),
        known([PLAIN], parameters={"priority": 1}),
        known([REGION]),
    ]
    requests = [request for request in (*same, *others) if request is not None]
    for request in requests:
        request.admitted(1, forms)
    first, second, *made = [request.form for request in requests]
    assert first is second
    assert len(made) == len(others)
    assert len({first, *made}) == len({form.number for form in (first, *made) if form}) == len(others) + 1


def test_a_request_keeps_its_form() -> None:
    """Also when its sender has forgotten it; and until it comes again it has none, because many never do."""
    forms: Forms[Submit] = Forms()
    request = known([PLAIN])
    assert request is not None
    assert repr(forms) == "<Forms 0>"
    assert request.form is None
    request.admitted(1, forms)
    form = request.form
    assert form is not None
    for number in range(2 * MAX_FORMS):
        forms.form(Submit(0, f"m{number}", 0, ()))
    request.admitted(2, forms)
    assert request.form is form
    assert request.edition == 2


def test_a_form_says_all_that_the_request_does() -> None:
    fields: dict[str, Any] = {
        "id": "me",
        "parameters": {"a": 1, "b": "of the body", "sequence_id": 7, "sequence_end": True, "priority": 3, "timeout": 9},
    }
    request = known([PLAIN], b"", head(version=5, forwarded={"b": "of the head"}), **fields)
    assert request is not None
    tensors = (Tensor("x", "UINT8", (4,), Inline(b"1234")),)
    whole = request.decoded.record(1, head(version=5, forwarded={"b": "of the head"}), tensors, 4)
    assert whole_request(*sent(request, b"1234")) == whole
    assert (whole.version, whole.client_id, whole.priority, whole.timeout_us) == (5, "me", 3, 9)
    assert (whole.sequence_id, whole.sequence_end) == (7, True)
    assert whole.parameters == {"a": 1, "b": "of the head"}


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "x", "datatype": "UINT8", "shape": [2], "data": [1, 2]},
        {"name": "x", "datatype": "UINT8", "shape": [9], "parameters": {"binary_data_size": 9}},
    ],
    ids=["values in the JSON", "larger than what travels in the record"],
)
def test_what_is_not_remembered(entry: dict[str, Any]) -> None:
    assert known([PLAIN]) is not None
    assert known([PLAIN, entry]) is None
    assert known([PLAIN], id="i" * 2048) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"json_size": 0},
        {"json_size": None},
        {"coding": "gzip"},
        {"accepts": "gzip"},
        {"keep_alive_line": b"Connection: keep-alive\r\n"},
    ],
)
def test_only_plain_requests_with_json_are_known_to_their_tensors(changed: dict[str, Any]) -> None:
    fields = b"POST / HTTP/1.1\r\n\r\n"
    decoded = DecodedRequest("", [("x", "UINT8", (4,), Part(0, 4))], (), {}, True, {})
    plain = learn(fields + b"{........}1234", head(), decoded, 8)
    assert plain is not None
    assert plain.request is not None
    assert plain.request.start == fields + b"{........}"
    learned = learn(fields + b"{........}1234", head(**changed), decoded, 8)
    assert learned is not None
    if changed == {"json_size": None}:
        # All of it is JSON, which happens to name no tensor in it.
        assert learned.request is not None
        assert learned.request.start == fields + b"{........}1234"
    else:
        assert learned.request is None
    undecoded = learn(fields + b"{........}1234", head(), None, 8)
    assert undecoded is not None
    assert undecoded.request is None


# --------------------------------------------------------------------------------------------------- on a connection


def request_bytes(said: bytes, body: bytes) -> bytes:
    return (
        (
            b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n"
            % (len(said), len(said) + len(body))
        )
        + said
        + body
    )


def exchange(client: Client, worker: Any, said: bytes, body: bytes, **completion: Any) -> tuple[Any, Any]:
    """The record the worker gets and the answer the client gets."""
    client.send(request_bytes(said, body))
    record = worker.next()
    worker.complete(record.request_id, **completion)
    return record, client.answer()


@pytest.mark.parametrize("formed", [False, True])
def test_a_connection_that_repeats_itself_gets_what_a_new_one_gets(formed: bool) -> None:
    """The third request of a kind is known; what follows differs from it in one thing each, and must not be taken for it."""
    outputs = (Tensor("y", "UINT8", (2,), Inline(b"ab")), Tensor("z", "UINT8", (1,), Inline(b"c")))
    other = (Tensor("y", "UINT8", (3,), Inline(b"abc")), Tensor("z", "INT8", (1,), Inline(b"d")))
    steps: list[tuple[bytes, bytes, dict[str, Any]]] = [
        *[(text([PLAIN]), b"123%d" % number, {"outputs": outputs}) for number in range(4)],
        (text([PLAIN]), b"12\r\n", {"outputs": other}),
        (text([PLAIN]), b"\r\n\r\n", {"outputs": outputs, "parameters": {"key": 1}}),
        (text([PLAIN]), b"4321", {"code": InvalidArgument.code, "message": "not that"}),
        (text([{**PLAIN, "name": "X"}]), b"1234", {"outputs": outputs}),
        (text([PLAIN], id="i"), b"1234", {"outputs": outputs}),
        (text([PLAIN]), b"1234", {"outputs": outputs[:1]}),
        (text([PLAIN]), b"1234", {"outputs": outputs}),
        (text([REGION]), b"", {"outputs": (Tensor("y", "UINT8", (4,), RegionSlice("region", 0, 4)),)}),
        (text([REGION]), b"", {"outputs": (Tensor("y", "UINT8", (4,), RegionSlice("region", 0, 4)),)}),
        (text([REGION]), b"", {"outputs": outputs}),
    ]
    with serving() as (front, (worker,)), front.client() as same:
        worker.formed = formed
        for said, body, completion in steps:
            with front.client() as fresh:
                expected = exchange(fresh, worker, said, body, **completion)
            record, answer = exchange(same, worker, said, body, **completion)
            assert answer == expected[1]
            assert record.inputs == expected[0].inputs
            assert (record.model, record.outputs, record.client_id) == (
                expected[0].model,
                expected[0].outputs,
                expected[0].client_id,
            )


def test_what_is_known_of_a_request_is_nothing_of_its_model() -> None:
    """It may be gone, or no longer answer over HTTP; and the front may be full."""
    said = text([PLAIN])
    with serving(requests={"max_in_flight": 1}) as (front, (worker,)), front.client() as client:
        for number in range(3):
            outputs = (Tensor("y", "UINT8", (1,), Inline(b"%d" % number)),)
            assert exchange(client, worker, said, b"1234", outputs=outputs)[1].parts == b"%d" % number
        with busy(front, worker):
            client.send(request_bytes(said, b"1234"))
            assert client.answer().status == 503
        front.model(worker, decoupled=True)
        client.send(request_bytes(said, b"1234"))
        assert "decoupled" in client.answer().error
        front.send(ModelGone("echo", 1))
        front.sync()
        client.send(request_bytes(said, b"1234"))
        assert client.answer().status == 404
        front.model(worker)
        assert exchange(client, worker, said, b"5678", outputs=())[0].inputs[0].place == Inline(b"5678")


@contextlib.contextmanager
def busy(front: FrontProcess, worker: Any) -> Any:
    """One request is in flight meanwhile."""
    with front.client() as other:
        other.send(request_bytes(text([PLAIN]), b"1234"))
        record = worker.next()
        yield
        worker.complete(record.request_id, outputs=())
        assert other.answer().status == 200
