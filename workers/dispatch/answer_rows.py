"""Records of answers of one form, encoded side by side: one array operation instead of a record and an encoder's call for each.

    | array | tag | request id u64 | form | outputs | no lease |      a row for each slot, all of one size

Rows differ in the id, which is written when a request gets its slot, and in the bytes of their outputs. Where these are is seen
in what the encoder makes of records that differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shm.arrays import Array
from shm.messages import FormCompletion
from shm.record import encoder

#: An id of as many bytes as ids can have, and one that differs from it in each of them but the last bit of the first.
_ID, _OTHER_ID = 0x8000000000000000, 0xFFFFFFFFFFFFFFFF


class AnswerRows:
    """Of a form with that number, for so many slots."""

    def __init__(self, form: int, sizes: Sequence[int], slots: int) -> None:
        """``sizes``: bytes of each output."""
        zeros = _encoded(_ID, form, [bytes(size) for size in sizes])
        self._id_at = int(np.flatnonzero(zeros != _encoded(_OTHER_ID, form, [bytes(size) for size in sizes]))[0])
        self._content = np.flatnonzero(zeros != _encoded(_ID, form, [b"\xff" * size for size in sizes]))
        self._rows = np.tile(zeros, (slots, 1))
        self._size = len(zeros)

    def name(self, slot: int, request_id: int) -> None:
        """The row of that slot is for that request."""
        self._rows[slot, self._id_at : self._id_at + 8] = np.frombuffer(request_id.to_bytes(8, "big"), np.uint8)

    def records(self, slots: Array, contents: Array) -> list[bytes]:
        """A record for each of these slots. ``contents``: their outputs side by side, UINT8[len(slots), size]."""
        rows = self._rows[slots]
        rows[:, self._content] = contents
        encoded, size = rows.tobytes(), self._size
        return [encoded[at : at + size] for at in range(0, len(encoded), size)]

    def __repr__(self) -> str:
        return f"<AnswerRows {len(self._rows)} of {self._size} bytes>"


def _encoded(request_id: int, form: int, contents: list[bytes]) -> Array:
    return np.frombuffer(encoder.encode(FormCompletion(request_id, form, tuple(contents))), np.uint8)
