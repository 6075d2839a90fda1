"""A large array of numbers that was cut out of the text of a request (``json_cut``), converted piece by piece. Sans-I/O.

    [ 0.1,0.2, ... ,0.3 ]
      └ piece ┘└ piece ┘       each piece, by itself, is read by simdjson into the tensor's place

No piece takes longer than about a millisecond, so whoever converts can look after others between two of them. What simdjson does
not understand, and what is wrong, goes piece by piece through RapidJSON like a small text. Where simdjson is not installed,
msgspec reads the pieces.
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
_MISMATCH = "Unable to parse 'data': Shape does not match true shape of 'data' field"


@dataclass(slots=True)
class JsonArray:
    """Converts an array of numbers or booleans that is still text."""

    #: From its opening bracket to its closing one, and where that lies in the request, for errors.
    text: memoryview
    offset: int
    name: str
    datatype: str
    shape: list[int]
    count: int

    def __post_init__(self) -> None:
        """Raises InvalidArgument: it cannot be a tensor of that datatype and shape, whatever it holds."""
        json_data.refuse_half_floats(self.datatype, self.count, self.name)
        # A value and its comma take two bytes, so nobody gets room for more values than there are.
        if 2 * self.count > len(self.text):
            raise InvalidArgument(_MISMATCH)

    @property
    def byte_size(self) -> int:
        """Returns the bytes of the tensor."""
        return self.count * (ELEMENT_SIZES[self.datatype] or 0)

    def wire_bytes(self) -> bytes:
        """Converts it at once, to the tensor's bytes. Raises as ``fill`` does."""
        content = bytearray(self.byte_size)
        for _ in self.fill(memoryview(content)):
            pass
        return bytes(content)

    def fill(self, place: memoryview) -> Generator[None, None, int]:
        """Writes the tensor's bytes and returns their number; stops after each piece.

        Raises InvalidArgument: what is wrong, as Triton says it.
        """
        nested = yield from self._check_nesting()
        out = np.frombuffer(place, DTYPES[self.datatype]) if self.datatype != "BYTES" else np.empty(0)
        parser = None if simdjson is None else simdjson.Parser()
        at = 0
        for start, piece in self._pieces():
            values = self._values(piece.translate(_BRACKETS_TO_BLANKS) if nested else piece, start, parser)
            if at + len(values) > self.count:
                raise InvalidArgument(_MISMATCH)
            with np.errstate(over="ignore"):  # beyond FP32 is infinity
                out[at : at + len(values)] = values
            at += len(values)
            yield
        if at != self.count:
            raise InvalidArgument(_MISMATCH)
        return self.byte_size

    def _pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yields the text within the outer brackets in pieces that end before a comma, each with its offset in the text."""
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
        """Returns whether there are lists in the list. Raises InvalidArgument: they are nested otherwise than the shape says."""
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
    """Returns the lengths of lists nested like ``[[,,],[,,]]``, outermost first; nothing where they are ragged or far too deep.

    The first innermost list tells a length. Where all are alike they leave a structure with one level less.
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
