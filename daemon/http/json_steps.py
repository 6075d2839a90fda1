"""Converts the JSON text of a tensor's values to the tensor's bytes, piece by piece. Sans-I/O.

The text may be an array of numbers, an array of booleans, an array of strings, or a base64 string.
The event loop can serve other connections between two pieces. No piece takes longer than about a millisecond.

A piece of strings ends where a quotation mark, a comma and a quotation mark follow each other. If these characters are the
string ",", the piece is no JSON. Then the piece is extended to the next place where such characters follow each other. Where
there is none for long, the piece ends inside a string, between two of its characters.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt

from tensord.daemon.http import json_data
from tensord.daemon.http.json_cut import find
from tensord.daemon.http.json_values import refusal
from tensord.daemon.http.request_head import parse
from tensord.shm.arrays import DTYPES, encoded
from tensord.shm.datatypes import ELEMENT_SIZES
from tensord.shm.errors import InvalidArgument

try:
    import simdjson
except ModuleNotFoundError:  # it has no wheel for this Python (setup.cfg)
    simdjson = None  # type: ignore[assignment]

#: Text converted at a time: of numbers, of strings (which may be tiny, and each costs), and of base64 (a multiple of four).
PIECE_BYTE_SIZE = 64 << 10
STRINGS_BYTE_SIZE = 16 << 10
_BASE64_BYTE_SIZE = 1 << 20
#: All bytes but those of nesting: nested numbers without these bytes are their nesting alone.
_LEAVES = bytes(range(256)).translate(None, b"[],")
_BRACKETS_TO_BLANKS = bytes.maketrans(b"[]", b"  ")
#: The kind of the datatype's dtype: simdjson's name for the type of a buffer, its element in numpy, and msgspec's way to the
#: same.
_BUFFERS: dict[str, tuple[Literal["d", "i", "u"], type[np.generic], msgspec.json.Decoder[Any]]] = {
    "f": ("d", np.float64, msgspec.json.Decoder(list[float])),
    "i": ("i", np.int64, msgspec.json.Decoder(list[int])),
    "u": ("u", np.uint64, msgspec.json.Decoder(list[int])),
}
_FLAT = re.compile(rb'\[[ \t\r\n]*"')
_SEPARATOR = re.compile(rb'"[ \t\r\n]*,[ \t\r\n]*(?=")')
_LENGTH = struct.Struct("<I")
_strings = msgspec.json.Decoder(list[str])
_booleans = msgspec.json.Decoder(list[bool])


@dataclass(slots=True)
class JsonArray:
    """Converts the JSON text of an array of numbers or booleans to the bytes of a tensor, in steps."""

    #: The array, from its opening bracket to its closing one, and its offset in the request's JSON, for errors.
    text: memoryview
    offset: int
    name: str
    datatype: str
    shape: list[int]
    count: int

    def __post_init__(self) -> None:
        json_data.refuse_half_floats(self.datatype, self.count, self.name)
        # A value and its comma take two bytes, so nobody gets room for more values than there are.
        if 2 * self.count > len(self.text):
            raise InvalidArgument(json_data.MISMATCH)

    @property
    def byte_size(self) -> int:
        return self.count * (ELEMENT_SIZES[self.datatype] or 0)

    def wire_bytes(self) -> bytes:
        """Returns the bytes of the tensor. Converts the whole array in one call, which takes long for a large array.

        Raises InvalidArgument if ``self.text`` is no JSON array for ``self.datatype`` and ``self.shape``.
        """
        content = bytearray(self.byte_size)
        for _ in self.fill(memoryview(content)):
            pass
        return bytes(content)

    def fill(self, place: memoryview) -> Generator[None, None, int]:
        """Writes the tensor's bytes into ``place``. Yields after each piece of the text. Returns how many bytes were written.

        Raises InvalidArgument if the text is no JSON array for this datatype and shape.
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
        """Cuts ``self.text`` at commas into pieces of limited size. Yields (offset of the piece in ``self.text``, piece)."""
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
            exact = parse(text, lambda offset: self.offset + start + offset - 1)
            content = json_data.flat(exact, self.datatype, self.name)
            if self.datatype == "BYTES":
                # An array of strings begins with one.
                raise json_data.of_wrong_kind(self.datatype) from None
            values = np.frombuffer(content, dtype)
        if not len(values):
            raise InvalidArgument(f"failed to parse the request JSON buffer: Invalid value. at {self.offset + start}")
        return values

    def _check_nesting(self) -> Generator[None, None, bool]:
        """Returns True if the array is nested, False if it is flat.

        Raises InvalidArgument if a nested array contradicts the tensor's shape.
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


def is_flat(text: memoryview) -> bool:
    """Returns whether a tensor's JSON text begins like a flat array of strings, with "[" and a quotation mark after it."""
    return _FLAT.match(text) is not None


@dataclass(slots=True)
class JsonStrings:
    """Converts the JSON text of an array of strings to the bytes of a BYTES tensor, in steps."""

    #: The array, from its opening bracket to its closing one.
    text: memoryview
    name: str
    count: int

    def __post_init__(self) -> None:
        if 3 * self.count > len(self.text):
            raise InvalidArgument(json_data.MISMATCH)

    @property
    def byte_size(self) -> int:
        """Returns an upper limit of the tensor's size in bytes, which follows from the length of ``self.text``."""
        return len(self.text) + self.count

    def fill(self, place: memoryview) -> Generator[None, None, int]:
        """Writes the tensor's bytes into ``place``. Yields after each piece of the text. Returns how many bytes were written.

        Raises InvalidArgument if ``self.text`` is no JSON array of exactly ``self.count`` strings.
        """
        start, written, count, last, is_open = 1, 0, 0, 0, False
        while start < len(self.text):
            goes_on = is_open
            values, start, is_open = self._piece(start, b'["' if goes_on else b"[")
            count += len(values) - goes_on
            if count > self.count:
                raise InvalidArgument(json_data.MISMATCH)
            content = encoded(values)
            if goes_on:
                (more,) = _LENGTH.unpack_from(content)
                _LENGTH.pack_into(place, last, written - last - _LENGTH.size + more)
                content = content[_LENGTH.size :]
            place[written : written + len(content)] = content
            written += len(content)
            if is_open and len(values) > goes_on:
                last = written - _LENGTH.size - len(values[-1].encode())
            yield
        if count != self.count or is_open:
            raise InvalidArgument(json_data.MISMATCH)
        return written

    def _piece(self, start: int, opening: bytes) -> tuple[list[str], int, bool]:
        """Reads a piece of the text. Returns its strings, where the next piece begins, and whether the last string goes on there.

        ``opening``: what the piece has before it, which is also a quotation mark if it begins inside a string.
        """
        search = start + STRINGS_BYTE_SIZE
        for _ in range(2):
            end, following = self._end_of_piece(start, search)
            if end < 0:
                return self._long_piece(start, opening)
            try:
                return _strings.decode(b"".join((opening, self.text[start:end], b"]"))), following, False
            except (msgspec.MsgspecError, UnicodeDecodeError):
                search = end
        # Not JSON, or not strings: the slow way says which, as of a small text, but not where in the whole text.
        try:
            values = parse(b"".join((opening, self.text[start:end], b"]")))
        except InvalidArgument as error:
            raise InvalidArgument(f"{error.message.rpartition(' at ')[0]} Input '{self.name}'") from error
        json_data.flat(values, "BYTES", self.name)
        raise json_data.of_wrong_kind("BYTES")

    def _end_of_piece(self, start: int, search: int) -> tuple[int, int]:
        """Returns where the piece ends and the next one begins; (-1, -1) if there is no end in the bytes behind ``search``."""
        limit = search + PIECE_BYTE_SIZE
        while (found := _SEPARATOR.search(self.text, search, limit)) is not None:
            mark = found.start()
            before = bytes(self.text[start:mark])
            if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
                return mark + 1, found.end()
            start = search = mark + 1
        return (-1, -1) if limit < len(self.text) else (len(self.text) - 1, len(self.text))

    def _long_piece(self, start: int, opening: bytes) -> tuple[list[str], int, bool]:
        """Does what ``_piece`` does where a long string begins or goes on: the piece ends inside of it."""
        size = STRINGS_BYTE_SIZE + PIECE_BYTE_SIZE
        for end in (start + size, start + 2 * size):
            # Nothing is as long that must not be cut as the escapes of two surrogates.
            for cut in range(end, end - 12, -1):
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    return _strings.decode(b"".join((opening, self.text[start:cut], b'"]'))), cut, True
        raise InvalidArgument(
            f"failed to parse the request JSON buffer: Invalid value, or more than {PIECE_BYTE_SIZE} bytes of text between "
            f"strings. Input '{self.name}'"
        )


@dataclass(slots=True)
class JsonBase64:
    """Decodes a base64 string from a JSON request to a tensor's bytes, in steps.

    The bytes are in the format of the binary tensor data extension.
    """

    #: The JSON string of base64, with its quotation marks.
    text: memoryview
    datatype: str
    count: int

    def __post_init__(self) -> None:
        needed = ELEMENT_SIZES[self.datatype]
        if needed is not None and not self.count * needed <= self.byte_size < self.count * needed + 3:
            raise refusal("array", "data")

    @property
    def byte_size(self) -> int:
        """Returns the most bytes that the tensor can have.

        Padding in the base64 text makes the tensor up to two bytes smaller.
        """
        return (len(self.text) - 2) // 4 * 3

    def fill(self, place: memoryview) -> Generator[None, None, int]:
        """Writes the tensor's bytes into ``place``. Yields after each piece of the text. Returns how many bytes were written.

        Raises InvalidArgument if the text is no base64, or if its size does not fit the tensor.
        """
        written, end = 0, len(self.text) - 1
        for start in range(1, end, _BASE64_BYTE_SIZE):
            content = json_data.from_base64(bytes(self.text[start : min(end, start + _BASE64_BYTE_SIZE)]))
            place[written : written + len(content)] = content
            written += len(content)
            yield
        needed = ELEMENT_SIZES[self.datatype]
        if needed is not None and written != self.count * needed:
            raise refusal("array", "data")
        return written
