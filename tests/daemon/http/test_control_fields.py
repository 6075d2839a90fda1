"""Bodies of control requests: what they say, or Triton's sentence about what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.http import control_fields, json_values
from tensord.shm.errors import InvalidArgument


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"5", b'"text"', b"{}", b" {} "])
def test_bodies_without_fields(body: bytes) -> None:
    assert control_fields.read(body) == {}


def test_fields() -> None:
    fields = control_fields.read(b'{"a": true, "b": "x", "c": 18446744073709551615, "d": {"e": "AQI="}}', required=True)
    assert json_values.boolean(fields["a"]) is True
    assert json_values.text(fields["b"]) == "x"
    assert json_values.unsigned(fields["c"]) == (1 << 64) - 1
    assert control_fields.base64_content("e", json_values.member(control_fields.members(fields["d"]), "e")) == b"\1\2"


@pytest.mark.parametrize(
    ("body", "required", "text"),
    [
        (b"", True, "The document is empty. at 0"),
        (b"{", False, "Missing a name for object member. at 1"),
        (b"\xff", False, "at 0"),
        (b'{"a":"\xff"}', False, "Invalid encoding in string. at"),
    ],
)
def test_bodies_that_are_refused(body: bytes, required: bool, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        control_fields.read(body, required)
    assert caught.value.message.startswith("failed to parse the request JSON buffer: ")
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("call", "value", "text"),
    [
        (json_values.boolean, 1, "attempt to access JSON non-boolean as boolean"),
        (json_values.text, 5, "attempt to access JSON non-string as string"),
        (json_values.unsigned, -1, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (json_values.unsigned, 1.0, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (json_values.unsigned, True, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (json_values.unsigned, 1 << 64, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (control_fields.members, [], "attempt to get members for non-object"),
        (lambda value: json_values.member(value, "b64"), "AAAA", "non-existing object member 'b64'"),
        (lambda value: control_fields.base64_content("f", value), "*", "'f' should be base64 text"),
        (lambda value: control_fields.base64_content("f", value), "é", "'f' should be base64 text"),
        (lambda value: control_fields.base64_content("f", value), 1, "attempt to access JSON non-string as string"),
    ],
)
def test_fields_that_are_refused(call: Any, value: Any, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call(value)
    assert text in caught.value.message
