"""Records of answers of one form, encoded side by side: one array operation instead of a record and an encoder's call for each.

    | array | tag | request id u64 | form | outputs | no lease |      a row for each request, all of one size

Rows differ in the id and in the bytes of their outputs. Where these are is seen in what the encoder makes of records that differ
in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shm.arrays import Array
from shm.messages import FormCompletion
from shm.record import encoder

#: An id of as many bytes as ids can have, and one that differs from it in the first of them.
_ID, _OTHER_ID = 0x8000000000000000, 0xFF00000000000000


class AnswerRows:
    """Of a form with that number; ``name`` says for which requests."""

    def __init__(self, form: int, sizes: Sequence[int]) -> None:
        """``sizes``: bytes of each output."""
        self._sample = _encoded(_ID, form, [bytes(size) for size in sizes])
        self._id_at = int(np.argmax(self._sample != _encoded(_OTHER_ID, form, [bytes(size) for size in sizes])))
        content = np.flatnonzero(self._sample != _encoded(_ID, form, [b"\xff" * size for size in sizes]))
        #: Of one output: a slice costs less.
        self._content: Array | slice = slice(content[0], content[-1] + 1) if len(sizes) == 1 else content
        self._rows = self._sample[None]

    def name(self, request_ids: Sequence[int]) -> None:
        """A row for each of these requests."""
        self._rows = np.tile(self._sample, (len(request_ids), 1))
        self._rows[:, self._id_at : self._id_at + 8] = np.array(request_ids, ">u8").view(np.uint8).reshape(-1, 8)

    def records(self, contents: Array) -> list[bytes]:
        """A record for each of them. ``contents``: their outputs side by side, UINT8[requests, size]."""
        rows, size = self._rows, len(self._sample)
        rows[:, self._content] = contents
        encoded = rows.tobytes()
        return [encoded[at : at + size] for at in range(0, len(encoded), size)]

    def __repr__(self) -> str:
        return f"<AnswerRows {self._rows.shape}>"


def _encoded(request_id: int, form: int, contents: list[bytes]) -> Array:
    return np.frombuffer(encoder.encode(FormCompletion(request_id, form, tuple(contents))), np.uint8)
