"""Large arrays of strings, and base64, in JSON: the same bytes as of small ones, whatever the strings look like."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.http import json_steps
from tensord.daemon.http.json_steps import PIECE_BYTE_SIZE, JsonBase64, JsonStrings
from tensord.shm.arrays import byte_content
from tensord.shm.errors import InvalidArgument
from tests.daemon.http.heads import decode, filled, request_of, tensor
from tests.generated import examples


def converted(data: str, count: int) -> bytes:
    head = f'{{"inputs":[{{"name":"x","datatype":"BYTES","shape":[{count}],"data":{data}}}]}}'.encode()
    ((_, _, _, source),) = decode(memoryview(head), 0).inputs
    assert isinstance(source, JsonStrings)
    return filled(source)


def decoded(text: bytes, datatype: str, count: int) -> bytes:
    return filled(JsonBase64(memoryview(b'"' + text + b'"'), datatype, count))


def wire(values: list[str]) -> bytes:
    elements = np.empty(len(values), np.object_)
    elements[:] = values
    return byte_content(elements)


@pytest.mark.parametrize(
    "kind", ["", "a", ",", '"', '","', "\\", '\\",\\"', "ä\n", " , ", "[", "]", "x" * 100_000, '",' * 9000]
)
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_strings_of_one_kind(kind: str, indent: int | None, ascii_only: bool) -> None:
    values = [kind] * (PIECE_BYTE_SIZE // 3 + 10 if len(kind) < 1000 else 5)
    assert converted(json.dumps(values, indent=indent, ensure_ascii=ascii_only), len(values)) == wire(values)


@settings(max_examples=examples(40))
@given(st.lists(st.text(alphabet='",\\ []a\n\u00e4\U0001f600', max_size=6), min_size=1, max_size=30), st.booleans())
def test_any_strings(some: list[str], ascii_only: bool) -> None:
    values = some * (PIECE_BYTE_SIZE // len(some) + 1)
    data = json.dumps(values, separators=(",", ":"), ensure_ascii=ascii_only)
    assert converted(data, len(values)) == wire(values)


@pytest.mark.parametrize("kind", ["a", '"', "\\", "ä", "\U0001f600", '\\"\U0001f600', '",', " "])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_long_string_is_read_in_pieces(kind: str, ascii_only: bool) -> None:
    values = ["short", kind * PIECE_BYTE_SIZE * 4, ",", "x" + kind * PIECE_BYTE_SIZE * 4, ","]
    text = json.dumps(values, indent=40, ensure_ascii=ascii_only).encode()
    source = JsonStrings(memoryview(text), "x", len(values))
    place = bytearray(source.byte_size)
    steps = source.fill(memoryview(place))
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            assert bytes(place[: end.value]) == wire(values)
            break
        count += 1
    assert count > len(text) / (2 * PIECE_BYTE_SIZE)


def test_a_piece_does_not_end_between_strings() -> None:
    first, second = "x" * (PIECE_BYTE_SIZE + 5000), "y" * PIECE_BYTE_SIZE * 2
    text = f'["{first}",{" " * (PIECE_BYTE_SIZE // 2)}"{second}"]'
    assert converted(text, 2) == wire([first, second])


@pytest.mark.parametrize("wrong", ["\\q", "\\ud83d", "\n", '"x', '"', '",'])
def test_what_is_wrong_in_a_long_string(wrong: str) -> None:
    for at in (0, PIECE_BYTE_SIZE * 2, PIECE_BYTE_SIZE * 4 - 1):
        text = "a" * at + wrong + "a" * (PIECE_BYTE_SIZE * 4 - at)
        with pytest.raises(InvalidArgument, match=r"failed to parse the request JSON|does not match true shape"):
            filled(JsonStrings(memoryview(f'["a", "{text}", "b"]'.encode()), "x", 3))


def test_what_is_before_separators_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is in a string, behind more backslashes than most have."""
    text, read = b'["' + (b"\\" * 65 + b'","') * 1500 + b'"]', list[int]()

    def copied(part: memoryview) -> bytes:
        read.append(len(part))
        return bytes(part)

    monkeypatch.setattr(json_steps, "bytes", copied, raising=False)
    with pytest.raises(InvalidArgument):
        filled(JsonStrings(memoryview(text), "x", 3))
    assert sum(read) < 2 * len(text)


def test_an_array_for_strings_that_does_not_begin_with_one() -> None:
    blanks = " " * 40_000
    head = request_of(tensor(datatype="BYTES", data="DATA")).replace(b'"DATA"', f'[{blanks},{blanks}"a"]'.encode())
    ((_, _, _, source),) = decode(head, 0).inputs
    with pytest.raises(InvalidArgument, match="as string"):
        filled(source)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["1", "null", '["a"]', '"\\ud83d"', "x", ""])
def test_a_wrong_element_among_many(wrong: str) -> None:
    count = PIECE_BYTE_SIZE // 2
    for at in (1, count // 2, count - 1):
        values = ['"a"'] * count
        values[at] = wrong
        with pytest.raises(InvalidArgument, match=r"as string|is nested, but not as|failed to parse the request JSON"):
            converted(f"[{','.join(values)}]", count)


@pytest.mark.parametrize("count", [0, 1, PIECE_BYTE_SIZE - 1, PIECE_BYTE_SIZE + 1, 1 << 50])
def test_another_number_of_strings_than_the_shape_has(count: int) -> None:
    with pytest.raises(InvalidArgument, match="Shape does not match true shape of 'data' field"):
        converted(json.dumps(["a"] * PIECE_BYTE_SIZE), count)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 100_000, (3 << 20) - 1, 3 << 20, (3 << 20) + 1])
def test_the_same_bytes_come_out(size: int) -> None:
    content = bytes(range(251)) * (size // 251 + 1)
    assert decoded(base64.b64encode(content[:size]), "UINT8", size) == content[:size]
    assert decoded(base64.b64encode(content[:size]), "BYTES", 1) == content[:size]


@pytest.mark.parametrize("count", [0, 1, 99, 101, 102, 1 << 60])
def test_another_size_than_the_tensor_has(count: int) -> None:
    with pytest.raises(InvalidArgument, match="attempt to access JSON non-array as array"):
        decoded(base64.b64encode(bytes(400)), "FP32", count)
    with pytest.raises(InvalidArgument, match="attempt to access JSON non-array as array"):
        decoded(base64.b64encode(bytes(100)), "UINT8", count)


@pytest.mark.parametrize("wrong", [b"*", b"\xff", b" ", b"=", b"\\n"])
def test_no_base64(wrong: bytes) -> None:
    text = base64.b64encode(bytes(3 << 20))
    for at in (0, 5, 2 << 20):
        broken = text[:at] + (wrong * 4)[:4] + text[at + 4 :]
        with pytest.raises(InvalidArgument, match="attempt to access JSON non-array as array"):
            decoded(broken, "UINT8", 3 << 20)
