"""Converts a large JSON array of strings in a request to a BYTES tensor, piece by piece. Sans-I/O.

    [ "a","b", ... ,"," , ... ,"z" ]      a piece ends at a quotation mark that a comma and another one follow
      └ piece  ┘└ piece      ┘

Such a place may also be the beginning of a string that is nothing but a comma. A piece that ends there ends in the middle of a
string and is no JSON: then parsing it fails, and the piece is extended to the next such place, which is the right one.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

import msgspec

from tensord.daemon.http import json_data
from tensord.daemon.http.request_head import parse
from tensord.shm.arrays import encoded
from tensord.shm.errors import InvalidArgument

#: Text converted at a time. Strings may be tiny, and each costs.
PIECE_BYTE_SIZE = 16 << 10
_FLAT = re.compile(rb'\[[ \t\r\n]*"')
_SEPARATOR = re.compile(rb'"[ \t\r\n]*,[ \t\r\n]*(?=")')
_strings = msgspec.json.Decoder(list[str])


def is_flat(text: memoryview) -> bool:
    """Returns whether a JSON text is an array whose first element is a string."""
    return _FLAT.match(text) is not None


@dataclass(slots=True)
class JsonStrings:
    """Converts the JSON text of an array of strings to the bytes of a BYTES tensor, in steps."""

    #: The array, from its opening bracket to its closing one.
    text: memoryview
    name: str
    count: int

    def __post_init__(self) -> None:
        """Checks the length of the text. Raises InvalidArgument: the text is too short for ``count`` strings."""
        if 3 * self.count > len(self.text):
            raise InvalidArgument(json_data.MISMATCH)

    @property
    def byte_size(self) -> int:
        """Returns the most bytes that the tensor can have.

        A string takes 4 bytes for its length in the tensor, and in the text 3 bytes for its quotation marks and comma.
        """
        return len(self.text) + self.count

    def fill(self, place: memoryview) -> Generator[None, None, int]:
        """Writes the tensor's bytes into ``place``, and yields after each piece. Returns how many bytes were written.

        Raises: InvalidArgument: the text is no JSON array of ``count`` strings; the message says what is wrong.
        """
        start, written, count = 1, 0, 0
        while start < len(self.text):
            values, start = self._piece(start)
            count += len(values)
            if count > self.count:
                raise InvalidArgument(json_data.MISMATCH)
            content = encoded(values)
            place[written : written + len(content)] = content
            written += len(content)
            yield
        if count != self.count:
            raise InvalidArgument(json_data.MISMATCH)
        return written

    def _piece(self, start: int) -> tuple[list[str], int]:
        """Returns the strings of the piece that begins at the offset ``start`` of the text, and where the next piece begins.

        Raises: InvalidArgument: the piece is no JSON, or holds something that is no string.
        """
        search = start + PIECE_BYTE_SIZE
        for _ in range(2):
            end, following = self._end_of_piece(search)
            try:
                return _strings.decode(b"[%b]" % bytes(self.text[start:end])), following
            except (msgspec.MsgspecError, UnicodeDecodeError):
                search = end
        # Not JSON, or not strings: the slow way says which, as of a small text, but not where in the whole text.
        try:
            values = parse(b"[%b]" % bytes(self.text[start:end]))
        except InvalidArgument as error:
            raise InvalidArgument(f"{error.message.rpartition(' at ')[0]} Input '{self.name}'") from error
        json_data.flat(values, "BYTES", self.name)
        raise json_data.of_wrong_kind("BYTES")

    def _end_of_piece(self, search: int) -> tuple[int, int]:
        """Finds the first offset from ``search`` on where a piece may end: behind a string, before a comma and another string.

        Returns: the offset behind that string, and the offset behind the comma, where the next piece begins. If there is no such
        place: the offset of the array's closing bracket, and the end of the text.
        """
        while (found := _SEPARATOR.search(self.text, search)) is not None:
            mark = found.start()
            backslashes = 0
            while self.text[mark - 1 - backslashes] == 0x5C:
                backslashes += 1
            if backslashes % 2 == 0:
                return mark + 1, found.end()
            search = mark + 1
        return len(self.text) - 1, len(self.text)
