"""Encodes and decodes MessagePack, as far as records need it: arrays, integers, strings, bytes, maps, booleans, floats and nil.

Integers are written in their shortest form, as the server's encoder writes them, and read in every form.
"""

from __future__ import annotations

import struct
from typing import Any, Union

from tensord_client import native

Buffer = Union[bytes, bytearray, memoryview]

_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_F32 = struct.Struct(">f")
_F64 = struct.Struct(">d")
_NUMBERS = {
    0xCA: _F32,
    0xCB: _F64,
    0xCC: struct.Struct(">B"),
    0xCD: _U16,
    0xCE: _U32,
    0xCF: _U64,
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
_LENGTHS: dict[int, struct.Struct] = {size: struct.Struct(">" + form) for size, form in ((1, "B"), (2, "H"), (4, "I"))}


class Malformed(ValueError):
    """Received bytes are no valid record (message) in MessagePack."""


def pack(value: Any) -> bytes:
    """Encodes a value in MessagePack.

    Raises: ValueError: an integer needs more than 64 bits, or a string cannot be UTF-8; TypeError: the type has no encoding.
    """
    kind = type(value)
    if kind is int:
        return integer(value)
    if kind is str:
        return text(value)
    if kind is bytes:
        return b"".join((binary_head(len(value)), value))
    if value is None:
        return b"\xc0"
    if kind is bool:
        return b"\xc3" if value else b"\xc2"
    if kind is tuple or kind is list:
        return array_head(len(value)) + b"".join([pack(each) for each in value])
    if kind is float:
        return b"\xcb" + _F64.pack(value)
    if kind is dict:
        return map_head(len(value)) + b"".join([pack(each) for pair in value.items() for each in pair])
    raise TypeError(f"{kind.__name__} cannot be encoded")


def integer(value: int) -> bytes:
    """Encodes an integer in its shortest form. Raises ValueError: it needs more than 64 bits."""
    if value >= 0:
        if value < 0x80:
            return bytes((value,))
        if value < 0x100:
            return bytes((0xCC, value))
        if value < 0x10000:
            return b"\xcd" + _U16.pack(value)
        if value < 0x100000000:
            return b"\xce" + _U32.pack(value)
        if value < 1 << 64:
            return b"\xcf" + _U64.pack(value)
    elif value >= -0x20:
        return bytes((value + 0x100,))
    elif value >= -0x80:
        return bytes((0xD0, value + 0x100))
    elif value >= -0x8000:
        return b"\xd1" + _U16.pack(value + 0x10000)
    elif value >= -0x80000000:
        return b"\xd2" + _U32.pack(value + 0x100000000)
    elif value >= -(1 << 63):
        return b"\xd3" + _U64.pack(value + (1 << 64))
    raise ValueError(f"{value} needs more than 64 bits")


def text(value: str) -> bytes:
    """Encodes a string. Raises UnicodeEncodeError (a ValueError): the string cannot be UTF-8."""
    content = value.encode()
    size = len(content)
    if size < 0x20:
        return bytes((0xA0 | size,)) + content
    if size < 0x100:
        return bytes((0xD9, size)) + content
    if size < 0x10000:
        return b"\xda" + _U16.pack(size) + content
    return b"\xdb" + _U32.pack(size) + content


def binary_head(size: int) -> bytes:
    """Encodes the head (type and size) of a byte string of ``size`` bytes; the bytes must follow it."""
    if size < 0x100:
        return bytes((0xC4, size))
    if size < 0x10000:
        return b"\xc5" + _U16.pack(size)
    return b"\xc6" + _U32.pack(size)


def array_head(count: int) -> bytes:
    """Encodes the head (type and size) of an array of ``count`` elements; the elements must follow it."""
    if count < 0x10:
        return bytes((0x90 | count,))
    if count < 0x10000:
        return b"\xdc" + _U16.pack(count)
    return b"\xdd" + _U32.pack(count)


def map_head(count: int) -> bytes:
    """Encodes the head (type and size) of a map of ``count`` pairs; keys and values must follow it in turn."""
    if count < 0x10:
        return bytes((0x80 | count,))
    if count < 0x10000:
        return b"\xde" + _U16.pack(count)
    return b"\xdf" + _U32.pack(count)


def unpack(content: Buffer) -> Any:
    """Decodes the one value that ``content`` consists of. Raises Malformed: it is no valid value, or bytes follow it."""
    value, at = unpack_from(content, 0, len(content))
    if at != len(content):
        raise Malformed(f"{len(content) - at} bytes too many")
    return value


def unpack_from(content: Buffer, at: int, end: int) -> tuple[Any, int]:
    """Decodes the value that begins at ``content[at]``. Returns the value and the position behind it. Arrays become lists.

    Raises: Malformed: the value does not end by position ``end``, or is of a type that records do not have.
    """
    if native.unpack_from is not None:
        found = native.unpack_from(content, at, end)
        if found is not None:
            return found
    if at >= end:
        raise Malformed("a value is missing")
    try:
        value, at = _value(content, at)
    except (struct.error, IndexError) as error:
        raise Malformed("a value is cut off") from error
    except UnicodeDecodeError as error:
        raise Malformed("a string is no UTF-8") from error
    if at > end:
        raise Malformed("a value is cut off")
    return value, at


def _value(content: Buffer, at: int) -> tuple[Any, int]:
    head = content[at]
    at += 1
    if head < 0x80:
        return head, at
    if head < 0xC0:
        if head >= 0xA0:
            return _text(content, at, head & 0x1F)
        if head >= 0x90:
            return _array(content, at, head & 0x0F)
        return _map(content, at, head & 0x0F)
    if head >= 0xE0:
        return head - 0x100, at
    number = _NUMBERS.get(head)
    if number is not None:
        return number.unpack_from(content, at)[0], at + number.size
    if head <= 0xC3:
        if head == 0xC1:
            raise Malformed("0xc1 begins no value")
        return (None if head == 0xC0 else head == 0xC3), at
    if head <= 0xC6:
        size, at = _length(content, at, 1 << (head - 0xC4))
        return _part(content, at, size), at + size
    if 0xD9 <= head <= 0xDB:
        size, at = _length(content, at, 1 << (head - 0xD9))
        return _text(content, at, size)
    if head == 0xDC or head == 0xDD:
        size, at = _length(content, at, 2 << (head - 0xDC))
        return _array(content, at, size)
    if head == 0xDE or head == 0xDF:
        size, at = _length(content, at, 2 << (head - 0xDE))
        return _map(content, at, size)
    raise Malformed(f"{head:#x} begins no value of a record")


def _length(content: Buffer, at: int, width: int) -> tuple[int, int]:
    return _LENGTHS[width].unpack_from(content, at)[0], at + width


def _part(content: Buffer, at: int, size: int) -> bytes:
    part = bytes(content[at : at + size])
    if len(part) != size:
        raise Malformed("a value is cut off")
    return part


def _text(content: Buffer, at: int, size: int) -> tuple[str, int]:
    return _part(content, at, size).decode(), at + size


def _array(content: Buffer, at: int, count: int) -> tuple[list[Any], int]:
    made: list[Any] = []
    for _ in range(count):
        head = content[at]
        # What most elements are costs no call.
        if head < 0x80:
            made.append(head)
            at += 1
        elif head == 0xC0:
            made.append(None)
            at += 1
        elif head == 0xA0:
            made.append("")
            at += 1
        elif head == 0xCF:
            made.append(_U64.unpack_from(content, at + 1)[0])
            at += 9
        else:
            value, at = _value(content, at)
            made.append(value)
    return made, at


def _map(content: Buffer, at: int, count: int) -> tuple[dict[Any, Any], int]:
    made: dict[Any, Any] = {}
    for _ in range(count):
        key, at = _value(content, at)
        try:
            made[key], at = _value(content, at)
        except TypeError as error:
            raise Malformed("the key of a map is no value that can be one") from error
    return made, at
