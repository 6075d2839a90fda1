"""Cuts the large ``data`` of tensors out of the JSON text of a request, without parsing the text. Sans-I/O.

    ..."data": [ 0.1,0.2, ... ,0.3 ]...      the remaining text     ..."data": ["<token>:0"]...
               └─── cut out ───────┘         what was cut out       [ 0.1,0.2, ... ,0.3 ]

In the remaining text, a placeholder such as ``["<token>:0"]`` stands for each value that was cut out. The token is random, so
clients cannot forge a placeholder. A request whose remaining text has more than ``MAX_TEXT`` bytes is refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import msgspec

from tensord.shm.errors import InvalidArgument

#: Data of fewer bytes stays in the text.
_MIN_BYTE_SIZE = 2048
#: The most bytes that may be left of the text.
MAX_TEXT = 1 << 20
#: Text that is copied and looked at at a time, and how much the first look at a place takes.
_PIECE_BYTE_SIZE = 64 << 10
_GLANCE_BYTE_SIZE = 512
#: Keys that are looked at in one step.
_MARKS_A_STEP = 512
#: The text that stands in place of what was cut out. A client cannot know it.
_TOKEN = secrets.token_hex(16)
_PLACEHOLDER = f'["{_TOKEN}:'.encode()
_KEY = b'"data"'
#: Outside a string, a quotation mark follows one of these, or a colon or bracket, which no key follows.
_BEFORE_KEY = b"{, \t\r\n"
#: A key, up to the value, and what that begins with: a text, or an array and its first element.
_OPENING = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*(?=(")|\[[ \t\r\n]*([^ \t\r\n{\]]))')
#: Whole strings of an array, as many as there are; and before them the rest of one. (Groups are not possessive: those of Python
#: before 3.11.5 take the beginning of a string along whose end is missing.)
_REST = rb'[^"\\]*+(?:\\.[^"\\]*+)*+"'
_RUN = rb'(?:[ \t\r\n,]*+"' + _REST + rb")*[ \t\r\n,]*+"
_STRINGS = (re.compile(_RUN, re.DOTALL), re.compile(rb"(?:" + _REST + _RUN + rb")?", re.DOTALL))
_MARK, _CLOSING, _BACKSLASH = b'"]\\'
#: Instead of a place: there is no end.
_UNCLOSED = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """Holds a JSON text with placeholders for its large ``data`` values."""

    text: bytes
    #: Where each piece of large data begins and ends in ``document``, the original text.
    spans: list[tuple[int, int]]
    document: memoryview

    def number_of(self, data: Any) -> int | None:
        """Returns the index in ``self.spans`` of the large value that the placeholder ``data`` stands for.

        ``data``: the value of a ``data`` key in ``self.text``, decoded or as ``msgspec.Raw``.
        Returns None if ``data`` is no placeholder.
        """
        if isinstance(data, msgspec.Raw):
            text = bytes(data) if memoryview(data).nbytes < 64 else b""
            return int(text[len(_PLACEHOLDER) : -2]) if text.startswith(_PLACEHOLDER) else None
        if isinstance(data, list) and data and isinstance(data[0], str) and data[0].startswith(_TOKEN):
            return int(data[0][len(_TOKEN) + 1 :])
        return None

    def place(self, offset: int) -> int:
        """Converts an offset in the shortened JSON ``text`` to the offset of the same byte in ``document``, the client's JSON."""
        for number, (start, end) in enumerate(self.spans):
            if start >= offset:
                break
            offset += end - start - len(_placeholder(number))
        return offset


def steps(document: bytes | memoryview) -> Generator[None, None, Cut | None]:
    """Cuts the large values of ``data`` keys out of ``document``, a JSON text. Yields often.

    But it does not yield within an array of numbers or a base64 string, of which it reads some MiB in a millisecond.
    Returns the shortened text and the places of the values, or None if there are no large values.
    Raises InvalidArgument if the text without the large values has more than ``MAX_TEXT`` bytes.
    """
    view = memoryview(document)
    size, at, kept, marks = len(view), 0, 0, 0
    spans: list[tuple[int, int]] = []
    while at < size:
        key = find(view, _KEY, at, size, MAX_TEXT - kept)
        kept += (size if key < 0 else key) - at
        if kept > MAX_TEXT:
            raise _too_long(size)
        if key < 0:
            break
        at = key + len(_KEY)
        opening = _OPENING.match(view, key)
        if opening is None or view[key - 1] not in _BEFORE_KEY:
            kept += len(_KEY)
        else:
            start = opening.end()
            end = yield from _end_of(view, start, opening)
            if end == _UNCLOSED:
                # No JSON. Without an end of this one there is none of another.
                end = size
            if size > end and end - start >= _MIN_BYTE_SIZE:
                spans.append((start, end))
                kept += start - key + len(_PLACEHOLDER)
            else:
                end = max(end, start)
                kept += end - key
            at = end
        marks += 1
        if marks % _MARKS_A_STEP == 0:
            yield
    if kept > MAX_TEXT:
        raise _too_long(size)
    return _without(view, spans) if spans else None


def _too_long(size: int) -> InvalidArgument:
    return InvalidArgument(
        f"the request JSON has {size} bytes, more than {MAX_TEXT} of them besides large data of tensors; "
        f"at most {MAX_TEXT} are allowed"
    )


def _without(view: memoryview, spans: list[tuple[int, int]]) -> Cut:
    pieces: list[bytes | memoryview] = []
    at = 0
    for number, (start, end) in enumerate(spans):
        pieces += (view[at:start], _placeholder(number))
        at = end
    return Cut(b"".join([*pieces, view[at:]]), spans, view)


def _placeholder(number: int) -> bytes:
    return b'%b%d"]' % (_PLACEHOLDER, number)


def _end_of(view: memoryview, start: int, opening: re.Match[bytes]) -> Generator[None, None, int]:
    # The result ``start`` means that only a JSON parser can find the end.
    if opening[1] is not None:
        end = find(view, b'"', start + 1, len(view))
        return end + 1 if view[end - 1] != _BACKSLASH else start
    if opening[2] == b'"':
        return (yield from _end_of_strings(view, start))
    if opening[2] != b"[":
        return find(view, b"]", start, len(view)) + 1
    # Nested numbers: what follows the array is another key or the end of the object.
    limit = len(view)
    for mark in (b'"', b"}"):
        found = find(view, mark, start, limit)
        limit = limit if found < 0 else found
    tail = bytes(view[max(start, limit - _MIN_BYTE_SIZE) : limit])
    return limit - len(tail) + tail.rfind(b"]") + 1


def _end_of_strings(view: memoryview, start: int) -> Generator[None, None, int]:
    at, inside = start + 1, False
    while at < len(view):
        piece = bytes(view[at : at + _PIECE_BYTE_SIZE])
        # A backslash and what it stands before are not separated.
        if len(piece) == _PIECE_BYTE_SIZE and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]
        if b"]" not in piece:
            inside ^= _is_odd(piece)
        else:
            end = _STRINGS[inside].match(piece).end()  # type: ignore[union-attr]
            if end == len(piece):
                inside = False
            elif piece[end] == _CLOSING:
                return at + end + 1
            elif piece[end] == _MARK or (inside and not end):
                inside = True  # it goes on in the next piece
            else:
                return start  # a JSON parser has to read it
        at += len(piece)
        yield
    return _UNCLOSED


def _is_odd(text: bytes) -> bool:
    marks = text.count(b'"')
    if marks and b"\\" in text:
        marks -= text.replace(b"\\\\", b"").count(b'\\"')
    return marks % 2 == 1


def find(view: memoryview, what: bytes, start: int, end: int, enough: int | None = None) -> int:
    """Returns the offset in ``view`` of the first ``what`` in ``view[start:end]``. Returns -1 if there is no ``what``.

    ``enough``: a number of bytes, or None. If the first ``enough`` bytes from ``start`` have no ``what``, the result may be -1.
    """
    size, begin = _GLANCE_BYTE_SIZE, start
    while start < end and (enough is None or start - begin <= enough):
        found = bytes(view[start : min(end, start + size)]).find(what)
        if found >= 0:
            return start + found
        start += size - len(what) + 1
        size = _PIECE_BYTE_SIZE
    return -1
