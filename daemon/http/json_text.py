"""Encodes output tensors as flat JSON arrays, and each response to a generate request as a JSON object.

Numbers are written as the shortest text that reads back as the same value of their datatype. NaN and the infinities are
written as Triton writes them, though JSON has no such literals.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from tensord.shm.arrays import DTYPES, array
from tensord.shm.common.datatypes import DATATYPES
from tensord.shm.datatypes import element_count
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import Content, PreparedAnswer, PreparedTensor, Slice

#: Elements written at a time: about a millisecond.
PIECE_COUNT = 32768
#: BYTES are text already, or are not.
_PIECE_BYTE_SIZE = 256 << 10
_LENGTH = struct.Struct("<I")
_encode = msgspec.json.Encoder().encode
#: Returns the bytes of a slice of the response arena.
View = Callable[[Slice], memoryview]


def writer(tensor: PreparedTensor) -> Callable[[bytes | memoryview], bytes]:
    """Returns a function that converts the bytes of a tensor to a JSON array.

    This function and the returned function raise InvalidArgument if JSON cannot express the tensor: it is FP16 or BF16, or a
    string is not UTF-8.
    """
    if tensor.datatype == "BYTES":
        return lambda content: _strings(_values(tensor, content).tolist(), tensor.name)
    _check_datatype(tensor.datatype)
    dtype, what = DTYPES[tensor.datatype], f"output '{tensor.name}'"
    byte_size = element_count(tensor.shape, what) * dtype.itemsize

    def write(content: bytes | memoryview) -> bytes:
        if len(content) != byte_size:
            array(content, tensor.datatype, tensor.shape, what)  # which says what is wrong
        return _numbers(np.frombuffer(content, dtype))

    return write


def pieces(tensor: PreparedTensor, content: bytes | memoryview) -> Iterator[bytes]:
    """Yields a tensor as a flat JSON array, in pieces. Encoding one piece takes about 1 ms.

    ``content``: the tensor's bytes. Raises InvalidArgument if JSON cannot express the tensor.
    """
    texts = _string_pieces(tensor, content) if tensor.datatype == "BYTES" else _number_pieces(tensor, content)
    yield b"[" + next(texts, b",")[1:]
    yield from texts
    yield b"]"


# Pieces begin with the comma before the next element.


def _number_pieces(tensor: PreparedTensor, content: bytes | memoryview) -> Iterator[bytes]:
    values = _values(tensor, content)
    for start in range(0, len(values), PIECE_COUNT):
        yield b"," + _numbers(values[start : start + PIECE_COUNT])[1:-1]


def _string_pieces(tensor: PreparedTensor, content: bytes | memoryview) -> Iterator[bytes]:
    elements: list[bytes] = []
    start = at = 0
    while at < len(content):
        (length,) = _LENGTH.unpack_from(content, at)
        element, is_long = content[at + 4 : at + 4 + length], length > _PIECE_BYTE_SIZE
        at += 4 + length
        if not is_long:
            elements.append(bytes(element))
        if elements and (is_long or at - start > _PIECE_BYTE_SIZE or len(elements) == PIECE_COUNT // 4):
            yield b"," + _strings(elements, tensor.name)[1:-1]
            elements, start = [], at
        if is_long:
            yield from _long_string(element, tensor.name)
            start = at
    if elements:
        yield b"," + _strings(elements, tensor.name)[1:-1]


def _long_string(element: bytes | memoryview, name: str) -> Iterator[bytes]:
    begin, start = b',"', 0
    while start < len(element):
        end = start + _PIECE_BYTE_SIZE
        try:
            text, size = codecs.utf_8_decode(element[start:end], "strict", end >= len(element))
        except UnicodeDecodeError as error:
            raise _no_text(name) from error
        yield begin + _encode(text)[1:-1]
        begin, start = b"", start + size
    yield b'"'


def _values(tensor: PreparedTensor, content: bytes | memoryview) -> npt.NDArray[Any]:
    _check_datatype(tensor.datatype)
    return array(content, tensor.datatype, tensor.shape, f"output '{tensor.name}'").ravel()


def _check_datatype(datatype: str) -> None:
    if not DATATYPES[datatype].json:
        raise InvalidArgument(
            f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
        )


def _numbers(values: npt.NDArray[Any]) -> bytes:
    if values.dtype.kind != "f" or (finite := np.isfinite(values)).all():
        return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    texts = orjson.dumps(np.where(finite, values, 0), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
    for text, found in (b"NaN", np.isnan), (b"Infinity", np.isposinf), (b"-Infinity", np.isneginf):
        for at in np.flatnonzero(found(values)).tolist():
            texts[at] = text
    return b"[%b]" % b",".join(texts)


def _strings(elements: list[bytes], name: str) -> bytes:
    try:
        return _encode([element.decode() for element in elements])
    except UnicodeDecodeError as error:
        raise _no_text(name) from error


def _no_text(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"output '{name}' holds bytes that are not UTF-8 text. Please use the binary data format for output {name}"
    )


class ResponseLayout:
    """Encodes the responses to one generate request as JSON objects, which differ only in the values of their outputs.

    An output of one element is written as that element. Any other output is written as a flat array.
    """

    __slots__ = ("_outputs", "_shared", "prepared")

    def __init__(self, prepared: PreparedAnswer, model: str, client_id: str) -> None:
        """Encodes the JSON that all responses to one request share. ``client_id``: the request's id, as the client gave it.

        Raises InvalidArgument if JSON cannot express an output of ``prepared``.
        """
        self.prepared = prepared
        self._shared: dict[str, Any] = {"id": client_id} if client_id else {}
        self._shared |= {"model_name": model, "model_version": str(prepared.version)}
        self._shared |= prepared.parameters
        #: Name and writer of each output that lies in no region, and whether it is written as its only element.
        self._outputs = [
            (tensor.name, writer(tensor), {1}.issuperset(tensor.shape))
            for tensor in prepared.outputs
            if tensor.region is None
        ]

    def encode(self, contents: tuple[Content, ...], view: View | None = None) -> bytes:
        """Returns one response as a JSON object.

        Args:
          contents: the bytes of each output, or their slice of the response arena.
          view: returns the memory of a slice. It may be None if no output is a slice.
        Raises InvalidArgument if JSON cannot express an output.
        """
        fields = dict(self._shared)
        for (name, write, is_one), place in zip(self._outputs, contents, strict=True):
            if isinstance(place, Slice):
                assert view is not None
                data = write(view(place))
            else:
                data = write(place)
            fields[name] = msgspec.Raw(data[1:-1] if is_one else data)
        return msgspec.json.encode(fields)
