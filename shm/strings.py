"""Counts, decodes and encodes the elements of BYTES tensors: in C where that could be built, else in Python. No numpy here.

    | length u32 little-endian | length bytes |      elements follow each other without padding

Millions of elements take a second in Python. Who decodes or encodes so many calls ``decode`` and ``encode`` for a few thousand at
a time, because in C no other thread of Python runs meanwhile.
"""

from __future__ import annotations

from tensord.shm.extensions import check


def _count(content: bytes | memoryview, most: int, /) -> tuple[int, int]:
    """Returns how many complete elements lie at the beginning of content, at most ``most``, and where they end."""
    found = at = 0
    while found < most and at + 4 <= len(content):
        end = at + 4 + int.from_bytes(content[at : at + 4], "little")
        if end > len(content):
            break
        found, at = found + 1, end
    return found, at


def _decode(content: bytes, at: int, most: int, /) -> tuple[list[bytes], int]:
    """Returns the complete elements from offset ``at`` on, at most ``most``, and where they end."""
    elements: list[bytes] = []
    for _ in range(_count(memoryview(content)[at:], most)[0]):
        end = at + 4 + int.from_bytes(content[at : at + 4], "little")
        elements.append(content[at + 4 : end])
        at = end
    return elements, at


def _encode(elements: list[bytes] | list[str], /) -> bytes:
    """Returns the content of a tensor with these elements. Raises TypeError: an element is neither bytes nor str."""
    pieces: list[bytes] = []
    for element in elements:
        content = element.encode() if isinstance(element, str) else element
        pieces += (len(content).to_bytes(4, "little"), content)
    return b"".join(pieces)


try:
    from tensord.shm import _strings

    check(_strings)
except ImportError:  # not built, or not from these sources
    count, decode, encode = _count, _decode, _encode
else:
    count, decode, encode = _strings.count, _strings.decode, _strings.encode
