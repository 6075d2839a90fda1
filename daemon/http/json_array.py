"""Converts a large JSON array of numbers, which was cut out of a request (``json_cut``), piece by piece. Sans-I/O.

    [ 0.1,0.2, ... ,0.3 ]
      └ piece ┘└ piece ┘       each piece, by itself, is read by simdjson into the tensor's place

No piece takes longer than about a millisecond, so that the event loop can serve other connections between two pieces. A piece
that simdjson refuses is parsed by RapidJSON, like a small text, which converts it or says what is wrong. If simdjson is not
installed, msgspec parses the pieces.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt

from tensord.daemon.http import json_data
from tensord.daemon.http.json_cut import find
from tensord.daemon.http.request_head import parse
from tensord.shm.arrays import DTYPES
from tensord.shm.datatypes import ELEMENT_SIZES
from tensord.shm.errors import InvalidArgument

try:
    import simdjson
except ModuleNotFoundError:  # it has no wheel for this Python (setup.cfg)
    simdjson = None  # type: ignore[assignment]

#: Text converted at a time.
PIECE_BYTE_SIZE = 64 << 10
#: What is left of nested numbers without these is their nesting.
_LEAVES = bytes(range(256)).translate(None, b"[],")
_BRACKETS_TO_BLANKS = bytes.maketrans(b"[]", b"  ")
#: By the kind of the datatype's dtype: simdjson's name for the type of a buffer, what that holds, and msgspec's way to the same.
_BUFFERS: dict[str, tuple[Literal["d", "i", "u"], type[np.generic], msgspec.json.Decoder[Any]]] = {
    "f": ("d", np.float64, msgspec.json.Decoder(list[float])),
    "i": ("i", np.int64, msgspec.json.Decoder(list[int])),
    "u": ("u", np.uint64, msgspec.json.Decoder(list[int])),
}
_booleans = msgspec.json.Decoder(list[bool])


@dataclass(slots=True)
class JsonArray:
    """Converts the JSON text of an array of numbers or booleans to a tensor's bytes, in steps."""

    #: The array, from its opening bracket to its closing one, and its offset in the request's JSON, for errors.
    text: memoryview
    offset: int
    name: str
    datatype: str
    shape: list[int]
    count: int

    def __post_init__(self) -> None:
        """Checks datatype and length. Raises InvalidArgument: JSON cannot express the datatype, or the text is too short."""
        json_data.refuse_half_floats(self.datatype, self.count, self.name)
        # A value and its comma take two bytes, so nobody gets room for more values than there are.
        if 2 * self.count > len(self.text):
            raise InvalidArgument(json_data.MISMATCH)

    @property
    def byte_size(self) -> int:
        """Returns how many bytes the tensor has."""
        return self.count * (ELEMENT_SIZES[self.datatype] or 0)

    def wire_bytes(self) -> bytes:
        """Converts the whole array at once and returns the tensor's bytes.

        Raises InvalidArgument: the text is no JSON array for this datatype and shape.
        """
        content = bytearray(self.byte_size)
        for _ in self.fill(memoryview(content)):
            pass
        return bytes(content)

    def fill(self, place: memoryview) -> Generator[None, None, int]:
        """Writes the tensor's bytes into ``place``, and yields after each piece. Returns how many bytes were written.

        Raises: InvalidArgument: the text is no JSON array for this datatype and shape; the message is in Triton's words.
        """
        nested = yield from self._check_nesting()
        out = np.frombuffer(place, DTYPES[self.datatype]) if self.datatype != "BYTES" else np.empty(0)
        parser = None if simdjson is None else simdjson.Parser()
        at = 0
        for start, piece in self._pieces():
            values = self._values(piece.translate(_BRACKETS_TO_BLANKS) if nested else piece, start, parser)
            if at + len(values) > self.count:
                raise InvalidArgument(json_data.MISMATCH)
            with np.errstate(over="ignore"):  # beyond FP32 is infinity
                out[at : at + len(values)] = values
            at += len(values)
            yield
        if at != self.count:
            raise InvalidArgument(json_data.MISMATCH)
        return self.byte_size

    def _pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yields the text between the outer brackets in pieces that end before a comma, each with its offset in ``text``.

        Raises: InvalidArgument: the text of one value is longer than a piece.
        """
        start, end = 1, len(self.text) - 1
        while end - start > PIECE_BYTE_SIZE:
            piece = bytes(self.text[start : start + PIECE_BYTE_SIZE])
            comma = piece.rfind(b",")
            if comma < 0:
                raise InvalidArgument(
                    f"Unable to parse 'data': a value of input '{self.name}' has more than {PIECE_BYTE_SIZE} bytes of text"
                )
            yield start, piece[:comma]
            start += comma + 1
        yield start, bytes(self.text[start:end])

    def _values(self, piece: bytes, start: int, parser: simdjson.Parser | None) -> npt.NDArray[Any]:
        text = b"[%b]" % piece
        dtype = DTYPES[self.datatype]
        try:
            if self.datatype == "BOOL":
                values: npt.NDArray[Any] = np.array(_booleans.decode(text), np.bool_)
            else:
                buffer, wide, decoder = _BUFFERS[dtype.kind]
                if parser is None:
                    values = np.array(decoder.decode(text), wide)
                else:
                    # The same bits. The two differ in what they refuse, and that is read the exact way.
                    values = np.frombuffer(cast(simdjson.Array, parser.parse(text)).as_buffer(of_type=buffer), wide)
            if dtype.kind in "iu" and dtype.itemsize < 8 and len(values):
                limits = np.iinfo(dtype)
                if values.min() < limits.min or values.max() > limits.max:
                    raise ValueError("out of range")
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError, msgspec.MsgspecError):
            values = np.frombuffer(
                json_data.flat(parse(text, lambda offset: self.offset + start + offset - 1), self.datatype, self.name),
                dtype,
            )
        if not len(values):
            raise InvalidArgument(f"failed to parse the request JSON buffer: Invalid value. at {self.offset + start}")
        return values

    def _check_nesting(self) -> Generator[None, None, bool]:
        """Returns whether the array holds nested arrays; yields between steps of bounded work.

        Raises: InvalidArgument: the nesting contradicts the shape.
        """
        if find(self.text, b"[", 1, len(self.text)) < 0:
            return False
        structure = bytearray()
        for start in range(0, len(self.text), PIECE_BYTE_SIZE):
            structure += bytes(self.text[start : start + PIECE_BYTE_SIZE]).translate(None, _LEAVES)
            yield
        dims = yield from _dimensions(bytes(structure), len(self.shape))
        if not json_data.is_nesting_of(dims, self.shape):
            raise json_data.misnested(self.shape, self.name)
        return True


def _dimensions(structure: bytes, rank: int) -> Generator[None, None, list[int]]:
    """Returns the lengths of nested lists, outermost first; empty: lists of one level differ, or they are nested far too deep.

    It takes the length of the first innermost list, and removes all lists like that one: if all were alike, a structure with one
    level less is left. Yields after each level.

    Args:
      structure: the brackets and commas of the lists alone, such as ``[[,,],[,,]]``.
      rank: the number of dimensions of the tensor.
    """
    left, dims = structure, list[int]()
    while left and len(dims) <= 2 * rank + 1:
        closing = left.find(b"]")
        innermost = left[left.rfind(b"[", 0, closing + 1) : closing + 1]
        if not innermost:
            return []
        dims.append(innermost.count(b",") + 1)
        left = left.replace(innermost, b"")
        yield
    # What was taken away may have been anything that looked alike; so build it, and compare.
    built = b""
    for dim in dims:
        built = b"[" + b",".join([built] * dim) + b"]"
    return dims[::-1] if built == structure else []
