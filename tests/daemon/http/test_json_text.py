"""Output tensors as text: the same at once and in pieces, and every value reads back as itself."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from tensord.daemon.http.json_text import PIECE_COUNT, ResponseLayout, pieces, writer
from tensord.shm.arrays import DTYPES, array, byte_content
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import Content, PreparedAnswer, PreparedTensor, RegionSlice
from tests.records import Tensor, WholeAnswer


def tensor(datatype: str, values: np.ndarray) -> tuple[PreparedTensor, bytes]:
    content = byte_content(values) if datatype == "BYTES" else values.astype(DTYPES[datatype]).tobytes()
    return PreparedTensor("y", datatype, values.shape), content


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name not in ("FP16", "BF16", "BYTES")])
@pytest.mark.parametrize("count", [0, 1, 3 * PIECE_COUNT + 5])
def test_numbers(datatype: str, count: int) -> None:
    bits = np.random.default_rng(0).integers(0, 256, count * DTYPES[datatype].itemsize, np.uint8).tobytes()
    values = np.frombuffer(bits, DTYPES[datatype]) if datatype != "BOOL" else np.arange(count) % 3 == 0
    described, content = tensor(datatype, values)
    texts = list(pieces(described, content))
    assert len(texts) <= 6
    for text in (b"".join(texts), writer(described)(content)):
        back = np.array(json.loads(text), DTYPES[datatype])
        np.testing.assert_array_equal(back, array(content, datatype, values.shape))


def test_the_shortest_text_and_the_literals() -> None:
    described, content = tensor("FP32", np.array([0.1, 3, -0.0, 16777216, 1e-45], np.float32))
    assert writer(described)(content) == b"[0.1,3.0,-0.0,16777216.0,1e-45]"
    for datatype in ("FP32", "FP64"):
        described, content = tensor(datatype, np.array([math.nan, math.inf, -math.inf, 0.1]))
        assert writer(described)(content) == b"".join(pieces(described, content)) == b"[NaN,Infinity,-Infinity,0.1]"


@pytest.mark.parametrize("count", [0, 1, 20_000])
@pytest.mark.parametrize("size", [0, 40])
def test_strings(count: int, size: int) -> None:
    values = np.array([("ä\n" * size + str(number)).encode() for number in range(count)], np.object_)
    described, content = tensor("BYTES", values)
    assert b"".join(pieces(described, content)) == writer(described)(content)
    assert json.loads(writer(described)(content)) == [value.decode() for value in values]


@pytest.mark.parametrize("before", ["", "a", "ab", "abc"])
def test_a_long_string_is_written_in_pieces_cut_between_characters(before: str) -> None:
    long = before + 'é"€\U0001f600\n' * 100_000
    values = np.array([each.encode() for each in ("b", long, "", long, long, "c")], np.object_)
    described, content = tensor("BYTES", values)
    for each in (content, memoryview(content)):
        texts = list(pieces(described, each))
        assert max(map(len, texts)) < 1 << 20
        assert b"".join(texts) == writer(described)(content)
    assert json.loads(b"".join(texts)) == ["b", long, "", long, long, "c"]


@pytest.mark.parametrize("value", [b"\xff", bytes(1 << 20) + b"\xe2\x82", b"\x80" * (1 << 20)])
def test_bytes_that_are_no_text(value: bytes) -> None:
    described, content = tensor("BYTES", np.array([b"a", value], np.object_))
    for write in (lambda of, content: writer(of)(content), lambda *arguments: list(pieces(*arguments))):
        with pytest.raises(InvalidArgument, match="Please use the binary data format for output y"):
            write(described, content)


def encode(prepared: PreparedAnswer, contents: tuple[Content, ...], client_id: str) -> bytes:
    """Returns a response of model "m" as JSON."""
    return ResponseLayout(prepared, "m", client_id).encode(contents)


def response(*outputs: Tensor, **fields: Any) -> tuple[PreparedAnswer, tuple[Content, ...]]:
    answer = WholeAnswer(1, version=3, outputs=outputs, **fields)
    return answer.prepared, answer.contents


def test_a_response_as_one_object() -> None:
    answer = response(
        Tensor("text", "BYTES", (1, 1), b"\2\0\0\0hi"),
        Tensor("n", "UINT8", (3,), b"\1\2\3"),
        Tensor("none", "UINT8", (0,), b""),
        Tensor("nan", "FP32", (1,), b"\0\0\xc0\x7f"),
        Tensor("there", "UINT8", (1,), RegionSlice("r", 0, 1)),
        parameters={"tokens": 7},
    )
    encoded = encode(*answer, "id")
    assert b'"nan":NaN' in encoded
    assert json.loads(encoded.replace(b"NaN", b"null")) == {
        "id": "id",
        "model_name": "m",
        "model_version": "3",
        "tokens": 7,
        "text": "hi",
        "n": [1, 2, 3],
        "none": [],
        "nan": None,
    }
    assert "id" not in json.loads(encode(*response(), ""))


def test_a_response_that_is_no_text() -> None:
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        encode(*response(Tensor("y", "BYTES", (1,), b"\1\0\0\0\xff")), "")
