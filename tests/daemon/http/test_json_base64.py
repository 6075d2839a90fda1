from __future__ import annotations

import base64

import pytest

from tensord.daemon.http.json_base64 import JsonBase64
from tensord.shm.errors import InvalidArgument


def filled(text: bytes, datatype: str, count: int) -> bytes:
    source = JsonBase64(memoryview(b'"' + text + b'"'), datatype, count)
    place = bytearray(source.byte_size)
    steps = source.fill(memoryview(place))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bytes(place[: end.value])


@pytest.mark.parametrize("size", [0, 1, 2, 3, 100_000, (3 << 20) - 1, 3 << 20, (3 << 20) + 1])
def test_the_same_bytes_come_out(size: int) -> None:
    content = bytes(range(251)) * (size // 251 + 1)
    assert filled(base64.b64encode(content[:size]), "UINT8", size) == content[:size]
    assert filled(base64.b64encode(content[:size]), "BYTES", 1) == content[:size]


@pytest.mark.parametrize("count", [0, 1, 99, 101, 102, 1 << 60])
def test_another_size_than_the_tensor_has(count: int) -> None:
    with pytest.raises(InvalidArgument, match="attempt to access JSON non-array as array"):
        filled(base64.b64encode(bytes(400)), "FP32", count)
    with pytest.raises(InvalidArgument, match="attempt to access JSON non-array as array"):
        filled(base64.b64encode(bytes(100)), "UINT8", count)


@pytest.mark.parametrize("wrong", [b"*", b"\xff", b" ", b"=", b"\\n"])
def test_no_base64(wrong: bytes) -> None:
    text = base64.b64encode(bytes(3 << 20))
    for at in (0, 5, 2 << 20):
        broken = text[:at] + (wrong * 4)[:4] + text[at + 4 :]
        with pytest.raises(InvalidArgument, match="attempt to access JSON non-array as array"):
            filled(broken, "UINT8", 3 << 20)
