"""Counts, decodes and encodes the elements of BYTES tensors in pure Python.

Each element is its length in bytes, as an unsigned 32-bit little-endian integer, and then its bytes. There is no padding.
"""

from __future__ import annotations

import struct

_length = struct.Struct("<I").pack


def count(content: bytes | memoryview, most: int, /) -> tuple[int, int]:
    """Counts at most ``most`` complete elements of a BYTES tensor's content. Returns the count and the offset after them."""
    found = at = 0
    while found < most and at + 4 <= len(content):
        end = at + 4 + int.from_bytes(content[at : at + 4], "little")
        if end > len(content):
            break
        found, at = found + 1, end
    return found, at


def decode(content: bytes, at: int, most: int, /) -> tuple[list[bytes], int]:
    """Decodes at most ``most`` complete elements of a BYTES tensor, from offset ``at`` on.

    Returns the elements and the offset after them.
    """
    elements: list[bytes] = []
    while len(elements) < most and at + 4 <= len(content):
        start = at + 4
        end = start + int.from_bytes(content[at:start], "little")
        if end > len(content):
            break
        elements.append(content[start:end])
        at = end
    return elements, at


def encode(elements: list[bytes] | list[str], /) -> bytes:
    """Encodes bytes or str elements as the content of a BYTES tensor. A str becomes UTF-8.

    Raises TypeError if an element is neither bytes nor str.
    """
    pieces: list[bytes] = []
    for element in elements:
        content = element if isinstance(element, bytes) else str.encode(element)
        pieces += (_length(len(content)), content)
    return b"".join(pieces)
