"""Large arrays in JSON: what is cut out, what it becomes, and that what is wrong is refused as in a small request."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.http import json_cut, json_steps
from tensord.daemon.http.conversions import at_once
from tensord.daemon.http.json_steps import PIECE_BYTE_SIZE, JsonArray, JsonBase64
from tensord.shm.arrays import DTYPES, array
from tensord.shm.errors import InvalidArgument, ServingError
from tests.daemon.http.heads import decode, filled
from tests.generated import examples

#: Enough values for several pieces.
COUNT = PIECE_BYTE_SIZE
MISMATCH = "Shape does not match true shape of 'data' field"


@pytest.fixture(params=["simdjson", "msgspec"], autouse=True, scope="module")
def reader(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs the test with each library that may read the numbers; without the first one the second is used."""
    if request.param == "simdjson":
        pytest.importorskip("simdjson", reason="pysimdjson is not installed: it has no wheel for this Python")
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_steps, "simdjson", None)
        yield


def request(data: str, datatype: str, shape: list[int], more: str = "") -> bytes:
    return (f'{{{more}"inputs":[{{"name":"x","datatype":"{datatype}","shape":{shape},"data" : {data}}}]}}').encode()


def converted(data: str, datatype: str, shape: list[int], more: str = "") -> bytes:
    """Returns a tensor's bytes as the front converts them for a request's body."""
    ((_, _, _, source),) = decode(memoryview(request(data, datatype, shape, more)), 0).inputs
    if isinstance(source, bytes):
        return source
    assert isinstance(source, JsonArray | JsonBase64)
    return filled(source)


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name not in ("FP16", "BF16", "BYTES")])
@pytest.mark.parametrize("count", [2000, 40 * (COUNT // 40)])
def test_every_datatype_comes_back_bit_by_bit(datatype: str, count: int) -> None:
    dtype = DTYPES[datatype]
    random = np.random.default_rng(count)
    bits = random.integers(0, 256, count * dtype.itemsize, np.uint8).tobytes()
    values = np.frombuffer(bits, dtype) if datatype != "BOOL" else random.integers(0, 2, count).astype(np.bool_)
    if dtype.kind == "f":
        values = np.nan_to_num(values)
    for data in (json.dumps(values.tolist()), json.dumps(values.reshape(4, -1, 5).tolist(), indent=1)):
        assert converted(data, datatype, [4, count // 20, 5] if "\n" in data else [count]) == values.tobytes()


def test_literals_and_what_overflows() -> None:
    values = [1.5, math.nan, math.inf, -math.inf] * (COUNT // 4)
    wire = converted(json.dumps(values), "FP32", [COUNT])
    np.testing.assert_array_equal(array(wire, "FP32", (COUNT,)), np.array(values, np.float32))
    wire = converted("[" + "1e39,-1e39," * 5000 + "0]", "FP32", [10001])
    assert array(wire, "FP32", (10001,))[:2].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize(
    ("value", "datatype", "expected"),
    [
        ("-0", "FP64", 0.0),
        ("-0.0", "FP64", -0.0),
        ("18446744073709551616", "FP64", 2.0**64),
        ("-9223372036854775809", "FP64", -(2.0**63)),
        ("9007199254740993", "FP64", 2.0**53),
        ("1e-400", "FP64", 0.0),
        ("2.4703282292062328e-324", "FP64", 5e-324),
        ("1.7976931348623159e308", "FP64", math.inf),
        ("123456789012345678901234567890e-10", "FP64", 12345678901234567890.0),
        ("18446744073709551615", "UINT64", 2**64 - 1),
        ("-9223372036854775808", "INT64", -(2**63)),
    ],
)
def test_numbers_at_the_edges(value: str, datatype: str, expected: float) -> None:
    wire = converted(f"[{','.join([value] * 3000)}]", datatype, [3000])
    assert wire == np.full(3000, expected, DTYPES[datatype]).tobytes()


@pytest.mark.parametrize(
    ("wrong", "datatype", "found"),
    [
        ("true", "FP32", "attempt to access JSON non-number as double"),
        ('"1"', "FP32", "attempt to access JSON non-number as double"),
        ("{}", "FP32", "attempt to access JSON non-number as double"),
        ("null", "BOOL", "attempt to access JSON non-boolean as boolean"),
        ("1.0", "INT32", "attempt to access JSON non-signed-integer as signed-integer"),
        ("-1", "UINT64", "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ("128", "INT8", "a value of input 'x' is out of the range of INT8"),
        ("18446744073709551616", "UINT64", "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ("1", "BYTES", "attempt to access JSON non-string as string"),
        ("1", "FP16", "receiving FP16 data via JSON is not supported"),
    ],
)
@pytest.mark.parametrize("count", [3000, COUNT])
def test_a_wrong_value_among_many(wrong: str, datatype: str, found: str, count: int) -> None:
    good = {"BOOL": "true", "FP32": "0.5"}.get(datatype, "1")
    for at in (1, count // 2, count - 1):
        values = [good] * count
        values[at] = wrong
        with pytest.raises(InvalidArgument, match=found):
            converted(f"[{','.join(values)}]", datatype, [count])


@pytest.mark.parametrize(
    ("wrong", "reason"), [("01", "Missing a comma or"), (".5", "Invalid value"), ("", "Invalid value")]
)
@pytest.mark.parametrize("count", [3000, COUNT])
def test_a_syntax_error_among_many_is_told_where_it_is(wrong: str, reason: str, count: int) -> None:
    for at in (1, count // 2):
        values = ["1"] * count
        values[at] = wrong
        text = request(f"[{','.join(values)}]", "INT32", [count])
        with pytest.raises(InvalidArgument) as caught:
            converted(f"[{','.join(values)}]", "INT32", [count])
        assert reason in caught.value.message
        offset = int(caught.value.message.rpartition(" ")[2])
        assert offset in (expected := text.index(b"[1,") + 1 + 2 * at, expected + 1)


def test_a_syntax_error_behind_an_array_is_told_where_it_is() -> None:
    text = request(json.dumps([1] * 5000), "INT32", [5000]) + b" x"
    with pytest.raises(InvalidArgument, match=f"followed by other values. at {len(text) - 1}$"):
        decode(text, 0)


@pytest.mark.parametrize("count", [COUNT - 1, COUNT + 1, 10 * COUNT, 1])
def test_another_number_of_values_than_the_shape_has(count: int) -> None:
    with pytest.raises(InvalidArgument, match=MISMATCH):
        converted(json.dumps([1] * COUNT), "INT8", [count])


def test_a_large_claim_gets_no_memory() -> None:
    with pytest.raises(InvalidArgument, match=MISMATCH):
        decode(request(json.dumps([1] * COUNT), "INT8", [1 << 50]), 0)


@pytest.mark.parametrize("count", [1200, COUNT])
@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[:-1] + rows[-1],
        lambda rows: [*rows[:-2], rows[-2] + rows[-1][:1], rows[-1][1:]],
        lambda rows: [[*rows], [*rows]],
        lambda rows: [value for row in rows for value in row],
        lambda rows: [[value] for row in rows for value in row],
    ],
    ids=["mixed", "ragged", "twice", "flat", "one by one"],
)
def test_nesting(count: int, change: Any) -> None:
    rows = np.arange(count).reshape(-1, 4).tolist()
    data = json.dumps(change(rows))
    if change(rows)[0] in (0, [0]):
        assert len(converted(data, "INT32", [count])) == 4 * count
    if change(rows)[0] == 0:
        return
    with pytest.raises(InvalidArgument, match="is nested, but not as its shape"):
        converted(data, "INT32", [count // 4, 4])


@pytest.mark.parametrize(
    "data", ["[[1,2]3,[4,5]]", "[[1,2],3[4,5]]", "[[1,2],[3,]]", "[[1 2],[3,4]]", "[1,2,]", "[,1,2]"]
)
def test_broken_lists_that_look_well_nested(data: str) -> None:
    for repeat in (400, COUNT // 4):
        whole = data.replace("1", ",".join(["1"] * repeat))
        for shape in ([2, repeat + 1], [repeat + 1], [repeat + 2]):
            with pytest.raises(ServingError):
                converted(whole, "INT32", shape)


def test_only_values_of_the_key_are_cut() -> None:
    numbers = json.dumps(list(range(2000)))
    more = json.dumps({"note": f'{{"data": {numbers}', "other": list(range(2000))})[1:-1] + ","
    document = request(numbers, "INT32", [2000], more)
    found = at_once(json_cut.steps(document))
    assert found is not None
    assert [document[start:end].decode() for start, end in found.spans] == [numbers]
    assert converted(numbers, "INT32", [2000], more) == np.arange(2000, dtype=np.int32).tobytes()


def test_a_value_longer_than_a_piece() -> None:
    for long in ("1" * (PIECE_BYTE_SIZE + 10), " " * (PIECE_BYTE_SIZE + 10)):
        with pytest.raises(InvalidArgument, match="has more than 65536 bytes of text"):
            converted(f"[1,{long},2]", "INT32", [3])


def test_much_text_that_is_no_tensor_is_refused() -> None:
    more = json.dumps({"parameters": {f"k{number}": 1 for number in range(100_000)}})[1:-1] + ","
    with pytest.raises(
        InvalidArgument, match=r"more than 1048576 of them besides large data of tensors; at most 1048576 are"
    ):
        converted("[1]", "INT8", [1], more)
    text = base64.b64encode(bytes(2_000_000)).decode()
    assert converted(f'"{text}"', "UINT8", [2_000_000]) == bytes(2_000_000)


@settings(max_examples=examples(50))
@given(st.binary(max_size=40), st.integers(0, 5000), st.sampled_from(["FP32", "INT8", "BOOL", "BYTES"]))
def test_any_bytes_among_many_numbers(odd: bytes, at: int, datatype: str) -> None:
    text = request(json.dumps([1] * 2500), datatype, [2500])
    text = text[:at] + odd + text[at + len(odd) :]
    try:
        for _, datatype, shape, source in decode(memoryview(text), 0).inputs:
            content = source.wire_bytes() if isinstance(source, JsonArray) else source
            assert isinstance(content, bytes)
            array(content, datatype, shape)
    except ServingError:
        pass
