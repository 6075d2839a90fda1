"""Generate's plain JSON objects against requests and answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tensord.daemon.http.generate_codec import JoinedAnswers, decode
from tensord.daemon.http.json_text import ResponseLayout
from tensord.shm.common.scheduling import Scheduling
from tensord.shm.control_records import ModelState
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import PreparedAnswer, PreparedTensor


def described(**shapes: tuple[str, list[int]]) -> bytes:
    """Returns the metadata of a model with these inputs."""
    inputs = [{"name": name, "datatype": datatype, "shape": shape} for name, (datatype, shape) in shapes.items()]
    return json.dumps({"name": "m", "inputs": inputs, "outputs": []}).encode()


TEXT = described(text_input=("BYTES", [1]), n=("INT32", [1]), temp=("FP32", [-1]))


def test_inputs_parameters_and_id() -> None:
    body = {"id": "7", "text_input": "é", "zz": 3, "b": True, "parameters": {"n": 2, "stop": "x"}, "temp": [1, 2.5]}
    request = decode(json.dumps(body).encode(), TEXT)
    assert request.id == "7"
    assert request.parameters == {"zz": 3, "b": True, "stop": "x"}
    assert request.inputs == [
        ("text_input", "BYTES", (1,), b"\2\0\0\0\xc3\xa9"),
        ("n", "INT32", (1,), b"\2\0\0\0"),
        ("temp", "FP32", (2,), b"\0\0\x80\x3f\0\0\x20\x40"),
    ]


def test_reserved_parameters_are_what_they_are_everywhere() -> None:
    body = b'{"parameters": {"sequence_id": 5, "sequence_start": true, "priority": 1, "timeout": 9}}'
    request = decode(body, TEXT)
    assert request.scheduling == Scheduling(1, 9, 5, sequence_start=True)
    assert request.parameters == {}


@pytest.mark.parametrize(
    ("wanted", "value", "shape"),
    [
        ([1], 5, (1,)),
        ([1], [5], (1,)),
        ([-1], 5, (1,)),
        ([-1], [5, 6, 7], (3,)),
        ([-1], [], (0,)),
        ([-1, 2], [5, 6], (1, 2)),
        ([-1, -1], [5, 6], (1, 2)),
        ([-1, 3], [1, 2, 3], (1, 3)),
        ([2, 2], [1, 2, 3, 4], (2, 2)),
        ([2, 2], [[1, 2], [3, 4]], (2, 2)),
        ([-1, 2], [[1, 2], [3, 4], [5, 6]], (3, 2)),
        ([-1, -1, 1], [[[1], [2]]], (1, 2, 1)),
        ([-1, 0], [], (1, 0)),
        ([], 5, ()),
    ],
)
def test_shapes(wanted: list[int], value: Any, shape: tuple[int, ...]) -> None:
    request = decode(json.dumps({"x": value}).encode(), described(x=("INT32", wanted)))
    assert request.inputs[0][2] == shape


@pytest.mark.parametrize(
    ("wanted", "value"),
    [([1], [5, 6]), ([1], []), ([2], 5), ([-1, 2], [1, 2, 3]), ([2, 2], [[1, 2]]), ([-1], [[1, 2]]), ([2, -1], [[]])],
)
def test_values_that_fit_no_shape(wanted: list[int], value: Any) -> None:
    with pytest.raises(InvalidArgument, match="The schema can not convert input 'x' to tensor with proper shape"):
        decode(json.dumps({"x": value}).encode(), described(x=("INT32", wanted)))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "failed to parse the request JSON buffer: The document is empty. at 0"),
        (b"{", "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
        (b"{}\0x", "failed to parse the request JSON buffer: The document root must not be followed by other values. at 2"),
        (b"\xff", "failed to parse"),
        (b"[" * 100_000, "failed to parse"),
        (b"[1]", "attempt to get members for non-object"),
        (b"5", "attempt to get members for non-object"),
        (b'{"id": 5}', "Unable to parse 'id'"),
        (b'{"q": null}', "parameter 'q' has invalid type. It should be either 'int', 'bool', or 'string'."),
        (b'{"q": {"a": 1}}', "parameter 'q' has invalid type"),
        (b'{"parameters": 5}', "Converting keyword: 'parameters': attempt to get members for non-object"),
        (b'{"parameters": {"o": []}}', "Converting keyword: 'parameters': parameter 'o' has invalid type"),
        (b'{"text_input": 5}', "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        (b'{"text_input": null}', "non-string as string"),
        (b'{"text_input": {"a": "b"}}', "non-string as string"),
        (b'{"n": "2"}', "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        (b'{"n": 2.0}', "non-signed-integer"),
        (b'{"n": 3000000000}', "out of the range of INT32"),
        (b'{"temp": [1, [2]]}', "is nested, but not as its shape"),
        (b'{"triton_x": 1}', "reserved"),
    ],
)  # fmt: skip
def test_refusals(body: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        decode(body, TEXT)
    assert text in raised.value.message


def test_halves_are_refused_in_json() -> None:
    with pytest.raises(InvalidArgument, match="receiving FP16 data via JSON is not supported"):
        decode(b'{"x": 1}', described(x=("FP16", [1])))


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, {"n": [], "of_one": [], "pair": []}),
        (1, {"n": 0, "of_one": 5, "pair": [1, 2]}),
        (3, {"n": [0, 1, 2], "of_one": [5, 5, 5], "pair": [1, 2, 1, 2, 1, 2]}),
    ],
)
def test_responses_are_joined_along_their_first_axes_and_numbers_without_one_to_a_list(
    count: int, expected: dict[str, Any]
) -> None:
    shapes: dict[str, list[int]] = {"n": [], "of_one": [1], "pair": [2]}
    outputs = [{"name": name, "datatype": "UINT8", "shape": shape} for name, shape in shapes.items()]
    joined = JoinedAnswers(ModelState("m", 4, "READY", metadata=json.dumps({"outputs": outputs}).encode()), 100)
    prepared = PreparedAnswer(4, tuple(PreparedTensor(name, "UINT8", tuple(shapes[name])) for name in shapes))
    for number in range(count):
        joined.add(prepared, (bytes([number]), b"\5", b"\1\2"), lambda place: memoryview(b""))
    whole, contents = joined.whole()
    assert json.loads(ResponseLayout(whole, "m", "").encode(contents)) == {
        "model_name": "m",
        "model_version": "4",
        **expected,
    }
