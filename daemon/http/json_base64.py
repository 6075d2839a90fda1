"""Large base64 text for an input: decoded piece by piece. Sans-I/O."""

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
    """Decodes base64 of what the binary tensor data extension would send."""

    #: With its quotation marks.
    text: memoryview
    datatype: str
    count: int

    def __post_init__(self) -> None:
        """Raises InvalidArgument: it cannot be a tensor of that datatype with so many elements."""
        needed = ELEMENT_SIZES[self.datatype]
        if needed is not None and not self.count * needed <= self.byte_size < self.count * needed + 3:
            raise refusal("data", "non-array", "array")

    @property
    def byte_size(self) -> int:
        """Returns what the tensor takes at most: two bytes of the last three may be padding."""
        return (len(self.text) - 2) // 4 * 3

    def fill(self, place: memoryview) -> Generator[None, None, int]:
        """Writes the tensor's bytes and returns their number; stops after each piece.

        Raises: InvalidArgument: it is no base64, or has another size. Whether strings fit together in it is the worker's to say.
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
