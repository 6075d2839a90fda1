"""Elements of BYTES tensors: what is in C and what is in Python does the same, and many are converted in slices."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm import arrays, strings
from tensord.shm.arrays import SLICE, Strings
from tensord.shm.common import strings as in_python

_strings = pytest.importorskip("tensord.shm._strings", reason="no compiler was there")
ELEMENTS = st.lists(st.binary(max_size=9), max_size=9)


@given(ELEMENTS, st.integers(0, 20), st.binary(max_size=6))
def test_both_do_the_same(elements: list[bytes], most: int, rest: bytes) -> None:
    content = _strings.encode(elements)
    assert content == in_python.encode(elements)
    for whole in (content, content + rest, content[:-1]):
        assert _strings.count(whole, most) == in_python.count(whole, most)
        for at in (0, len(content), len(whole) + 1):
            assert _strings.decode(whole, at, most) == in_python.decode(whole, at, most)


@pytest.mark.parametrize("encode", [_strings.encode, in_python.encode])
def test_text_is_utf_8_and_others_are_refused(encode: Any) -> None:
    assert encode(["ä", b"\xff"]) == b"\2\0\0\0\xc3\xa4\1\0\0\0\xff"
    assert encode([]) == b""
    for bad in ([1], [None], [b"", 1.5]):
        with pytest.raises(TypeError):
            encode(bad)
    with pytest.raises(UnicodeEncodeError):
        encode(["\ud800"])


@pytest.mark.parametrize("arguments", [(b"x",), ("x", 0, 1), (b"x", -1, 1), (b"x", 0, -1)])
def test_what_is_asked_wrongly_ends_nothing(arguments: Any) -> None:
    try:
        assert _strings.decode(*arguments)[0] == []
    except TypeError:
        pass


@pytest.mark.parametrize("kind", ["O", "S", "U", "numbers"])
def test_many_are_converted_in_slices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way an array of strings is encoded and decoded, no call handles more than a slice."""
    texts = [str(number) for number in range(3 * SLICE + 7)]
    given = {
        "O": np.array([text.encode() for text in texts], np.object_),
        "S": np.array(texts, "S"),
        "U": np.array(texts, "U"),
        "numbers": np.array([int(text) for text in texts], np.object_),
    }[kind]
    calls: list[int] = []

    def encode(elements: list[Any]) -> bytes:
        calls.append(len(elements))
        return in_python.encode(elements)

    def decode(content: bytes, at: int, most: int) -> tuple[list[bytes], int]:
        calls.append(most)
        return in_python.decode(content, at, most)

    monkeypatch.setattr(strings, "encode", encode)
    monkeypatch.setattr(strings, "decode", decode)
    encoded = arrays.encoded_strings(given)
    assert isinstance(encoded, Strings)
    assert max(calls) == SLICE
    assert (encoded.shape, encoded.size, encoded.ndim, len(encoded)) == (given.shape, given.size, 1, given.size)
    wanted = [text.encode() for text in texts]
    assert np.asarray(encoded.reshape((given.size, 1))).ravel().tolist() == wanted
    assert arrays.as_strings(given).tolist() == wanted
    assert arrays.in_slices(given).tolist() == given.tolist()
    assert arrays.byte_content(encoded) is encoded.content
    assert max(calls) == SLICE


def test_others_run_while_many_are_converted() -> None:
    """A thread that waits for Python's lock gets it between two slices."""
    content = arrays.byte_content(np.full(40 * SLICE, b"abcd", np.object_))
    went, stop = [0], threading.Event()

    def go() -> None:
        while not stop.is_set():
            went[0] += 1
            stop.wait(0)

    other = threading.Thread(target=go)
    other.start()
    try:
        before = went[0]
        while went[0] < before + 10:
            np.asarray(Strings(content, (40 * SLICE,)))
    finally:
        stop.set()
        other.join()
