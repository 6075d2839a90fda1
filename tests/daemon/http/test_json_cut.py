"""Large data in the text of a request: what is cut out is exactly the value, whatever stands in it, and the walk has bounds."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.daemon.http import json_cut
from tensord.daemon.http.conversions import at_once
from tensord.daemon.http.json_cut import MAX_TEXT, Cut
from tensord.shm.errors import InvalidArgument
from tests.generated import examples

#: In text these are what an end could be mistaken for.
ODD = '",\\[]{}: \na\u00e4\U0001f600'


def put_together(found: Cut) -> bytes:
    """Puts the cut-out arrays back and returns the whole text."""
    pieces, at = [], 0
    for number, (start, end) in enumerate(found.spans):
        mark = found.text.index(b'["', at)
        while b":%d" % number not in found.text[mark : mark + 64].partition(b'"]')[0]:
            mark = found.text.index(b'["', mark + 1)
        pieces += [found.text[at:mark], bytes(found.document[start:end])]
        at = found.text.index(b'"]', mark) + 2
    return b"".join([*pieces, found.text[at:]])


values = st.one_of(
    st.lists(st.text(alphabet=ODD, max_size=6), min_size=1, max_size=8).map(lambda some: some * (20_000 // len(some))),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8).map(lambda some: some * 700),
    st.lists(st.lists(st.integers(-9, 9), min_size=2, max_size=2), min_size=500, max_size=800),
    st.integers(2048, 200_000).map(lambda size: "QUJD" * (size // 4)),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(values, min_size=1, max_size=3), st.sampled_from([None, 1]), st.booleans())
def test_what_is_cut_out_is_the_value(data: list[Any], indent: int | None, ascii_only: bool) -> None:
    inputs = [{"name": ODD, "data": value, "parameters": {"data": "no", "a": '"data":["'}} for value in data]
    text = json.dumps({"id": '"data": [1,', "inputs": inputs}, indent=indent, ensure_ascii=ascii_only).encode()
    found = at_once(json_cut.steps(memoryview(text)))
    assert found is not None
    assert [json.loads(bytes(found.document[start:end])) for start, end in found.spans] == data
    assert put_together(found) == text
    for number, entry in enumerate(json.loads(found.text)["inputs"]):
        assert found.number_of(entry["data"]) == number


@settings(max_examples=examples(60), deadline=None)
@given(st.text(alphabet=ODD, max_size=20), st.integers(65_500, 65_560))
def test_whatever_lies_on_the_border_of_a_piece(odd: str, at: int) -> None:
    strings = ["x" * at, odd, "]", odd, *["y"] * 30_000]
    text = json.dumps({"inputs": [{"data": strings}]}, separators=(",", ":")).encode()
    found = at_once(json_cut.steps(text))
    assert found is not None
    ((start, end),) = found.spans
    assert json.loads(text[start:end]) == strings


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[' + b'{"name":"x","datatype":"FP32","shape":[1],"data":[1]},' * 40_000,
        b'{"inputs":[' + b'"data":[1,' * 300_000,
        b'{"inputs":[' + b'"data":["a",' * 300_000,
        b'{"inputs":[' + b'"data":"a,' * 300_000,
        b'{"inputs":[' + b'"data"' * 300_000,
        b'{"id":"' + b"x" * 2 * MAX_TEXT + b'"}',
        b'{"inputs":[' + b" " * 2 * MAX_TEXT + b"]}",
        b"[" * 2 * MAX_TEXT,
        b'{"data":[["' + b"a" * 2 * MAX_TEXT + b'"]]}',
    ],
    ids=["inputs", "numbers", "strings", "texts", "keys", "id", "blanks", "brackets", "nested strings"],
)
def test_what_is_left_of_the_text_has_a_bound(text: bytes) -> None:
    with pytest.raises(InvalidArgument) as refused:
        at_once(json_cut.steps(text))
    assert refused.value.message == (
        f"the request JSON has {len(text)} bytes, more than {MAX_TEXT} of them besides large data of tensors; "
        f"at most {MAX_TEXT} are allowed"
    )


def test_the_walk_ends_soon_after_the_bound() -> None:
    """The rest of a text that is refused is not looked at: counted in steps, of which each has its share of the text."""

    def count(size: int) -> int:
        text = b'{"inputs":[' + b'{"name":"x","datatype":"FP32","shape":[1],"data":[1]},' * (size // 54)
        steps, taken = json_cut.steps(text), 0
        with contextlib.suppress(InvalidArgument):
            for _ in steps:
                taken += 1
            raise AssertionError("it was not refused")
        return taken

    assert count(2 * MAX_TEXT) == count(20 * MAX_TEXT) > 10


def test_long_strings_are_walked_through_in_steps() -> None:
    text = json.dumps({"data": ["]abc"] * 500_000}).encode()
    assert sum(1 for _ in json_cut.steps(text)) >= len(text) // (64 << 10)


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=60), st.integers(0, 5000))
def test_any_bytes_are_walked_through(odd: bytes, at: int) -> None:
    text = json.dumps({"inputs": [{"data": [1] * 1000}, {"data": ["a"] * 1000}]}).encode()
    text = text[:at] + odd + text[at + len(odd) :]
    found = at_once(json_cut.steps(text))
    if found is not None:
        assert put_together(found) == text
