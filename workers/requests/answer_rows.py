"""Records of answers of one number, put together from what the encoder made of one, instead of a record and its call for each.

    | array | tag | request id u64 | number | outputs | no lease, code, trace |      all of one size

They differ in the id and in the bytes of their outputs. Where these are is seen in what the encoder makes of records that differ
in nothing else. ``AnswerRows`` makes one for each of many requests, by array operations, ``AnswerPieces`` many for one request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.messages import AnswerRecord
from tensord.shm.record import encoder

#: An id of as many bytes as ids can have, and one that differs from it in the first of them.
_ID, _OTHER_ID = 0x8000000000000000, 0xFF00000000000000


class AnswerRows:
    """Answers of that number; ``name`` says for which requests."""

    def __init__(self, number: int, sizes: Sequence[int]) -> None:
        """``sizes``: bytes of each output."""
        self._sample, self._id_at, content = _layout(number, sizes)
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


class AnswerPieces:
    """Answers of that number: what stands before, between and behind the outputs."""

    def __init__(self, number: int, sizes: Sequence[int]) -> None:
        """``sizes``: bytes of each output."""
        sample, self._id_at, content = _layout(number, sizes)
        encoded, begins, at = sample.tobytes(), [], 0
        for size in sizes:
            # What has no bytes stands nowhere: it is with what follows.
            begins.append(int(content[at]) if at < len(content) else len(encoded))
            at += size
        ends = [0, *(begin + size for begin, size in zip(begins, sizes, strict=True))]
        pieces = [encoded[end:begin] for end, begin in zip(ends, [*begins, len(encoded)], strict=True)]
        self._head = pieces[0]
        #: What follows each output.
        self._behind = pieces[1:]

    def of(self, request_id: int) -> tuple[bytes, list[bytes]]:
        """For that request: what stands before its outputs, and what follows each of them."""
        head, at = self._head, self._id_at
        return head[:at] + request_id.to_bytes(8) + head[at + 8 :], self._behind

    def __repr__(self) -> str:
        return f"<AnswerPieces around {len(self._behind)} outputs>"


def _layout(number: int, sizes: Sequence[int]) -> tuple[Array, int, Array]:
    """A record, where its id begins, and where the bytes of its outputs are."""
    sample = _encoded(_ID, number, [bytes(size) for size in sizes])
    id_at = int(np.argmax(sample != _encoded(_OTHER_ID, number, [bytes(size) for size in sizes])))
    return sample, id_at, np.flatnonzero(sample != _encoded(_ID, number, [b"\xff" * size for size in sizes]))


def _encoded(request_id: int, number: int, contents: list[bytes]) -> Array:
    return np.frombuffer(encoder.encode(AnswerRecord(request_id, number, tuple(contents))), np.uint8)
