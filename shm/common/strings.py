"""Counts, decodes and encodes the elements of BYTES tensors, in Python; the daemon has the same in C (``_strings.c``).

| length u32 little-endian | length bytes |      elements follow each other without padding
"""

from __future__ import annotations

import struct

_length = struct.Struct("<I").pack


def count(content: bytes | memoryview, most: int, /) -> tuple[int, int]:
    """Returns how many complete elements lie at the beginning of content, at most ``most``, and where they end."""
    found = at = 0
    while found < most and at + 4 <= len(content):
        end = at + 4 + int.from_bytes(content[at : at + 4], "little")
        if end > len(content):
            break
        found, at = found + 1, end
    return found, at


def decode(content: bytes, at: int, most: int, /) -> tuple[list[bytes], int]:
    """Returns the complete elements from offset ``at`` on, at most ``most``, and where they end."""
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
    """Returns the content of a tensor with these elements. Raises TypeError: an element is neither bytes nor str."""
    pieces: list[bytes] = []
    for element in elements:
        content = element if isinstance(element, bytes) else str.encode(element)
        pieces += (_length(len(content)), content)
    return b"".join(pieces)
