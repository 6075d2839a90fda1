"""Decodes large base64 text in the JSON of a request to a tensor's bytes, piece by piece. Sans-I/O."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Generator
from dataclasses import dataclass

from tensord.daemon.http.request_head import refusal
from tensord.shm.datatypes import ELEMENT_SIZES

#: Text decoded at a time; a multiple of four, which are three bytes.
_PIECE_BYTE_SIZE = 1 << 20


@dataclass(slots=True)
class JsonBase64:
    """Decodes the base64 text of a tensor's bytes, in steps. The bytes are those that the binary tensor data extension sends."""

    #: The JSON string of base64, with its quotation marks.
    text: memoryview
    datatype: str
    count: int

    def __post_init__(self) -> None:
        """Checks the length of the text. Raises InvalidArgument: it does not fit ``count`` elements of the datatype."""
        needed = ELEMENT_SIZES[self.datatype]
        if needed is not None and not self.count * needed <= self.byte_size < self.count * needed + 3:
            raise refusal("data", "non-array", "array")

    @property
    def byte_size(self) -> int:
        """Returns the most bytes that the tensor can have; it has up to two fewer if the base64 text ends with padding."""
        return (len(self.text) - 2) // 4 * 3

    def fill(self, place: memoryview) -> Generator[None, None, int]:
        """Writes the tensor's bytes into ``place``, and yields after each piece. Returns how many bytes were written.

        Raises: InvalidArgument: the text is no base64, or has not the tensor's size. (A worker checks the strings of BYTES.)
        """
        written, end = 0, len(self.text) - 1
        for start in range(1, end, _PIECE_BYTE_SIZE):
            try:
                content = base64.b64decode(bytes(self.text[start : min(end, start + _PIECE_BYTE_SIZE)]), validate=True)
            except (binascii.Error, ValueError) as error:
                raise refusal("data", "non-array", "array") from error
            place[written : written + len(content)] = content
            written += len(content)
            yield
        needed = ELEMENT_SIZES[self.datatype]
        if needed is not None and written != self.count * needed:
            raise refusal("data", "non-array", "array")
        return written
